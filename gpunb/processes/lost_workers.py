"""Workers that have lost their zygote: each is killed, and its end is reported when it has come.

The system kills them when their zygote dies, but nobody reaps them for the kernel. The devices of a
worker are not free before it is gone. So the kernel watches each one through a pidfd.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable

from gpunb.processes.pool import WorkerPool
from gpunb.processes.worker_process import WorkerProcess
from gpunb.system import linux
from gpunb.system.loop import Loop

_PAUSE = 0.1
"""Seconds until a step that lacked resources is tried again."""


class LostWorkers:
    """Ends workers without a zygote, on the loop's thread."""

    def __init__(self, loop: Loop, pool: WorkerPool) -> None:
        self._loop = loop
        self._pool = pool
        self._watched: set[int] = set()

    def end(self, process: WorkerProcess, reason: str) -> None:
        """Kill a process, and report its end with this reason when it is gone."""
        if process.pid is None:
            self._pool.gone_later(process, reason)
            return
        try:
            descriptor = linux.pidfd_open(process.pid)
        except OSError as error:
            if error.errno == errno.ESRCH:
                self._pool.gone_later(process, reason)
            else:  # no descriptor is left: its devices are not free before its end is seen
                self._loop.after(_PAUSE, functools.partial(self.end, process, reason))
            return

        def ended() -> None:
            self._unwatch(descriptor)
            self._pool.gone(process, reason)

        try:
            linux.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            pass
        self._watched.add(descriptor)
        self._watch(descriptor, ended)

    def _watch(self, descriptor: int, ended: Callable[[], None]) -> None:
        """Watch the end of a process, now or as soon as the system has memory for it."""
        if descriptor not in self._watched:
            return
        try:
            self._loop.watch(descriptor, ended)
        except OSError:
            self._loop.after(_PAUSE, functools.partial(self._watch, descriptor, ended))

    def _unwatch(self, descriptor: int) -> None:
        self._watched.discard(descriptor)
        self._loop.unwatch(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        """Watch no process any more."""
        for descriptor in list(self._watched):
            self._unwatch(descriptor)

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        while self._watched:
            os.close(self._watched.pop())
