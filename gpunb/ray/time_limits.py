"""Time limits of calls in a Ray worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from gpunb.ray.transport import CallHeader
from gpunb.scheduler.tasks import TaskId

GRACE = 5.0
"""Seconds that a task has to end by itself after its time-out, before its process is ended."""


class TimeLimits:
    """Interrupts calls at their time limits, and ends the process if that does not help."""

    def __init__(
        self,
        interrupt: Callable[[TaskId], object],
        end_process: Callable[[TaskId, float], object],
    ) -> None:
        self._interrupt = interrupt
        self._end_process = end_process
        self._late: set[TaskId] = set()
        self._seconds: dict[TaskId, float] = {}

    def error(self, label: str, task: TaskId) -> TimeoutError | None:
        """Return the error of a call that was interrupted at its time limit; else None."""
        return _too_late(label, self._seconds.get(task, 0)) if task in self._late else None

    @contextlib.contextmanager
    def watching(self, header: CallHeader, *, on_main_thread: bool) -> Iterator[None]:
        """Interrupt a call at its time limit, if it has one."""
        task, seconds = header.task, header.timeout
        if seconds is None:
            yield
            return
        self._seconds[task] = seconds

        def interrupt() -> None:
            self._late.add(task)
            self._interrupt(task)

        timers = [threading.Timer(seconds, interrupt)]
        if on_main_thread:
            timers.append(threading.Timer(seconds + GRACE, self._end_process, (task, seconds)))
        for each in timers:
            each.daemon = True
            each.start()
        try:
            yield
        finally:
            for each in timers:
                each.cancel()
            self._late.discard(task)
            self._seconds.pop(task, None)


async def within(header: CallHeader, value: Awaitable[Any]) -> Any:
    """Await the value of a call, at most as long as its time limit allows.

    Raises:
        TimeoutError: the call ran longer.
    """
    try:
        async with asyncio.timeout(header.timeout) as limit:
            return await value
    except TimeoutError:
        if header.timeout is None or not limit.expired():
            raise  # the call's own
        raise _too_late(f"{header.name} (#{header.task})", header.timeout) from None


def _too_late(label: str, seconds: float) -> TimeoutError:
    return TimeoutError(f"{label} ran longer than its timeout of {seconds:g} s and was stopped")
