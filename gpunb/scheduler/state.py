"""The scheduler's records of tasks, workers and actors, and the tables of their states.

The records are mutable and private to `gpunb.scheduler`; other packages see events, decisions and
snapshots. Only `set_state` changes a state. It raises AssertionError if the table forbids that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from gpunb.scheduler.actor_queue import Calls
from gpunb.scheduler.events import Decision
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.resources import Allocation, Machine, Shares
from gpunb.scheduler.tasks import (
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

TaskState: TypeAlias = Literal["waiting", "queued", "running", "over"]
WorkerState: TypeAlias = Literal["busy", "idle", "leaving"]
ActorState: TypeAlias = Literal["starting", "alive", "parking", "parked", "leaving", "ending"]

TASK_TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = {
    "waiting": frozenset({"queued", "running", "over"}),
    "queued": frozenset({"waiting", "running", "over"}),
    "running": frozenset({"waiting", "queued", "over"}),
    "over": frozenset(),
}
"""A task waits for its inputs, its actor or the worker that it was sent to, is queued for room, and
runs; a retry goes back."""

WORKER_TRANSITIONS: Mapping[WorkerState, frozenset[WorkerState]] = {
    "busy": frozenset({"idle", "leaving"}),
    "idle": frozenset({"busy", "leaving"}),
    "leaving": frozenset(),
}
"""In any state the process may be gone; the record is then deleted."""

ACTOR_TRANSITIONS: Mapping[ActorState, frozenset[ActorState]] = {
    "starting": frozenset({"starting", "alive", "ending"}),
    "alive": frozenset({"starting", "parking", "leaving", "ending"}),
    "parking": frozenset({"starting", "alive", "parked", "ending"}),
    "parked": frozenset({"starting", "alive", "ending"}),
    "leaving": frozenset({"leaving", "starting", "ending"}),
    "ending": frozenset(),
}
"""An actor that loses its process is starting again, if it may. Several calls that run at once may
ask it to leave."""


@dataclass(slots=True, eq=False)
class Task:
    """A task that is not over.

    Attributes:
        since: time of the last change between waiting and running.
        needs: unfinished tasks whose results this task takes.
        order: place among all tasks in the order of their submission.
        rank: the lowest is served first: the time since which it waits for nothing but room, later
            for a long expected time and earlier for a priority; and a number.
        depth: a task is deeper than its parent, and than the tasks that wait for it.
        attempt: number of the last attempt, from 1; 0 before the first one.
        queued_since: `since`, as it was before the task got its worker.
        alike: as in `Submitted`.
        stop: the reason of the last request to stop this attempt.
        blocked, blocked_on, blocked_count: whether a running task waits, for which tasks, and how
            many of these must end first; no tasks if it waits for something else.
        disowned: whether new children are cancelled at once, because the task was, with children.
        settled: whether the outcome is known before the end: of the constructor of a restarted
            actor, and of a call in a thread, which cannot be stopped.
    """

    id: TaskId
    spec: TaskSpec
    since: float
    parent: TaskId | None = None
    actor: ActorId | None = None
    needs: set[TaskId] | None = None
    state: TaskState = "waiting"
    order: int = 0
    rank: tuple[float, int] = (0.0, 0)
    depth: int = 0
    attempt: int = 0
    retries: int = 0
    worker: WorkerId | None = None
    stop: Literal["cancel", "kill", "timeout"] | None = None
    blocked: bool = False
    blocked_on: tuple[TaskId, ...] = ()
    blocked_count: int = 0
    disowned: bool = False
    settled: bool = False
    queued_since: float = 0.0
    alike: Hashable = None

    def set_state(self, state: TaskState) -> None:
        if state not in TASK_TRANSITIONS[self.state]:
            raise AssertionError(f"{self!r} may not go from {self.state!r} to {state!r}")
        self.state = state

    @property
    def is_constructor(self) -> bool:
        return self.actor == self.id

    @property
    def is_call(self) -> bool:
        """Whether the task waits for its actor. Other tasks wait in the queue for room."""
        return self.actor is not None and self.actor != self.id

    @property
    def may_retry(self) -> bool:
        limit = self.spec.max_retries
        return self.stop is None and (limit < 0 or self.retries < limit)

    def outcome(self, report: Report | Crashed) -> Outcome:
        """The outcome of the task if this attempt was the last."""
        if self.stop == "kill":
            return Cancelled()
        if self.stop == "cancel":
            # As in Ray: a task that catches its interrupt and returns a value has this value.
            caught = isinstance(report, Succeeded) and not report.cell and self.actor is None
            if not caught:
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
    """A worker process, from the decision to start it until the process is gone.

    Attributes:
        key: the tasks that the worker may run later; None if it runs no other task.
        calls: number of calls of each function with a limit of calls.
        blocked: number of blocked tasks; the worker lends its CPUs if all tasks are.
        depth: of its task, or of the least deep of the calls for which an actor waits.
        since: time of the start of its last task, or since which it is idle or leaves.
        keeps_loan: whether its CPUs, while it lends them, are kept for deeper tasks.
        killed: whether a `Kill` was decided; the worker gets no more work.
        forced_end: how its tasks end, if the scheduler ended the process for a reason of its own.
        prepared: whether the worker was started before there was a task for it, and has had none.
        ahead: the tasks that it was sent ahead; the calls of actors are with the other calls.
    """

    id: WorkerId
    allocation: Allocation
    key: ReuseKey | None
    actor: ActorId | None = None
    state: WorkerState = "busy"
    since: float = 0.0
    tasks: set[TaskId] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    blocked: int = 0
    lends_cpus: bool = False
    depth: int = 0
    keeps_loan: bool = True
    killed: bool = False
    last_task: TaskId | None = None
    forced_end: Crashed | None = None
    prepared: bool = False
    ahead: deque[Task] = field(default_factory=deque)

    @property
    def not_lent(self) -> Allocation:
        """The holdings that a blocked worker keeps: all but its CPUs, which it lends."""
        return replace(self.allocation, cpus=0)

    def set_state(self, state: WorkerState) -> None:
        if state not in WORKER_TRANSITIONS[self.state]:
            raise AssertionError(f"{self!r} may not go from {self.state!r} to {state!r}")
        self.state = state


@dataclass(slots=True, eq=False)
class Actor:
    """An actor that has a process or may still get one.

    Attributes:
        calls, running: the calls that wait, and those that run.
        released: whether no handle of the actor is left.
        end: how further calls end; None while the actor may run them.
        failed_starts: how often in a row the process ended in the constructor.
        reason: why the actor lost its last process.
        parked: the shares that a parked actor had.
        restores: how often a parked actor asked for them.
        parkable: whether its worker has not refused to be parked.
        idle_since: time of the end of its last call.
        steady: whether its worker may be sent calls ahead.
    """

    id: ActorId
    spec: TaskSpec
    rules: ActorSpec
    calls: Calls[Task]
    state: ActorState = "starting"
    worker: WorkerId | None = None
    running: set[TaskId] = field(default_factory=set)
    restarts: int = 0
    released: bool = False
    end: Outcome | None = None
    failed_starts: int = 0
    reason: str = ""
    parked: Shares = ()
    restores: int = 0
    parkable: bool = True
    idle_since: float = 0.0
    steady: bool = False

    def set_state(self, state: ActorState) -> None:
        if state not in ACTOR_TRANSITIONS[self.state]:
            raise AssertionError(f"{self!r} may not go from {self.state!r} to {state!r}")
        self.state = state

    @property
    def restarting(self) -> bool:
        """Whether the actor starts again, so that it takes no calls for an unknown time."""
        return self.state == "leaving" or (self.state == "starting" and self.restarts > 0)


class State:
    """All records of a session, which the parts of the scheduler share.

    Attributes:
        tasks, workers, actors: the records; a record is deleted when its subject is gone.
        capacity: the room that is free now.
        obtainable: the room that is free when all tasks have ended, except blocked ones; actors
            keep theirs.
        waiters: blocked tasks without a time limit that wait for other tasks.
        wanted: keys of the devices that other sessions wait for.
        decisions, now: the answer to the event that is being handled, and its time.
    """

    def __init__(self, machine: Machine, policy: Policy) -> None:
        self.machine = machine
        self.policy = policy
        self.tasks: dict[TaskId, Task] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.actors: dict[ActorId, Actor] = {}
        self.capacity = Capacity(machine)
        self.obtainable = Capacity(machine)
        self.waiters: set[TaskId] = set()
        self.wanted: frozenset[str] = frozenset()
        self.decisions: list[Decision] = []
        self.now = 0.0

    def holder(self, group: ActorId) -> Worker:
        """The worker that stands for the room of a placed group."""
        worker = self.actors[group].worker
        assert worker is not None
        return self.workers[worker]

    def kept(self, worker: Worker, group: ActorId | None) -> Allocation:
        """The allocation that stays taken while a worker is blocked. For a worker in a placement
        group that is all the group holds, unless it is the group of the argument."""
        own = worker.allocation.within
        if own is None or own.group == group:
            return worker.not_lent
        return self.holder(own.group).allocation

    def is_unfinished(self, ident: TaskId) -> bool:
        """Whether tasks that need this task have to wait for it."""
        task = self.tasks.get(ident)
        return task is not None and not task.settled
