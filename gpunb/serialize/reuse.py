"""Large buffers that were sent before and did not change are not copied again.

What was sent is let go with the object whose memory it is a copy of. Some buffers belong to an
object that is made for the pickle alone, while their memory stays where it is, in the trees of a
forest for instance. What was sent of these is let go when a number of values were sent without it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import OrderedDict, deque
from typing import Any

from gpunb.objects import Segment, address
from gpunb.pages import Watch

LARGE = 1 << 20
"""Bytes from which on a buffer is remembered."""

ROUNDS = 20
"""Values that are sent before a buffer that nobody owns is forgotten, if it is in none of them."""

_OWNERLESS = 1 / 8
"""The part of all memory that such buffers may have."""


class _Sent:
    """A buffer as it was sent. `owner` refers to whose memory it is; None if that cannot be known.
    `used` is the number of the last value that it was a part of."""

    __slots__ = ("owner", "segment", "used", "watch")

    def __init__(self, segment: Segment, watch: Watch | None, owner: Any, used: int) -> None:
        self.segment = segment
        self.watch = watch
        self.owner = owner
        self.used = used


class Reuse:
    """Segments for the large buffers of one sender. What was used last is kept longest.

    Args:
        limit: bytes of segments to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent: OrderedDict[tuple[int, int], _Sent] = OrderedDict()
        self._held = 0
        self._values = 0
        self._lock = threading.Lock()
        self._gone: deque[tuple[int, int]] = deque()

    def segment(self, raw: memoryview) -> Segment | None:
        """A segment that holds what the flat view holds; None if it is not worth remembering.

        Raises:
            OutOfMemoryError: if there is no memory left for it.
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
        """A value was sent, and nothing that was made to pickle it is left."""
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
        # Watched before it is copied: what somebody writes meanwhile counts as a change.
        try:
            watch = Watch(raw)
        except OSError:
            watch = None
        segment, _ = Segment.write([raw])
        self._sent[key] = _Sent(segment, watch, self._owner(key, raw), self._values)
        self._held += raw.nbytes
        while self._held > self._limit:
            self._drop(next(iter(self._sent)))
        return segment

    def _owner(self, key: tuple[int, int], raw: memoryview) -> Any:
        """Lets go of the segment when whoever has the buffer is gone."""
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
        """The buffer is gone. Said by destructors, at any time: done later if somebody is here."""
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
            if sent.used == self._values:  # it was made to be pickled, so the memory is another's
                sent.owner = None
            else:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        del self._sent[key]
        self._held -= key[1]

    def __len__(self) -> int:
        return len(self._sent)


def owner_of(raw: memoryview) -> Any:
    """Whose memory it is: the one that views of it come from, as far as that can be told."""
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
    """Whether it is a copy that was made to be pickled, and will be elsewhere the next time."""
    return hasattr(owner_of(raw), "passing")  # as `devices` says


def _below(owner: Any) -> Any:
    if isinstance(owner, memoryview):
        return owner.obj
    if isinstance(owner, ctypes.Array):
        return getattr(owner, "owner", None)  # as `devices` says of a tensor's storage
    numpy = sys.modules.get("numpy")
    return owner.base if numpy is not None and isinstance(owner, numpy.ndarray) else None


def _same(sent: _Sent, raw: memoryview) -> bool:
    if sent.watch is not None:
        return sent.watch.untouched(raw)
    copy = sent.segment.map()
    return not _compare(address(copy), address(raw), raw.nbytes)


_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
