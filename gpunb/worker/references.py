"""Counts the references of a worker to objects, and reports the changes to the kernel.

1. `hold` and `drop` only note a change: a destructor may call them between any two steps.
2. `report` sends the changes before each request and after each task. Gains go first, so that the
   kernel lets go of nothing that is still wanted.
3. An interrupt may hit between a reply that gives a reference and its note. So after an attempt
   that was interrupted, `take_stock` sends all references that exist here.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable

from gpunb.protocol import messages as msg
from gpunb.protocol.backend import HOLDERS, ObjectId


class References:
    """The changes that the kernel was not told of yet."""

    def __init__(self, send: Callable[[msg.Message], object]) -> None:
        self._send = send
        self._changes: deque[tuple[ObjectId, int]] = deque()
        self._reporting = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there are changes."""
        return bool(self._changes)

    def hold(self, obj: ObjectId) -> None:
        """Note one more reference."""
        self._changes.append((obj, 1))

    def drop(self, obj: ObjectId) -> None:
        """Note one reference less."""
        self._changes.append((obj, -1))

    def report(self, *, gains_only: bool = False) -> None:
        """Send the changes to the kernel."""
        # The changes that another thread just sends come before what this thread sends next.
        if not self._changes and not self._reporting.locked():
            return
        with self._reporting:
            changes: dict[ObjectId, int] = {}
            while self._changes:
                obj, count = self._changes.popleft()
                changes[obj] = changes.get(obj, 0) + count
            for obj, count in sorted(changes.items(), key=lambda each: -each[1]):
                if count < 0 and gains_only:
                    self._changes.append((obj, count))
                elif count:
                    self._send(msg.Held(obj, count))

    def tidy(self) -> None:
        """Let go of references in garbage that only the collector can find."""
        gc.collect()
        self.report()

    def take_stock(self) -> None:
        """Send all references that this process has, unless other threads change them meanwhile."""
        if threading.active_count() > 1:
            self.report()
            return
        gc.collect()
        self._changes.clear()
        held: dict[ObjectId, int] = {}
        for each in gc.get_objects():
            if (refers := HOLDERS.get(type(each))) is not None:
                try:
                    obj = refers(each)
                except AttributeError:
                    continue  # an interrupt hit its constructor
                held[obj] = held.get(obj, 0) + 1
        self._send(msg.Stock(tuple(held.items())))

    def recover(self) -> None:
        """Open the lock, which an interrupt may have left closed. No other thread is left."""
        if self._reporting.locked():
            self._reporting.release()
