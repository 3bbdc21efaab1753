"""The memory budget of objects: counts their bytes, and chooses the objects that move to disk.

`object_memory` moves them. The budget counts the bytes of the segments that the store keeps alive.
Another process may map a segment too; then its memory is free when the last process unmaps it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from gpunb.exceptions import OutOfMemoryError
from gpunb.scheduler.resources import parse_size, size_text

__all__ = ["Budget", "parse_limit", "total_memory"]

K = TypeVar("K")


class _Item:
    """One block of memory; `holders` counts how often it was added, `pins` its present users."""

    __slots__ = ("holders", "leaving", "nbytes", "on_disk", "pins")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.holders = 0
        self.pins = 0
        self.leaving = False
        self.on_disk = False


class Budget(Generic[K]):
    """Counts the bytes in memory and on disk, and chooses the objects that move to disk.

    For any thread. The key of an entry is a hashable object. An object that is added twice counts
    once, and stays until it was removed twice.

    Attributes:
        limit: bytes in memory.
        spill: whether anything may be moved to disk.
    """

    def __init__(self, limit: int, *, spill: bool = False) -> None:
        self.limit = limit
        self.spill = spill
        self._items: dict[K, _Item] = {}
        self._movable: OrderedDict[K, _Item] = OrderedDict()
        """The objects that stay in memory, the least recently used first."""
        self._used = 0
        self._leaving = 0
        self._spilled = 0
        # Reentrant: a signal's handler may come in between, and put something.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._items)

    def facts(self) -> dict[str, int]:
        """Return the bytes in memory, the bytes allowed in memory, and the bytes on disk."""
        with self._lock:
            return {"used": self._used, "limit": self.limit, "spilled": self._spilled}

    def admit(self, items: Sequence[tuple[K, int]], what: str = "the object") -> list[K]:
        """Count new objects of so many bytes each: all of them or none.

        Returns:
            The objects to move to disk for them: the least recently used that are not in use. A
            new object that does not fit by itself is among them. The caller must call `moved` or
            `stays` for each.

        Raises:
            OutOfMemoryError: they do not fit, and nothing may be moved.
        """
        with self._lock:
            total = sum(nbytes for _, nbytes in items)
            excess = self._used - self._leaving + total - self.limit
            chosen: list[K] = []
            if total and excess > 0:
                if not self.spill:
                    raise OutOfMemoryError(self.refusal(what, total))
                chosen = self._choose(excess, items)
            for obj, nbytes in items:
                self.add(obj, nbytes)
            for obj in chosen:
                item = self._movable.pop(obj)
                item.leaving = True
                self._leaving += item.nbytes
            return chosen

    def _choose(self, excess: int, items: Sequence[tuple[K, int]]) -> list[K]:
        chosen: list[tuple[K, int]] = [each for each in items if each[1] > self.limit]
        found = sum(nbytes for _, nbytes in chosen)
        old = ((obj, item.nbytes) for obj, item in self._movable.items() if not item.pins)
        new = (each for each in items if each[1] <= self.limit)
        for source in (old, new):
            for each in source:
                if found >= excess:
                    break
                chosen.append(each)
                found += each[1]
        # The last one may be so large that some of those before it can stay.
        needed = []
        for each in chosen:
            if found - each[1] >= excess:
                found -= each[1]
            else:
                needed.append(each[0])
        return needed

    def add(self, obj: K, nbytes: int) -> None:
        """Count an object that is in memory, whether it fits or not, or another holder of it."""
        with self._lock:
            item = self._items.get(obj)
            if item is None:
                item = self._items[obj] = self._movable[obj] = _Item(nbytes)
                self._used += nbytes
            item.holders += 1

    def remove(self, obj: K) -> None:
        """Remove one holder of an object. Without holders its memory is free."""
        with self._lock:
            item = self._items.get(obj)
            if item is None:
                return
            item.holders -= 1
            if item.holders:
                return
            del self._items[obj]
            self._movable.pop(obj, None)
            if item.on_disk:
                self._spilled -= item.nbytes
                return
            self._used -= item.nbytes
            if item.leaving:
                self._leaving -= item.nbytes

    def touch(self, obj: K) -> None:
        """Note that an object is used now."""
        with self._lock:
            if obj in self._movable:
                self._movable.move_to_end(obj)

    def pin(self, obj: K) -> None:
        """Note that a process maps the object until `unpin`: to move it would free nothing."""
        with self._lock:
            item = self._items.get(obj)
            if item is not None:
                item.pins += 1
                self.touch(obj)

    def unpin(self, obj: K) -> None:
        with self._lock:
            item = self._items.get(obj)
            if item is not None and item.pins:
                item.pins -= 1

    def moved(self, obj: K) -> None:
        """Note that an object is on disk now, unless it was removed meanwhile."""
        with self._lock:
            item = self._left(obj)
            if item is not None:
                item.on_disk = True
                self._used -= item.nbytes
                self._spilled += item.nbytes

    def stays(self, obj: K) -> None:
        """Note that an object could not be moved. It is the first to be chosen again."""
        with self._lock:
            item = self._left(obj)
            if item is not None:
                self._movable[obj] = item
                self._movable.move_to_end(obj, last=False)

    def _left(self, obj: K) -> _Item | None:
        item = self._items.get(obj)
        if item is None or not item.leaving:
            return None
        item.leaving = False
        self._leaving -= item.nbytes
        return item

    def refusal(self, what: str, nbytes: int, reason: str = "") -> str:
        """Return the error that says why there is no room, and what the user can do about it."""
        facts = self.facts()
        text = (
            f"no room for {what} ({size_text(nbytes)}): objects take {size_text(facts['used'])} "
            f"of the {size_text(self.limit)} of memory that they may have"
        )
        ways = "drop refs that are not needed any more (del ref), or allow more with "
        if self.spill:
            text += f", and they could not be moved to disk: {reason}"
            return f"{text}\nTo go on, {ways}gpunb.init(object_memory=...)"
        ways += "gpunb.init(object_memory=...), or have objects moved to disk with "
        return f"{text}\nTo go on, {ways}gpunb.init(spill=True)"


# ------------------------------------------------------------------------------------ the option


def parse_limit(value: float | str | None) -> int:
    """Return the bytes of the option `object_memory`; by default half of the machine's memory.

    Raises:
        ValueError, TypeError: a bad value.
    """
    if value is None:
        return total_memory() // 2
    return parse_size(value, "object_memory")


def total_memory(root: str = "/sys/fs/cgroup", groups: str = "/proc/self/cgroup") -> int:
    """Return the bytes of memory for this process: the machine's, or its cgroup's limit if less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder, name in _groups(root, groups):
        try:
            with open(os.path.join(folder, name)) as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # ValueError: it says "max"
            continue
    return min(limits)


def _groups(root: str, groups: str) -> list[tuple[str, str]]:
    """Folder and file of each limit: of the process's own group, and of all above it."""
    found = []
    try:
        with open(groups) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = os.path.join(root, "memory"), "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # In a container the path may be the machine's, of which only the top is there.
        found += [(os.path.join(top, *parts[:count]), name) for count in range(len(parts) + 1)]
    return found
