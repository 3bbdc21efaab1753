"""A head process: a session that outlives kernels, and serves those that attach to it.

It runs the same local runtime as a kernel does. Beside it there is a socket on which kernels of
the same user knock; what they ask for is the business of `clients`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket

from gpunb.backend import Backend
from gpunb.runtime import doors, heads, listening
from gpunb.runtime.clients import Client
from gpunb.runtime.driver import Driver
from gpunb.runtime.local import Local
from gpunb.workers.channel import Channel

_TOLD = 50
"""Things that would be lost with a head process, of which whoever ends it is told."""


class Head:
    """Lets kernels in; on the loop's thread, but for what says otherwise."""

    def __init__(self, driver: Driver, name: str, listener: socket.socket) -> None:
        self._driver = driver
        self._name = name
        self._path = heads.path_of(name)
        self._listener = listener
        self._idents = itertools.count(1)
        self._clients = driver.kept.clients
        self._strangers: set[socket.socket] = set()

    def open(self) -> None:
        """Let kernels in."""
        self._driver.facts.session["head"] = self._name
        self._driver.loop.watch(self._listener.fileno(), self._knock)

    def close(self) -> None:
        """Let nobody in any more, and send all away; from any thread, after the loop's end."""
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for client in self._clients:
            client.channel.close()
        for sock in self._strangers:
            sock.close()

    def _knock(self) -> None:
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
        if problem is None and "end" in asked:
            self._end(sock)
            return
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

    def _end(self, sock: socket.socket) -> None:
        """Somebody asks it to end, unless something would be lost."""
        lost = self._driver.kept.losses()
        more = len(lost) - _TOLD
        said = [*lost[:_TOLD], f"and {more} more"] if more > 0 else lost
        with contextlib.suppress(OSError):
            sock.send(json.dumps({"lost": said}).encode())
        self._forget(sock, close=True)
        if not lost:
            os.kill(os.getpid(), signal.SIGTERM)


def serve(session: Local, name: str, listener: socket.socket | None = None) -> Head:
    """Let kernels attach to a session of this process, through the socket of that name.

    Raises:
        GpunbError: there can be no socket.
    """
    head = Head(session.driver, name, listener or listening.listen(name))
    session.end = f"the head process {name!r} was stopped"
    session.loop.post((head.open,))
    return head


def local(session: Backend | None) -> Local:
    """The session of this process, which is one of its own."""
    assert isinstance(session, Local)
    return session
