"""Finds out from the system's page map whether memory of this process was written to.

1. `arm` write-protects pages with an asynchronous userfaultfd. The first write to a page removes
   the protection without waking any process, and leaves a mark in the page map.
2. A page has one mark for all watches, and `arm` removes it. So `arm` reads the marks in the same
   step, and sets `lost` for the other watches of a marked page. All of them are `lost` until the
   marks are known: after an interrupt in between they report too many writes, never too few.
3. Pages that were replaced without a write (returned to the system, or mapped anew) have lost their
   protection, and count as written.

To arm or scan a gigabyte takes a fraction of a millisecond; the first write to each page costs one
page fault. Needs Linux 6.7. Memory that other processes may write to cannot be watched. Writes of a
device to memory that is registered with it leave no mark.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import os
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Iterator

from gpunb.data.segments import PAGE, address
from gpunb.system.signals import whole

_SYSCALLS = {"x86_64": 323, "aarch64": 282, "ppc64le": 364, "s390x": 355, "riscv64": 282}
_USER_MODE_ONLY = 1
_API, _UNPOPULATED, _ASYNC = 0xAA, 1 << 13, 1 << 15
_WRITE_PROTECT = 2
_REMOVE_MARKS, _MUST_BE_ARMED = 1, 2
_ARMED, _WRITTEN, _PRESENT, _SWAPPED = 1, 2, 8, 16
_THERE = _PRESENT | _SWAPPED  # arming an empty page leaves a swap entry
_REGIONS = 512
_BUCKET = 16 << 20


def _request(kind: int, number: int, size: int) -> int:
    """Return the number of an ioctl request that reads and writes `size` bytes."""
    return 3 << 30 | size << 16 | kind << 8 | number


_BEGIN = _request(0xAA, 0x3F, 24)
_REGISTER = _request(0xAA, 0x00, 32)
_PROTECT = _request(0xAA, 0x06, 24)
_SCAN = _request(ord("f"), 16, 96)


class Watch:
    """Finds out whether a buffer was written to since `arm`, or since the watch was made.

    The pages at its ends may have other data, too, so the buffer's bytes on them are compared.

    Attributes:
        first, last: the addresses where its whole pages begin and end.
        lost: whether another watch has removed marks of writes to these pages.
    """

    def __init__(self, raw: memoryview) -> None:
        """Watch the memory of a flat view; the view itself is not kept.

        Raises:
            OSError: the system cannot watch it.
        """
        self._start = _address(raw)
        self._nbytes = raw.nbytes
        self.first = -(-self._start // PAGE) * PAGE
        self.last = (self._start + self._nbytes) // PAGE * PAGE
        self.lost = False
        self.arm(raw)

    def arm(self, raw: memoryview) -> None:
        """Forget earlier writes.

        Raises:
            OSError: the system cannot watch the memory.
        """
        if self.first < self.last:
            if not Mappings().private(raw):
                raise OSError(0, "other processes may write to this memory")
            with _lock:
                faults = _faults()
                others = {each: each.lost for each in self._others()}
                for each in others:  # stays if an interrupt comes before the marks are known
                    each.lost = True
                self.lost = True
                regions = faults.arm(self.first, self.last, report=bool(others))
                for each, before in others.items():
                    each.lost = before or any(
                        start < each.last and each.first < end for start, end in regions
                    )
                _remember(self)
                self.lost = False
        self._ends = self._read_ends(raw)

    def untouched(self, raw: memoryview) -> bool:
        """Whether the buffer is at the same place and has the same content."""
        if _address(raw) != self._start or raw.nbytes != self._nbytes:
            return False
        if self._ends != self._read_ends(raw):
            return False
        if self.first >= self.last:
            return True
        try:
            with _lock:
                return not (self.lost or _faults().written(self.first, self.last))
        except OSError:
            return False

    def _read_ends(self, raw: memoryview) -> bytes:
        if self.first >= self.last:
            return bytes(raw)
        head = self.first - self._start
        return bytes(raw[:head]) + bytes(raw[self.last - self._start :])

    def buckets(self) -> range:
        return range(self.first // _BUCKET, (self.last - 1) // _BUCKET + 1)

    def _others(self) -> set[Watch]:
        """Return the other watches of any of these pages."""
        near = {each for part in self.buckets() for each in _watches.get(part, ())} - {self}
        return {e for e in near if e.first < self.last and self.first < e.last}


_watches: dict[int, weakref.WeakSet[Watch]] = {}
"""The watches of this process, by the parts of its memory (`_BUCKET`)."""


def _remember(watch: Watch) -> None:
    for part in watch.buckets():
        _watches.setdefault(part, weakref.WeakSet()).add(watch)
    if len(_watches) > 1000:
        for part in [part for part, there in _watches.items() if not there]:
            del _watches[part]


def _address(raw: memoryview) -> int:
    return address(raw) if raw.nbytes else 0


class _Faults:
    """The userfaultfd and the page map of one process."""

    def __init__(self) -> None:
        number = _SYSCALLS.get(platform.machine())
        if sys.platform != "linux" or number is None:
            raise OSError(0, "this system has no userfaultfd that we know")
        libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
        self._descriptor = libc.syscall(number, flags)
        if self._descriptor < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.pid = os.getpid()
        fcntl.ioctl(
            self._descriptor, _BEGIN, bytearray(struct.pack("QQQ", _API, _ASYNC | _UNPOPULATED, 0))
        )
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._libc = libc

    def arm(self, start: int, end: int, *, report: bool) -> list[tuple[int, int]]:
        """Protect the pages; with `report` return the regions that were written to before.

        Raises:
            OSError: the system cannot.
        """
        # Pages that have lost their protection were replaced, and count as written.
        written = list(self._find(start, end, 0, _ARMED, inverted=_ARMED)) if report else []
        fcntl.ioctl(
            self._descriptor,
            _REGISTER,
            bytearray(struct.pack("QQQQ", start, end - start, _WRITE_PROTECT, 0)),
        )
        if not report:
            protect = bytearray(struct.pack("QQQ", start, end - start, 1))
            fcntl.ioctl(self._descriptor, _PROTECT, protect)
            return []
        # Reads and removes the marks in one step, so that no write comes in between.
        written.extend(self._find(start, end, _REMOVE_MARKS | _MUST_BE_ARMED, 0, returned=_WRITTEN))
        return written

    def written(self, start: int, end: int) -> bool:
        """Whether any page was written to or replaced."""
        lost, new = _ARMED, _WRITTEN
        found = self._find(start, end, 0, 0, any_of=lost | new, inverted=lost, most=1)
        gone = self._find(start, end, 0, _THERE, inverted=_THERE, most=1)
        return any(True for _ in found) or any(True for _ in gone)

    def _find(
        self,
        start: int,
        end: int,
        flags: int,
        all_of: int,
        *,
        any_of: int = 0,
        inverted: int = 0,
        returned: int = 0,
        most: int = 0,
    ) -> Iterator[tuple[int, int]]:
        """Yield regions of pages with these properties (see PAGEMAP_SCAN in the Linux manual)."""
        length = 1 if most else _REGIONS
        regions = ctypes.create_string_buffer(24 * length)
        place = ctypes.addressof(regions)
        reported = returned or all_of | any_of
        while start < end:
            masks = inverted, all_of, any_of, reported
            fields = (96, flags, start, end, 0, place, length, most, *masks)
            argument = ctypes.create_string_buffer(struct.pack("12Q", *fields), 96)
            found: int = self._libc.ioctl(self._pagemap, ctypes.c_ulong(_SCAN), argument)
            if found < 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            for first, last, what in struct.iter_unpack("QQQ", regions.raw[: 24 * found]):
                if not returned or what & returned:
                    yield first, last
            if most:
                return
            start = struct.unpack_from("Q", argument.raw, 32)[0]

    @whole
    def __del__(self) -> None:
        for name in ("_descriptor", "_pagemap"):
            descriptor = self.__dict__.pop(name, -1)
            if descriptor >= 0:
                os.close(descriptor)


class Mappings:
    """The kinds of this process's memory mappings, as they were at the first question."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._starts: list[tuple[int, bool]] = []

    def _read(self) -> None:
        with open("/proc/self/maps", "rb") as file:
            for line in file:
                place, kinds, _, _, inode, *name = line.split(None, 5)
                start, end = place.split(b"-")
                sealed = bool(name) and name[0].startswith(b"/memfd:gpunb ")
                private = kinds.endswith(b"p") and (inode == b"0" or sealed)
                self._ends.append(int(end, 16))
                self._starts.append((int(start, 16), private))

    def private(self, raw: memoryview) -> bool:
        """Whether only this process can write to the memory of a flat view."""
        if not raw.nbytes:
            return True
        if not self._ends:
            try:
                self._read()
            except OSError:
                return False
        first = address(raw)
        last = first + raw.nbytes
        number = bisect.bisect_right(self._ends, first)
        while number < len(self._ends) and self._starts[number][0] <= first:
            if not self._starts[number][1]:
                return False
            if self._ends[number] >= last:
                return True
            first = self._ends[number]
            number += 1
        return False


_current: _Faults | None = None
_failure: OSError | None = None
_lock = threading.RLock()
"""Reentrant, because a destructor may run while its thread has the lock."""


def _faults() -> _Faults:
    """Return the userfaultfd of this process; call it with the lock held."""
    global _current, _failure
    if _current is None or _current.pid != os.getpid():
        if _failure is not None:
            raise _failure
        _watches.clear()
        try:
            _current = _Faults()
        except OSError as error:
            _failure = error
            raise
    return _current


def _in_child() -> None:
    """Start anew in a forked child: the lock's thread may be missing, and the descriptors are the
    parent's."""
    global _current, _lock
    _lock = threading.RLock()
    _watches.clear()
    _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
