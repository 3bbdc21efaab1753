"""The engine's record of each actor: its names, its process, and the reason of its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpunb.api.refs import value_of
from gpunb.engine.jobs import Job, Owner
from gpunb.exceptions import ActorAlreadyExistsError, ActorDiedError
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import GROUPS, HIDDEN, SESSIONS, NewActor, Outcome, titled
from gpunb.protocol.sink import Sink
from gpunb.scheduler.resources import Shares, Within
from gpunb.scheduler.tasks import ActorId, TaskId, WorkerId

REMEMBERED = 10_000
"""Actors whose end is remembered."""


@dataclass(slots=True, eq=False)
class ActorRecord:
    """An actor from its creation until its process is gone.

    Attributes:
        owner: as of a `Job`.
        pending: its calls that are not over, and which process has made each.
        failure: what its constructor raised, as an outcome.
        leaving: whether its end was asked for, so that its name is free.
        starts: how often its process was started.
        constructor: what is to run again should it start again.
        since: when its process was started last, on the clock of `time.monotonic`.
        held: the shares of devices that it has.
        environment: the variables that it asks for, which what it submits inherits.
        title: the text that its own `__repr__` gave after its constructor; empty if there is none.
        parent: the task that made it.
        of_ranks: whether it is the placement group of a cell or call in several ranks.
        within: the bundle in which it runs.
        lacks: what a parked actor waits for on its devices, in words; empty if for nothing.
    """

    id: ActorId
    class_name: str
    new: NewActor
    sink: Sink | None
    owner: Owner | None = None
    pending: dict[TaskId, WorkerId] = field(default_factory=dict)
    process: WorkerProcess | None = None
    gpus: tuple[int | str, ...] = ()
    failure: Outcome | None = None
    leaving: bool = False
    starts: int = 0
    constructor: Job | None = None
    since: float = 0.0
    held: Shares = ()
    environment: tuple[tuple[str, str], ...] = ()
    title: str = ""
    parent: TaskId | None = None
    of_ranks: bool = False
    within: Within | None = None
    lacks: str = ""

    @property
    def kind(self) -> str:
        """The kind: an actor, a session of cells or a placement group."""
        if self.new.rules.bundles:
            return "group"
        return "session" if self.new.namespace.startswith(SESSIONS) else "actor"

    @property
    def one_by_one(self) -> bool:
        """Whether it runs one call at a time, on the main thread of its process."""
        rules = self.new.rules
        return rules.max_concurrency == 1 and not rules.groups and not self.new.concurrent

    @property
    def label(self) -> str:
        return f"{self.title or self.class_name} (#{self.id})"

    @property
    def place(self) -> tuple[int, str | None] | None:
        """The cell that created the actor."""
        return self.sink.place if self.sink is not None else None

    def facts(self) -> dict[str, Any]:
        """Return the facts that a handle shows, as plain values."""
        return {
            "id": self.id,
            "name": self.new.name,
            "class": self.class_name,
            "type": self.new.type,
            "state": "ending" if self.leaving else "alive" if self.since else "starting",
            "gpus": list(self.gpus),
            "pid": self.process.pid if self.process is not None else None,
            "session": self.kind == "session",
        }


class ActorTable:
    """All actors. Any thread may add actors without a name; all else happens on the loop's."""

    def __init__(self) -> None:
        self._actors: dict[ActorId, ActorRecord] = {}
        self._names: dict[tuple[str, str], ActorRecord] = {}
        self._ends: dict[ActorId, str] = {}
        self._residents: dict[WorkerId, ActorRecord] = {}

    def __iter__(self) -> Any:
        return iter(list(self._actors.values()))

    def get(self, ident: ActorId) -> ActorRecord | None:
        return self._actors.get(ident)

    def set_title(self, ident: ActorId, title: str) -> None:
        """Note the title of an actor, as its class gives it, if the actor has not ended."""
        if (actor := self._actors.get(ident)) is not None:
            actor.title = title

    def label(self, job: Job) -> str:
        """Return a description of a job for an error: of a call with the title of its actor."""
        actor = self._actors.get(job.call.actor or job.id)
        if actor is None or not actor.title:
            return job.label
        return f"{titled(job.call.spec.name, actor.class_name, actor.title)} (#{job.id})"

    def named(self, new: NewActor) -> ActorRecord | None:
        """Return the existing actor with the same name; None if the name is free."""
        return self._names.get((new.namespace, new.name)) if new.name is not None else None

    def names(self) -> list[tuple[str, str]]:
        """Return the names of actors as (namespace, name), without those of other things."""
        return sorted(each for each in self._names if not each[0].startswith(HIDDEN))

    def find(self, name: str, namespace: str) -> ActorRecord:
        """Return the actor with this name.

        Raises:
            ValueError: none has it.
        """
        actor = self._names.get((namespace, name))
        if actor is None:
            others = sorted(other for space, other in list(self._names) if space == namespace)
            known = f"there are {', '.join(map(repr, others))}" if others else "none has a name"
            what = "placement group" if namespace.startswith(GROUPS) else "actor"
            raise ValueError(f"no {what} has the name {name!r}: {known}")
        return actor

    def add(self, actor: ActorRecord) -> None:
        """Add a new actor.

        Raises:
            ActorAlreadyExistsError: its name is taken.
        """
        new = actor.new
        if new.name is not None:
            taken = self._names.setdefault((new.namespace, new.name), actor)
            if taken is not actor and new.rules.bundles:
                raise ActorAlreadyExistsError(
                    f"the name {new.name!r} is taken by placement group #{taken.id}: have that one "
                    f"with get_placement_group({new.name!r}), or end it with "
                    "remove_placement_group"
                )
            if taken is not actor:
                raise ActorAlreadyExistsError(
                    f"the name {new.name!r} is taken by the actor {taken.label}: have that one "
                    f"with gpunb.get_actor({new.name!r}) or get_if_exists=True, or end it with "
                    "gpunb.kill"
                )
        self._actors[actor.id] = actor

    def move(self, actor: ActorRecord, namespace: str) -> None:
        """Move the name of an actor to another namespace, where nobody has it."""
        name = actor.new.name or ""
        self._names.pop((actor.new.namespace, name), None)
        actor.new = replace(actor.new, namespace=namespace)
        self._names[namespace, name] = actor

    def on(self, worker: WorkerId) -> ActorRecord | None:
        """Return the actor that runs on a worker; None if there is none."""
        return self._residents.get(worker)

    def place(self, job: Job) -> None:
        """Note that a placement group has its room, and no process."""
        actor = self._actors[job.id]
        actor.gpus, actor.held, actor.since = job.gpus, job.held, job.since
        self._residents[job.worker or 0] = actor

    def move_in(self, job: Job, process: WorkerProcess) -> tuple[Any, ...] | None:
        """Make a constructor's worker the actor's worker, and return the actor's description."""
        actor = self._actors.get(job.id)
        if actor is None or job.worker is None:
            return None
        actor.process, actor.gpus, actor.held = process, job.gpus, job.held
        actor.since = job.since
        actor.starts += 1
        self._residents[job.worker] = actor
        new, rules, again = actor.new, actor.new.rules, actor.starts > 1
        most, groups = rules.max_concurrency, rules.groups
        return tuple(
            msg.HostedActor(actor.id, new.name, new.type, again, most, new.concurrent, groups)
        )

    def moved_out(self, worker: WorkerId) -> None:
        """Note that the worker of an actor is gone."""
        actor = self._residents.pop(worker, None)
        if actor is not None and (actor.process is None or actor.process.worker == worker):
            actor.process, actor.gpus, actor.held, actor.since = None, (), (), 0.0

    def settled(self, job: Job, failure: Outcome | None) -> None:
        """Note that a constructor or a call is over."""
        if job.call.kind == "method" and (actor := self._actors.get(job.call.actor)) is not None:
            actor.pending.pop(job.id, None)
        elif job.call.kind == "create" and (actor := self._actors.get(job.id)) is not None:
            actor.failure = failure
            if failure is not None:
                self.leave(actor)

    def keeps(self, job: Job, failure: Outcome | None) -> bool:
        """Return whether a finished constructor may have to run again, with the same inputs."""
        actor = self._actors.get(job.id)
        if actor is None or failure is not None or not actor.new.rules.max_restarts:
            return False
        actor.constructor = job
        return True

    def constructed_again(self, job: Job, failure: Outcome | None) -> bool:
        """Return whether a report is about a constructor that was settled before."""
        actor = self._actors.get(job.id)
        if actor is None or actor.constructor is not job or actor.starts < 2:
            return False
        actor.failure = failure
        if failure is not None:
            self.leave(actor)
        return True

    def over(self, ident: ActorId) -> None:
        """Note that an actor is over for good. Its process may still be there."""
        actor = self._actors.get(ident)
        if actor is not None:
            self.leave(actor)

    def leave(self, actor: ActorRecord) -> None:
        """Note that the end of an actor was requested. Its name is free from now on."""
        actor.leaving = True
        key = (actor.new.namespace, actor.new.name or "")
        if self._names.get(key) is actor:
            del self._names[key]

    def ended(self, actor: ActorRecord, reason: str) -> None:
        """Remove an actor that is gone, and remember the reason."""
        self.leave(actor)
        del self._actors[actor.id]
        self._ends[actor.id] = reason
        if len(self._ends) > REMEMBERED:
            del self._ends[next(iter(self._ends))]

    def why(self, ident: ActorId, reason: str) -> str:
        """Return why an actor is gone, from the scheduler's reason and the facts known here."""
        actor = self._actors.get(ident)
        if actor is None:
            return self._ends.get(ident, reason)
        first, _, rest = _text_of(actor.failure).partition("\n")
        if reason.rpartition(": ")[2] in first:  # the error says the same
            return f"{reason}\n{rest}" if rest else reason
        return f"{reason}: {_text_of(actor.failure)}" if first else reason

    def target(self, ident: ActorId) -> ActorRecord | None:
        """Return the actor of a call; None if it is gone.

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
    """Return the text of a failed outcome."""
    if failure is not None:
        try:
            value_of(failure)
        except BaseException as error:
            return str(error)
    return ""
