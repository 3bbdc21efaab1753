"""The results of a generator on Ray, which come one by one."""

from __future__ import annotations

from typing import Any

import ray


class Stream:
    """Ray's generator of references, and how far it was read."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.taken = 0
        self._over = False

    def waitable(self) -> Any:
        """What Ray can wait for: ready when the next value is, or the end."""
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
            return None
        if ref.is_nil():
            return None
        self.taken += 1
        return ref
