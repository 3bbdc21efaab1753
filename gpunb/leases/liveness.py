"""FIFOs: locked named pipes that prove that a session lives, and that wake the session.

Each session has one FIFO, a named pipe in the ledger's folder. Other sessions wake it, that is,
write a byte, when something has changed.

1. All processes of a session inherit one descriptor of its FIFO, which is locked (flock). When the
   last of them is gone, the system unlocks the FIFO, and a reader gets the end of the file. So
   `is_alive` looks at the lock, and `watch` waits for the end.
2. The first processes start before the session is in the ledger, so the FIFO is made before, under
   a name with the prefix `new-`. Other sessions do not remove it while it is young or locked. It
   gets its final name (`name_fifo`) under the lock of the ledger.
3. If the FIFO's name is removed, the lock still proves that the session lives. Other sessions find
   the pipe in /proc (`unlisted_pids`) and write to it, and the session makes another FIFO. Its
   older processes have not inherited that one, so a *keeper* process (`keeper`) holds it open until
   they are gone.

Other users may write into the folder: reads are short, and their results are checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import select
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpunb.leases.records import LATEST, printable

LONGEST = 1000
"""Characters of each fact that a session publishes about itself."""

_QUIET = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_ENDING = 200
"""Milliseconds in which the processes of a closed session end."""

_ABOUT_SIZE = 1 << 16
"""Bytes that are read of the facts about a session."""

_BRACKETS = 64
"""Brackets that these facts may have, so that nothing is nested deeply."""

_TEXTS = ("user", "notebook", "kernel", "python")
_NUMBERS = ("pid", "since")
NEW = "new-"
"""Prefix of the name of a FIFO before its session is in the ledger."""

YOUNG = 10.0
"""Seconds in which a session locks the FIFO that it has made."""

_FILES = 8192
"""Entries of a folder that are read at most."""

_NOTICES = 16 * 4096
"""Bytes that are read from a FIFO at a time."""


def make(folder: int, ident: bytes, mode: int, about: Mapping[str, Any], *, early: bool) -> int:
    """Make the FIFO of a session and the file with facts about it; return the FIFO's descriptor.

    `folder` is a descriptor of the ledger's folder. An `early` FIFO is made without the lock of the
    ledger, and gets its final name from `name_fifo`.
    """
    name = (NEW if early else "") + ident.hex()
    os.mkfifo(name, 0o600, dir_fd=folder)
    fifo = -1
    try:
        # For reading and writing: the pipe has a writer, and so no end, while the session lives.
        fifo = os.open(name, os.O_RDWR | _QUIET, dir_fd=folder)
        os.fchmod(fifo, mode)
        fcntl.flock(fifo, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        _unlink(folder, f"{ident.hex()}.json")  # of an earlier FIFO of this session
        facts = os.open(f"{ident.hex()}.json", new, 0o600, dir_fd=folder)
        with open(facts, "w", encoding="utf-8") as file:
            os.fchmod(facts, mode)
            short = {k: v[:LONGEST] if isinstance(v, str) else v for k, v in about.items()}
            json.dump(short, file)
    except BaseException:
        if fifo >= 0:
            os.close(fifo)
        remove(folder, ident)
        raise
    return fifo


def name_fifo(folder: int, ident: bytes) -> None:
    """Give an early FIFO its final name; call it with the ledger locked."""
    name = ident.hex()
    with contextlib.suppress(FileNotFoundError):
        os.rename(NEW + name, name, src_dir_fd=folder, dst_dir_fd=folder)


def is_in_folder(folder: int, ident: bytes, fifo: int) -> bool:
    """Whether this FIFO is in the folder, under its final name or its early one."""
    for name in (ident.hex(), NEW + ident.hex()):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(status, os.fstat(fifo)):
                return True
        except OSError:
            continue
    return False


def about(folder: int, ident: bytes) -> Mapping[str, Any]:
    """Return the facts that a session has published; only plain values of the known names."""
    try:
        descriptor = os.open(f"{ident.hex()}.json", os.O_RDONLY | _QUIET, dir_fd=folder)
        try:
            status = os.fstat(descriptor)
            data = os.read(descriptor, _ABOUT_SIZE) if stat.S_ISREG(status.st_mode) else b""
            return {**parse_about(data), "uid": status.st_uid}
        finally:
            os.close(descriptor)
    except OSError:
        return {}


def parse_about(data: bytes) -> Mapping[str, Any]:
    """Return the valid facts in a session's file; another user may have written it."""
    if data.count(b"[") + data.count(b"{") > _BRACKETS:
        return {}
    try:
        content = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    facts: dict[str, Any] = {}
    for name in _TEXTS:
        if isinstance(value := content.get(name), str):
            facts[name] = printable(value[:LONGEST])
    for name in _NUMBERS:
        value = content.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= LATEST:
            facts[name] = value
    return facts


def notify(folder: int, idents: Iterable[bytes]) -> None:
    """Write to the FIFOs of sessions, which wakes them."""
    for ident in idents:
        try:
            fifo = os.open(ident.hex(), os.O_WRONLY | _QUIET, dir_fd=folder)
        except OSError:
            continue  # the session is gone
        _write_to(fifo)


def _write_to(fifo: int) -> None:
    try:
        if stat.S_ISFIFO(os.fstat(fifo).st_mode):
            os.write(fifo, b"!")
    except OSError:
        pass  # the pipe is full: the session has not handled earlier wake-ups
    finally:
        os.close(fifo)


