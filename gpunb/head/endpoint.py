"""The sockets by which other processes find a session: its control socket, and the name and socket
of a head process. Also the signals that end a head process.

Imports little, so that other processes find a new head process before it has imported the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gpunb.control import client
from gpunb.exceptions import GpunbError
from gpunb.head import discovery
from gpunb.system import unix_socket

if TYPE_CHECKING:
    from gpunb.system.loop import Loop

serving: str | None = None
"""The name of this process, if it is a head process from its start."""

_BACKLOG = 64
_LOST = 1.0
"""Seconds between two checks whether the file of a socket is still there."""

_made: dict[Path, tuple[int, int]] = {}
"""The sockets that this process has made."""


class Lock:
    """The name of a head process, which it holds as long as it lives."""

    held: ClassVar[dict[str, Lock]] = {}

    def __init__(self, name: str) -> None:
        """Take the name.

        Raises:
            GpunbError: another head process has it.
        """
        self._name = name
        self._file = self._lock(name)
        self.held[name] = self

    @staticmethod
    def _lock(name: str) -> int:
        path = discovery.path_of(name, "lock")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            pid = discovery.pid_of(name)
            known = "is starting or ending" if pid is None else f"runs already, as process {pid}"
            raise GpunbError(
                f"the head process {name!r} {known}: attach with gpunb.init({name!r}), or end it "
                f"with `gpunb stop {name}`"
            ) from None
        return file

    def renew(self) -> None:
        """Take the name again, if its file was removed.

        Raises:
            GpunbError: another head process has it.
        """
        if os.fstat(self._file).st_nlink:
            return
        file = self._lock(self._name)
        os.close(self._file)
        self._file = file

    def release(self) -> None:
        """Give the name up."""
        self.held.pop(self._name, None)
        os.close(self._file)


def listen(name: str) -> socket.socket:
    """Make the socket of that name, whose lock is held. Connections wait until they are accepted.

    Raises:
        GpunbError: the socket cannot be made.
    """
    path = discovery.path_of(name)
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        path.unlink(missing_ok=True)  # of a head process that was killed
        with client.address(path) as target:
            listener.bind(target)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
        _made[path] = _identity(path)
    except OSError as error:
        listener.close()
        raise GpunbError(f"nobody can attach through {path}: {error.strerror}") from error
    return listener


def listen_again(name: str) -> tuple[socket.socket, Path]:
    """Make the socket of a head process again, if its file was removed. Returns it and its path.

    Raises:
        GpunbError: the socket cannot be made.
        OSError: the socket cannot be made now.
    """
    if (lock := Lock.held.get(name)) is not None:
        lock.renew()
    return listen(name), discovery.path_of(name)


def lies(path: Path) -> bool | None:
    """Whether the path still has the socket that this process made there; None without a file."""
    try:
        return _identity(path) == _made.get(path)
    except FileNotFoundError:
        return None


def remove(path: Path) -> None:
    """Remove the socket that this process made there, unless another one has replaced it."""
    with contextlib.suppress(OSError):
        if lies(path):
            path.unlink()
    _made.pop(path, None)


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def open_control_socket() -> None:
    """Make this process's control socket, so that others find it. Requests wait until it is open.

    Raises:
        GpunbError, OSError: the socket cannot be made.
    """
    global _control_server
    path = client.path_of(os.getpid())
    new = path.with_name(f".{path.name}")
    new.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with client.address(new) as target:
            listener.bind(target)
        os.chmod(new, 0o600)
        listener.listen(16)
        new.rename(path)  # not before the socket listens, or it would look abandoned
        _made[path] = _identity(path)
    except OSError:
        listener.close()
        raise
    _control_server = listener, path


def control_server() -> tuple[socket.socket, Path]:
    """The control socket of this process, and its path; the caller closes it.

    Raises:
        GpunbError, OSError: the socket cannot be made.
    """
    global _control_server
    if _control_server is None:
        open_control_socket()
    assert _control_server is not None
    server, _control_server = _control_server, None
    return server


_control_server: tuple[socket.socket, Path] | None = None


class ListeningSocket:
    """A socket to which other processes connect, made again if its file was removed; on the loop's
    thread."""

    def __init__(
        self,
        loop: Loop,
        made: tuple[socket.socket, Path],
        again: Callable[[], tuple[socket.socket, Path]],
        accepted: Callable[[socket.socket], None],
    ) -> None:
        """`accepted` is called with each new connection."""
        self.listener, self.path = made
        self._loop, self._again, self._accepted = loop, again, accepted
        self._open = True
        loop.watch(self.listener.fileno(), self._accept)
        loop.after(_LOST, self._look)

    def _accept(self) -> None:
        sock = unix_socket.accept(self._loop, self.listener)
        if sock is not None:
            self._accepted(sock)

    def close(self) -> None:
        """Close the socket; also after the loop's end."""
        self._open = False
        remove(self.path)
        self.listener.close()

    def _look(self) -> None:
        if not self._open:
            return
        try:
            if lies(self.path) is None:
                made = self._again()
                self._loop.unwatch(self.listener.fileno())
                self.listener.close()
                self.listener, self.path = made
                self._loop.watch(self.listener.fileno(), self._accept)
        except (GpunbError, OSError):
            pass  # the next check tries again
        self._loop.after(_LOST, self._look)


def note(name: str, text: str) -> None:
    """Write a line into the log of this head process, which is its standard error."""
    with contextlib.suppress(OSError):  # the disk is full
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} head process {name!r} (pid {os.getpid()})"
        os.write(2, f"{line} {text}\n".encode(errors="replace"))


def end_on_signals() -> None:
    """End the process in order when a signal asks for it."""

    def end(number: int, _: object) -> None:
        note(serving or "", f"ends: {signal.Signals(number).name}")
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
