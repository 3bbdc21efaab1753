"""A head process: a session that outlives kernels, and serves the kernels that attach to it.

It runs the same engine as a kernel does. Kernels of the same user connect to its socket; `peer`
answers their requests.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import socket

from gpunb.engine.backend import EngineBackend
from gpunb.engine.engine import Engine
from gpunb.head import discovery, endpoint
from gpunb.head.peer import Peer
from gpunb.head.retention import Retention
from gpunb.protocol.backend import Backend
from gpunb.protocol.channel import Channel
from gpunb.system import unix_socket

_LISTED = 50
"""The number of cells and sessions in the text about what would be lost with a head process."""


class Head:
    """Accepts connections of kernels. On the loop's thread, unless a method says otherwise."""

    def __init__(self, engine: Engine, name: str, listener: socket.socket) -> None:
        self._engine = engine
        self._name = name
        self._listener = listener
        self._socket: endpoint.ListeningSocket | None = None
        self._idents = itertools.count(1)
        self._clients: set[Peer] = set()
        self.retention = Retention(engine, engine.facts, self._clients)
        self._unidentified: set[socket.socket] = set()

    def open(self) -> None:
        """Accept connections."""
        self._engine.facts.session["head"] = self._name
        made = self._listener, discovery.path_of(self._name)
        again = functools.partial(endpoint.listen_again, self._name)
        self._socket = endpoint.ListeningSocket(self._engine.loop, made, again, self.accepted)

    def close(self) -> None:
        """Accept no more connections, and close all; from any thread, after the loop's end."""
        if self._socket is not None:
            self._socket.close()
        self._listener.close()
        for client in self._clients:
            client.channel.close()
        for sock in self._unidentified:
            sock.close()

    def accepted(self, sock: socket.socket) -> None:
        """Wait for the first message of a new connection."""
        loop = self._engine.loop
        if unix_socket.peer(sock)[1] != os.getuid():
            sock.close()
            return
        try:
            loop.watch(sock.fileno(), lambda: self._on_request(sock))
        except OSError:  # no descriptor is left; later connections may succeed
            sock.close()
            return
        self._unidentified.add(sock)
        loop.after(discovery.PATIENCE, lambda: self._forget(sock, close=True))

    def _forget(self, sock: socket.socket, *, close: bool) -> None:
        if sock in self._unidentified:
            self._unidentified.remove(sock)
            self._engine.loop.unwatch(sock.fileno())
            if close:
                sock.close()

    def _on_request(self, sock: socket.socket) -> None:
        """Handle the first message of a connection, which has the facts about its sender."""
        try:
            data = sock.recv(discovery.LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it only checked whether this process runs
            self._forget(sock, close=True)
            return
        try:
            asked = json.loads(data)
        except (ValueError, RecursionError):
            asked = None
        problem = discovery.mismatch(asked)
        if problem is None and "end" in asked:
            self._end(sock)
            return
        error = f"the head process {self._name!r} cannot be attached to: {problem}"
        answer = {"ok": True} if problem is None else {"ok": False, "error": error}
        try:
            sock.send(json.dumps(answer).encode())
        except OSError:
            problem = "it cannot be answered"  # and is not to wait for an answer
        self._forget(sock, close=problem is not None)
        if problem is None:
            sock.setblocking(True)
            about = asked.get("about") if isinstance(asked.get("about"), dict) else {}
            ident = next(self._idents)
            try:
                client = Peer(
                    self._engine,
                    self.retention,
                    Channel(sock),
                    ident=ident,
                    about=about,
                    left=self._clients.discard,
                )
            except OSError:  # the loop cannot watch it
                sock.close()
                return
            self._clients.add(client)

    def _end(self, sock: socket.socket) -> None:
        """Handle a request to end, unless something would be lost."""
        lost = self.retention.losses()
        more = len(lost) - _LISTED
        listed = [*lost[:_LISTED], f"and {more} more"] if more > 0 else lost
        with contextlib.suppress(OSError):
            sock.send(json.dumps({"lost": listed}).encode())
        self._forget(sock, close=True)
        if not lost:
            os.kill(os.getpid(), signal.SIGTERM)


def serve(session: EngineBackend, name: str, listener: socket.socket | None = None) -> Head:
    """Let kernels attach to a session of this process, through the socket of that name.

    Raises:
        GpunbError: the socket cannot be made.
    """
    head = Head(session.engine, name, listener or endpoint.listen(name))
    session.end = f"the head process {name!r} was stopped"
    session.loop.post((head.open,))
    return head


def local(session: Backend | None) -> EngineBackend:
    """The session of this process, which is one of its own."""
    assert isinstance(session, EngineBackend)
    return session
