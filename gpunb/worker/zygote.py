"""The zygote: a small clean process that forks workers.

It is executed and not forked, so it holds nothing of the kernel. It has one thread, imports the
modules that the kernel names, and never computes, because libraries that have computed hang in
forked children. There are two generations: the first imports nothing and can serve at once. It
forks a second one, which imports the preload list, so a slow or broken preload delays no task. When
tasks import more, the second one forks another zygote, which imports that too, and so on. A zygote
ends with the one that forked it, and workers end with the zygote that forked them.
`gpunb.protocol.zygote` has the requests and the answers.

A device is free when its worker and all that the worker started are gone:

1. The descriptor of a worker's process tells that it has ended. The process is not reaped yet, so
   no other process can have its number, and its process group can be killed safely.
2. The worker is reaped. Processes that it started outside its group become children of the zygote,
   because the zygote adopts orphans. `_sweep` finds and kills them.
3. An orphan may have had children too, which are adopted when it ends: step 2 again.
4. `exited` is sent once the worker and all its orphans are gone. Ends go before requests in
   `serve`, so a new worker gets the device of one that has ended.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gpunb.protocol import plain
from gpunb.protocol.zygote import SECOND, Preload
from gpunb.system import limits, linux, process_control
from gpunb.worker import first_use, preload
from gpunb.worker import main as worker_main

DESCRIPTORS = 4
"""A worker's: its channel, standard output, standard error, and the interrupt pipe."""

_NO_MEMORY = 0.01
_END_GRACE = 2.0

_AGAIN = 200
"""Milliseconds until the next try of a fork for which the system had no room."""


