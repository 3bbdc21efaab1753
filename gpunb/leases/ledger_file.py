"""Finds, opens and locks the file of the ledger."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from gpunb.exceptions import GpunbError
from gpunb.leases import liveness
from gpunb.leases.records import LEDGER_FILE
from gpunb.system import runtime_dir

VARIABLE = "GPUNB_LEDGER_DIR"

PATIENCE = 0.02
"""Seconds to try for the ledger's lock. A session holds it for some ten microseconds."""

_TRIES = 3
_PASSING = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
        *(errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBUSY),
    )
)
"""Errors that may be over in a moment, so that a session tries to enter again."""

HELD_UP = "a process that was stopped has the ledger of leases locked"


class Busy(Exception):
    """The ledger cannot be used now; the text says why. Try again later."""


def ledger_path() -> Path:
    """Return the ledger's folder: GPUNB_LEDGER_DIR, else one in the user's runtime folder."""
    named = os.environ.get(VARIABLE)
    return Path(named).absolute() if named else runtime_dir.chosen() / runtime_dir.LEASES


def ledger_folder(*, make: bool = False) -> Path:
    """Return `ledger_path` after a check. A missing folder is made if `make` is true.

    Raises:
        GpunbError: the folder cannot be made or used.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return runtime_dir.runtime_folder() / runtime_dir.LEASES
    path = ledger_path()
    way_out = (
        "name a folder that is, or can be made, writable for all who share this machine's devices "
        f"(such as mode 3770 and a group), or unset {VARIABLE}"
    )
    if make:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise GpunbError(
                f"{VARIABLE}={named!r} cannot be made: {error.strerror}; {way_out}"
            ) from error
    if path.exists() and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise GpunbError(f"{VARIABLE}={named!r} is not a folder that you can write to: {way_out}")
    return path


def check() -> None:
    """Check that a session can use the ledger, now or later.

    Raises:
        GpunbError: it never can.
    """
    path = ledger_folder(make=True)
    try:
        folder, file = open_ledger_file(path)
        try:
            ident = os.urandom(16)
            os.close(liveness.make(folder, ident, 0o600, {}, early=True))
            liveness.remove(folder, ident)
        finally:
            os.close(file)
            os.close(folder)
    except Busy:
        return
    except OSError as error:
        if error.errno in _PASSING:
            return
        raise GpunbError(
            f"the ledger of leases in {path} cannot be used: {error.strerror}. Without it nobody "
            "knows which devices other sessions have: mend the folder, or set "
            f"{VARIABLE if os.environ.get(VARIABLE) else runtime_dir.VARIABLE} to another one on a "
            "disk of this machine; gpunb.init(num_gpus=0) does without devices"
        ) from error


def lock(descriptor: int, patience: float = PATIENCE) -> None:
    """Lock the ledger. Does not wait long, because the process with the lock may be stopped.

    Raises:
        Busy: the ledger was locked all the time.
    """
    until = 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            until = until or now + patience
            if now > until:
                raise Busy(HELD_UP) from None
            time.sleep(0.0001)
        else:
            return


def read(ledger: int, size: int) -> bytes:
    """Return the first bytes of the ledger: `size` of them, or all if there are fewer."""
    data = os.pread(ledger, size, 0)
    while len(data) < size and (more := os.pread(ledger, size - len(data), len(data))):
        data += more
    return data


def write(ledger: int, data: bytes, offset: int) -> None:
    """Write all the data into the ledger at this offset."""
    done = os.pwrite(ledger, data, offset)
    while done < len(data):
        done += os.pwrite(ledger, data[done:], offset + done)


def open_ledger_file(path: Path) -> tuple[int, int]:
    """Open the folder and the ledger in it, which is made if it is missing; return both."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Programs that clean up temporary folders skip locked ones.
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return folder, _open_in(folder)
    except BaseException:
        os.close(folder)
        raise


def mode_for(folder: int) -> int:
    """Return the mode of files that all who may write into the folder can read and write."""
    mode = stat.S_IMODE(os.fstat(folder).st_mode)
    return 0o600 | (0o060 if mode & 0o020 else 0) | (0o006 if mode & 0o002 else 0)


def _make_in(folder: int) -> None:
    """Make an empty ledger. It gets its mode before its name: another user opens it at once."""
    name = f"{liveness.NEW}{os.urandom(16).hex()}"  # which others clear away if this process dies
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        os.fchmod(descriptor, mode_for(folder))
        with contextlib.suppress(FileExistsError):  # another session has made one meanwhile
            os.link(name, LEDGER_FILE, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):  # the files are being removed
            os.unlink(name, dir_fd=folder)


def _open_in(folder: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return liveness.is_regular(os.open(LEDGER_FILE, flags, dir_fd=folder))
        _make_in(folder)
    raise Busy("the ledger of leases is removed again and again")
