"""The control socket of a session: other processes ask for its status and stop its jobs.

A Unix socket in a folder that only the user can enter, for lines of JSON: a request and its reply,
or a request to watch and one snapshot after the other. Without a request the server does nothing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from gpunb.engine.publisher import INTERVAL, StatusPublisher, StatusWatch
from gpunb.engine.state import EngineState
from gpunb.engine.status import Status
from gpunb.exceptions import GpunbError
from gpunb.head import endpoint
from gpunb.protocol import backend
from gpunb.scheduler import events as ev
from gpunb.system import unix_socket
from gpunb.system.loop import Loop

MOST = 64
"""Connections at a time; more are closed at once."""

PATIENCE = 10.0
"""Seconds until a client has to have sent its request."""

LONGEST = 1 << 16
"""Bytes of the longest request."""

Request: TypeAlias = dict[str, Any]

Answer: TypeAlias = Callable[[dict[str, Any]], object]
"""Sends ``{"ok": True, "value": ...}`` or ``{"ok": False, "error": text}``."""


class ControlServer:
    """Answers requests; on the loop's thread."""

    def __init__(
        self,
        engine: EngineState,
        facts: Status,
        publisher: StatusPublisher,
        end: Callable[[], None],
    ) -> None:
        """`end` shuts the session down; it is called in a thread of its own."""
        self._engine = engine
        self._facts = facts
        self.publisher = publisher
        self._end = end
        self._socket: endpoint.ListeningSocket | None = None
        self._clients: set[_Client] = set()
        self._owner = os.getpid()
        self._verbs: dict[str, Callable[[Request], Any]] = {
            "status": self._status,
            "timeline": self._timeline,
            "cancel": self._cancel,
            "interrupt": self._interrupt,
            "kill": self._kill,
            "stop": self._stop,
            "release": self._release,
        }

    def open(self) -> None:
        """Listen. If that is impossible, note the problem; the session goes on."""
        try:
            made = endpoint.control_server()
        except (GpunbError, OSError) as error:
            text = f"other processes cannot look at this session: {error}"
            self._engine.faults.texts.append(text)
            return
        self._socket = endpoint.ListeningSocket(
            self._engine.loop, made, endpoint.control_server, self.accepted
        )

    def close(self) -> None:
        """Stop listening, and close all connections."""
        for client in list(self._clients):
            client.close()
        if self._socket is not None:
            self._engine.loop.unwatch(self._socket.listener.fileno())
            self._socket.close()
            self._socket = None

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        made, self._socket = self._socket, None
        if made is not None:
            made.listener.close()
        while self._clients:
            self._clients.pop().sock.close()

    def accepted(self, sock: socket.socket) -> None:
        """Serve a new connection."""
        if len(self._clients) >= MOST or unix_socket.peer(sock)[1] not in (os.getuid(), 0):
            sock.close()
            return
        try:
            self._clients.add(_Client(self, self._engine.loop, sock))
        except OSError:  # the loop has no room for this client; go on listening
            sock.close()

    def remove(self, client: _Client) -> None:
        """Forget a client that has closed."""
        self._clients.discard(client)

    def carry_out(self, request: Any, reply: Answer) -> None:
        """Carry out a request; call `reply` with the outcome, now or later on this thread."""
        try:
            if not isinstance(request, dict):
                raise GpunbError("a request must be a JSON object")
            what = request.get("do")
            if what == "logs":
                self._logs(request, reply)
            elif what in self._verbs:
                reply({"ok": True, "value": self._verbs[what](request)})
            else:
                known = ", ".join(["watch", "logs", *self._verbs])
                raise GpunbError(f"{what!r} cannot be asked for: known are {known}")
        except Exception as error:
            known_error = isinstance(error, (GpunbError, ValueError))
            reply({"ok": False, "error": str(error) if known_error else repr(error)})

    def _status(self, request: Request) -> Any:
        return self._facts.get("status")

    def _timeline(self, request: Request) -> Any:
        return self._facts.get("timeline")

    def _cancel(self, request: Request) -> None:
        """Cancel a job and all jobs that it submitted."""
        job, force = self._job(request), request.get("force") is True
        self._engine.check_force((job, 0), force)
        self._engine.feed(ev.CancelRequested(job, force, recursive=True))

    def _interrupt(self, request: Request) -> None:
        """Raise KeyboardInterrupt in a job."""
        self._engine.feed(ev.InterruptRequested(self._job(request)))

    def _kill(self, request: Request) -> None:
        """End an actor, or a session of cells."""
        actor = _ident(request, "actor")
        if self._engine.actors.get(actor) is None:
            raise GpunbError(f"there is no actor or session of cells #{actor} that is not over")
        self._engine.kill(actor, restart=False)

    def _stop(self, request: Request) -> None:
        """Stop the trials of a sweep, and start no more."""
        self._engine.groups.stop_sweep(str(request.get("sweep")))

    def _job(self, request: Request) -> int:
        job = _ident(request, "job")
        if job not in self._engine.jobs:
            raise GpunbError(f"there is no job #{job} that is not over")
        return job

    def _logs(self, request: Request, reply: Answer) -> None:
        """Reply with the output of a job from a position on, and its state. Reads in a thread,
        because a log may be large and on a disk."""
        job = _ident(request, "job")
        position = request.get("position", 0)
        if not isinstance(position, int) or position < 0:
            raise GpunbError(f"position={position!r} must be a whole number, 0 or more")
        facts, log = self._facts.job(job), self._facts.get("log", job)
        if log is None:
            raise GpunbError(f"nothing is kept of what job #{job} has shown")

        about = {name: facts.get(name) if facts else None for name in ("name", "state")}

        def read() -> None:
            try:
                outcome = {"ok": True, "value": {**about, **log.read_from(position)}}
            except Exception as error:  # an invalid position, or an error of the disk
                outcome = {"ok": False, "error": f"the log of job #{job} cannot be read: {error!r}"}
            self._engine.loop.post((reply, outcome))

        threading.Thread(target=read, name="gpunb-logs", daemon=True).start()

    def _release(self, request: Request) -> dict[str, list[int]]:
        """End the idle workers, or the whole session."""
        idle = sorted(worker.id for worker in self._engine.scheduler.workers.idle)
        if request.get("all") is True:
            threading.Thread(target=self._end, name="gpunb-end", daemon=True).start()
        else:
            self._engine.feed(ev.ReleaseRequested())
        return {"released": idle}


