"""Workers that a zygote forks: the kernel's side of `zygote`."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpunb import linux
from gpunb.workers import launching, system
from gpunb.workers.launching import Launched
from gpunb.workers.loop import Loop
from gpunb.workers.pool import Pool, Process

_RESTARTS = 5
"""Zygotes that may die within `_WINDOW` seconds before we give up starting new ones."""

_WINDOW = 30.0
_END_WAIT = 3.0


class _Generation:
    """One zygote: the socket to it, and which processes are its own."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.processes: dict[int, Process] = {}
        self.usable = True
        self.served = False


class ForkSource:
    """Starts the zygote, has it preload, forks through it, and replaces it when it dies."""

    def __init__(
        self,
        loop: Loop,
        pool: Pool,
        preload: Sequence[str],
        launched: Launched | None = None,
        kept: int | None = None,
    ) -> None:
        """All its processes have the descriptor `kept` open as long as they live."""
        self._kept = kept
        self._loop = loop
        self._pool = pool
        self._asked = frozenset(preload)
        # Tasks that use gpunb themselves should not pay for importing it.
        self._preload = ("gpunb.api", *preload)
        self._first: _Generation | None = None
        self._second: _Generation | None = None
        self._process: Any = None
        self._deaths: list[float] = []
        self._stillborn = 0
        self._generations: set[_Generation] = set()
        self.environment: dict[str, str] = {}
        self.preloaded: dict[str, str | None] | None = None
        self.notes: list[str] = []
        self._adopt(launched or launching.zygote())

    # ----------------------------------------------------------------------------------- zygotes

    def _adopt(self, launched: Launched) -> None:
        """Have a first generation, and through it the second."""
        self._process = launched.process
        self.environment = launched.environment
        self._first = self._listen(launched.sock)
        if self._kept is not None:
            self._tell(self._first, ("keep",), [self._kept])
        self._breed()

    def _breed(self) -> None:
        assert self._first is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._second = self._listen(ours)
        self._second.usable = False
        self._tell(self._first, ("preload", self._preload), [theirs.fileno()])
        theirs.close()

    def _listen(self, sock: socket.socket) -> _Generation:
        generation = _Generation(sock)
        self._generations.add(generation)
        self._loop.watch(sock.fileno(), lambda: self._heard(generation))
        return generation

    def _tell(self, to: _Generation, request: Any, descriptors: Sequence[int] = ()) -> bool:
        try:
            socket.send_fds(to.sock, [pickle.dumps(request, 5)], descriptors)
        except OSError:
            return False
        return True

    # ------------------------------------------------------------------------------- for the pool

    def start(self, process: Process, descriptors: Sequence[int]) -> None:
        generation = self._second if self._second and self._second.usable else self._first
        if generation is None:
            self._lost(process, "no zygote could be started; see gpunb doctor")
            return
        generation.processes[process.token] = process
        process.origin = generation
        process.environment = self.environment
        if not self._tell(generation, ("fork", process.token), descriptors):
            del generation.processes[process.token]
            self._lost(process, "the zygote died")

    def signal(self, process: Process, number: int) -> None:
        generation = process.origin
        if isinstance(generation, _Generation) and generation.usable:
            self._tell(generation, ("signal", process.token, int(number)))
        elif generation is self._first and self._first is not None:
            self._tell(self._first, ("signal", process.token, int(number)))

    def close(self) -> None:
        """End the zygotes; they end the workers and what these left."""
        for generation in list(self._generations):
            self._forget(generation)
        if self._process is not None and not self._reaped():
            system.kill(self._process.pid)
            self._reaped()

    def _reaped(self) -> bool:
        """Wait a while for the first zygote's end. Not by `join`, which waits for everybody who has
        inherited the pipe that loky made."""
        deadline = time.monotonic() + _END_WAIT
        while self._process.exitcode is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    # ------------------------------------------------------------------------------------ hearing

    def _heard(self, generation: _Generation) -> None:
        try:
            data = generation.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._died(generation)
            return
        what, *rest = pickle.loads(data)
        if what == "exited":
            self._exited(generation, *rest)
        elif what == "forked":
            token, pid = rest
            if token in generation.processes:
                generation.processes[token].pid = pid
        elif what == "failed":
            process = generation.processes.pop(rest[0], None)
            if process is not None:
                self._pool.gone(process, f"it could not be started: {rest[1]}")
        elif what == "preloaded":
            self._preloaded(generation, *rest)

    def _exited(self, generation: _Generation, token: Any, status: int) -> None:
        process = generation.processes.pop(token, None)
        if process is not None:
            self._pool.gone(process, system.describe_status(status))

    def _preloaded(
        self, generation: _Generation, problems: dict[str, str | None], unsafe: str | None
    ) -> None:
        self.preloaded = {name: each for name, each in problems.items() if name in self._asked}
        for name, problem in problems.items():
            if problem:
                self.notes.append(f"preload: {name} could not be imported: {problem}")
        if unsafe:
            self.notes.append(f"preload: not used, workers import for themselves: {unsafe}")
            self._drop(generation)
            return
        generation.usable = generation.served = True
        self._pool.renew()

    def _drop(self, generation: _Generation) -> None:
        self._forget(generation)
        self._second = None

    def _forget(self, generation: _Generation) -> None:
        self._generations.discard(generation)
        self._loop.unwatch(generation.sock.fileno())
        generation.sock.close()

    # --------------------------------------------------------------------------------------- ends

    def _died(self, generation: _Generation) -> None:
        """A zygote is gone, and with it, by the kernel's hand, the workers it forked."""
        self._forget(generation)
        lost, generation.processes = list(generation.processes.values()), {}
        if generation is self._second:
            self._second = None
            self._stillborn += not generation.served
            if self._stillborn > 1:  # the first one goes on serving
                self.notes.append("preload: not used, the process that imported it died twice")
            elif self._worth_another():
                self._breed()
        elif generation is self._first:
            self._first = self._second = None  # the second ends with it, and is heard of later
            self._reaped()
            if self._worth_another():
                self._adopt(launching.zygote())
        self._pool.renew()  # the standbys that it forked are of no use any more
        for process in lost:
            self._await(process, "it was killed when its zygote died")

    def _worth_another(self) -> bool:
        now = time.monotonic()
        self._deaths = [each for each in self._deaths if each > now - _WINDOW] + [now]
        if len(self._deaths) <= _RESTARTS:
            return True
        self.notes.append(f"{len(self._deaths)} zygotes died within {_WINDOW:g} s")
        return False

    def _await(self, process: Process, reason: str) -> None:
        """Without a zygote to tell of it, watch the process itself until it is gone."""
        try:
            if process.pid is None:
                raise ProcessLookupError
            descriptor = linux.pidfd_open(process.pid)
        except OSError:
            self._lost(process, reason)
            return

        def ended() -> None:
            self._loop.unwatch(descriptor)
            os.close(descriptor)
            self._pool.gone(process, reason)

        try:
            linux.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            pass
        self._loop.watch(descriptor, ended)

    def _lost(self, process: Process, reason: str) -> None:
        """Tell of it later: the pool is in the middle of something."""
        gone: Callable[[], None] = lambda: self._pool.gone(process, reason)  # noqa: E731
        self._loop.after(0, gone)
