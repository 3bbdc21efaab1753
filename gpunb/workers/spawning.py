"""Workers that are started one by one as new interpreters, where forking is not to be had."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from gpunb import linux
from gpunb.workers import child, system
from gpunb.workers.launching import launch
from gpunb.workers.loop import Loop
from gpunb.workers.pool import Pool, Process

_END_WAIT = 3.0


class SpawnSource:
    """Starts each worker through loky: slower by about a tenth of a second, and sharing nothing."""

    def __init__(self, loop: Loop, pool: Pool, kept: int | None = None) -> None:
        """All its processes have the descriptor `kept` open as long as they live."""
        self._kept = () if kept is None else (kept,)
        self._loop = loop
        self._pool = pool
        self._started: dict[int, tuple[Any, int]] = {}
        self.preloaded: dict[str, str | None] | None = None
        self.notes: list[str] = []

    def start(self, process: Process, descriptors: Sequence[int]) -> None:
        from loky.backend.process import LokyProcess

        ends = [Connection(os.dup(each)) for each in (*descriptors, *self._kept)]
        try:
            started = LokyProcess(target=child.spawned, args=(os.getpid(), *ends), name="gpunb")
            launch(started)
        except OSError as error:
            reason = f"it could not be started: {error.strerror}"
            self._loop.after(0, lambda: self._pool.gone(process, reason))
            return
        finally:
            for each in ends:
                each.close()
        process.origin = self
        process.environment = dict(os.environ)
        process.pid = started.pid
        # A child of the worker may inherit the sentinel; a pidfd means the worker itself.
        try:
            end = linux.pidfd_open(started.pid)
        except OSError:  # an old system, or a sandbox
            end = started.sentinel
        self._started[process.token] = started, end
        self._loop.watch(end, lambda: self._ended(process))

    def signal(self, process: Process, number: int) -> None:
        if process.token not in self._started:
            return
        started, _ = self._started[process.token]
        if number == signal.SIGKILL:
            system.kill_group(started.pid)
        system.kill(started.pid, number)

    def close(self) -> None:
        for started, end in self._started.values():
            self._loop.unwatch(end)
            system.kill_group(started.pid)
            system.kill(started.pid)
        for started, end in self._started.values():
            started.join(_END_WAIT)
            self._close(started, end)
        self._started.clear()

    def _ended(self, process: Process) -> None:
        started, end = self._started.pop(process.token)
        self._loop.unwatch(end)
        system.kill_group(started.pid)
        started.join(_END_WAIT)
        self._close(started, end)
        code = started.exitcode
        if code is None or code >= 0:
            reason = f"it exited with status {code}"
        else:
            reason = f"it was killed by {signal.Signals(-code).name}"
        self._pool.gone(process, reason)

    @staticmethod
    def _close(started: Any, end: int) -> None:
        if end != started.sentinel:
            os.close(end)
