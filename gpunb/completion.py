"""Refs in the order in which they become ready."""

from __future__ import annotations

import queue
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from gpunb import backend
from gpunb.exceptions import GetTimeoutError
from gpunb.refs import HEARTBEAT, ObjectRef, check_timeout

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
        self._left = len(pending)
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
        return self._left

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        if not self._left:
            raise StopIteration
        while True:
            try:
                ref = self._ready.get(timeout=self._patience())
            except queue.Empty:
                continue
            self._left -= 1
            return ref

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        import asyncio

        if not self._left:
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
                try:
                    await asyncio.wait_for(there.wait(), self._patience())
                except TimeoutError:
                    pass
                continue
            self._left -= 1
            return ref

    def _patience(self) -> float:
        """How long to wait at once: an interrupt is not seen by who sleeps longer."""
        if self._deadline is None:
            return HEARTBEAT
        left = self._deadline - time.monotonic()
        if left <= 0 and self._ready.empty():
            raise GetTimeoutError(f"{self._left} results were not there in time; the tasks go on")
        return min(max(left, 0.0), HEARTBEAT)
