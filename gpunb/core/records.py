"""The scheduler's books: what it remembers of each task, worker and actor.

Mutable, and private to `gpunb.core`; the outside sees events, decisions and snapshots.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gpunb.core.resources import Allocation
from gpunb.core.tasks import (
    ActorId,
    ActorSpec,
    Cancelled,
    Crashed,
    Interrupted,
    Outcome,
    Report,
    ReuseKey,
    Succeeded,
    TaskId,
    TaskSpec,
    TimedOut,
    WorkerId,
)


@dataclass(slots=True, eq=False)
class Task:
    """A task that is not over.

    Its `attempt` counts from 1 and is 0 before the first run. `again` marks a constructor that
    runs again for a restarted actor, long after it was settled.
    """

    id: TaskId
    spec: TaskSpec
    since: float
    parent: TaskId | None = None
    actor: ActorId | None = None
    needs: set[TaskId] | None = None
    state: Literal["waiting", "queued", "running", "over"] = "waiting"
    order: int = 0
    attempt: int = 0
    retries: int = 0
    worker: WorkerId | None = None
    stop: Literal["cancel", "timeout"] | None = None
    blocked: bool = False
    again: bool = False

    @property
    def constructs(self) -> bool:
        return self.actor == self.id

    def outcome(self, report: Report | Crashed) -> Outcome:
        """How the task ends if this is the last that is heard of it."""
        if self.stop == "cancel":
            return Cancelled()
        if self.stop == "timeout" and not isinstance(report, Succeeded):
            return TimedOut(self.spec.timeout or 0.0)
        return Cancelled() if isinstance(report, Interrupted) else report


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process, from the decision to start it until it is gone.

    `lent` while its CPUs are lent, because all its tasks are blocked; `killed` once its end was
    asked for, so that it gets no more work; `last` is the task it was given last.
    """

    id: WorkerId
    allocation: Allocation
    key: ReuseKey | None
    actor: ActorId | None = None
    state: Literal["busy", "idle", "leaving"] = "busy"
    since: float = 0.0
    tasks: set[TaskId] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    blocked: int = 0
    lent: bool = False
    killed: bool = False
    last: TaskId | None = None


@dataclass(slots=True, eq=False)
class Actor:
    """An actor that is not dead. `calls` wait in the order they were handed in."""

    id: ActorId
    spec: TaskSpec
    rules: ActorSpec
    state: Literal["starting", "alive", "ending"] = "starting"
    worker: WorkerId | None = None
    calls: deque[Task] = field(default_factory=deque)
    running: set[TaskId] = field(default_factory=set)
    restarts: int = 0
    released: bool = False


Timer: TypeAlias = tuple[float, str, int, int]
"""(time, kind, id of a task or worker, attempt)"""


@dataclass(slots=True, eq=False)
class Timers:
    """Times at which something must be looked at again.

    Nothing is cancelled: `matters` tells whether a timer still has a target, and those without
    are dropped when they come first, or all together when there are too many.
    """

    matters: Callable[[Timer], bool]
    heap: list[Timer] = field(default_factory=list)
    announced: float | None = None
    limit: int = 1024

    def add(self, time: float, kind: str, ident: int, attempt: int = 0) -> None:
        heapq.heappush(self.heap, (time, kind, ident, attempt))
        if len(self.heap) > self.limit:
            self.heap = [timer for timer in self.heap if self.matters(timer)]
            heapq.heapify(self.heap)
            self.limit = max(1024, 2 * len(self.heap))

    def due(self, now: float) -> list[Timer]:
        found = []
        while self.heap and self.heap[0][0] <= now:
            found.append(heapq.heappop(self.heap))
        self.announced = None
        return found

    def next(self) -> float | None:
        """The next time, if it was not announced before."""
        while self.heap and not self.matters(self.heap[0]):
            heapq.heappop(self.heap)
        if not self.heap:
            return None
        first = self.heap[0][0]
        if self.announced is not None and self.announced <= first:
            return None
        self.announced = first
        return first