def main(control: Connection, kernel: int) -> None:
    """Serve the process `kernel` until it is gone. Runs in a process of its own."""
    os.setsid()
    process_control.set_name("gpunb-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sock = socket.socket(fileno=os.dup(control.fileno()))
    control.close()
    _no_terminal()
    worker_main.warm_up(1)
    _serve(sock, kernel)


def _no_terminal() -> None:
    """Replace the standard streams, which are the kernel's."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the process's own for good
    worker_main.own_streams()


def _serve(sock: socket.socket, parent: int) -> NoReturn:
    try:
        Zygote(sock, parent).serve()
    finally:
        os._exit(0)


class Zygote:
    """Forks workers on request, and reaps them."""

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
        self._delayed: deque[tuple[Any, list[int]]] = deque()
        self._delayed_by: str | None = None
        process_control.adopt_orphans()

    def serve(self) -> None:
        """Serve until the kernel or the first generation is gone; then end all workers."""
        gc.collect()
        gc.freeze()
        own = (self._sock.fileno(), self._parent)
        while True:
            wait = _AGAIN if self._delayed else None
            events = [descriptor for descriptor, _ in self._poll.poll(wait)]
            # Ends go first: they free devices that the next worker may use.
            for descriptor in events:
                if descriptor not in own:
                    self._gone(descriptor)
            if self._parent in events or (own[0] in events and not self._request()):
                self._end()
                return
            self._fork_delayed()

    def _reply(self, *answer: Any) -> None:
        data = plain.dumps(answer)
        while True:
            try:
                self._sock.send(data)
                return
            except OSError as error:
                if error.errno not in (errno.ENOBUFS, errno.ENOMEM):
                    return  # the kernel is gone: the next poll says so
                time.sleep(_NO_MEMORY)  # an end that is never told would keep a device for ever

    # ----------------------------------------------------------------------------------- requests

    def _request(self) -> bool:
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._sock, 65536, DESCRIPTORS)
        except OSError:
            return False
        if not data:
            return False
        verb, *rest = plain.loads(data)
        if verb in ("fork", "preload"):
            token: Any = rest[0] if verb == "fork" else (SECOND, rest[0])
            if flags & socket.MSG_CTRUNC:  # no descriptor was left for all that were sent
                _close(descriptors)
                lacks = limits.explain(OSError(errno.EMFILE, ""))
                self._reply("failed", token, f"in the process that forks it, {lacks}")
            else:
                self._fork_or_delay(token, descriptors)
        elif verb == "keep" and descriptors:
            os.set_inheritable(descriptors[0], False)
        elif verb == "signal":
            token, number = rest
            if token in self._pids:
                self._signal(self._pids[token], number)
            elif number == signal.SIGKILL:
                self._drop_delayed(token)
        elif verb == "prepare":
            first_use.prepare()
            gc.freeze()
        elif verb == "ping":
            self._reply("pong")
        return True

    def _fork_or_delay(self, token: Any, descriptors: list[int]) -> None:
        reason = self._delayed_by if self._delayed else self._fork(token, descriptors)
        if reason is not None:
            self._delayed.append((token, descriptors))
            self._delayed_by = reason
            self._reply("delayed", token, reason)

    def _fork_delayed(self) -> None:
        """Fork the delayed processes in their order, as far as the system has room now."""
        while self._delayed:
            token, descriptors = self._delayed.popleft()
            if self._fork(token, descriptors) is not None:
                self._delayed.appendleft((token, descriptors))
                return

    def _drop_delayed(self, token: object) -> None:
        """End a process that was not forked yet."""
        for each in [each for each in self._delayed if each[0] == token]:
            self._delayed.remove(each)
            _close(each[1])
            self._reply("exited", token, int(signal.SIGKILL))

    def _signal(self, pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            process_control.kill_group(pid)
        process_control.kill(pid, number)

    def _fork(self, token: Any, descriptors: Sequence[int]) -> str | None:
        """Fork a worker or a zygote with these descriptors. Return why the system had no room for
        it, or None."""
        me = os.getpid()
        spare = None
        try:
            spare = os.dup(self._parent)  # or there might be none to watch the new process by
            pid = os.fork()
        except OSError as error:
            return limits.explain(error)
        finally:
            if spare is not None:
                os.close(spare)
        if pid == 0:
            try:
                self._forget()
                if isinstance(token, tuple):
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                if process_control.die_with_parent(me):
                    if isinstance(token, tuple):
                        _second_generation(descriptors[1], socket.socket(fileno=descriptors[0]), me)
                    worker_main.main(*descriptors)
            finally:
                os._exit(1)
        self._pids[token] = pid
        self._tokens[pid] = token
        self._watch(pid)
        self._reply("forked", token, pid)
        _close(descriptors)
        return None

    def _forget(self) -> None:
        """In a child: close the descriptors of the zygote."""
        os.close(self._parent)
        _close(list(self._watched))
        for _, descriptors in self._delayed:
            _close(descriptors)
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
            # Not reaped yet: the number of the group is still the worker's.
            process_control.kill_group(pid)
        _, status = os.waitpid(pid, 0)
        left = self._sweep()
        if token is not None:
            del self._pids[token]
            self._ended.append((token, status, set(self._orphans)))
        self._orphans.discard(pid)
        self._report(pid, left)

    def _sweep(self) -> set[int]:
        """Kill the orphans of dead workers, which are children of this process now. Return the
        process ids of those that were not known before."""
        found = set()
        for pid in process_control.children() or ():
            if pid not in self._tokens and pid not in self._orphans:
                process_control.kill_group(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                    self._watch(pid)
                except ProcessLookupError:
                    continue
                except OSError:  # no descriptor is left to watch it by: wait for its end here
                    os.waitpid(pid, 0)
                    continue
                self._orphans.add(pid)
                found.add(pid)
        return found

    def _report(self, gone: int, heirs: set[int]) -> None:
        """Send `exited` for each worker without orphans. A worker that waits for the process that
        is gone now waits for the orphans of that process, too: its `heirs`."""
        waiting = []
        for token, status, left in self._ended:
            if gone in left:
                left.discard(gone)
                left.update(heirs)
            if left:
                waiting.append((token, status, left))
            else:
                self._reply("exited", token, status)
        self._ended = waiting

    def _end(self) -> None:
        """Kill all workers and their orphans, and wait a while for their ends."""
        deadline = time.monotonic() + _END_GRACE
        for pid in self._tokens:
            process_control.kill_group(pid)
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


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


def _second_generation(file: int, sock: socket.socket, parent: int) -> NoReturn:
    """Import what the `Preload` in this file names, check that forking is still safe, and serve."""
    with open(file, "rb") as stream:
        stream.seek(0)
        wanted = Preload(*plain.loads(stream.read()))
    process_control.set_name("gpunb-preload" if wanted.imports is None else "gpunb-follow")
    answers = list(preload.carry_out(wanted))
    # From here on the poll loop sees the end of the parent and can clean up after itself.
    process_control.die_with_parent(parent, 0)
    if os.getppid() != parent:
        os._exit(1)
    for each in answers:
        sock.send(plain.dumps(each))
    _serve(sock, parent)
