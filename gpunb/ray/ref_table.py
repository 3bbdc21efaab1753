"""Maps each id in this process to its Ray reference, as long as there are references to the id."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpunb.protocol.backend import ObjectId
from gpunb.system.signals import interrupt_later


class RefTable:
    """Counts the references to objects of this process; Ray counts those of the cluster.

    A destructor can run at any time, so `drop` takes no lock: it puts the id into a queue, and a
    thread of the table counts down.
    """

    def __init__(self, gone: Callable[[ObjectId, Any], object] | None = None) -> None:
        """`gone` is called, on the table's thread, with each object that has no references left."""
        self._refs: dict[ObjectId, Any] = {}
        self._counts: dict[ObjectId, int] = {}
        self._lock = threading.Lock()
        self._changes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gone = gone
        self._thread = threading.Thread(target=self._tidy, name="gpunb-references", daemon=True)
        self._thread.start()

    def add(self, obj: ObjectId, ref: Any) -> None:
        """From now on the id stands for this, and the caller holds one reference."""
        with self._lock:
            self._refs[obj] = ref
            self._counts[obj] = self._counts.get(obj, 0) + 1

    def arrive(self, objects: Iterable[ObjectId], refs: Iterable[Any]) -> None:
        """Count one reference to each of these objects, for a value that arrived with them."""
        with self._lock:
            for obj, ref in zip(objects, refs, strict=True):
                if ref is not None:
                    self._refs.setdefault(obj, ref)
                self._counts[obj] = self._counts.get(obj, 0) + 1

    def leave(self, objects: Sequence[ObjectId]) -> None:
        """Take back what `arrive` counted: the value is gone."""
        for obj in objects:
            self._changes.put(obj)

    def hold(self, obj: ObjectId) -> None:
        with self._lock:
            self._counts[obj] = self._counts.get(obj, 0) + 1

    def drop(self, obj: ObjectId) -> None:
        """At any time, from any thread."""
        try:
            self._changes.put(obj)
        except KeyboardInterrupt:
            interrupt_later()  # it is there by now

    def find(self, obj: ObjectId) -> Any:
        """The Ray reference of an id; None if this process does not know it."""
        return self._refs.get(obj)

    def close(self) -> None:
        self._changes.put(None)
        with self._lock:
            refs = list(self._refs.values())  # they go when this is left, without the lock
            self._refs.clear()
            self._counts.clear()
        del refs

    def __len__(self) -> int:
        return len(self._refs)

    def _tidy(self) -> None:
        while (obj := self._changes.get()) is not None:
            with self._lock:
                left = self._counts.get(obj, 0) - 1
                if left > 0:
                    self._counts[obj] = left
                    continue
                self._counts.pop(obj, None)
                ref = self._refs.pop(obj, None)
            if self._gone is not None:
                self._gone(obj, ref)
            del ref
