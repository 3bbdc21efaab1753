"""Memory segments for large data: written once, sealed, mapped by processes with the descriptor.

1. A segment never changes. It is filled with `pwrite` (page faults make a new shared mapping half
   as fast) and then sealed, so that a receiver need not trust the sender. The kernel writes large
   ones without a seal in files that it uses again (see `segment_pool`).
2. A receiver maps it *privately*: it may write to its view, and gets its own copy of each page that
   it writes to. Other processes do not see these writes; pages that are only read are not copied.
3. The file has no name, in memory or on disk (`spilled`). It lives as long as a descriptor or a
   mapping of it in any process, so nothing is left when the last process dies.
4. Many small segments share the file of an arena (see `arenas`): they are blocks of it.
"""

from __future__ import annotations

import array
import functools
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpunb.data.files import (
    clearer,
    copy,
    memory_file,
    read_only,
    reserve,
    seal,
    unnamed_file,
    write_all,
)
from gpunb.system.signals import UNDIVIDED, whole

__all__ = ["LARGE", "Buffer", "Segment", "aligned", "untouched"]

Buffer = bytes | bytearray | memoryview | pickle.PickleBuffer

PAGE = mmap.PAGESIZE
ALIGNMENT = 64
"""Bytes; a cache line, and enough for every vector instruction and dtype."""

PAGE_ALIGNED_FROM = 64 * 1024
"""Buffers of at least so many bytes share no page with others, for `untouched`."""

LARGE = 1_000_000
"""Bytes of the smallest value that is mapped in any case. A smaller one may be a block of an arena,
which is copied: then a view of it does not keep the memory of the whole arena."""

_ZEROS = memoryview(bytes(PAGE))
_BYTE = array.array("B", b"\0")
_MAP_FIXED = 0x10  # not in the mmap module


