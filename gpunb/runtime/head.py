"""A head process: a session that outlives kernels, and serves those that attach to it.

It runs the same local runtime as a kernel does. Beside it there is a socket on which kernels of
the same user knock; what they ask for is the business of `clients`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import socket
from pathlib import Path

from gpunb.backend import Backend
from gpunb.exceptions import GpunbError
from gpunb.runtime import doors, heads, kernels
from gpunb.runtime.clients import Client
from gpunb.runtime.driver import Driver
from gpunb.runtime.local import Local
from gpunb.workers.channel import Channel

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


class Head:
    """Lets kernels in; on the loop's thread, but for what says otherwise."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._name = name
        self._path: Path | None = None
        self._listener: socket.socket | None = None
        self._idents = itertools.count(1)
        self._clients: set[Client] = set()
        self._strangers: set[socket.socket] = set()

    def listen(self) -> None:
        """Have the socket; from any thread, before `open`. Who knocks waits until then.

        Raises:
            GpunbError: there can be none.
        """
        path = heads.path_of(self._name)
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        listener = socket.socket(socket.AF_UNIX, kind)
        try:
            path.unlink(missing_ok=True)  # of one that was killed: the name is locked
            with kernels.address(path) as target:
                listener.bind(target)
            os.chmod(path, 0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise GpunbError(f"nobody can attach through {path}: {error.strerror}") from error
        self._listener, self._path = listener, path

    def open(self) -> None:
        """Let kernels in."""
        assert self._listener is not None
        self._driver.facts.session["head"] = self._name
        self._driver.loop.watch(self._listener.fileno(), self._knock)

    def close(self) -> None:
        """Let nobody in any more, and send all away; from any thread, after the loop's end."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._listener is not None:
            self._listener.close()
        for client in self._clients:
            client.channel.close()
        for sock in self._strangers:
            sock.close()

    def _knock(self) -> None:
        assert self._listener is not None
        loop = self._driver.loop
        sock = doors.accept(loop, self._listener)
        if sock is None:
            return
        if doors.peer(sock)[1] != os.getuid():
            sock.close()
            return
        self._strangers.add(sock)
        loop.watch(sock.fileno(), lambda: self._hear(sock))
        loop.after(heads.PATIENCE, lambda: self._forget(sock, close=True))

    def _forget(self, sock: socket.socket, *, close: bool) -> None:
        if sock in self._strangers:
            self._strangers.remove(sock)
            self._driver.loop.unwatch(sock.fileno())
            if close:
                sock.close()

    def _hear(self, sock: socket.socket) -> None:
        """Who it is that has knocked."""
        try:
            said = sock.recv(heads.LONGEST)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:  # it only wanted to know whether we are here
            self._forget(sock, close=True)
            return
        try:
            asked = json.loads(said)
        except ValueError:
            asked = None
        problem = heads.mismatch(asked)
        error = f"the head process {self._name!r} cannot be attached to: {problem}"
        with contextlib.suppress(OSError):
            answer = {"ok": True} if problem is None else {"ok": False, "error": error}
            sock.send(json.dumps(answer).encode())
        self._forget(sock, close=problem is not None)
        if problem is None:
            sock.setblocking(True)
            about = asked.get("about") if isinstance(asked.get("about"), dict) else {}
            ident = next(self._idents)
            client = Client(self._driver, Channel(sock), ident, about, self._clients.discard)
            self._clients.add(client)


def serve(session: Local, name: str) -> Head:
    """Let kernels attach to a session of this process; at once when this returns.

    Raises:
        GpunbError: there can be no socket.
    """
    head = Head(session.driver, name)
    head.listen()
    session.end = f"the head process {name!r} was stopped"
    session.loop.post((head.open,))
    return head


def local(session: Backend | None) -> Local:
    """The session of this process, which is one of its own."""
    assert isinstance(session, Local)
    return session


def end_on_signals() -> None:
    """Have the process end in order when it is asked to."""

    def end(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
