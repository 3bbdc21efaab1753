"""The records of the tasks and actors of a kernel on Ray."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from gpunb.protocol.backend import SESSIONS, NewActor
from gpunb.protocol.sink import Pipe, Sink
from gpunb.ray.transport import INTERRUPTED
from gpunb.scheduler.resources import GPU, UNIT, Demand
from gpunb.scheduler.tasks import ActorId, TaskId

KILLED = "it was killed"
LEFT = "it left by itself, with exit_actor or sys.exit"
RELEASED = "its last handle is gone"

WANTED = {KILLED: "cancelled", LEFT: "done", RELEASED: "done"}
"""The state of an ended actor, by the reason of its end; any other reason is a failure."""

HISTORY = 1000
"""The number of ended jobs that are kept."""


@dataclass(eq=False)
class RayJob:
    """A task, a call of an actor, or its constructor.

    Attributes:
        ref: Ray's reference to its first result until the job is over; then None, to keep nothing.
        began: start on the clock of `time.monotonic`; None before the start.
        log: path, on its node, to which Python writes a fatal error of its process.
        exit: the exit status that its process has announced.
        cancelled: whether it was cancelled, through Ray.
        stopped: whether that was only to interrupt it, so that what it brings home counts.
        of_ranks: whether the job is a rank, or a step in the start of one; its parent is then the
            coordinator or the session.
    """

    id: TaskId
    name: str
    kind: str
    demand: Demand
    sink: Sink | None = None
    ref: Any = None
    actor: ActorId = 0
    parent: TaskId | None = None
    state: str = "queued"
    made: float = field(default_factory=time.monotonic)
    began: float | None = None
    ended: float | None = None
    gpus: tuple[int | str, ...] = ()
    node_id: str = ""
    pid: int | None = None
    attempt: int = 1
    worker: str = ""
    log: str = ""
    exit: int | None = None
    stderr: Pipe = field(default_factory=Pipe)
    cancelled: bool = False
    stopped: bool = False
    late: float | None = None
    reported: threading.Event = field(default_factory=threading.Event)
    of_ranks: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} (#{self.id})"

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    @property
    def seconds(self) -> float:
        """Seconds in the present state; for a job that is over, seconds of its last attempt."""
        end = self.ended if self.ended is not None else time.monotonic()
        start = self.began if self.began is not None else self.made
        return max(0.0, end - start)

    @property
    def waited(self) -> float:
        until = self.began if self.began is not None else self.ended or time.monotonic()
        return max(0.0, until - self.made)

    @property
    def devices(self) -> list[list[Any]]:
        """Its devices, as triples of resource, id and share."""
        share = min(1.0, self.demand.gpus / UNIT / max(1, len(self.gpus))) or 1.0
        return [[GPU, each, share] for each in self.gpus]

    def error_lines(self) -> str:
        """The last lines of its standard error for an error text; empty if there are none."""
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
class RayActor:
    """An actor. `own` if this session made it, and so learns of its end; `made` once its
    constructor has succeeded."""

    id: ActorId
    handle: Any
    new: NewActor
    name: str
    demand: Demand
    job: RayJob | None = None
    ended: bool = False
    own: bool = True
    made: bool = False
    why: str = ""

    @property
    def kind(self) -> str:
        return "session" if self.new.namespace.startswith(SESSIONS) else "actor"

    @property
    def label(self) -> str:
        """Its class, and its name if it has one; for a session of cells, the class has the name."""
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


class RayJobs:
    """The jobs of a kernel, by number.

    Attributes:
        groups: the ids of the placement groups of ranks, by the call or the session that has them;
            empty for ranks that need nothing.
    """

    def __init__(self) -> None:
        self.open: dict[TaskId, RayJob] = {}
        self.past: OrderedDict[TaskId, RayJob] = OrderedDict()
        self.actors: dict[ActorId, RayActor] = {}
        self.groups: dict[TaskId, bytes] = {}
        self.counts = {"ended": 0}
        self._lock = threading.Lock()

    def add(self, job: RayJob) -> None:
        with self._lock:
            self.open[job.id] = job

    def get(self, ident: TaskId) -> RayJob | None:
        return self.open.get(ident) or self.past.get(ident)

    def end(self, job: RayJob, state: str) -> None:
        """Note that a job is over, in this state."""
        with self._lock:
            if self.open.pop(job.id, None) is None:
                return
            if (
                state == "done"
                and job.kind in INTERRUPTED
                and job.sink is not None
                and job.sink.failed
            ):
                state = "failed"  # a cell that raised has brought its error home
            left_out = state == "failed" or job.began is None
            self._add_past(job, "cancelled" if job.cancelled and left_out else state)
        if job.kind != "create" and job.sink is not None:
            job.sink.end()

    def leave(self, actor: ActorId, why: str) -> None:
        """Note that an actor is gone, and how long it lived."""
        with self._lock:
            job = self.open.pop(actor, None)
            if job is not None:
                self._add_past(job, WANTED.get(why, "failed"))

    def _add_past(self, job: RayJob, state: str) -> None:
        """End a job and its ranks; the caller holds the lock."""
        job.state, job.ended, job.ref = state, time.monotonic(), None
        if not job.of_ranks or job.kind in ("call", "cell"):
            self.past[job.id] = job
            self.counts["ended"] += not job.of_ranks
        if (group := self.groups.pop(job.id, None)) is not None:
            remove_group(group)
            for each in [each for each in self.open.values() if each.parent == job.id]:
                del self.open[each.id]
                self._add_past(each, "cancelled" if state == "cancelled" else "failed")
        if len(self.past) > HISTORY:
            self.past.popitem(last=False)


def remove_group(group: bytes) -> None:
    """End a placement group, and the processes in it."""
    with contextlib.suppress(Exception):  # it has ended, or the cluster is gone
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(group)))