def clear(fifo: int) -> None:
    """Remove the bytes from a FIFO."""
    with contextlib.suppress(BlockingIOError):
        os.read(fifo, _NOTICES)


def is_alive(folder: int, ident: bytes, pid: int = 0) -> bool:
    """Whether any process of the session is left; `pid` is its kernel.

    If the FIFO of a living session was removed, write to it, so that the session makes another one.
    """
    alive = _is_held(folder, ident.hex())
    return bool(alive) or (alive is None and pid > 0 and _notify_removed(ident.hex(), pid))


def _is_held(folder: int, name: str) -> bool | None:
    """Whether a process has locked the FIFO of this name; None if there is no such file."""
    try:
        descriptor = os.open(name, os.O_RDONLY | _QUIET, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        # Another user owns it, or no descriptor is left: it may be locked.
        return error.errno not in (errno.ENXIO, errno.ELOOP)
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode) and _is_locked(descriptor)
    finally:
        os.close(descriptor)


def _notify_removed(name: str, pid: int) -> bool:
    """Write to a FIFO that a process has open under a removed name; False if it has no such FIFO or
    belongs to another user."""
    for target, way in _removed_fifos(pid):
        if os.path.basename(target) == name:
            with contextlib.suppress(OSError):
                _write_to(os.open(way, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            return True
    return False


def _removed_fifos(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the removed FIFOs that a process has open: the former path, and a path to open it."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for each in itertools.islice(entries, _FILES):
                with contextlib.suppress(OSError):
                    target = os.readlink(each.path).removesuffix(_REMOVED)
                    if _is_name(os.path.basename(target)) and not os.path.lexists(target):
                        yield target, each.path
    except OSError:
        pass  # the process is gone, or belongs to another user


def unlisted_pids(folder: int, known: Iterable[bytes]) -> list[int]:
    """Return the processes of living sessions whose FIFOs in this folder were removed, and wake
    these sessions. The present ledger does not have these sessions, so their leases are unknown."""
    names = {ident.hex() for ident in known}
    pids: set[int] = set()
    try:
        path = os.readlink(f"/proc/self/fd/{folder}").removesuffix(_REMOVED)
    except OSError:
        return []
    for pid in _pids_with_locks():
        for target, way in _removed_fifos(pid):
            where, name = os.path.split(target)
            if where == path and name not in names:
                pids.add(pid)
                with contextlib.suppress(OSError):
                    _write_to(os.open(way, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    return sorted(pids)


def _pids_with_locks() -> set[int]:
    """Return the processes that hold locks of the kind that FIFOs have."""
    try:
        with open("/proc/locks", "rb") as file:
            lines = file.read(1 << 22).splitlines()
    except OSError:
        return set()
    words = [line.split() for line in lines]
    pids = [each[4] for each in words if len(each) > 4 and each[1:4] == _LOCKED]
    return {int(each) for each in pids if each.isdigit()}


_LOCKED = [b"FLOCK", b"ADVISORY", b"WRITE"]
_REMOVED = " (deleted)"


def watch(folder: int, ident: bytes) -> int | None:
    """Return a descriptor that ends (hangs up) with the session; None if the session is gone."""
    try:
        descriptor = os.open(ident.hex(), os.O_RDONLY | _QUIET, dir_fd=folder)
    except OSError:
        return None
    if _is_locked(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def unnamed_fifo() -> int:
    """Return a pipe for a session that cannot make its FIFO yet; its processes inherit it."""
    reads, writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # For reading and writing, like a FIFO.
        return os.open(f"/proc/self/fd/{writes}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(reads)
        os.close(writes)


def await_end(watched: int) -> None:
    """Wait a moment for the end of a closed session's processes; close the descriptor."""
    poll = select.poll()
    poll.register(watched, 0)
    poll.poll(_ENDING)
    os.close(watched)


def sweep(folder: int, known: Iterable[bytes]) -> list[bytes]:
    """Remove the files of dead sessions; return the living sessions that are not `known`."""
    ours, living = {ident.hex() for ident in known}, []
    with os.scandir(folder) as entries:
        names = [each.name for each in itertools.islice(entries, _FILES)]
    for each in names:
        name = each.removesuffix(".json").removeprefix(NEW)
        if name in ours or not _is_name(name):
            continue
        if _is_held(folder, name):
            if each == name:
                living.append(bytes.fromhex(name))
        elif not _is_being_made(folder, NEW + name):
            _unlink(folder, each)
    return living


def _is_being_made(folder: int, name: str) -> bool:
    """Whether a session that is not in the ledger yet has this FIFO, or has just made it."""
    try:
        made = os.stat(name, dir_fd=folder, follow_symlinks=False).st_ctime
    except OSError:
        return False
    return time.time() - made < YOUNG or bool(_is_held(folder, name))


def remove(folder: int, ident: bytes) -> None:
    """Remove the files of a session."""
    for name in (ident.hex(), f"{NEW}{ident.hex()}", f"{ident.hex()}.json"):
        _unlink(folder, name)


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # another session has removed it, or another user owns it


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _is_name(name: str) -> bool:
    return len(name) == 32 and not set(name) - set("0123456789abcdef")


def is_regular(descriptor: int) -> int:
    """Return the descriptor if it belongs to a regular file.

    Raises:
        OSError: it does not; the descriptor is closed, then.
    """
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file")
