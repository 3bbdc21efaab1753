"""The runtime's record of each task: what to send, where it runs, what it printed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from gpunb.backend import STREAMING, Call, ObjectId, Outcome
from gpunb.core.resources import Shares
from gpunb.core.tasks import ActorId, TaskId, WorkerId
from gpunb.runtime.output import Pipe, Sink
from gpunb.runtime.setup import Surroundings
from gpunb.workers.pool import Process

HISTORY = 10_000
"""Tasks remembered after their end, and events for a look back."""

Wait: TypeAlias = tuple[tuple[TaskId, ...], int]
"""The tasks whose end is waited for, and of how many of them; none if it is something else."""

UNSURE: Wait = ((), 0)
WATCH: Wait = ((), -1)
"""Of who is to be told of an object, and may do other things as well."""


class Owner(Protocol):
    """A kernel that is attached to this process, whose tasks run here.

    Attributes:
        ident: as in `TaskSpec`.
        surroundings: of its process, which its workers share.
        about: what it has said of itself.
    """

    ident: int
    about: Mapping[str, Any]
    surroundings: Surroundings


@dataclass(slots=True, eq=False)
class Job:
    """A task from its submission until it is settled. Times are of `time.monotonic`.

    Attributes:
        results: the objects that it makes, as far as their number is known beforehand.
        handed_out: what the caller was given for it.
        owner: the attached kernel whose it is, at whatever remove; None if this process's own.
        waited: seconds until its first attempt.
        held: the shares of devices that its worker has.
        waits: what it waits for at this moment.
        awaits: what it needs to go on that only watches, as far as it is known.
    """

    id: TaskId
    call: Call
    results: list[ObjectId]
    handed_out: list[ObjectId]
    parent: TaskId | None = None
    owner: Owner | None = None
    worker: WorkerId | None = None
    attempt: int = 0
    process: Process | None = None
    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    gpus: tuple[int | str, ...] = ()
    held: Shares = ()
    reported: tuple[int, list[Outcome]] | None = None
    stdout: Pipe | None = None
    stderr: Pipe | None = None
    waits: list[Wait] = field(default_factory=list)
    awaits: Wait = UNSURE

    def waits_for(self) -> Wait:
        """What it waits for altogether, with all its threads."""
        waits = [each for each in self.waits if each != WATCH] or [self.awaits]
        return waits[0] if len(waits) == 1 else UNSURE

    @property
    def streams(self) -> bool:
        """Whether its results come one by one."""
        return self.call.returns == STREAMING

    @property
    def sink(self) -> Sink | None:
        sink: Sink | None = self.call.sink
        return sink

    @property
    def log(self) -> Any:
        """What its sink keeps of its output."""
        return getattr(self.sink, "log", None)

    @property
    def place(self) -> tuple[int, str | None] | None:
        """The number of the cell that it comes from, and the front end's name for it."""
        place: tuple[int, str | None] | None = getattr(self.sink, "place", None)
        return place

    @property
    def background(self) -> bool:
        """Whether nobody waits for it in the notebook."""
        return bool(getattr(self.sink, "background", False))

    @property
    def pid(self) -> int | None:
        """Of the process that runs it, or did; it may have none yet that is known here."""
        return self.process.pid if self.process is not None else None

    @property
    def label(self) -> str:
        return f"{self.call.spec.name} (#{self.id})"

    def feed(self, stream: str, data: bytes | str) -> str:
        """Text of what the worker wrote, as far as it is whole."""
        pipe: Pipe | None = getattr(self, stream)
        if pipe is None:
            pipe = Pipe()
            setattr(self, stream, pipe)
        return pipe.feed(data)

    def last_words(self) -> str:
        """The end of its standard error, for a message; empty if there was none."""
        text = self.stderr.last_lines() if self.stderr else ""
        return f"\nThe last lines of its standard error were:\n{text}" if text.strip() else ""

    def facts(self) -> dict[str, Any]:
        """The job as plain values; `seconds` in its present state."""
        return {
            "id": self.id,
            "name": self.call.spec.name,
            "state": "running" if self.worker is not None else "queued",
            "seconds": round(time.monotonic() - self.since, 3),
            "gpus": list(self.gpus),
            "pid": self.pid,
        }


@dataclass(frozen=True, slots=True)
class Past:
    """A task that is over; `seconds` of its last attempt, `ended` on the clock of
    `time.monotonic`. As a part of the timeline also one that is not over, or an actor."""

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

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "seconds": round(self.seconds, 3),
            "gpus": list(self.gpus),
            "pid": self.pid,
        }