class Segment:
    """One immutable block of memory, held through a file descriptor.

    The object owns its descriptor and closes it when it goes away. Views from `map` stay valid
    after that.

    Attributes:
        size: bytes.
        place: the file and the offset in it if the segment is a block of an arena, else None.
    """

    __slots__ = ("__weakref__", "_descriptors", "size")

    place: tuple[Segment, int] | None = None

    def __init__(self, descriptor: int, size: int) -> None:
        # A list, because its pop() is atomic: two threads never close the descriptor twice, which
        # could close a new descriptor of that number.
        self._descriptors = [descriptor]
        self.size = size

    @classmethod
    def write(
        cls, buffers: Sequence[Buffer | Sequence[Buffer]]
    ) -> tuple[Segment, tuple[tuple[int, int], ...]]:
        """Copy `buffers` into a new sealed segment.

        A sequence in place of a buffer stands for the pieces of one buffer.

        Returns:
            The segment, and the (offset, length) of each buffer in bytes. Offsets are multiples
            of 64; buffers from 64 KiB on have their pages to themselves.

        Raises:
            OutOfMemoryError: no memory is left.
            BufferError: a buffer is not contiguous.
        """
        pieces = flat_pieces(buffers)
        spans, size = lay_out(pieces, PAGE_ALIGNED_FROM)
        segment = None
        try:
            with UNDIVIDED:
                segment = cls(memory_file(), size)
            os.ftruncate(segment.fileno(), size)
            write_all(segment.fileno(), without_gaps(pieces, spans))
            seal(segment.fileno())
        except BaseException as error:
            if segment is not None:
                segment.close()
            pieces.clear()  # the error's traceback would keep the data alive
            if isinstance(error, OSError):
                raise clearer(error, size) from error
            raise
        return segment, spans

    @classmethod
    def adopt(cls, descriptor: int, size: int | None = None) -> Segment:
        """Return a segment that owns a descriptor from another process; close it on an error.

        Raises:
            ValueError: the file is shorter than `size` bytes: reading beyond its end would kill
                the process.
        """
        try:
            there = os.fstat(descriptor).st_size
            if size is not None and size > there:
                raise ValueError(f"a segment of {size:,} bytes was announced, {there:,} came")
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, there if size is None else size)

    def map(self) -> memoryview:
        """Return a private, writable view of the whole segment.

        Writes to the view are seen only through this view. The memory is unmapped when the last
        view that was sliced or cast from it dies, even after the segment is closed.

        Raises:
            OutOfMemoryError: the process cannot map more memory.
        """
        return self._map(self.fileno(), 0)

    def _map(self, descriptor: int, offset: int) -> memoryview:
        if not self.size:  # an empty mapping is an error
            return memoryview(bytearray())
        try:
            return _map_private(descriptor, self.size, offset)
        except OSError as error:
            raise clearer(error, self.size) from error

    def spilled(self, folder: str) -> Segment:
        """Return a segment with the same content in a file without a name in `folder`.

        It can be mapped and sent like any other. A file on disk cannot be sealed: instead its
        descriptor and its permissions are read-only. This segment stays open.

        Raises:
            OutOfMemoryError: the disk, or the user's quota, is full.
            OSError: no file can be made in the folder.
        """
        file, offset = self.place or (self, 0)
        source = file.fileno()
        try:
            with UNDIVIDED:
                target = Segment(unnamed_file(folder), self.size)
            with target:
                if self.size:
                    reserve(target.fileno(), 0, self.size)
                    copy(source, offset, self.size, target.fileno(), 0)
                with UNDIVIDED:
                    return Segment(read_only(target.fileno()), self.size)
        except OSError as error:
            raise clearer(error, self.size, f"in {folder}") from error

    def fileno(self) -> int:
        """Return the descriptor, which stays the segment's own.

        Raises:
            ValueError: the segment is closed.
        """
        try:
            return self._descriptors[0]
        except IndexError:
            raise ValueError("the segment is closed") from None

    def dup(self) -> Segment:
        """Return another segment object on the same memory, with a descriptor of its own."""
        with UNDIVIDED:
            return Segment(os.dup(self.fileno()), self.size)

    @property
    def closed(self) -> bool:
        """Whether the descriptor is closed."""
        return not self._descriptors

    def close(self) -> None:
        """Close the descriptor; further calls do nothing."""
        with UNDIVIDED:
            try:
                descriptor = self._descriptors.pop()
            except (IndexError, AttributeError):  # AttributeError: __init__ has not finished
                return
            os.close(descriptor)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    __del__ = whole(close)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"descriptor {self.fileno()}"
        return f"<Segment of {self.size:,} bytes, {state}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Segment cannot be pickled: send its descriptor over a unix socket")


def untouched(view: Buffer) -> bool:
    """Return whether this process has written to none of the view's pages.

    For views of a segment's `map`: the page map of the system shows whether a page of a private
    mapping still belongs to the file, or was written to and copied. Takes about 10 ms per GiB.

    True is certain, False is not. It is also the answer for a view that shares a page with a
    changed neighbour, that is not contiguous, or if the system has no page map.
    """
    try:
        with pickle.PickleBuffer(view).raw() as raw:
            return not raw.nbytes or _pages_untouched(address(raw), raw.nbytes)
    except (BufferError, TypeError, ValueError, OSError, ImportError):
        return False


# An entry of /proc/self/pagemap has 8 bytes. Bit 63: the page is in memory; 62: it is swapped out;
# 61: it belongs to a file. A page in memory or swap that belongs to no file is a private copy. All
# three bits are in the entry's most significant byte.
_IN_MEMORY, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
_TOP_BYTE = 7 if sys.byteorder == "little" else 0
_NOT_COPIED = bytes(
    top for top in range(256) if top & _OF_FILE or not top & (_IN_MEMORY | _SWAPPED)
)
_PAGES_AT_ONCE = 64 * 1024


