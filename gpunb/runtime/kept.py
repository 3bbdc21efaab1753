"""What outlives the kernel that asked for it: background cells, and sessions of cells.

A head process keeps what such a cell has shown, and its result until a kernel has brought it home
and for a while after; for how long, and how much of it, is bounded. A session that its kernel has
left goes on with the next one that asks for it by its name. All on the loop's thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpunb.backend import SESSIONS, ObjectId
from gpunb.core import events as ev
from gpunb.core.resources import size_text
from gpunb.core.tasks import ActorId, TaskId
from gpunb.exceptions import ObjectLostError
from gpunb.runtime.jobs import HISTORY, Job
from gpunb.runtime.log import Log
from gpunb.runtime.output import Sink

if TYPE_CHECKING:
    from gpunb.runtime.actors import Actor
    from gpunb.runtime.clients import Client
    from gpunb.runtime.driver import Driver

UNSEEN_FOR = 24 * 3600.0
"""Seconds for which a result is kept that no kernel has brought home."""

SEEN_FOR = 600.0
"""Seconds for which it is kept after the first has, for others."""

MOST = 1000
"""Results that are kept, if nobody else holds them."""

PART = 4
"""They take at most this part of the memory that objects may have: one in so many bytes."""


@dataclass(slots=True, eq=False)
class Cell:
    """A background cell. Times are of `time.monotonic`.

    Attributes:
        client: whose it is.
        number: of the cell in its notebook.
        actor: the session that it runs in, or 0, and `session` its name.
        timeout: as it was said.
        log: what it has shown.
        ended: when it was over, and `past` what was known of it then.
        size: bytes of its result.
        fetched: whether its client has that, if it has not bound it yet.
        seen: why nobody misses its result: who has brought it home, in words.
        since: from when on its time runs: it is over, and its kernel gone or nobody misses it.
    """

    id: TaskId
    client: Client
    name: str
    number: int
    sink: Sink | None
    actor: ActorId
    session: str | None
    timeout: float | None
    log: Log
    ended: float | None = None
    past: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0
    fetched: bool = False
    seen: str | None = None
    since: float | None = None

    @property
    def left(self) -> bool:
        """Whether its kernel is gone, and nobody has brought it home."""
        return self.client.gone and self.seen is None

    @property
    def risked(self) -> bool:
        """Whether something would be lost if the head process ended now."""
        return self.seen is None and (self.client.gone or not self.fetched)

    @property
    def expires(self) -> float | None:
        """When its result is given up."""
        if self.since is None:
            return None
        return self.since + (UNSEEN_FOR if self.seen is None else SEEN_FOR)


class Kept:
    """The background cells and sessions of all clients."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._cells: dict[TaskId, Cell] = {}
        self._waiting: dict[TaskId, Cell] = {}
        self._size = 0
        self._wake: float | None = None
        self._given_up: dict[TaskId, tuple[str, Log]] = {}
        self.clients: set[Client] = set()
        self._sessions: dict[ActorId, Client] = {}
        self.most_bytes = driver.store.memory.facts()["limit"] // PART

    # ---------------------------------------------------------------------------------- the cells

    def add(self, job: Job, client: Client) -> None:
        """A client has handed in a background cell."""
        actor = self._driver.actors.get(job.call.actor) if job.call.actor else None
        session = actor.new.name if actor is not None else None
        cell = self._cells[job.id] = Cell(
            job.id,
            client,
            job.call.spec.name,
            (job.place or (0, None))[0],
            job.sink,
            job.call.actor,
            session,
            job.call.spec.timeout,
            job.log,
        )
        obj = (job.id, 0)
        self._driver.store.hold(obj)
        self._driver.store.entry(obj).notify(functools.partial(self._ended, cell))

    def keeps(self, job: Job | None) -> bool:
        """Whether a task does not end with its client: it is such a cell, or comes from one."""
        while job is not None:
            if job.id in self._cells or job.parent in self._cells:
                return True
            job = self._driver.jobs.get(job.parent or 0)
        return False

    def left(self, client: Client) -> None:
        """A client is gone; what of its cells and sessions is there stays."""
        for cell in list(self._cells.values()):
            if cell.client is client and cell.ended is not None and cell.since is None:
                self._waits(cell)
        for actor in self._driver.actors:
            if actor.owner is client and actor.new.namespace == client.sessions:
                self._sessions[actor.id] = client

    def _ended(self, cell: Cell) -> None:
        outcome = self._driver.store.get((cell.id, 0))
        cell.ended = time.monotonic()
        cell.size = outcome.payload.nbytes if outcome is not None else 0
        cell.past = self._driver.facts.job(cell.id) or {}
        if cell.past.get("state") == "cancelled":
            cell.seen = "it was cancelled"
        if cell.client.gone or cell.seen is not None:
            self._waits(cell)
        if cell.client.gone:  # workers that it had for tasks of its own are of no use to anybody
            release = ev.ReleaseRequested(cell.client.ident)
            self._driver.loop.post((self._driver.feed, release))

    def fetched(self, client: Client, objects: Sequence[ObjectId]) -> None:
        """A client asks for these."""
        for task, _ in objects:
            cell = self._cells.get(task)
            if cell is not None and cell.client is client and cell.ended is not None:
                cell.fetched = True

    def adopt(self, client: Client, ident: TaskId) -> dict[str, Any]:
        """Let a client have the result, and what is known of the cell.

        Raises:
            ValueError: there is no such cell.
            ObjectLostError: its result is not kept any more.
        """
        cell = self._cell(ident)
        obj = (ident, 0)
        self._driver.store.hold(obj)
        self._driver.store.granted(-client.ident, [obj])
        return {
            **self._facts(cell),
            "number": cell.number,
            "actor": cell.actor,
            "timeout": cell.timeout,
            "past": dict(cell.past),
        }

    def brought_home(self, client: Client, ident: TaskId) -> None:
        """A client has bound what the cell made."""
        cell = self._cells.get(ident)
        if cell is not None and cell.ended is not None and cell.seen is None:
            cell.seen = f"kernel {client.pid} has brought it home"
            self._waits(cell)

    def log(self, ident: TaskId, position: int) -> tuple[bytes, int]:
        """What a cell has shown from a position of its log on, and where that goes on.

        Raises:
            ValueError: nothing is kept of it.
        """
        cell = self._cells.get(ident)
        log = cell.log if cell is not None else self._given_up.get(ident, ("", None))[1]
        if log is None:
            raise ValueError(f"nothing is kept of what job #{ident} has shown")
        return log.portion(position)

    def _cell(self, ident: TaskId) -> Cell:
        cell = self._cells.get(ident)
        if cell is not None:
            return cell
        if ident in self._given_up:
            raise ObjectLostError(self._given_up[ident][0])
        known = self._driver.facts.job(ident)
        label = f"#{ident} {known['name']}" if known is not None else f"#{ident}"
        raise ValueError(
            f"{label} is no background cell that the head process keeps: %gpu ps lists those that "
            "wait to be brought home"
        )

    # ------------------------------------------------------------------------------- the sessions

    def session(self, client: Client, name: str, sink: Sink | None) -> tuple[Any, ...] | None:
        """The session of that name that its kernel has left, rather of the same notebook and of
        late, which is the client's from now on: its number, and what that kernel has said of it."""
        self._see_who_left()
        actors, found = self._driver.actors, None
        for actor in self._left_sessions():
            if actor.new.name == name:
                own = self._sessions[actor.id].about.get("notebook") == client.about.get("notebook")
                if found is None or own >= found[0]:
                    found = own, actor
        if found is None:
            return None
        actor = found[1]
        before = self._sessions.pop(actor.id)
        actors.move(actor, client.sessions)
        actor.owner, actor.sink = client, sink
        return actor.id, actor.new.settings, dict(before.about)

    def _see_who_left(self) -> None:
        """A kernel that has ended just now may not have been heard of."""
        for client in list(self.clients):
            client.look()

    def _left_sessions(self) -> Iterator[Actor]:
        for ident in list(self._sessions):
            actor = self._driver.actors.get(ident)
            if actor is None:
                del self._sessions[ident]
            elif not actor.leaving:
                yield actor

    # ------------------------------------------------------------------------------ who wants what

    def facts(self) -> list[dict[str, Any]]:
        """What kernels that are gone have left: cells to bring home, and sessions."""
        self._see_who_left()
        cells = [self._facts(cell) for cell in self._cells.values() if cell.left]
        sessions = [
            {
                "id": actor.id,
                "name": actor.class_name,
                "session": actor.new.name,
                "state": "session",
                "notebook": self._sessions[actor.id].about.get("notebook"),
            }
            for actor in self._left_sessions()
        ]
        return [*cells, *sessions]

    def losses(self) -> list[str]:
        """What would be lost if the head process ended now, each in a few words."""
        cells = [
            f"#{cell.id} {cell.name}: "
            + ("not over" if cell.ended is None else "over, and not brought home")
            for cell in self._cells.values()
            if cell.risked
        ]
        actors = []
        for actor in self._driver.actors:
            if actor.new.detached and not actor.leaving:
                session = actor.new.namespace.startswith(SESSIONS)
                kind = "session" if session else f"detached actor {actor.class_name}"
                actors.append(f"#{actor.id} {kind} {actor.new.name or ''}".rstrip())
        return [*cells, *actors]

    def _facts(self, cell: Cell) -> dict[str, Any]:
        known: Mapping[str, Any] = cell.past or self._driver.facts.job(cell.id) or {}
        state = known.get("state", "done")
        if state == "done" and getattr(cell.sink, "failed", False):
            state = "failed"
        return {
            "id": cell.id,
            "name": cell.name,
            "session": cell.session,
            "state": state,
            "over": cell.ended is not None,
            "ago": None if cell.ended is None else round(time.monotonic() - cell.ended, 3),
            "size": cell.size,
            "notebook": cell.client.about.get("notebook"),
        }

    # ----------------------------------------------------------------------------------- the bounds

    def _waits(self, cell: Cell) -> None:
        """From now on its time runs, and it counts. What is too much is given up: first what
        somebody has brought home, then the oldest."""
        cell.since = time.monotonic()
        if cell.id not in self._waiting:
            self._waiting[cell.id] = cell
            self._size += cell.size
        if len(self._waiting) > MOST or self._size > self.most_bytes:
            order = sorted(self._waiting.values(), key=lambda each: (each.seen is None, each.since))
            for each in order:
                many = len(self._waiting) > MOST
                if not many and self._size <= self.most_bytes:
                    break
                limit = f"{MOST} results" if many else f"{size_text(self.most_bytes)} of results"
                self._give_up(each, f"at most {limit} are kept, and others came after it")
        self._look_later(cell.expires)

    def _look_later(self, when: float | None) -> None:
        if when is not None and (self._wake is None or when < self._wake):
            self._wake = when
            self._driver.loop.at(when, functools.partial(self._look, when))

    def _look(self, when: float) -> None:
        """Give up what was kept for long enough."""
        if self._wake != when:
            return
        self._wake = None
        for cell in list(self._waiting.values()):
            if cell.expires is not None and cell.expires <= time.monotonic():
                text = f"{UNSEEN_FOR / 3600:g} hours have passed since its end"
                if cell.seen is not None:
                    text = f"{cell.seen}, and {SEEN_FOR / 60:g} minutes have passed since"
                self._give_up(cell, text)
        for cell in list(self._waiting.values()):
            self._look_later(cell.expires)

    def _give_up(self, cell: Cell, why: str) -> None:
        del self._cells[cell.id]
        if self._waiting.pop(cell.id, None) is not None:
            self._size -= cell.size
        text = (
            f"the result of #{cell.id} {cell.name} is not kept any more: {why}. What it has shown "
            f"may still be there: %gpu logs {cell.id}"
        )
        self._given_up[cell.id] = text, cell.log
        if len(self._given_up) > HISTORY:
            del self._given_up[next(iter(self._given_up))]
        self._driver.store.drop((cell.id, 0))
