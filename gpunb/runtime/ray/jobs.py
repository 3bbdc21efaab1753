"""What the kernel knows of the tasks and actors that run on Ray."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from gpunb.backend import SESSIONS, NewActor
from gpunb.core.resources import GPU, UNIT, Demand
from gpunb.core.tasks import ActorId, TaskId
from gpunb.runtime.output import Pipe

KILLED = "it was killed"
LEFT = "it left by itself, with exit_actor or sys.exit"
RELEASED = "its last handle is gone"

WANTED = {KILLED: "cancelled", LEFT: "done", RELEASED: "done"}
"""How an actor has ended, by the reason; any other end is a failure."""

HISTORY = 1000
"""Jobs that are over and still known."""


@dataclass(eq=False)
class Job:
    """A task, a call of an actor, or its constructor.

    Attributes:
        ref: of its first result while it is not over; None later, so that nothing is kept.
        began: on the clock of `time.monotonic`; None before.
        node: the address of the node that it runs on.
        log: on that node, the file to which Python writes a fatal error of its process.
        exit: the status with which its process has said that it would exit.
    """

    id: TaskId
    name: str
    kind: str
    demand: Demand
    sink: Any = None
    ref: Any = None
    actor: ActorId = 0
    parent: TaskId | None = None
    state: str = "queued"
    made: float = field(default_factory=time.monotonic)
    began: float | None = None
    ended: float | None = None
    gpus: tuple[int | str, ...] = ()
    node: str = ""
    node_id: str = ""
    pid: int | None = None
    attempt: int = 1
    worker: str = ""
    log: str = ""
    exit: int | None = None
    stderr: Pipe = field(default_factory=Pipe)
    cancelled: bool = False
    late: float | None = None
    told: threading.Event = field(default_factory=threading.Event)

    @property
    def label(self) -> str:
        return f"{self.name} (#{self.id})"

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    @property
    def seconds(self) -> float:
        """In its present state; once it is over, of its last attempt."""
        end = self.ended if self.ended is not None else time.monotonic()
        start = self.began if self.began is not None else self.made
        return max(0.0, end - start)

    @property
    def waited(self) -> float:
        until = self.began if self.began is not None else self.ended or time.monotonic()
        return max(0.0, until - self.made)

    @property
    def devices(self) -> list[list[Any]]:
        """Those that it has, as triples of resource, id and share."""
        share = min(1.0, self.demand.gpus / UNIT / max(1, len(self.gpus))) or 1.0
        return [[GPU, each, share] for each in self.gpus]

    def last_words(self) -> str:
        """The end of its standard error, for a message; empty if there was none."""
        text = self.stderr.last_lines()
        return f"\nThe last lines of its standard error were:\n{text}" if text.strip() else ""

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "seconds": round(self.seconds, 3),
            "gpus": list(self.gpus),
            "devices": self.devices,
            "pid": self.pid,
        }


@dataclass(eq=False)
class Actor:
    """An actor. `own` if it was made in this session, which then knows of its end; `made` once
    its constructor has succeeded."""

    id: ActorId
    handle: Any
    new: NewActor
    name: str
    demand: Demand
    job: Job | None = None
    ended: bool = False
    own: bool = True
    made: bool = False
    why: str = ""

    @property
    def kind(self) -> str:
        return "session" if self.new.namespace.startswith(SESSIONS) else "actor"

    @property
    def label(self) -> str:
        """Its class, and its name if it has one; a session of cells says its name by itself."""
        named = self.kind == "actor" and self.new.name is not None
        return f"{self.name} {self.new.name}" if named else self.name

    def _state(self) -> str:
        if self.ended:
            return "ending"
        if self.made or not self.own:
            return "alive"
        return "starting" if self.job is not None and self.job.began is not None else "queued"

    def facts(self) -> dict[str, Any]:
        job = self.job
        return {
            "state": self._state(),
            "gpus": list(job.gpus) if job is not None else [],
            "devices": job.devices if job is not None else [],
            "pid": job.pid if job is not None else None,
            "type": self.new.type,
            "class": self.name,
            "name": self.new.name,
        }


class Jobs:
    """All of them by number."""

    def __init__(self) -> None:
        self.open: dict[TaskId, Job] = {}
        self.past: OrderedDict[TaskId, Job] = OrderedDict()
        self.actors: dict[ActorId, Actor] = {}
        self.counts = {"ended": 0}
        self._lock = threading.Lock()

    def add(self, job: Job) -> None:
        with self._lock:
            self.open[job.id] = job

    def get(self, ident: TaskId) -> Job | None:
        return self.open.get(ident) or self.past.get(ident)

    def end(self, job: Job, state: str) -> None:
        """It is over, in this state."""
        with self._lock:
            if self.open.pop(job.id, None) is None:
                return
            if state == "done" and job.kind == "cell" and getattr(job.sink, "failed", False):
                state = "failed"  # a cell that raised has brought its error home
            left_out = state == "failed" or job.began is None
            self._keep(job, "cancelled" if job.cancelled and left_out else state)
        if job.kind != "create" and (end := getattr(job.sink, "end", None)) is not None:
            end()

    def leave(self, actor: ActorId, why: str) -> None:
        """An actor is gone: it is over, with the time that it lived."""
        with self._lock:
            job = self.open.pop(actor, None)
            if job is not None:
                self._keep(job, WANTED.get(why, "failed"))

    def _keep(self, job: Job, state: str) -> None:
        """Under the lock: it is over."""
        job.state, job.ended, job.ref = state, time.monotonic(), None
        self.past[job.id] = job
        self.counts["ended"] += 1
        if len(self.past) > HISTORY:
            self.past.popitem(last=False)
