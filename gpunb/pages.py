"""Whether memory of this process was written to since somebody looked: the system keeps track.

The pages are protected against writing by a userfaultfd of the asynchronous kind: the first write
to a page lifts the protection, without waking anybody, and leaves a mark that a scan of the page
map finds. To arm a gigabyte takes a fraction of a millisecond, and so does a look at it. What is
armed costs its writer a page fault for each page, once. Linux 6.7 or newer.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
import sys
import threading

from gpunb.objects import PAGE, address

_SYSCALLS = {"x86_64": 323, "aarch64": 282, "ppc64le": 364, "s390x": 355, "riscv64": 282}
_USER_MODE_ONLY = 1
_API, _UNPOPULATED, _ASYNC = 0xAA, 1 << 13, 1 << 15
_WRITE_PROTECT, _WRITTEN = 2, 1 << 1


def _request(kind: int, number: int, size: int) -> int:
    """The number of a request that reads and writes so many bytes."""
    return 3 << 30 | size << 16 | kind << 8 | number


_BEGIN = _request(0xAA, 0x3F, 24)
_REGISTER = _request(0xAA, 0x00, 32)
_PROTECT = _request(0xAA, 0x06, 24)
_SCAN = _request(ord("f"), 16, 96)


class Watch:
    """Knows whether a buffer was written to since `arm`, or since it was made.

    Bytes on the pages at its ends, which others may share, are compared.
    """

    def __init__(self, raw: memoryview) -> None:
        """For a flat, writable view, of which nothing is kept.

        Raises:
            OSError: the system does not tell.
        """
        self._start = _place(raw)
        self._nbytes = raw.nbytes
        self._first = -(-self._start // PAGE) * PAGE
        self._last = (self._start + self._nbytes) // PAGE * PAGE
        self.arm(raw)

    def arm(self, raw: memoryview) -> None:
        """Forget what was written until now.

        Raises:
            OSError: the system does not tell.
        """
        if self._first < self._last:
            _faults().protect(self._first, self._last - self._first)
        self._ends = self._read_ends(raw)

    def untouched(self, raw: memoryview) -> bool:
        """Whether the buffer, at the same place, holds what it held."""
        if _place(raw) != self._start or raw.nbytes != self._nbytes:
            return False
        if self._ends != self._read_ends(raw):
            return False
        try:
            return self._first >= self._last or not _faults().written(self._first, self._last)
        except OSError:
            return False

    def _read_ends(self, raw: memoryview) -> bytes:
        if self._first >= self._last:
            return bytes(raw)
        head = self._first - self._start
        return bytes(raw[:head]) + bytes(raw[self._last - self._start :])


def _place(raw: memoryview) -> int:
    return address(raw) if raw.nbytes else 0


class _Faults:
    """The userfaultfd of one process."""

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

    def protect(self, start: int, length: int) -> None:
        fcntl.ioctl(
            self._descriptor,
            _REGISTER,
            bytearray(struct.pack("QQQQ", start, length, _WRITE_PROTECT, 0)),
        )
        fcntl.ioctl(self._descriptor, _PROTECT, bytearray(struct.pack("QQQ", start, length, 1)))

    def written(self, start: int, end: int) -> bool:
        """Whether any page was; also of memory that is not registered any more."""
        region = ctypes.create_string_buffer(24)
        place = ctypes.addressof(region)
        fields = (96, 0, start, end, 0, place, 1, 1, 0, _WRITTEN, 0, _WRITTEN)
        argument = ctypes.create_string_buffer(struct.pack("12Q", *fields), 96)
        found: int = self._libc.ioctl(self._pagemap, ctypes.c_ulong(_SCAN), argument)
        if found < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return found > 0

    def __del__(self) -> None:
        for name in ("_descriptor", "_pagemap"):
            descriptor = getattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)


_current: _Faults | None = None
_failure: OSError | None = None
_lock = threading.Lock()


def _faults() -> _Faults:
    global _current, _failure
    with _lock:
        if _current is None or _current.pid != os.getpid():
            if _failure is not None:
                raise _failure
            try:
                _current = _Faults()
            except OSError as error:
                _failure = error
                raise
        return _current
