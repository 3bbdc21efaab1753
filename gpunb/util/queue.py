"""`Queue`: a queue that tasks, actors and the kernel share, in an actor of its own."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable, Mapping
from typing import Any

from gpunb.api.actor_class import RemoteClass
from gpunb.api.actor_handle import kill
from gpunb.scheduler.options import ActorOptions

__all__ = ["Empty", "Full", "Queue"]

_MAX_WAITING = 1_000_000
"""Number of calls that may wait at once for items or for room."""


class Empty(queue.Empty):
    """The queue has no item, or got none in time."""


class Full(queue.Full):
    """The queue is full, or had no room in time."""


class Queue:
    """A first-in first-out queue. It can be passed to tasks and actors.

    Args:
        maxsize: the largest number of items; 0 without limit.
        actor_options: options of `gpunb.remote` for the actor that holds the items.
    """

    def __init__(self, maxsize: int = 0, actor_options: Mapping[str, Any] | None = None) -> None:
        options = {"max_concurrency": _MAX_WAITING, **(actor_options or {})}
        items: Any = RemoteClass(_Items, ActorOptions().updated(options))
        self.maxsize = maxsize
        self.actor = items.remote(maxsize)

    def __len__(self) -> int:
        return self.qsize()

    def qsize(self) -> int:
        """The number of items."""
        count: int = self.actor.qsize.remote().result()
        return count

    size = qsize

    def empty(self) -> bool:
        """Whether the queue has no item."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Whether the queue has no room."""
        return 0 < self.maxsize <= self.qsize()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add an item. Waits for room at most `timeout` seconds; without `block` not at all.

        Raises:
            Full: there was no room in time.
        """
        self._check_put(self.actor.put.remote([item], _wait_time(block, timeout)).result())

    async def put_async(
        self,
        item: Any,
        block: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109 - the name that programs use
    ) -> None:
        """As `put`, in a coroutine."""
        self._check_put(await self.actor.put.remote([item], _wait_time(block, timeout)))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take an item. Waits for one at most `timeout` seconds; without `block` not at all.

        Raises:
            Empty: there was no item in time.
        """
        return _only_item(self.actor.get.remote(_wait_time(block, timeout)).result())

    async def get_async(
        self,
        block: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109 - the name that programs use
    ) -> Any:
        """As `get`, in a coroutine."""
        return _only_item(await self.actor.get.remote(_wait_time(block, timeout)))

    def put_nowait(self, item: Any) -> None:
        """As ``put(item, block=False)``."""
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        """As ``get(block=False)``."""
        return self.get(block=False)

    def put_nowait_batch(self, items: Iterable[Any]) -> None:
        """Add all the items at once.

        Raises:
            Full: there is no room for all; none was added.
        """
        many = list(items)
        if not self.actor.put_all.remote(many).result():
            raise Full(f"{len(many)} items are more than there is room for")

    def get_nowait_batch(self, num_items: int) -> list[Any]:
        """Take `num_items` items at once.

        Raises:
            Empty: the queue has fewer; none was taken.
        """
        items: list[Any] | None = self.actor.get_many.remote(num_items).result()
        if items is None:
            raise Empty(f"there are fewer than {num_items} items")
        return items

    def shutdown(self, force: bool = False, grace_period_s: float = 5) -> None:
        """End the queue. Calls that wait for it fail."""
        kill(self.actor)

    @staticmethod
    def _check_put(added: bool) -> None:
        if not added:
            raise Full("there is no room in the queue")


class _Items:
    """The actor's side of a queue, which holds the items.

    `patience` is the longest wait in seconds: 0 does not wait, None waits without limit.
    """

    def __init__(self, maxsize: int) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(maxsize)

    async def qsize(self) -> int:
        return self._queue.qsize()

    async def put(self, item: list[Any], patience: float | None) -> bool:
        try:
            if patience == 0:
                self._queue.put_nowait(item[0])
            else:
                await asyncio.wait_for(self._queue.put(item[0]), patience)
        except (asyncio.QueueFull, TimeoutError):
            return False
        return True

    async def get(self, patience: float | None) -> list[Any]:
        try:
            if patience == 0:
                return [self._queue.get_nowait()]
            return [await asyncio.wait_for(self._queue.get(), patience)]
        except (asyncio.QueueEmpty, TimeoutError):
            return []

    async def put_all(self, items: list[Any]) -> bool:
        queue = self._queue
        if 0 < queue.maxsize < queue.qsize() + len(items):
            return False
        for each in items:
            queue.put_nowait(each)
        return True

    async def get_many(self, count: int) -> list[Any] | None:
        if self._queue.qsize() < count:
            return None
        return [self._queue.get_nowait() for _ in range(count)]


def _wait_time(block: bool, timeout: float | None) -> float | None:
    if not block:
        return 0
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout={timeout!r} must be 0 or more seconds")
    return timeout


def _only_item(found: list[Any]) -> Any:
    if not found:
        raise Empty("there is no item in the queue")
    return found[0]