class _Client:
    """One connection."""

    def __init__(self, control_server: ControlServer, loop: Loop, sock: socket.socket) -> None:
        self.sock = sock
        self._control_server = control_server
        self._loop = loop
        self._received = b""
        self._has_request = False
        self._unsent = b""
        self._watch: StatusWatch | None = None
        self._gone = False
        self._loop.watch(sock.fileno(), self._on_readable)
        self._loop.after(PATIENCE, self._close_if_silent)

    def close(self) -> None:
        """Close the connection."""
        if self._gone:
            return
        self._gone = True
        if self._watch is not None:
            self._watch.stop()
        self._loop.unwatch(self.sock.fileno())
        self.sock.close()
        self._control_server.remove(self)

    def _close_if_silent(self) -> None:
        if not self._has_request:
            self.close()

    def _send_snapshot(self, snapshot: dict[str, Any] | None) -> bool:
        if snapshot is None:
            self.close()
            return True
        if self._unsent:
            return False  # a slow reader gets a later snapshot instead
        self._send({"snapshot": snapshot})
        return True

    def _on_readable(self) -> None:
        try:
            data = self.sock.recv(LONGEST)
        except BlockingIOError:
            self._flush()
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        elif not self._has_request:
            self._received += data
            line, end, _ = self._received.partition(b"\n")
            if end:
                self._has_request = True
                self._handle(line)
            elif len(self._received) > LONGEST:
                self.close()

    def _handle(self, line: bytes) -> None:
        try:
            request = json.loads(line)
            if isinstance(request, dict) and request.get("do") == "watch":
                interval = _number(request, "interval", INTERVAL)
                self._watch = self._control_server.publisher.watch(self._send_snapshot, interval)
                return
        except (ValueError, RecursionError) as error:
            self._send({"ok": False, "error": f"not JSON: {error}"})
        except GpunbError as error:
            self._send({"ok": False, "error": str(error)})
        else:
            self._control_server.carry_out(request, self._send)

    def _send(self, value: dict[str, Any]) -> None:
        if not self._gone:
            self._unsent += json.dumps(value, default=str).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            self._loop.watch_writing(self.sock.fileno(), True)
            return
        except OSError:
            self.close()
            return
        if self._watch is None and self._has_request:
            self.close()
        else:
            self._loop.watch_writing(self.sock.fileno(), False)


def end_of(session: backend.Backend) -> Callable[[], None]:
    """Return a function that shuts a session down like `gpunb.shutdown`. The next session of this
    process, if there is one, shows a note about it."""

    def end() -> None:
        with backend.lock():  # so that no other session begins meanwhile
            session.shutdown()
            if backend.existing() is session:
                backend.install(None)
                backend.NOTICES.append(
                    "the session before was ended by `gpunb release --all`, and what was in it is "
                    "gone; this one has the defaults: gpunb.init(...) in its place sets others"
                )

    return end


def _ident(request: dict[str, Any], name: str) -> int:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise GpunbError(f"{name}={value!r} must be a number, such as 7")
    return value


def _number(request: dict[str, Any], name: str, default: float) -> float:
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GpunbError(f"{name}={value!r} must be a number of seconds")
    return float(value)
