"""Large data in memory files: written once, sealed, mapped by whoever holds the descriptor.

Two rules:
1. A segment never changes. It is filled with `pwrite` (a fresh shared mapping is half as fast,
   because of its page faults) and then sealed, so that a receiver need not trust the sender.
2. A receiver maps it *privately*: it may write to its view, and a page that it writes to becomes
   its own. Nobody else sees that, and pages that are only read are never copied.

A memory file lives as long as a descriptor or a mapping of it, in whatever process: when the last
process dies, however it dies, nothing is left behind. So it is with the files on disk that a
segment can be moved to: they have no name either.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpunb import linux
from gpunb.exceptions import OutOfMemoryError

__all__ = ["Buffer", "Segment", "unnamed_file", "untouched"]

Buffer = bytes | bytearray | memoryview | pickle.PickleBuffer

PAGE = mmap.PAGESIZE
ALIGNMENT = 64
"""Bytes; a cache line, and enough for every vector instruction and dtype."""

PAGE_ALIGNED_FROM = 64 * 1024
"""Buffers of at least so many bytes share no page with others, so that `untouched` can tell."""

# The kernel cuts a write short there anyway, macOS refuses it.
_MOST_BYTES = 0x7FFFF000
_MOST_PIECES = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in os.sysconf_names else 16
_ZEROS = memoryview(bytes(PAGE))
_COPIED_AT_ONCE = 64 << 20  # an interrupt is heard in between
_NO_ROOM = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSOCK}
_MFD_NOEXEC_SEAL = 0x8  # not in the os module


class Segment:
    """One immutable block of memory, held through a file descriptor.

    The object owns its descriptor and closes it when it goes away. Views from `map` stay valid
    after that.

    Attributes:
        size: bytes.
    """

    __slots__ = ("__weakref__", "_descriptors", "size")

    def __init__(self, descriptor: int, size: int) -> None:
        # A list, because its pop() is atomic: two threads that close never close twice, which
        # might hit a descriptor that is somebody else's by then.
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
            OutOfMemoryError: if there is no memory left for it.
            BufferError: if a buffer is not contiguous.
        """
        pieces = [_pieces(buffer) for buffer in buffers]
        spans, size = _lay_out([sum(map(len, parts)) for parts in pieces])
        segment = None
        try:
            segment = cls(_memory_file(), size)
            os.ftruncate(segment.fileno(), size)
            _write_all(segment.fileno(), _without_gaps(pieces, spans))
            _seal(segment.fileno())
        except BaseException as error:
            if segment is not None:
                segment.close()
            pieces.clear()  # the error's traceback would keep the data alive
            if isinstance(error, OSError):
                raise _clearer(error, size) from error
            raise
        return segment, spans

    @classmethod
    def adopt(cls, descriptor: int, size: int | None = None) -> Segment:
        """Take over a descriptor that came from another process; close it if that fails.

        Raises:
            ValueError: if the file is not at least `size` bytes long: reading beyond its end
                would kill the process.
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

        What is written to the view is seen through this view alone. The memory is unmapped when
        the last view that was sliced or cast from it dies, whether the segment is open or not.

        Raises:
            OutOfMemoryError: if the process cannot map any more memory.
        """
        descriptor = self.fileno()
        if not self.size:  # an empty mapping is an error
            return memoryview(bytearray())
        try:
            return _map_private(descriptor, self.size)
        except OSError as error:
            raise _clearer(error, self.size) from error

    def spilled(self, folder: str) -> Segment:
        """Return a segment with the same content in a file without a name in `folder`.

        It can be mapped and sent like any other. A file cannot be sealed: instead its descriptor
        is read-only, and so are its permissions. This segment stays open.

        Raises:
            OutOfMemoryError: if the disk, or what one may use of it, is full.
            OSError: if there can be no file in the folder.
        """
        source = self.fileno()
        try:
            target = unnamed_file(folder)
            try:
                if self.size:
                    _reserve(target, self.size)
                    self._copy(source, target)
                return Segment(_read_only(target), self.size)
            finally:
                os.close(target)
        except OSError as error:
            raise _clearer(error, self.size, f"in {folder}") from error

    def _copy(self, source: int, target: int) -> None:
        done = 0
        while done < self.size:
            try:
                count = os.sendfile(target, source, done, min(self.size - done, _COPIED_AT_ONCE))
            except OSError as error:
                if done or error.errno not in _NOT_SUPPORTED:
                    raise
                _write_all(target, iter([self.map()]))
                return
            if not count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += count

    def fileno(self) -> int:
        """Return the descriptor, which stays the segment's own.

        Raises:
            ValueError: if the segment is closed.
        """
        try:
            return self._descriptors[0]
        except IndexError:
            raise ValueError("the segment is closed") from None

    def dup(self) -> Segment:
        """Return another segment object on the same memory, with a descriptor of its own."""
        return Segment(os.dup(self.fileno()), self.size)

    @property
    def closed(self) -> bool:
        """Whether the descriptor was given back."""
        return not self._descriptors

    def close(self) -> None:
        """Give the descriptor back; any number of times."""
        try:
            descriptor = self._descriptors.pop()
        except (IndexError, AttributeError):  # AttributeError: __init__ did not get that far
            return
        os.close(descriptor)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"descriptor {self.fileno()}"
        return f"<Segment of {self.size:,} bytes, {state}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Segment cannot be pickled: send its descriptor over a unix socket")


