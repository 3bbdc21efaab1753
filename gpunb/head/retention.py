"""Keeps background cells and sessions of cells whose kernel has left.

A head process keeps the output of such a cell, and its result until a kernel has brought it home
and for a while after. The time and the amount are limited. A session whose kernel has left goes on
with the next kernel that asks for it by name. All on the loop's thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpunb.engine.job_log import Log
from gpunb.engine.jobs import HISTORY, Job
from gpunb.exceptions import ObjectLostError
from gpunb.protocol.backend import SESSIONS, ObjectId
from gpunb.protocol.sink import Sink
from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import size_text
from gpunb.scheduler.tasks import ActorId, TaskId

if TYPE_CHECKING:
    from gpunb.engine.actors import ActorRecord
    from gpunb.engine.state import EngineState
    from gpunb.engine.status import Status
    from gpunb.head.attached import AttachedKernel

UNSEEN_FOR = 24 * 3600.0
"""Seconds for which a result is kept if no kernel has brought it home."""

SEEN_FOR = 600.0
"""Seconds for which a result is kept for other kernels, after the first one brought it home."""

MOST = 1000
"""The number of results that are kept, if no kernel has references to them."""

PART = 4
"""The results take at most this part of the memory for objects: one byte in so many."""


@dataclass(slots=True, eq=False)
class RetainedCell:
    """A background cell. Times are of `time.monotonic`.

    Attributes:
        client: the kernel that submitted the cell.
        number: execution count of the cell in its notebook.
        actor: the session that runs the cell, or 0, and `session` the name of the session.
        timeout: the time limit in seconds, as the user gave it.
        log: the output of the cell.
        ended: the time when the cell was over, and `past` the facts about it at that time.
        size: bytes of the result.
        fetched: whether the client has the result, even if it has not bound it yet.
        seen: why the result may be dropped, in words: which kernel has brought it home.
        since: the time from which the limit counts: the cell is over, and its kernel is gone or the
            result was brought home.
    """

    id: TaskId
    client: AttachedKernel
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
        """Whether its kernel is gone, and no kernel has brought it home."""
        return self.client.gone and self.seen is None

    @property
    def risked(self) -> bool:
        """Whether its result would be lost if the head process ended now."""
        return self.seen is None and (self.client.gone or not self.fetched)

    @property
    def expires(self) -> float | None:
        """The time when its result is dropped."""
        if self.since is None:
            return None
        return self.since + (UNSEEN_FOR if self.seen is None else SEEN_FOR)


class Retention:
    """The background cells and sessions of all kernels."""

    def __init__(self, engine: EngineState, facts: Status, clients: Set[AttachedKernel]) -> None:
        """`clients` has the kernels that are attached at the moment."""
        self._engine = engine
        self._cells: dict[TaskId, RetainedCell] = {}
        self._waiting: dict[TaskId, RetainedCell] = {}
        self._size = 0
        self._wake: float | None = None
        self._given_up: dict[TaskId, tuple[str, Log]] = {}
        self._status = facts
        self._clients = clients
        self._sessions: dict[ActorId, AttachedKernel] = {}
        self.most_bytes = engine.store.memory.facts()["limit"] // PART

    # ---------------------------------------------------------------------------------- the cells

    def add(self, job: Job, client: AttachedKernel) -> None:
        """Note a background cell that a client has submitted."""
        actor = self._engine.actors.get(job.call.actor) if job.call.actor else None
        session = actor.new.name if actor is not None else None
        cell = self._cells[job.id] = RetainedCell(
            job.id,
            client,
            job.call.spec.name,
            (job.shown.place or (0, None))[0],
            job.sink,
            job.call.actor,
            session,
            job.call.spec.timeout,
            job.shown.log,
        )
        obj = (job.id, 0)
        self._engine.store.hold(obj)
        self._engine.store.entry(obj).notify(functools.partial(self._ended, cell))

    def keeps(self, job: Job | None) -> bool:
        """Whether a task outlives its client: it is a background cell, or belongs to one."""
        while job is not None:
            if job.id in self._cells or job.parent in self._cells:
                return True
            job = self._engine.jobs.get(job.parent or 0)
        return False

    def left(self, client: AttachedKernel) -> None:
        """Note that a client is gone. Its background cells and sessions stay."""
        for cell in list(self._cells.values()):
            if cell.client is client and cell.ended is not None and cell.since is None:
                self._waits(cell)
        for actor in self._engine.actors:
            if actor.owner is client and actor.new.namespace == client.sessions:
                self._sessions[actor.id] = client

    def _ended(self, cell: RetainedCell) -> None:
        outcome = self._engine.store.get((cell.id, 0))
        cell.ended = time.monotonic()
        cell.size = outcome.payload.nbytes if outcome is not None else 0
        cell.past = self._status.job(cell.id) or {}
        if cell.past.get("state") == "cancelled":
            cell.seen = "it was cancelled"
        if cell.client.gone or cell.seen is not None:
            self._waits(cell)
        if cell.client.gone:  # no other kernel can use its idle workers
            release = ev.ReleaseRequested(cell.client.ident)
            self._engine.loop.post((self._engine.feed, release))

    def fetched(self, client: AttachedKernel, objects: Sequence[ObjectId]) -> None:
        """A client asks for these."""
        for task, _ in objects:
            cell = self._cells.get(task)
            if cell is not None and cell.client is client and cell.ended is not None:
                cell.fetched = True

    def adopt(self, client: AttachedKernel, ident: TaskId) -> dict[str, Any]:
        """Give a client a reference to the result of a cell. Returns the facts about the cell.

        Raises:
            ValueError: there is no such cell.
            ObjectLostError: its result is not stored any more.
        """
        cell = self._cell(ident)
        obj = (ident, 0)
        self._engine.store.hold(obj)
        self._engine.store.granted(-client.ident, [obj])
        return {
            **self._facts(cell),
            "number": cell.number,
            "actor": cell.actor,
            "timeout": cell.timeout,
            "past": dict(cell.past),
        }

    def brought_home(self, client: AttachedKernel, ident: TaskId) -> None:
        """Note that a client has bound the values of a cell."""
        cell = self._cells.get(ident)
        if cell is not None and cell.ended is not None and cell.seen is None:
            cell.seen = f"kernel {client.pid} has brought it home"
            self._waits(cell)

    def log(self, ident: TaskId, position: int) -> tuple[bytes, int]:
        """A part of a cell's output from a position of its log on, and the next position.

        Raises:
            ValueError: the output is not stored.
        """
        cell = self._cells.get(ident)
        log = cell.log if cell is not None else self._given_up.get(ident, ("", None))[1]
        if log is None:
            raise ValueError(f"nothing is kept of what job #{ident} has shown")
        return log.portion(position)

    def _cell(self, ident: TaskId) -> RetainedCell:
        cell = self._cells.get(ident)
        if cell is not None:
            return cell
        if ident in self._given_up:
            raise ObjectLostError(self._given_up[ident][0])
        known = self._status.job(ident)
        label = f"#{ident} {known['name']}" if known is not None else f"#{ident}"
        raise ValueError(
            f"{label} is no background cell that the head process keeps: %gpu ps lists those that "
            "wait to be brought home"
        )

    # ------------------------------------------------------------------------------- the sessions

    def session(
        self, client: AttachedKernel, name: str, sink: Sink
    ) -> tuple[ActorId, bytes, dict[str, Any]] | None:
        """Give a client the session of that name whose kernel has left. A session of the same
        notebook is preferred, then the latest. Returns its number, its settings, and the facts
        about the former kernel."""
        self._see_who_left()
        actors, best = self._engine.actors, None
        for actor in self._left_sessions():
            if actor.new.name == name:
                own = self._sessions[actor.id].about.get("notebook") == client.about.get("notebook")
                if best is None or own >= best[0]:
                    best = own, actor
        if best is None:
            return None
        actor = best[1]
        before = self._sessions.pop(actor.id)
        actors.move(actor, client.sessions)
        actor.owner, actor.sink = client, sink
        return actor.id, actor.new.settings, dict(before.about)

    def _see_who_left(self) -> None:
        """Handle the ends of kernels that have ended just now."""
        for client in list(self._clients):
            client.look()

    def _left_sessions(self) -> Iterator[ActorRecord]:
        for ident in list(self._sessions):
            actor = self._engine.actors.get(ident)
            if actor is None:
                del self._sessions[ident]
            elif not actor.leaving:
                yield actor

    # ------------------------------------------------------------------------------ who wants what

    def facts(self) -> list[dict[str, Any]]:
        """Facts about the cells and sessions of kernels that are gone."""
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
        """A text for each cell and session that would be lost if the head process ended now."""
        cells = [
            f"#{cell.id} {cell.name}: "
            + ("not over" if cell.ended is None else "over, and not brought home")
            for cell in self._cells.values()
            if cell.risked
        ]
        actors = []
        for actor in self._engine.actors:
            if actor.new.detached and not actor.leaving:
                session = actor.new.namespace.startswith(SESSIONS)
                kind = "session" if session else f"detached actor {actor.class_name}"
                actors.append(f"#{actor.id} {kind} {actor.new.name or ''}".rstrip())
        return [*cells, *actors]

    def _facts(self, cell: RetainedCell) -> dict[str, Any]:
        known: Mapping[str, Any] = cell.past or self._status.job(cell.id) or {}
        state = known.get("state", "done")
        if state == "done" and cell.sink is not None and cell.sink.failed:
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

    def _waits(self, cell: RetainedCell) -> None:
        """Start the time limit of a result. If there are too many results, drop some: first those
        that a kernel has brought home, then the oldest."""
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
            self._engine.loop.at(when, functools.partial(self._look, when))

    def _look(self, when: float) -> None:
        """Drop the results whose time is over."""
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

    def _give_up(self, cell: RetainedCell, why: str) -> None:
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
        self._engine.store.drop((cell.id, 0))
