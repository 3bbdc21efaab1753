"""A small clean process that forks workers.

It is executed, not forked, so nothing of the kernel is in it; it has one thread, imports what it
is told to and never computes, because libraries that have computed hang in forked children.
It forks in two generations: the first imports nothing and can serve at once; it forks a second
one that imports the preload list, so that a slow or broken preload holds nobody up. The second
ends with the first, workers end with the zygote that forked them, and what workers leave behind
becomes a child of a zygote and is killed.

Requests from the kernel are tuples of builtin types: ``("fork", token)`` with the worker's
descriptors, ``("preload", modules)`` with the control socket for the second generation,
``("signal", token, number)``, and ``("keep",)`` with a descriptor that this process and all that
it forks from then on have open as long as they live. The answers: ``("forked", token, pid)``,
``("exited", token, status)``, ``("preloaded", {module: problem or None}, why it must not be used
or None)``, ``("failed", token, reason)``.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gpunb import linux
from gpunb.workers import child, system, threads
from gpunb.workers.modules import loaded

DESCRIPTORS = 4
"""A worker's: its channel, standard output, standard error, and the interrupt pipe."""

_END_GRACE = 2.0
_TRIAL = 10.0


def main(control: Connection, kernel: int) -> None:
    """Serve the kernel process `kernel` until it is gone. Runs in a process of its own."""
    os.setsid()
    system.set_name("gpunb-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sock = socket.socket(fileno=os.dup(control.fileno()))
    control.close()
    _no_terminal()
    child.warm_up()
    _serve(sock, kernel)


def _no_terminal() -> None:
    """Nothing that happens here belongs on the kernel's standard streams."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the process's own for good
    child.own_streams()


def _serve(sock: socket.socket, parent: int) -> NoReturn:
    try:
        Zygote(sock, parent).serve()
    finally:
        os._exit(0)


class Zygote:
    """Forks on request, reaps, and keeps the books of who lives."""

    def __init__(self, sock: socket.socket, parent: int) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._parent = linux.pidfd_open(parent)
        self._poll.register(self._parent, select.POLLIN)
        self._pids: dict[object, int] = {}
        self._tokens: dict[int, object] = {}
        self._watched: dict[int, int] = {}
        self._ended: list[tuple[object, int, set[int]]] = []
        self._orphans: set[int] = set()
        system.adopt_orphans()

    def serve(self) -> None:
        """Until the kernel or the first generation is gone; then end everything."""
        gc.collect()
        gc.freeze()
        own = (self._sock.fileno(), self._parent)
        while True:
            events = [descriptor for descriptor, _ in self._poll.poll()]
            # A device is free when its worker is gone: that goes before forking another.
            for descriptor in events:
                if descriptor not in own:
                    self._gone(descriptor)
            if self._parent in events or (own[0] in events and not self._request()):
                self._end()
                return

    def _tell(self, *answer: Any) -> None:
        try:
            self._sock.send(pickle.dumps(answer, 5))
        except OSError:
            pass  # the kernel is gone: the next poll says so

    # ----------------------------------------------------------------------------------- requests

    def _request(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 65536, DESCRIPTORS)
        except OSError:
            return False
        if not data:
            return False
        verb, *rest = pickle.loads(data)
        if verb == "fork":
            self._fork_worker(rest[0], descriptors)
        elif verb == "preload":
            self._fork_zygote(rest[0], descriptors[0])
        elif verb == "keep":
            os.set_inheritable(descriptors[0], False)
        elif verb == "signal":
            token, number = rest
            if token in self._pids:
                self._signal(self._pids[token], number)
        return True

    def _signal(self, pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            system.kill_group(pid)
        system.kill(pid, number)

    def _fork_worker(self, token: object, descriptors: Sequence[int]) -> None:
        me = os.getpid()
        pid = self._fork(token)
        if pid == 0:
            try:
                if system.die_with_parent(me):
                    child.main(*descriptors)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)

    def _fork_zygote(self, modules: Sequence[str], control: int) -> None:
        me = os.getpid()
        pid = self._fork(("zygote", tuple(modules)))
        if pid == 0:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                if system.die_with_parent(me):
                    _second_generation(modules, socket.socket(fileno=control), me)
            finally:
                os._exit(1)
        os.close(control)

    def _fork(self, token: object) -> int:
        """Fork, and forget in the child what is not its own."""
        try:
            pid = os.fork()
        except OSError as error:
            self._tell("failed", token, f"fork: {error.strerror}")
            return -1
        if pid == 0:
            self._forget()
            return 0
        self._pids[token] = pid
        self._tokens[pid] = token
        self._watch(pid)
        self._tell("forked", token, pid)
        return pid

    def _forget(self) -> None:
        os.close(self._parent)
        for descriptor in self._watched:
            os.close(descriptor)
        self._sock.close()

    # -------------------------------------------------------------------------------------- ends

    def _watch(self, pid: int) -> None:
        descriptor = linux.pidfd_open(pid)
        self._watched[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)

    def _gone(self, descriptor: int) -> None:
        pid = self._watched.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        token = self._tokens.pop(pid, None)
        if token is not None:
            # Not reaped yet, so nobody else can have its number: the group is its own.
            system.kill_group(pid)
        _, status = os.waitpid(pid, 0)
        left = self._sweep()
        if token is not None:
            del self._pids[token]
            self._ended.append((token, status, set(self._orphans)))
        self._orphans.discard(pid)
        self._report(pid, left)

    def _sweep(self) -> set[int]:
        """Kill what dead workers left: it has become a child of this process. The new ones."""
        found = set()
        for pid in system.children() or ():
            if pid not in self._tokens and pid not in self._orphans:
                system.kill_group(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                    self._watch(pid)
                except ProcessLookupError:
                    continue
                self._orphans.add(pid)
                found.add(pid)
        return found

    def _report(self, gone: int, heirs: set[int]) -> None:
        """Say of a worker that it is gone when all that it left is gone too, `heirs` of what
        is `gone` now among them."""
        waiting = []
        for token, status, left in self._ended:
            if gone in left:
                left.discard(gone)
                left.update(heirs)
            if left:
                waiting.append((token, status, left))
            else:
                self._tell("exited", token, status)
        self._ended = waiting

    def _end(self) -> None:
        """Kill every worker and what it left, and wait for that for a while."""
        deadline = time.monotonic() + _END_GRACE
        for pid in self._tokens:
            system.kill_group(pid)
            self._signal(pid, signal.SIGKILL)
        while time.monotonic() < deadline:
            self._sweep()
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                time.sleep(0.005)
            self._tokens.pop(pid, None)


def _second_generation(modules: Sequence[str], sock: socket.socket, parent: int) -> NoReturn:
    """Import the preload list, see whether forking is still safe, and serve."""
    system.set_name("gpunb-preload")
    problems: dict[str, str | None] = {}
    with threads.single():
        for name in modules:
            try:
                importlib.import_module(name)
                problems[name] = None
            except BaseException as error:
                problems[name] = f"{type(error).__name__}: {error}"
    loaded.edited()  # from here on, what is edited is not what the preload has loaded
    child.warm_up()
    importlib.import_module("gpunb.workers.hosting")  # what asyncio takes to load, for all actors
    if "IPython" in sys.modules:
        importlib.import_module("gpunb.workers.cells")
        importlib.import_module("gpunb.workers.shell").rehearse()
    threads.find()
    unsafe = _unsafe()
    # From here on the poll loop sees the end of the parent and can clean up after itself.
    system.die_with_parent(parent, 0)
    if os.getppid() != parent:
        os._exit(1)
    sock.send(pickle.dumps(("preloaded", problems, unsafe), 5))
    _serve(sock, parent)


def _unsafe() -> str | None:
    """Why children of this process might hang or see a wrong GPU; None if all is well."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import initialised CUDA, which does not survive a fork"
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "_backends", None):
        return "an import started a JAX backend, which does not survive a fork"
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    descriptor = linux.pidfd_open(pid)
    ended, _, _ = select.select([descriptor], [], [], _TRIAL)
    os.close(descriptor)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not ended:
        return f"a trial child did not end within {_TRIAL:g} s"
    # A BLAS stops its threads when the process forks; what is left now would be missing in the
    # children, and waited for there.
    left = system.threads() - 1
    if left:
        return f"{left} thread{'s' if left > 1 else ''} started by an import went on after a fork"
    return None
