"""Refs in the order in which they become ready."""

from __future__ import annotations

import queue
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from gpunb import backend
from gpunb.exceptions import GetTimeoutError
from gpunb.refs import ObjectRef, check_timeout, in_task
from gpunb.signals import HEARTBEAT

T = TypeVar("T")


class as_completed(Generic[T]):  # noqa: N801 - it is used like the function of that name elsewhere
    """Yield refs as they become ready (or fail), in ``for`` or ``async for``:

        for ref in gpunb.as_completed(refs):
            print(gpunb.get(ref))

    Args:
        refs: each is yielded once.
        timeout: seconds from now, for all of them.

    Raises:
        GetTimeoutError: not all were ready in time; those that were have been yielded.
        TypeError: not refs.
    """

    def __init__(self, refs: Iterable[ObjectRef[T]], *, timeout: float | None = None) -> None:
        check_timeout(timeout)
        pending = list(dict.fromkeys(refs))
        for each in pending:
            if not isinstance(each, ObjectRef):
                raise TypeError(f"as_completed takes ObjectRef, not {each!r:.60}")
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._pending = dict.fromkeys(pending)
        self._ready: queue.SimpleQueue[ObjectRef[T]] = queue.SimpleQueue()
        self._wake: Any = None
        for each in pending:
            backend.current().notify(each.id, lambda ref=each: self._tell(ref))  # type: ignore[misc]

    def _tell(self, ref: ObjectRef[T]) -> None:
        self._ready.put(ref)
        wake = self._wake
        if wake is not None:
            wake()

    def __len__(self) -> int:
        """How many are yet to come."""
        return len(self._pending)

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        if not self._pending:
            raise StopIteration
        while True:
            try:
                ref = self._ready.get(timeout=self._patience())
            except queue.Empty:
                if self._deadline is None and in_task():
                    # So that the kernel knows that the task goes on with one of these only.
                    backend.current().wait([each.id for each in self._pending], 1, None)
                continue
            del self._pending[ref]
            return ref

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        import asyncio

        from gpunb.awaiting import until

        if not self._pending:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        there = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(there.set)
            except RuntimeError:
                pass  # the loop was closed: nobody waits any more

        self._wake = wake
        while True:
            there.clear()
            try:
                ref = self._ready.get_nowait()
            except queue.Empty:
                if self._deadline is None:
                    await until(there, [each.id for each in self._pending])
                    continue
                try:
                    await asyncio.wait_for(there.wait(), self._patience())
                except TimeoutError:
                    pass
                continue
            del self._pending[ref]
            return ref

    def _patience(self) -> float:
        """How long to wait at once: an interrupt is not seen by who sleeps longer."""
        if self._deadline is None:
            return HEARTBEAT
        left = self._deadline - time.monotonic()
        if left <= 0 and self._ready.empty():
            raise GetTimeoutError(
                f"{len(self._pending)} results were not there in time; the tasks go on"
            )
        return min(max(left, 0.0), HEARTBEAT)
