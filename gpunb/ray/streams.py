"""The results of a generator on Ray, which come one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray


class RayStream:
    """Ray's generator of references, and how far it was read.

    Attributes:
        stopped: whether it was cancelled, which Ray may forget.
    """

    def __init__(self, generator: Any, finished: Callable[[], bool]) -> None:
        """`finished` says of one that is over and was stopped whether it had come to its end."""
        self.generator = generator
        self.taken = 0
        self.stopped = False
        self._finished = finished
        self._last: Any = None
        self._over = False

    def waitable(self) -> Any:
        """A reference that Ray can wait for: ready when the next value or the end is there."""
        return self.generator

    def peek(self) -> Any:
        """The reference of the next value, which may never come."""
        generator = self.generator
        if self._over or generator._stream_exhausted():
            return generator.completed()
        core = generator.worker.core_worker
        return core.peek_object_ref_stream(generator.completed())[0]

    def ready(self) -> bool:
        """Whether the next value is there, or the end."""
        return self._over or bool(ray.wait([self.generator], timeout=0, fetch_local=False)[0])

    def take(self) -> Any:
        """The next reference, which is there; None at the end."""
        if self._over:
            return None
        try:
            ref = self.generator._next_sync(None)
        except StopIteration:
            self._over = True
            # Ray may leave out what was cancelled before it gave anything, and does not say so.
            if not self.stopped or (self.taken and self._finished()) or self._has_failed():
                return None
            ref = ray.put(ray.exceptions.TaskCancelledError())
        if ref.is_nil():
            return None
        self.taken += 1
        if self.stopped:
            self._last = ref
        return ref

    def _has_failed(self) -> bool:
        """Whether the last value was an error, as it should be."""
        ref, self._last = self._last, None
        try:
            if ref is not None:
                ray.get(ref)
        except Exception:
            return True
        return False
