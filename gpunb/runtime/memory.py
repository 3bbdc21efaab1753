"""How much memory objects may take, and which of them move to disk when it is full.

`Budget` keeps the books and decides, `Memory` carries it out. What counts are the segments that
the store keeps alive. That somebody else maps one too is not known: its memory is free when the
last of them lets go.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from gpunb.core.resources import parse_size, size_text
from gpunb.exceptions import OutOfMemoryError
from gpunb.objects import unnamed_file
from gpunb.serialize import Payload

__all__ = ["Budget", "Memory", "parse_limit", "parse_spill", "total_memory"]

K = TypeVar("K")

_IN_MEMORY_ONLY = {"tmpfs", "ramfs", "devtmpfs"}


class _Item:
    """One block of memory; `holders` is how often it was added, `pins` how many use it now."""

    __slots__ = ("holders", "leaving", "nbytes", "on_disk", "pins")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.holders = 0
        self.pins = 0
        self.leaving = False
        self.on_disk = False


class Budget(Generic[K]):
    """The books of what lies in memory and what on disk, and the choice of what is to move.

    For any thread. What is booked is known by an object that can be hashed; booked twice, it
    counts once, and is there until it was removed as often.

    Attributes:
        limit: bytes in memory.
        spill: whether anything may be moved to disk.
    """

    def __init__(self, limit: int, *, spill: bool = False) -> None:
        self.limit = limit
        self.spill = spill
        self._items: dict[K, _Item] = {}
        self._movable: OrderedDict[K, _Item] = OrderedDict()
        """In memory to stay, the least recently used first."""
        self._used = 0
        self._leaving = 0
        self._spilled = 0
        # Reentrant: a signal's handler may come in between, and put something.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._items)

    def facts(self) -> dict[str, int]:
        """Bytes in memory, allowed in memory, and on disk."""
        with self._lock:
            return {"used": self._used, "limit": self.limit, "spilled": self._spilled}

    def admit(self, items: Sequence[tuple[K, int]], what: str = "the object") -> list[K]:
        """Book new objects of so many bytes each, all of them or none.

        Returns:
            What has to be moved to disk for them: the least recently used that nobody uses now.
            An object that does not fit by itself is among them. `moved` or `stays` is to follow
            for each.

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
        """Book an object that is in memory, whether it fits or not; or one more who has it."""
        with self._lock:
            item = self._items.get(obj)
            if item is None:
                item = self._items[obj] = self._movable[obj] = _Item(nbytes)
                self._used += nbytes
            item.holders += 1

    def remove(self, obj: K) -> None:
        """One less has the object; if it was the last, its memory is free."""
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
        """The object is used just now."""
        with self._lock:
            if obj in self._movable:
                self._movable.move_to_end(obj)

    def pin(self, obj: K) -> None:
        """Somebody maps the object, so to move it would free nothing; `unpin` is to follow."""
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
        """The object is on disk now, unless it was removed meanwhile."""
        with self._lock:
            item = self._left(obj)
            if item is not None:
                item.on_disk = True
                self._used -= item.nbytes
                self._spilled += item.nbytes

    def stays(self, obj: K) -> None:
        """The object could not be moved; it is the first to be chosen again."""
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
        """Why there is no room for so many bytes, and what to do about it."""
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