def untouched(view: Buffer) -> bool:
    """Return whether this process has written to none of the view's pages.

    For views of a segment's `map`. The kernel knows: a page of a private mapping belongs to the
    file until it is written to, then it is a copy. Takes about 10 ms per GiB.

    A page counts as a whole, so a view that shares one with a changed neighbour counts as
    changed. So does one that is not contiguous, or on a system that does not tell: True is
    certain, False is not.
    """
    try:
        with pickle.PickleBuffer(view).raw() as raw:
            return not raw.nbytes or _pages_untouched(address(raw), raw.nbytes)
    except (BufferError, TypeError, ValueError, OSError, ImportError):
        return False


# In an entry of /proc/self/pagemap, 8 bytes per page, three of the top bits count: 63 the page is
# in memory, 62 it is swapped out, 61 it belongs to a file. One that is there, or swapped out, and
# does not belong to the file is a private copy. All three are in the entry's most significant byte.
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
    """Return where in this process's memory a flat view begins."""
    import ctypes

    if not raw.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(raw))
    view = (ctypes.c_void_p * 20)()  # a Py_buffer, which is smaller, begins with the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(raw), view, 0)
    try:
        return view[0] or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(view)


def _pieces(buffer: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """Return the buffer's parts as flat views of bytes, without copying."""
    parts = buffer if isinstance(buffer, (list, tuple)) else (buffer,)
    return [_flat(part) for part in parts]


def _flat(part: Buffer) -> memoryview:
    if isinstance(part, pickle.PickleBuffer):
        return part.raw()
    if isinstance(part, memoryview) and part.format == "B" and part.ndim == 1 and part.contiguous:
        return part
    return pickle.PickleBuffer(part).raw()


def _lay_out(lengths: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (offset, length) for each buffer, and the size of the whole, in bytes."""
    spans = []
    end = 0
    for length in lengths:
        large = length >= PAGE_ALIGNED_FROM
        start = _round_up(end, PAGE if large else ALIGNMENT)
        spans.append((start, length))
        # The next buffer, however small, must not touch a large one's last page.
        end = _round_up(start + length, PAGE) if large else start + length
    return tuple(spans), max((start + length for start, length in spans), default=0)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _without_gaps(
    pieces: Sequence[Sequence[memoryview]], spans: Sequence[tuple[int, int]]
) -> Iterator[memoryview]:
    """Yield what stands in the file from start to end: the pieces, and zeros between them."""
    position = 0
    for parts, (start, length) in zip(pieces, spans, strict=True):
        if start > position:
            yield _ZEROS[: start - position]  # less than a page
        yield from (part for part in parts if len(part))
        position = start + length


def _write_all(descriptor: int, pieces: Iterator[memoryview]) -> None:
    """Write `pieces` one after the other, in as few calls as the system allows."""
    offset = 0
    batch: list[memoryview] = []
    room = _MOST_BYTES
    for piece in pieces:
        rest = piece
        while len(rest) > room:
            batch.append(rest[:room])
            offset = _write_batch(descriptor, batch, offset)
            rest, batch, room = rest[room:], [], _MOST_BYTES
        batch.append(rest)
        room -= len(rest)
        if len(batch) == _MOST_PIECES:
            offset = _write_batch(descriptor, batch, offset)
            batch, room = [], _MOST_BYTES
    _write_batch(descriptor, batch, offset)


def _write_batch(descriptor: int, batch: list[memoryview], offset: int) -> int:
    """Write all of `batch`, in several calls if the system takes only a part; return the end."""
    while batch:
        written = _write_some(descriptor, batch, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += written
        done = 0
        while done < len(batch) and written >= len(batch[done]):
            written -= len(batch[done])
            done += 1
        batch = batch[done:]
        if written:
            batch[0] = batch[0][written:]
    return offset


def _write_some(descriptor: int, batch: list[memoryview], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, batch, offset)
    return os.pwrite(descriptor, batch[0], offset)


def _memory_file() -> int:
    """Return a descriptor of an empty file in memory; of an unlinked file where there is none."""
    if linux.has_memory_files():
        flags = linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING
        # The second try is for machines that forbid memory files which could be executed.
        for extra in (0, _MFD_NOEXEC_SEAL):
            try:
                return linux.memfd_create("gpunb", flags | extra)
            except OSError as error:
                if error.errno not in {errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EINVAL}:
                    raise
    import tempfile

    with tempfile.TemporaryFile(prefix="gpunb-") as file:
        return os.dup(file.fileno())


def unnamed_file(folder: str) -> int:
    """Return a descriptor of an empty file in `folder` that no name leads to.

    Raises:
        OSError: if there can be none.
    """
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o400)
        except OSError as error:  # EISDIR: the system is too old to know the flag
            if error.errno not in {errno.EISDIR, *_NOT_SUPPORTED}:
                raise
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix="gpunb-", dir=folder)
    try:
        os.unlink(path)
        os.fchmod(descriptor, 0o400)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _reserve(descriptor: int, size: int) -> None:
    """Have the disk's blocks for a file: a full disk is met before anything is copied."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except AttributeError:  # macOS
        pass
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def _read_only(descriptor: int) -> int:
    """Return a descriptor of the same file that cannot be written through, where there is /proc."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(descriptor)


def _seal(descriptor: int) -> None:
    """Make the file unchangeable for everybody; unlinked files cannot be sealed."""
    try:
        fcntl.fcntl(descriptor, linux.F_ADD_SEALS, linux.F_SEAL_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _clearer(error: OSError, size: int, where: str = "of shared memory") -> Exception:
    """Return what to raise instead of `error` when `size` bytes could not be had."""
    if error.errno not in _NO_ROOM:
        return error
    return OutOfMemoryError(
        f"no room for {size:,} bytes ({size / 2**30:.2f} GiB) {where}: {error.strerror}"
    )


def _map_private(descriptor: int, size: int) -> memoryview:
    """Map through libc where possible.

    Python's own mmap (before 3.13) keeps a duplicate of the descriptor for each mapping, so that
    a list of a thousand arrays would use up a thousand of the usual 1,024 descriptors.
    """
    try:
        import ctypes

        map_, unmap = _libc()
    except (ImportError, AttributeError, OSError):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=access))
    address = map_(descriptor, size)
    try:
        block = (ctypes.c_ubyte * size).from_address(address)
        # Not at exit: arrays may still be read by then, and the system cleans up anyway.
        weakref.finalize(block, unmap, address, size).atexit = False
    except BaseException:
        unmap(address, size)
        raise
    return memoryview(block).cast("B")


@functools.cache
def _libc() -> tuple[Callable[[int, int], int], Callable[[int, int], object]]:
    """Return (map, unmap), the first taking a descriptor and a size in bytes."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    integers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *integers)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    failed = ctypes.c_void_p(-1).value

    def map_(descriptor: int, size: int) -> int:
        address = libc.mmap(None, size, access, mmap.MAP_PRIVATE, descriptor, 0)
        if address is None or address == failed:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(address)

    return map_, libc.munmap
