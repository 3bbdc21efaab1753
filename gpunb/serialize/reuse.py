"""Large buffers that were sent before and did not change are not copied again."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict, deque
from typing import Any

from gpunb.objects import Segment, address
from gpunb.pages import Watch

LARGE = 1 << 20
"""Bytes from which on a buffer is remembered."""


class _Sent:
    """A buffer as it was sent. `owner` is whose memory it is; None if that cannot be known."""

    __slots__ = ("owner", "segment", "watch")

    def __init__(self, segment: Segment, watch: Watch | None, owner: Any) -> None:
        self.segment = segment
        self.watch = watch
        self.owner = owner


class Reuse:
    """Segments for the large buffers of one sender. What was used last is kept longest.

    Args:
        limit: bytes of segments to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent: OrderedDict[tuple[int, int], _Sent] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()
        self._gone: deque[tuple[int, int]] = deque()

    def segment(self, raw: memoryview) -> Segment | None:
        """A segment that holds what the flat view holds; None if it is not worth remembering.

        Raises:
            OutOfMemoryError: if there is no memory left for it.
        """
        if raw.readonly or not LARGE <= raw.nbytes <= self._limit:
            return None
        with self._lock:
            self._forget_gone()
            key = address(raw), raw.nbytes
            sent = self._sent.get(key)
            if sent is not None and _same(sent, raw):
                self._sent.move_to_end(key)
                return sent.segment
            if sent is not None:
                self._drop(key)
            return self._write(key, raw)

    def _write(self, key: tuple[int, int], raw: memoryview) -> Segment:
        # Watched before it is copied: what somebody writes meanwhile counts as a change.
        try:
            watch = Watch(raw)
        except OSError:
            watch = None
        segment, _ = Segment.write([raw])
        self._sent[key] = _Sent(segment, watch, self._owner(key, raw.obj))
        self._held += raw.nbytes
        while self._held > self._limit:
            self._drop(next(iter(self._sent)))
        return segment

    def _owner(self, key: tuple[int, int], owner: Any) -> Any:
        """Lets go of the segment when whoever has the buffer is gone."""
        this = weakref.ref(self)

        def gone(_: Any) -> None:
            reuse = this()
            if reuse is not None:
                reuse.forget(key)

        while type(base := getattr(owner, "base", None)) is type(owner):
            owner = base  # of an array that is a view, the one that has the memory
        try:
            return weakref.ref(owner, gone)
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
            if key in self._sent:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        del self._sent[key]
        self._held -= key[1]

    def __len__(self) -> int:
        return len(self._sent)


def _same(sent: _Sent, raw: memoryview) -> bool:
    if sent.watch is not None:
        return sent.watch.untouched(raw)
    copy = sent.segment.map()
    return not _compare(address(copy), address(raw), raw.nbytes)


_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
