"""Where sessions are found: the socket of each one's desk, and the name and socket of a head
process, with the signals that end it.

Imports little, so that a head process that starts can be found before it has imported the rest.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from pathlib import Path

from gpunb.exceptions import GpunbError
from gpunb.runtime import heads, kernels

serving: str | None = None
"""The name of this process, if it is a head process from its start."""

_BACKLOG = 64


class Lock:
    """Held by the head process of a name as long as it lives."""

    def __init__(self, name: str) -> None:
        """Have the name.

        Raises:
            GpunbError: another one has it.
        """
        path = heads.path_of(name, "lock")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            pid = heads.pid_of(name)
            known = "is starting or ending" if pid is None else f"runs already, as process {pid}"
            raise GpunbError(
                f"the head process {name!r} {known}: attach with gpunb.init({name!r}), or end it "
                f"with `gpunb stop {name}`"
            ) from None

    def release(self) -> None:
        """Let another one have it."""
        os.close(self._file)


def listen(name: str) -> socket.socket:
    """Have the socket of that name, whose lock is held. Who knocks waits until he is let in.

    Raises:
        GpunbError: there can be none.
    """
    path = heads.path_of(name)
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        path.unlink(missing_ok=True)  # of one that was killed
        with kernels.address(path) as target:
            listener.bind(target)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise GpunbError(f"nobody can attach through {path}: {error.strerror}") from error
    return listener


def open_desk() -> None:
    """Have this process's desk found from now on; who asks there waits until it is open.

    Raises:
        GpunbError, OSError: it cannot be.
    """
    global _desk
    path = kernels.path_of(os.getpid())
    new = path.with_name(f".{path.name}")
    new.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with kernels.address(new) as target:
            listener.bind(target)
        os.chmod(new, 0o600)
        listener.listen(16)
        new.rename(path)  # not before somebody listens, or it would look abandoned
    except OSError:
        listener.close()
        raise
    _desk = listener, path


def desk() -> tuple[socket.socket, Path]:
    """The socket of this process's desk, and where it is; it is the caller's.

    Raises:
        GpunbError, OSError: there can be none.
    """
    global _desk
    if _desk is None:
        open_desk()
    assert _desk is not None
    found, _desk = _desk, None
    return found


_desk: tuple[socket.socket, Path] | None = None


def end_on_signals() -> None:
    """Have the process end in order when it is asked to."""

    def end(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
