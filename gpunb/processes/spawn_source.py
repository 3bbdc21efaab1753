"""Workers that are started as new interpreters, where forks are not safe."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from gpunb.processes import launcher
from gpunb.processes.pool import WorkerPool
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol.zygote import Imports
from gpunb.system import limits, linux, process_control
from gpunb.system.loop import Loop
from gpunb.worker import main

_END_WAIT = 3.0

_UNKNOWN = "\0"
"""Stands for the unknown value of a variable; no real value can contain it."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds until a start that lacked resources is tried again; doubled each time."""


class SpawnSource:
    """Starts each worker through loky: slower by about a tenth of a second, and sharing nothing."""

    def __init__(self, loop: Loop, pool: WorkerPool, inherited: int | None = None) -> None:
        """All processes inherit the descriptor `inherited`."""
        self._inherited = () if inherited is None else (inherited,)
        self._loop = loop
        self._pool = pool
        self._started: dict[int, tuple[Any, int]] = {}
        self._delayed: deque[tuple[WorkerProcess, Sequence[int]]] = deque()
        self._trouble: str | None = None
        self._pause = _FIRST_PAUSE
        self.preloaded: dict[str, str | None] | None = None
        self.follows, self.followed = False, None

    @property
    def notes(self) -> list[str]:
        """Texts on problems with new processes."""
        return [] if self._trouble is None else [self._trouble]

    def held_up(self, process: WorkerProcess) -> str | None:
        """Return why a process has not started; None if nothing is known."""
        return self._trouble if any(each is process for each, _ in self._delayed) else None

    def import_first(self, _: Imports) -> bool:
        return False

    def start(
        self,
        process: WorkerProcess,
        descriptors: Sequence[int],
        *,
        bare: bool = False,
        wait: bool = False,
    ) -> None:
        process.origin = self
        process.environment = dict(os.environ)
        self._delayed.append((process, descriptors))
        if len(self._delayed) == 1:
            self._start_delayed()

    def _start_delayed(self) -> None:
        """Start waiting processes in order, until a resource runs out."""
        while self._delayed:
            process, descriptors = self._delayed[0]
            try:
                self._start(process, descriptors)
            except OSError as error:
                if limits.is_scarce(error):
                    self._trouble = f"a worker waits to be started: {limits.explain(error)}"
                    self._loop.after(self._pause, self._start_delayed)
                    self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                    return
                self._pool.gone_later(process, f"it could not be started: {error.strerror}")
            self._trouble, self._pause = None, _FIRST_PAUSE
            self._delayed.popleft()
            _close(descriptors)

    def _start(self, process: WorkerProcess, descriptors: Sequence[int]) -> None:
        from loky.backend.process import LokyProcess

        ends: list[Connection] = []
        try:
            for each in (*descriptors, *self._inherited):
                ends.append(Connection(os.dup(each)))  # noqa: PERF401 - the next one may fail
            started = LokyProcess(target=main.spawned, args=(os.getpid(), *ends), name="gpunb")
            before = dict(os.environ)
            launcher.launch(started)
            after = dict(os.environ)
            # If another thread changed a variable meanwhile, the process may have either value.
            changed = {name for name in before | after if before.get(name) != after.get(name)}
            process.environment = {**before, **after, **dict.fromkeys(changed, _UNKNOWN)}
        finally:
            for end in ends:
                end.close()
        process.pid = started.pid
        # A child of the worker may keep the sentinel open; a pidfd reports the worker's own end.
        try:
            end_of = linux.pidfd_open(started.pid)
        except OSError:  # an old system, or a sandbox
            end_of = started.sentinel
        self._started[process.token] = started, end_of
        self._loop.watch(end_of, lambda: self._on_end(process))

    def signal(self, process: WorkerProcess, number: int) -> None:
        if process.token in self._started:
            started, _ = self._started[process.token]
            if number == signal.SIGKILL:
                process_control.kill_group(started.pid)
            process_control.kill(started.pid, number)
        elif number == signal.SIGKILL:
            self._drop(process)

    def _drop(self, process: WorkerProcess) -> None:
        """End a process that has not started yet."""
        for each in [each for each in self._delayed if each[0] is process]:
            self._delayed.remove(each)
            _close(each[1])
            self._pool.gone_later(process, process_control.describe_status(signal.SIGKILL))

    def close(self) -> None:
        while self._delayed:
            _close(self._delayed.popleft()[1])
        for started, end in self._started.values():
            self._loop.unwatch(end)
            process_control.kill_group(started.pid)
            process_control.kill(started.pid)
        for started, end in self._started.values():
            started.join(_END_WAIT)
            self._close(started, end)
        self._started.clear()

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        while self._delayed:
            _close(self._delayed.popleft()[1])
        while self._started:
            _, (started, end) = self._started.popitem()
            self._close(started, end)
            launcher.forked(started)

    def _on_end(self, process: WorkerProcess) -> None:
        started, end = self._started.pop(process.token)
        self._loop.unwatch(end)
        process_control.kill_group(started.pid)
        started.join(_END_WAIT)
        self._close(started, end)
        self._pool.gone(process, process_control.describe_exit(started.exitcode))

    @staticmethod
    def _close(started: Any, end: int) -> None:
        if end != started.sentinel:
            os.close(end)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)
