"""Reuses segments of large buffers that were sent before and have not changed.

A segment is dropped with the object that owns the buffer's memory. But some buffers belong to an
object that exists only while it is pickled, although their memory stays (the trees of a forest, for
example). Their segments are dropped after `ROUNDS` values without them.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import OrderedDict, deque
from typing import Any

from gpunb.data.arenas import write_large
from gpunb.data.page_map import Watch
from gpunb.data.segments import Segment, address

LARGE = 1 << 20
"""Bytes of the smallest buffer whose segment is kept."""

ROUNDS = 20
"""Values without a buffer of unknown owner, after which its segment is dropped."""

_OWNERLESS = 1 / 8
"""The part of the limit that buffers of unknown owner may use."""


class _Sent:
    """A buffer that was sent. `owner` is a weak reference to the owner of its memory, or None;
    `used` is the number of the last value that had the buffer."""

    __slots__ = ("owner", "segment", "used", "watch")

    def __init__(self, segment: Segment, watch: Watch | None, owner: Any, used: int) -> None:
        self.segment = segment
        self.watch = watch
        self.owner = owner
        self.used = used


class Reuse:
    """Segments for the large buffers of one sender. The least recently used are dropped first.

    Args:
        limit: bytes of the segments together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent: OrderedDict[tuple[int, int], _Sent] = OrderedDict()
        self._held = 0
        self._values = 0
        self._lock = threading.Lock()
        self._gone: deque[tuple[int, int]] = deque()

    def segment(self, raw: memoryview) -> Segment | None:
        """Return a segment with the content of a flat view; None if it should not be kept.

        Raises:
            OutOfMemoryError: no memory is left for it.
        """
        if not LARGE <= raw.nbytes <= self._limit or passing(raw):
            return None
        with self._lock:
            self._forget_gone()
            key = address(raw), raw.nbytes
            sent = self._sent.get(key)
            if sent is not None and _same(sent, raw):
                self._sent.move_to_end(key)
                sent.used = self._values
                return sent.segment
            if sent is not None:
                self._drop(key)
            return self._write(key, raw)

    def sent(self) -> None:
        """Note that a value was sent. Objects that existed only for the pickler must be gone."""
        with self._lock:
            self._forget_gone()
            self._values += 1
            room = self._limit * _OWNERLESS
            ownerless = [key for key, sent in self._sent.items() if sent.owner is None]
            for key in reversed(ownerless):
                room -= key[1]
                if room < 0 or self._sent[key].used < self._values - ROUNDS:
                    self._drop(key)

    def _write(self, key: tuple[int, int], raw: memoryview) -> Segment:
        # Watched before the copy, so that a write during the copy counts as a change.
        try:
            watch = Watch(raw)
        except OSError:
            watch = None
        segment, _ = write_large([raw])
        self._sent[key] = _Sent(segment, watch, self._owner(key, raw), self._values)
        self._held += raw.nbytes
        while self._held > self._limit:
            self._drop(next(iter(self._sent)))
        return segment

    def _owner(self, key: tuple[int, int], raw: memoryview) -> Any:
        """Return a weak reference to the buffer's owner, which drops the segment with the owner."""
        this = weakref.ref(self)

        def gone(_: Any) -> None:
            reuse = this()
            if reuse is not None:
                reuse.forget(key)

        try:
            return weakref.ref(owner_of(raw), gone)
        except TypeError:
            return None

    def forget(self, key: tuple[int, int]) -> None:
        """Note the end of a buffer's owner. Destructors call it, perhaps within another method."""
        self._gone.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_gone()
            finally:
                self._lock.release()

    def _forget_gone(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            sent = self._sent.get(key)
            if sent is None:
                continue
            if sent.used == self._values:  # made only for the pickler: the real owner is unknown
                sent.owner = None
            else:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        del self._sent[key]
        self._held -= key[1]

    def __len__(self) -> int:
        return len(self._sent)


def owner_of(raw: memoryview) -> Any:
    """Return the object that owns a view's memory, as far as it is known."""
    owner = raw.obj
    while True:
        below = _below(owner)
        if below is None:
            return owner
        try:
            weakref.ref(below)
        except TypeError:
            return owner
        owner = below


def passing(raw: memoryview) -> bool:
    """Whether the memory is a copy for one pickle, which the next pickle makes again."""
    return hasattr(owner_of(raw), "passing")  # see `devices._Storage`


def _below(owner: Any) -> Any:
    if isinstance(owner, memoryview):
        return owner.obj
    if isinstance(owner, ctypes.Array):
        return getattr(owner, "owner", None)  # see `devices._Storage`
    numpy = sys.modules.get("numpy")
    return owner.base if numpy is not None and isinstance(owner, numpy.ndarray) else None


def _same(sent: _Sent, raw: memoryview) -> bool:
    if sent.watch is not None:
        return sent.watch.untouched(raw)
    copy = sent.segment.map()
    return not _compare(address(copy), address(raw), raw.nbytes)


_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
