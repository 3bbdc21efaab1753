"""Files without a name, in memory and on disk, and the calls that fill, copy and protect them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator

from gpunb.exceptions import OutOfMemoryError
from gpunb.system import limits, linux

__all__ = [
    "clearer",
    "copy",
    "fix_size",
    "memory_file",
    "read_all",
    "read_only",
    "reserve",
    "seal",
    "unnamed_file",
    "write_all",
]

# Linux cuts longer writes short, macOS refuses them.
_MOST_BYTES = 0x7FFFF000
_MOST_PIECES = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in os.sysconf_names else 16
_COPIED_AT_ONCE = 64 << 20  # an interrupt is handled in between
_NO_ROOM = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSOCK}
_MFD_NOEXEC_SEAL = 0x8  # not in the os module


def write_all(descriptor: int, pieces: Iterator[memoryview], offset: int = 0) -> None:
    """Write `pieces` one after the other, in as few calls as the system allows."""
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
    """Write all of `batch`, in several calls if the system takes a part; return the end offset."""
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


def read_all(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill `target` from a file.

    Raises:
        OSError: the file ends before.
    """
    while target:
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [target], offset)
        else:
            data = os.pread(descriptor, len(target), offset)
            count = len(data)
            target[:count] = data
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        target, offset = target[count:], offset + count


def copy(source: int, start: int, size: int, target: int, to: int) -> None:
    """Copy a part of one file to another. This moves the file position of `target`.

    Raises:
        OSError: the source ends before.
    """
    os.lseek(target, to, os.SEEK_SET)
    done = 0
    while done < size:
        most = min(size - done, _COPIED_AT_ONCE)
        try:
            count = os.sendfile(target, source, start + done, most)
        except OSError as error:
            if done or error.errno not in _NOT_SUPPORTED:
                raise
            _copy_in_pieces(source, start, size, target, to)
            return
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count


def _copy_in_pieces(source: int, start: int, size: int, target: int, to: int) -> None:
    room = memoryview(bytearray(min(size, 1 << 20)))
    for done in range(0, size, max(1, len(room))):
        piece = room[: size - done]
        read_all(source, piece, start + done)
        write_all(target, iter([piece]), to + done)


def memory_file() -> int:
    """Return a descriptor of an empty file in memory, or else of an unlinked file."""
    if linux.has_memory_files():
        flags = linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING
        # The second try is for systems that forbid executable memory files.
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
    """Return a descriptor of an empty file in `folder` without a name.

    Raises:
        OSError: no file can be made.
    """
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o400)
        except OSError as error:  # EISDIR: an old system ignores the flag
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


def reserve(descriptor: int, start: int, size: int) -> None:
    """Reserve the blocks of a part of a file, so that a full disk is noticed before the copy."""
    try:
        os.posix_fallocate(descriptor, start, size)
    except AttributeError:  # macOS
        pass
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def read_only(descriptor: int) -> int:
    """Return a read-only descriptor of the same file; a duplicate where there is no /proc."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.dup(descriptor)


def fix_size(descriptor: int) -> None:
    """Forbid to shrink or grow the file, if it is in memory."""
    try:
        fcntl.fcntl(descriptor, linux.F_ADD_SEALS, linux.F_SEAL_SIZE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def seal(descriptor: int) -> None:
    """Forbid all changes of the file, if it is in memory; files on disk cannot be sealed."""
    try:
        try:
            fcntl.fcntl(descriptor, linux.F_ADD_SEALS, linux.F_SEAL_ALL)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            # The system uses a page at this moment, for example to move it. The seal that only
            # forbids new writes does not check for such uses.
            fcntl.fcntl(descriptor, linux.F_ADD_SEALS, linux.F_SEAL_ALL_FUTURE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def clearer(error: OSError, size: int, where: str = "of shared memory") -> Exception:
    """Return the exception to raise for `error` of a request for `size` bytes."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OSError(error.errno, limits.explain(error))
    if error.errno not in _NO_ROOM:
        return error
    return OutOfMemoryError(
        f"no room for {size:,} bytes ({size / 2**30:.2f} GiB) {where}: {error.strerror}"
    )
