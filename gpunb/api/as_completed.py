"""`as_completed`: refs in the order in which their tasks end."""

from __future__ import annotations

import queue
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from gpunb.api.refs import ObjectRef, check_timeout, in_task
from gpunb.exceptions import GetTimeoutError
from gpunb.protocol import backend
from gpunb.system.signals import HEARTBEAT

T = TypeVar("T")


class as_completed(Generic[T]):  # noqa: N801 - it is used like the function of that name elsewhere
    """Yield refs as they become ready (or fail), in ``for`` or ``async for``:

        for ref in gpunb.as_completed(refs):
            print(gpunb.get(ref))

    Args:
        refs: each is yielded once.
        timeout: seconds from now until the last ref.

    Raises:
        GetTimeoutError: a ref was not ready in time; refs that were ready have been yielded.
        TypeError: `refs` holds another object than an ObjectRef.
    """

    def __init__(self, refs: Iterable[ObjectRef[T]], *, timeout: float | None = None) -> None:
        check_timeout(timeout)
        self._pending = dict.fromkeys(refs)
        for each in self._pending:
            if not isinstance(each, ObjectRef):
                raise TypeError(f"as_completed takes ObjectRef, not {each!r:.60}")
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._ready: queue.SimpleQueue[ObjectRef[T]] = queue.SimpleQueue()
        self._wake: Any = None
        for each in self._pending:
            backend.current().notify(each.id, lambda ref=each: self._add_ready(ref))  # type: ignore[misc]

    def _add_ready(self, ref: ObjectRef[T]) -> None:
        self._ready.put(ref)
        wake = self._wake
        if wake is not None:
            wake()

    def __len__(self) -> int:
        """The number of refs that have not been yielded."""
        return len(self._pending)

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        if not self._pending:
            raise StopIteration
        while True:
            try:
                ref = self._ready.get(timeout=self._next_wait())
            except queue.Empty:
                if self._deadline is None and in_task():
                    # Tells the kernel, which looks for deadlocks, what this task waits for.
                    backend.current().wait([each.id for each in self._pending], 1, None)
                continue
            del self._pending[ref]
            return ref

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        import asyncio

        from gpunb.api.heartbeat import until

        if not self._pending:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:
                pass  # the loop was closed

        self._wake = wake
        while True:
            arrived.clear()
            try:
                ref = self._ready.get_nowait()
            except queue.Empty:
                if self._deadline is None:
                    await until(arrived)
                    continue
                try:
                    await asyncio.wait_for(arrived.wait(), self._next_wait())
                except TimeoutError:
                    pass
                continue
            del self._pending[ref]
            return ref

    def _next_wait(self) -> float:
        """Seconds of the next wait, at most HEARTBEAT: an interrupt is seen only between waits.

        Raises:
            GetTimeoutError: the time is over.
        """
        if self._deadline is None:
            return HEARTBEAT
        left = self._deadline - time.monotonic()
        if left <= 0 and self._ready.empty():
            raise GetTimeoutError(
                f"{len(self._pending)} results were not there in time; the tasks go on"
            )
        return min(max(left, 0.0), HEARTBEAT)
