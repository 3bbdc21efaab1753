"""Pipes that say that a session is there, and that it is rung for: one for each, in a folder.

A session has its pipe open and locked (flock) in a descriptor that all its processes inherit: the
system unlocks it, and hangs up on whoever reads, when the last of them is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 1000
"""Characters of what a session tells of itself."""

_QUIET = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_ENDING = 200
"""Milliseconds in which the processes of a session that has ended are gone."""


def make(place: int, ident: bytes, mode: int, about: Mapping[str, Any]) -> int:
    """The bell of a new session, in the folder that `place` is open on, and beside it what is
    told of the session."""
    name = ident.hex()
    os.mkfifo(name, 0o600, dir_fd=place)
    # To read and write: it is never without a writer, and so never at its end, while we live.
    bell = os.open(name, os.O_RDWR | _QUIET, dir_fd=place)
    try:
        os.fchmod(bell, mode)
        fcntl.flock(bell, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        told = os.open(f"{name}.json", new, 0o600, dir_fd=place)
        with open(told, "w", encoding="utf-8") as file:
            os.fchmod(told, mode)
            json.dump(dict(about), file)
    except BaseException:
        os.close(bell)
        raise
    return bell


def about(place: int, ident: bytes) -> Mapping[str, Any]:
    """What a session tells of itself; it may be another user's, so only plain values are kept."""
    try:
        descriptor = os.open(f"{ident.hex()}.json", os.O_RDONLY | _QUIET, dir_fd=place)
        with open(descriptor, encoding="utf-8", errors="replace") as file:
            said = json.loads(file.read(1 << 16))
    except (OSError, ValueError):
        return {}
    if not isinstance(said, dict):
        return {}
    kept: dict[str, Any] = {}
    for name, value in said.items():
        if isinstance(value, str):
            kept[name] = "".join(each if each.isprintable() else "?" for each in value[:LONGEST])
        elif isinstance(value, (int, float)):
            kept[name] = value
    return kept


def ring(place: int, idents: Iterable[bytes]) -> None:
    """Let sessions know that something has changed."""
    for ident in idents:
        try:
            bell = os.open(ident.hex(), os.O_WRONLY | _QUIET, dir_fd=place)
        except OSError:
            continue  # it is gone
        try:
            os.write(bell, b"!")
        except OSError:
            pass  # it has been rung for often, and has not heard it yet
        finally:
            os.close(bell)


def silence(bell: int) -> None:
    """Take note of having been rung for."""
    try:
        while len(os.read(bell, 4096)) == 4096:
            pass
    except BlockingIOError:
        pass


def is_alive(place: int, ident: bytes) -> bool:
    """Whether any process of the session is left."""
    try:
        descriptor = os.open(ident.hex(), os.O_RDONLY | _QUIET, dir_fd=place)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno != errno.ENXIO
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def watch(place: int, ident: bytes) -> int | None:
    """A descriptor that hangs up when the session is gone; None if it is gone."""
    try:
        descriptor = os.open(ident.hex(), os.O_RDONLY | _QUIET, dir_fd=place)
    except OSError:
        return None
    if _is_locked(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def await_end(watched: int) -> None:
    """Wait a moment for a session that has ended to be gone."""
    poll = select.poll()
    poll.register(watched, 0)
    poll.poll(_ENDING)
    os.close(watched)


def sweep(place: int, known: Iterable[bytes]) -> None:
    """Remove what sessions left that are gone."""
    kept = {ident.hex() for ident in known}
    for each in os.listdir(place):
        name = each.removesuffix(".json")
        if name not in kept and _is_name(name) and not is_alive(place, bytes.fromhex(name)):
            _unlink(place, each)


def remove(place: int, ident: bytes) -> None:
    """Remove the bell of a session that is gone."""
    _unlink(place, ident.hex())
    _unlink(place, f"{ident.hex()}.json")


def _unlink(place: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=place)
    except OSError:
        pass  # somebody else did, or it is another user's


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _is_name(name: str) -> bool:
    return len(name) == 32 and not set(name) - set("0123456789abcdef")
