"""The engine's record of each task: what to send, which worker runs it, what it printed."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gpunb.data.serialize import Payload
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol.backend import STREAMING, Call, ObjectId, Outcome
from gpunb.protocol.sink import Pipe, Sink
from gpunb.protocol.verbs import Surroundings
from gpunb.scheduler.auto_share import Choice
from gpunb.scheduler.frozen import frozen
from gpunb.scheduler.resources import Shares, Within
from gpunb.scheduler.tasks import ActorId, TaskId, WorkerId

HISTORY = 10_000
"""Tasks remembered after their end."""


class Wait(NamedTuple):
    """The objects for which a thread of a task waits.

    Attributes:
        tasks: the tasks that make the objects; none if the thread waits for something else.
        number: how many of these tasks must end.
        sure: whether the thread goes on only then.
        watch: whether the thread only asked for a callback, and does other things meanwhile.
    """

    tasks: tuple[TaskId, ...] = ()
    number: int = 0
    sure: bool = False
    watch: bool = False


UNSURE = Wait()


class Part(NamedTuple):
    """The placement group or the sweep of which a task or an actor is a part.

    Attributes:
        id: its name among all of a session.
        kind: ``"group"`` or ``"sweep"``.
        name: the name of a sweep.
        total: the number of trials of a sweep; 0 if nobody knows.
        group: the number of a placement group.
    """

    id: str
    kind: str
    name: str = ""
    total: int = 0
    group: ActorId | None = None


def part_of_group(within: Within | None) -> Part | None:
    """Return the placement group of a bundle."""
    if within is None:
        return None
    return Part(f"group {within.group}", "group", group=within.group)


def part_id(part: Part | None) -> str | None:
    """Return the name by which a snapshot knows the group; None if there is no group."""
    return part.id if part is not None else None


class Owner(Protocol):
    """A kernel that is attached to this process, whose tasks run here.

    Attributes:
        ident: number of the kernel, as in `TaskSpec`.
        surroundings: the environment, folder and path of its process; its workers get the same.
        about: the description that it sent: its process id, notebook and so on.
    """

    ident: int
    about: Mapping[str, Any]
    surroundings: Surroundings


_NOWHERE = Sink()


@dataclass(slots=True, eq=False)
class Job:
    """A task from its submission until it is settled. Times are of `time.monotonic`.

    Attributes:
        results: ids of the objects that it makes; empty while their number is not known.
        handed_out: ids that its caller got for it.
        owner: the attached kernel that submitted it, or that submitted a task above it; None if
            that is this process.
        waited: seconds until its first attempt.
        held: the shares of devices that its worker has.
        waits: what it waits for now.
        ranks: for a coordinator, the tasks of its ranks, in order.
        rank: for one of these, its place among them; -1 for their placement group.
        group: for a coordinator, the placement group of its ranks.
        choice: the choice of its share, if earlier runs chose it.
        alike: what it has in common with the calls with which it may be sent ahead; None if it may
            not be.
        failure: the error of a cell that may run again with a larger share, to be shown if not.
        shown: its sink, or one that knows nothing.
        ename: the type of the error that a cell showed last.
        part_of: the placement group in which it runs, or the sweep of which it is a trial.
    """

    id: TaskId
    call: Call
    results: tuple[ObjectId, ...]
    handed_out: tuple[ObjectId, ...]
    parent: TaskId | None = None
    owner: Owner | None = None
    worker: WorkerId | None = None
    attempt: int = 0
    process: WorkerProcess | None = None
    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    gpus: tuple[int | str, ...] = ()
    held: Shares = ()
    reported: tuple[int, list[Outcome]] | None = None
    stdout: Pipe | None = None
    stderr: Pipe | None = None
    waits: tuple[Wait, ...] = ()
    ranks: tuple[TaskId, ...] = ()
    rank: int | None = None
    group: ActorId | None = None
    choice: Choice | None = None
    alike: Hashable = None
    failure: tuple[Mapping[str, Any], list[Payload]] | None = None
    ename: str = ""
    sink: Sink | None = field(init=False)
    shown: Sink = field(init=False)
    part_of: Part | None = field(init=False)

    def __post_init__(self) -> None:
        self.sink = self.call.sink
        self.shown = self.sink or _NOWHERE
        self.part_of = part_of_group(self.call.spec.demand.within)
        if self.parent is None and self.shown.sweep is not None:
            number, name, total = self.shown.sweep
            owner = f"{self.owner.ident}." if self.owner is not None else ""
            self.part_of = Part(f"sweep {owner}{number}", "sweep", name, total)

    def add_rank(self, child: Job) -> None:
        """Note a task that this coordinator has submitted."""
        if child.call.kind == "create":
            self.group, self.ranks, child.rank = child.id, (), -1
        else:
            child.rank = len(self.ranks)
            self.ranks = (*self.ranks, child.id)

    def waits_for(self) -> Wait:
        """Return the condition that all threads of the task wait for together."""
        waits = [each for each in self.waits if not each.watch]
        return waits[0] if len(waits) == 1 and waits[0].sure else UNSURE

    @property
    def streams(self) -> bool:
        """Whether the task yields its results one by one."""
        return self.call.returns == STREAMING

    @property
    def pid(self) -> int | None:
        """The process id of the last worker; None if it is not known yet."""
        return self.process.pid if self.process is not None else None

    @property
    def label(self) -> str:
        return f"{self.call.spec.name} (#{self.id})"

    def feed(self, stream: str, data: bytes | str) -> str:
        """Return the text of what the worker wrote, up to the last complete character."""
        pipe: Pipe | None = getattr(self, stream)
        if pipe is None:
            pipe = Pipe()
            setattr(self, stream, pipe)
        return pipe.feed(data)

    def last_words(self) -> str:
        """Return the end of the standard error for a message; an empty text if there was none."""
        text = self.stderr.last_lines() if self.stderr else ""
        return f"\nThe last lines of its standard error were:\n{text}" if text.strip() else ""

    def facts(self) -> dict[str, Any]:
        """Return the job as plain values; `seconds` in its present state."""
        return {
            "id": self.id,
            "name": self.call.spec.name,
            "state": "running" if self.worker is not None else "queued",
            "seconds": round(time.monotonic() - self.since, 3),
            "gpus": list(self.gpus),
            "pid": self.pid,
        }


@frozen
class Past:
    """A finished task; `seconds` of its last attempt, `ended` on the clock of `time.monotonic`. The
    timeline uses it also for tasks that are not over, and for actors."""

    id: TaskId
    name: str
    state: str
    seconds: float
    gpus: tuple[int | str, ...]
    pid: int | None
    log: Any = None
    kind: str = "call"
    actor: ActorId | None = None
    place: tuple[int, str | None] | None = None
    background: bool = False
    held: Shares = ()
    waited: float = 0.0
    ended: float = 0.0
    worker: WorkerId | None = None
    peak: int | None = None
    client: Mapping[str, Any] | None = None
    ranks: tuple[TaskId, ...] = ()
    rank: int | None = None
    choice: Choice | None = None
    part_of: Part | None = None

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "seconds": round(self.seconds, 3),
            "gpus": list(self.gpus),
            "pid": self.pid,
        }
