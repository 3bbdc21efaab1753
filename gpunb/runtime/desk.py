"""Where other processes of the user ask a session what it does, and have it stop things.

A Unix socket in a folder that only the user can enter. Lines of JSON go over it: a request and its
answer, or a request to watch and one snapshot after the other. Nothing is done while nobody asks.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gpunb import backend
from gpunb.core import events as ev
from gpunb.exceptions import GpunbError
from gpunb.runtime import doors, listening
from gpunb.runtime.picture import INTERVAL, Watch

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver

MOST = 64
"""Connections at a time; more are turned away."""

PATIENCE = 10.0
"""Seconds that a visitor may take to say what he wants."""

LONGEST = 1 << 16
"""Bytes of the longest request."""

Request: TypeAlias = dict[str, Any]

Answer: TypeAlias = Callable[[dict[str, Any]], object]
"""Takes ``{"ok": True, "value": ...}`` or ``{"ok": False, "error": text}``."""


class Desk:
    """Answers requests; on the loop's thread."""

    def __init__(self, driver: Driver, end: Callable[[], None]) -> None:
        """`end` shuts the session down, from a thread of its own."""
        self._driver = driver
        self._end = end
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._visitors: set[_Visitor] = set()
        self._owner = os.getpid()
        self._words: dict[str, Callable[[Request], Any]] = {
            "status": self._status,
            "timeline": self._timeline,
            "cancel": self._cancel,
            "interrupt": self._interrupt,
            "kill": self._kill,
            "release": self._release,
        }
        self.problem: str | None = None
        """Why there is no desk."""

    def open(self) -> None:
        """Listen. A session goes without, and says so, where that is impossible."""
        try:
            listener, path = listening.desk()
        except (GpunbError, OSError) as error:
            self.problem = f"other processes cannot look at this session: {error}"
            return
        self._listener, self._path = listener, path
        self._driver.loop.watch(listener.fileno(), self._knock)

    def close(self) -> None:
        """Let nobody in any more, and send all away."""
        for visitor in list(self._visitors):
            visitor.leave()
        if self._listener is None or self._path is None:
            return
        self._driver.loop.unwatch(self._listener.fileno())
        self._path.unlink(missing_ok=True)
        self._listener.close()
        self._listener = None

    def forked(self) -> None:
        """In a child that was forked off the kernel: this is the parent's."""
        if self._listener is not None:
            self._listener.close()
        for visitor in self._visitors:
            visitor.sock.close()

    def _knock(self) -> None:
        assert self._listener is not None
        sock = doors.accept(self._driver.loop, self._listener)
        if sock is None:
            return
        if len(self._visitors) >= MOST or doors.peer(sock)[1] not in (os.getuid(), 0):
            sock.close()
            return
        self._visitors.add(_Visitor(self, self._driver, sock))

    def left(self, visitor: _Visitor) -> None:
        """A visitor is gone."""
        self._visitors.discard(visitor)

    def carry_out(self, request: Any, answer: Answer) -> None:
        """Do what somebody wants, and say what came of it, now or later on this thread."""
        try:
            if not isinstance(request, dict):
                raise GpunbError("a request must be a JSON object")
            what = request.get("do")
            if what == "logs":
                self._logs(request, answer)
            elif what in self._words:
                answer({"ok": True, "value": self._words[what](request)})
            else:
                known = ", ".join(["watch", "logs", *self._words])
                raise GpunbError(f"{what!r} cannot be asked for: known are {known}")
        except Exception as error:
            known_error = isinstance(error, (GpunbError, ValueError))
            answer({"ok": False, "error": str(error) if known_error else repr(error)})

    def _status(self, request: Request) -> Any:
        return self._driver.facts.tell("status")

    def _timeline(self, request: Request) -> Any:
        return self._driver.facts.tell("timeline")

    def _cancel(self, request: Request) -> None:
        """Cancel a job with all that it submitted."""
        job, force = self._job(request), request.get("force") is True
        self._driver.check_force((job, 0), force)
        self._driver.feed(ev.CancelRequested(job, force, recursive=True))

    def _interrupt(self, request: Request) -> None:
        """Raise KeyboardInterrupt in a job."""
        self._driver.feed(ev.InterruptRequested(self._job(request)))

    def _kill(self, request: Request) -> None:
        """End an actor, or a session of cells."""
        actor = _ident(request, "actor")
        if self._driver.actors.get(actor) is None:
            raise GpunbError(f"there is no actor or session of cells #{actor} that is not over")
        self._driver.kill(actor, restart=False)

    def _job(self, request: Request) -> int:
        job = _ident(request, "job")
        if job not in self._driver.jobs:
            raise GpunbError(f"there is no job #{job} that is not over")
        return job

    def _logs(self, request: Request, answer: Answer) -> None:
        """What a job has shown, from a position on, and its state. In a thread: a log may be
        large, and lie on a disk."""
        job = _ident(request, "job")
        position = request.get("position", 0)
        if not isinstance(position, int) or position < 0:
            raise GpunbError(f"position={position!r} must be a whole number, 0 or more")
        facts, log = self._driver.facts.job(job), self._driver.facts.tell("log", job)
        if log is None:
            raise GpunbError(f"nothing is kept of what job #{job} has shown")

        about = {name: facts.get(name) if facts else None for name in ("name", "state")}

        def read() -> None:
            try:
                said = {"ok": True, "value": {**about, **log.told(position)}}
            except Exception as error:  # that is no position, or the disk fails
                said = {"ok": False, "error": f"the log of job #{job} cannot be read: {error!r}"}
            self._driver.loop.post((answer, said))

        threading.Thread(target=read, name="gpunb-logs", daemon=True).start()

    def _release(self, request: Request) -> dict[str, list[int]]:
        """Let go of what idle workers hold, or of all."""
        idle = sorted(worker.id for worker in self._driver.scheduler.workforce.idle)
        if request.get("all") is True:
            threading.Thread(target=self._end, name="gpunb-end", daemon=True).start()
        else:
            self._driver.feed(ev.ReleaseRequested())
        return {"released": idle}


