"""The scheduler's books: what it remembers of each task, worker and actor.

Mutable, and private to `gpunb.core`; the outside sees events, decisions and snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpunb.core.calls import Calls
from gpunb.core.resources import Allocation
from gpunb.core.tasks import (
    ActorDied,
    ActorId,
    ActorSpec,
    Cancelled,
    Crashed,
    Exited,
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

    Its `attempt` counts from 1 and is 0 before the first run. While it is `blocked`, it waits for
    `count` of the tasks `on`, or for something else if there are none. It was in line since it
    `waited` when it was given its worker. `disowned` once it was
    stopped together with its children, so that it gets no new ones. It is `settled` while it runs
    if it is a constructor that runs again for a restarted actor, or a call that cannot be stopped.
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
    on: tuple[TaskId, ...] = ()
    count: int = 0
    disowned: bool = False
    settled: bool = False
    waited: float = 0.0

    @property
    def constructs(self) -> bool:
        return self.actor == self.id

    @property
    def queues(self) -> bool:
        """Whether it waits in line for room; calls wait for their actor instead."""
        return self.actor is None or self.actor == self.id

    def outcome(self, report: Report | Crashed) -> Outcome:
        """How the task ends if this is the last that is heard of it."""
        if self.stop == "cancel":
            return Cancelled()
        if self.stop == "timeout" and not isinstance(report, Succeeded):
            return TimedOut(self.spec.timeout or 0.0)
        if isinstance(report, Interrupted):
            return Cancelled()
        if isinstance(report, Exited):
            if self.actor is None:
                return Crashed("it called exit_actor() outside of an actor")
            return ActorDied(self.actor, report.reason or "it called exit_actor()")
        return report


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process, from the decision to start it until it is gone.

    `lent` while its CPUs are lent, because all its tasks are blocked; `killed` once its end was
    asked for, so that it gets no more work; `last` is the task it was given last. `doom` is what
    its end will be said to be, if it was ended for a reason of its own.
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
    doom: Crashed | None = None


@dataclass(slots=True, eq=False)
class Actor:
    """An actor whose process is not gone for good.

    It has a `worker` from its start until that process is gone. `end` is how its calls end once
    it is sure that it will run no more of them.
    """

    id: ActorId
    spec: TaskSpec
    rules: ActorSpec
    calls: Calls
    state: Literal["starting", "alive", "ending"] = "starting"
    worker: WorkerId | None = None
    running: set[TaskId] = field(default_factory=set)
    restarts: int = 0
    released: bool = False
    end: Outcome | None = None