def _pages_untouched(start: int, length: int) -> bool:
    first, last = start // PAGE, (start + length - 1) // PAGE
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while first <= last:
            count = min(last - first + 1, _PAGES_AT_ONCE)
            entries = os.pread(pagemap, 8 * count, 8 * first)
            if len(entries) < 8 or entries[_TOP_BYTE::8].translate(None, _NOT_COPIED):
                return False
            first += len(entries) // 8
        return True
    finally:
        os.close(pagemap)


def address(raw: memoryview) -> int:
    """Return the address of a flat view."""
    import ctypes

    if not raw.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(raw))
    view = (ctypes.c_void_p * 20)()  # room for a Py_buffer, which begins with the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(raw), view, 0)
    try:
        return view[0] or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(view)


def aligned(size: int) -> memoryview:
    """Return new writable memory at an address that is a multiple of 64."""
    block = _BYTE * (size + ALIGNMENT - 1)
    start = -block.buffer_info()[0] % ALIGNMENT
    return memoryview(block)[start : start + size]


def flat_pieces(buffers: Sequence[Buffer | Sequence[Buffer]]) -> list[list[memoryview]]:
    """Return the pieces of each buffer as flat views of bytes, without copying."""
    return [
        [_flat(part) for part in (each if isinstance(each, (list, tuple)) else (each,))]
        for each in buffers
    ]


def _flat(part: Buffer) -> memoryview:
    if isinstance(part, pickle.PickleBuffer):
        return part.raw()
    if isinstance(part, memoryview) and part.format == "B" and part.ndim == 1 and part.contiguous:
        return part
    return pickle.PickleBuffer(part).raw()


def lay_out(
    pieces: Sequence[Sequence[memoryview]], page_aligned_from: float
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (offset, length) for each buffer, and the size of the whole, in bytes."""
    spans = []
    end = 0
    for parts in pieces:
        length = sum(map(len, parts))
        large = length >= page_aligned_from
        start = round_up(end, PAGE if large else ALIGNMENT)
        spans.append((start, length))
        # The next buffer must not be on the last page of a large one.
        end = round_up(start + length, PAGE) if large else start + length
    return tuple(spans), max((start + length for start, length in spans), default=0)


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def without_gaps(
    pieces: Sequence[Sequence[memoryview]], spans: Sequence[tuple[int, int]]
) -> Iterator[memoryview]:
    """Yield the content of the file in order: the pieces, and zeros between them."""
    position = 0
    for parts, (start, length) in zip(pieces, spans, strict=True):
        if start > position:
            yield _ZEROS[: start - position]  # less than a page
        yield from (part for part in parts if len(part))
        position = start + length


def _map_private(descriptor: int, size: int, offset: int) -> memoryview:
    """Return a private mapping, without a descriptor if possible.

    Python's mmap before 3.13 keeps a duplicate of the descriptor for each mapping, so a thousand
    arrays would use most of the usual 1,024 descriptors.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        private = mmap.mmap(
            descriptor, size, mmap.MAP_PRIVATE, access, trackfd=False, offset=offset
        )
        return memoryview(private)
    try:
        import ctypes

        map_at = _libc()
    except (ImportError, AttributeError, OSError):
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, access, offset=offset))
    # An interrupt must not lose a mapping. So Python maps anonymous memory, which it unmaps itself,
    # and the file is mapped over that memory.
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE, access)
    try:
        place = ctypes.addressof(ctypes.c_char.from_buffer(block))
        map_at(place, size, access, descriptor, offset)
    except OSError:
        # The anonymous memory may be unmapped already, and another thread's mapping may be there by
        # now, so `block` must never unmap it.
        _LOST.append(block)
        raise
    return memoryview(block)


_LOST: list[mmap.mmap] = []


@functools.cache
def _libc() -> Callable[[int, int, int, int, int], None]:
    """Return a function that maps a file over memory: address, bytes, access, descriptor and
    offset."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    integers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *integers)
    flags = mmap.MAP_PRIVATE | _MAP_FIXED

    def map_at(address: int, size: int, access: int, descriptor: int, offset: int) -> None:
        if libc.mmap(address, size, access, flags, descriptor, offset) != address:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    return map_at