class _Visitor:
    """One connection."""

    def __init__(self, desk: Desk, driver: Driver, sock: socket.socket) -> None:
        self.sock = sock
        self._desk = desk
        self._loop = driver.loop
        self._picture = driver.picture
        self._said = b""
        self._heard = False
        self._unsent = b""
        self._watch: Watch | None = None
        self._gone = False
        self._loop.watch(sock.fileno(), self._stirs)
        self._loop.after(PATIENCE, self._hurry)

    def leave(self) -> None:
        """Close the connection."""
        if self._gone:
            return
        self._gone = True
        if self._watch is not None:
            self._watch.stop()
        self._loop.unwatch(self.sock.fileno())
        self.sock.close()
        self._desk.left(self)

    def _hurry(self) -> None:
        if not self._heard:
            self.leave()

    def _show(self, snapshot: dict[str, Any] | None) -> bool:
        if snapshot is None:
            self.leave()
            return True
        if self._unsent:
            return False  # it reads slowly, and gets a later one instead
        self._send({"snapshot": snapshot})
        return True

    def _stirs(self) -> None:
        try:
            said = self.sock.recv(LONGEST)
        except BlockingIOError:
            self._flush()
            return
        except OSError:
            self.leave()
            return
        if not said:
            self.leave()
        elif not self._heard:
            self._said += said
            line, end, _ = self._said.partition(b"\n")
            if end:
                self._heard = True
                self._hear(line)
            elif len(self._said) > LONGEST:
                self.leave()

    def _hear(self, line: bytes) -> None:
        try:
            request = json.loads(line)
            if isinstance(request, dict) and request.get("do") == "watch":
                interval = _number(request, "interval", INTERVAL)
                self._watch = self._picture.watch(self._show, interval)
                return
        except ValueError as error:
            self._send({"ok": False, "error": f"not JSON: {error}"})
        except GpunbError as error:
            self._send({"ok": False, "error": str(error)})
        else:
            self._desk.carry_out(request, self._send)

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
            self.leave()
            return
        if self._watch is None and self._heard:
            self.leave()
        else:
            self._loop.watch_writing(self.sock.fileno(), False)


def end_of(session: backend.Backend) -> Callable[[], None]:
    """Shuts a session down as `gpunb.shutdown` does, if it is still this process's, and leaves
    word of it for what comes next here."""

    def end() -> None:
        with backend.lock():  # until it is over, so that no other begins meanwhile
            session.shutdown()
            if backend.existing() is session:
                backend.install(None)
                backend.WORD.append(
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