class Memory:
    """Has room for objects, moving others to disk if it may.

    A payload that is moved gets another segment. Whoever took the one before can use it on.

    Args:
        limit: bytes that segments may take.
        folder: where to move them to; None if they must not be moved.
        post: hands (function, argument) to the loop's thread.
    """

    def __init__(
        self,
        limit: int,
        folder: str | None = None,
        post: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> None:
        self._budget: Budget[Payload] = Budget(limit, spill=folder is not None)
        self._folder = folder or ""
        self._post = post
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._under_way = 0  # on the loop's thread only

    def facts(self) -> dict[str, int]:
        """For `status()`: bytes used, of the limit, and spilled."""
        return self._budget.facts()

    # --------------------------------------------------------------------------- from any thread

    def admit(self, payload: Payload, what: str) -> None:
        """Have room for a payload, waiting while others are moved; `release` is to follow.

        Raises:
            OutOfMemoryError: there is no room, or none on the disk.
        """
        items = _sizes([payload])
        if items:
            self._move(self._budget.admit(items, what), items, what)

    def hold(self, payload: Payload) -> None:
        """One more has the payload."""
        for each, nbytes in _sizes([payload]):
            self._budget.add(each, nbytes)

    def release(self, *payloads: Payload) -> None:
        """One less has each of the payloads."""
        for each in payloads:
            if each.segment is not None:
                self._budget.remove(each)

    def touch(self, payload: Payload) -> None:
        """The payload is used just now."""
        if payload.segment is not None:
            self._budget.touch(payload)

    def pin(self, payload: Payload) -> None:
        """A task has the payload until `unpin`: do not move it."""
        self._budget.pin(payload)

    def unpin(self, payload: Payload) -> None:
        self._budget.unpin(payload)

    # ------------------------------------------------------------------------ on the loop's thread

    def admit_soon(
        self,
        payloads: Sequence[Payload],
        what: str,
        then: Callable[[OutOfMemoryError | None], None],
        *,
        in_order: bool = False,
    ) -> None:
        """As `admit`, without waiting: `then` is called when there is room, or with the reason why
        there is none. That is at once if nothing has to be moved; with `in_order`, not before
        whoever asked earlier was told."""
        items = _sizes(payloads)
        chosen: Sequence[Payload] = ()
        refused: OutOfMemoryError | None = None
        try:
            if items:
                chosen = self._budget.admit(items, what)
        except OutOfMemoryError as error:
            refused = error.with_traceback(None)  # which would hold this frame, and the payloads
        if not chosen and not (in_order and self._under_way):
            then(refused)
            return
        post = self._post
        assert post is not None
        self._under_way += 1

        def tell(error: OutOfMemoryError | None) -> None:
            self._under_way -= 1
            then(error)

        def work() -> None:
            try:
                self._move(chosen, items, what)
            except OutOfMemoryError as error:
                post((tell, error))
            else:
                post((tell, refused))

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpunb-spill", daemon=True)
            self._thread.start()
        self._work.put(work)

    def close(self) -> None:
        """Move nothing more in the background; what is being moved is not waited for."""
        if self._thread is not None:
            self._work.put(None)

    # ------------------------------------------------------------------------------------- inside

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _move(
        self, chosen: Sequence[Payload], items: Sequence[tuple[Payload, int]], what: str
    ) -> None:
        done = 0
        try:
            for payload in chosen:
                segment = payload.segment
                assert segment is not None
                # The old one is not closed: somebody may be sending it.
                payload.segment = segment.spilled(self._folder)
                del segment  # its memory is free before the books say so
                self._budget.moved(payload)
                done += 1
        except BaseException as error:
            for payload in chosen[done:]:
                self._budget.stays(payload)
            self.release(*[payload for payload, _ in items])
            if not isinstance(error, Exception):
                raise
            total = sum(nbytes for _, nbytes in items)
            raise OutOfMemoryError(self._budget.refusal(what, total, str(error))) from error


def _sizes(payloads: Iterable[Payload]) -> list[tuple[Payload, int]]:
    sized = [(each, each.segment) for each in payloads]
    return [(each, segment.size) for each, segment in sized if segment is not None]


# ------------------------------------------------------------------------------------ the options


def parse_limit(value: float | str | None) -> int:
    """Bytes from the option `object_memory`; by default half of what there is.

    Raises:
        ValueError, TypeError: a bad value.
    """
    if value is None:
        return total_memory() // 2
    return parse_size(value, "object_memory")


def parse_spill(value: object) -> str | None:
    """The folder from the option `spill`; None for none.

    Raises:
        ValueError: there is no such folder, it cannot be written to, or it lies in memory.
        TypeError: neither a bool nor a path.
    """
    if value is None or value is False:
        return None
    if value is True:
        import tempfile

        folders = [tempfile.gettempdir(), "/var/tmp"]
        for folder in folders:
            if not _reason_against(folder):
                return folder
        raise ValueError(
            f"spill=True found no folder on a disk ({_reason_against(folders[0])}): "
            "name one, as in spill='/scratch'"
        )
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"spill must be True or a folder, not {value!r}")
    folder = os.path.abspath(os.path.expanduser(os.fspath(value)))
    reason = _reason_against(folder)
    if reason:
        raise ValueError(f"spill={os.fspath(value)!r} cannot be used: {reason}")
    return folder


def _reason_against(folder: str) -> str | None:
    try:
        os.close(unnamed_file(folder))
    except OSError as error:
        return f"{folder}: {error.strerror}"
    kind = _file_system(folder)
    if kind in _IN_MEMORY_ONLY:
        return f"{folder} is no disk, but memory ({kind})"
    return None


def _file_system(folder: str, table: str = "/proc/self/mountinfo") -> str | None:
    """The type of the file system that the folder is on; None if that is not known."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(table) as mounts:
            for line in mounts:
                mount, _, source = line.partition(" - ")
                if mount.split()[2] == number:
                    return source.split()[0]
    except (OSError, IndexError):
        pass
    return None


def total_memory(root: str = "/sys/fs/cgroup", groups: str = "/proc/self/cgroup") -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup's where less."""
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
