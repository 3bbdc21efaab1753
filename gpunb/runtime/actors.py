"""The runtime's record of each actor: its names, what it runs, and why it is gone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpunb.backend import SESSIONS, NewActor, Outcome
from gpunb.core.resources import Shares
from gpunb.core.tasks import ActorId, TaskId, WorkerId
from gpunb.exceptions import ActorAlreadyExistsError, ActorDiedError
from gpunb.refs import value_of
from gpunb.runtime.jobs import Job, Owner
from gpunb.runtime.output import Sink
from gpunb.workers import messages as msg
from gpunb.workers.pool import Process

REMEMBERED = 10_000
"""Actors whose end is remembered."""


@dataclass(slots=True, eq=False)
class Actor:
    """An actor from its creation until its process is gone.

    Attributes:
        owner: as of a `Job`.
        pending: its calls that are not over.
        failure: what its constructor raised, as an outcome.
        leaving: whether its end was asked for, so that its name is free.
        starts: how often its process was started.
        constructor: what is to run again should it start again.
        since: when its process was started last, on the clock of `time.monotonic`.
        held: the shares of devices that it has.
    """

    id: ActorId
    class_name: str
    new: NewActor
    sink: Sink | None
    owner: Owner | None = None
    pending: set[TaskId] = field(default_factory=set)
    process: Process | None = None
    gpus: tuple[int | str, ...] = ()
    failure: Outcome | None = None
    leaving: bool = False
    starts: int = 0
    constructor: Job | None = None
    since: float = 0.0
    held: Shares = ()

    @property
    def label(self) -> str:
        return f"{self.class_name} (#{self.id})"

    @property
    def place(self) -> tuple[int, str | None] | None:
        """The cell that it comes from."""
        place: tuple[int, str | None] | None = getattr(self.sink, "place", None)
        return place

    def facts(self) -> dict[str, Any]:
        """What a handle shows of it, as plain values."""
        return {
            "id": self.id,
            "name": self.new.name,
            "class": self.class_name,
            "type": self.new.type,
            "state": "ending" if self.leaving else "alive" if self.process else "starting",
            "gpus": list(self.gpus),
            "pid": self.process.pid if self.process is not None else None,
            "session": self.new.namespace.startswith(SESSIONS),
        }


class Actors:
    """All actors. Those without a name may be added from any thread; all else happens on the
    loop's."""

    def __init__(self) -> None:
        self._actors: dict[ActorId, Actor] = {}
        self._names: dict[tuple[str, str], Actor] = {}
        self._ends: dict[ActorId, str] = {}
        self._residents: dict[WorkerId, Actor] = {}

    def __iter__(self) -> Any:
        return iter(list(self._actors.values()))

    def get(self, ident: ActorId) -> Actor | None:
        return self._actors.get(ident)

    def named(self, new: NewActor) -> Actor | None:
        """The actor that has the name already."""
        return self._names.get((new.namespace, new.name)) if new.name is not None else None

    def find(self, name: str, namespace: str) -> Actor:
        """The actor of that name.

        Raises:
            ValueError: none has it.
        """
        actor = self._names.get((namespace, name))
        if actor is None:
            others = sorted(other for space, other in list(self._names) if space == namespace)
            known = f"there are {', '.join(map(repr, others))}" if others else "none has a name"
            raise ValueError(f"no actor has the name {name!r}: {known}")
        return actor

    def add(self, actor: Actor) -> None:
        """Book a new actor.

        Raises:
            ActorAlreadyExistsError: its name is taken.
        """
        new = actor.new
        if new.name is not None:
            taken = self._names.setdefault((new.namespace, new.name), actor)
            if taken is not actor:
                raise ActorAlreadyExistsError(
                    f"the name {new.name!r} is taken by the actor {taken.label}: have that one "
                    f"with gpunb.get_actor({new.name!r}) or get_if_exists=True, or end it with "
                    "gpunb.kill"
                )
        self._actors[actor.id] = actor

    def move(self, actor: Actor, namespace: str) -> None:
        """Let it have its name in another namespace, where it is free."""
        name = actor.new.name or ""
        self._names.pop((actor.new.namespace, name), None)
        actor.new = replace(actor.new, namespace=namespace)
        self._names[namespace, name] = actor

    def on(self, worker: WorkerId) -> Actor | None:
        """The actor that a worker is."""
        return self._residents.get(worker)

    def move_in(self, job: Job, process: Process) -> tuple[Any, ...] | None:
        """The worker that runs the constructor becomes the actor; what it is told of itself."""
        actor = self._actors.get(job.id)
        if actor is None or job.worker is None:
            return None
        actor.process, actor.gpus, actor.held = process, job.gpus, job.held
        actor.since = job.since
        actor.starts += 1
        self._residents[job.worker] = actor
        new = actor.new
        most = new.rules.max_concurrency
        again = actor.starts > 1
        return tuple(msg.Host(actor.id, new.name, new.type, again, most, new.concurrent))

    def moved_out(self, worker: WorkerId) -> None:
        """The worker is gone."""
        actor = self._residents.pop(worker, None)
        if actor is not None and actor.process is not None and actor.process.worker == worker:
            actor.process, actor.gpus, actor.held, actor.since = None, (), (), 0.0

    def settled(self, job: Job, failure: Outcome | None) -> None:
        """A constructor or a call is over."""
        if job.call.kind == "method" and (actor := self._actors.get(job.call.actor)) is not None:
            actor.pending.discard(job.id)
        elif job.call.kind == "create" and (actor := self._actors.get(job.id)) is not None:
            actor.failure = failure
            if failure is not None:
                self.leave(actor)

    def keeps(self, job: Job, failure: Outcome | None) -> bool:
        """Whether a constructor that is over may have to run again, with what it takes."""
        actor = self._actors.get(job.id)
        if actor is None or failure is not None or not actor.new.rules.max_restarts:
            return False
        actor.constructor = job
        return True

    def constructed_again(self, job: Job, failure: Outcome | None) -> bool:
        """An attempt was reported: whether it is of a constructor that was settled long ago."""
        actor = self._actors.get(job.id)
        if actor is None or actor.constructor is not job or actor.starts < 2:
            return False
        actor.failure = failure
        if failure is not None:
            self.leave(actor)
        return True

    def over(self, ident: ActorId) -> None:
        """It is over for good, though its process may still be there."""
        actor = self._actors.get(ident)
        if actor is not None:
            self.leave(actor)

    def leave(self, actor: Actor) -> None:
        """Its end was asked for: its name is free from now on."""
        actor.leaving = True
        key = (actor.new.namespace, actor.new.name or "")
        if self._names.get(key) is actor:
            del self._names[key]

    def ended(self, actor: Actor, reason: str) -> None:
        """It is gone."""
        self.leave(actor)
        del self._actors[actor.id]
        self._ends[actor.id] = reason
        if len(self._ends) > REMEMBERED:
            del self._ends[next(iter(self._ends))]

    def why(self, ident: ActorId, reason: str) -> str:
        """Why an actor is gone, from what the scheduler knows of it and what is known here."""
        actor = self._actors.get(ident)
        if actor is None:
            return self._ends.get(ident, reason)
        first, _, rest = _text_of(actor.failure).partition("\n")
        if reason.rpartition(": ")[2] in first:  # the error says the same
            return f"{reason}\n{rest}" if rest else reason
        return f"{reason}: {_text_of(actor.failure)}" if first else reason

    def target(self, ident: ActorId) -> Actor | None:
        """The actor that a call is for; None if it is gone.

        Raises:
            ActorDiedError: it never was in this session.
        """
        actor = self._actors.get(ident)
        if actor is None and ident not in self._ends:
            raise ActorDiedError(
                f"the actor #{ident} is not there: it belongs to a session that was shut down, "
                "or ended long ago"
            )
        return actor


def _text_of(failure: Outcome | None) -> str:
    """What an outcome that failed says."""
    if failure is not None:
        try:
            value_of(failure)
        except BaseException as error:
            return str(error)
    return ""
