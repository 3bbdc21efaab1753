"""The vocabulary: events say what happened, decisions say what is to be done.

An event that is late, doubled or meant for an attempt that is over changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gpunb.core.resources import Allocation
from gpunb.core.tasks import ActorId, ActorSpec, Outcome, Report, TaskId, TaskSpec, WorkerId

# ---------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Submitted:
    """A task was handed in, under an id that no task had before.

    `needs` are the unfinished tasks whose results it takes.
    """

    task: TaskId
    spec: TaskSpec
    needs: tuple[TaskId, ...] = ()
    parent: TaskId | None = None


@dataclass(frozen=True, slots=True)
class ActorCreated:
    """An actor was asked for; its constructor is the task of the same id."""

    actor: ActorId
    spec: TaskSpec
    rules: ActorSpec
    needs: tuple[TaskId, ...] = ()
    parent: TaskId | None = None


@dataclass(frozen=True, slots=True)
class CallSubmitted:
    """A method call was handed in by the task `parent`, or by the kernel.

    Calls of one caller start in the order of these events, unless the actor runs several at once.
    """

    task: TaskId
    actor: ActorId
    spec: TaskSpec
    needs: tuple[TaskId, ...] = ()
    parent: TaskId | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker reported the end of an attempt."""

    task: TaskId
    attempt: int
    worker: WorkerId
    report: Report


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker's process and all its children are gone, or it could not be started."""

    worker: WorkerId
    reason: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Blocked:
    """A running task waits until `count` of the tasks `on` are over; its CPUs are of no use to it.

    With no task named, it waits for something that comes by itself. What was said last counts.
    """

    task: TaskId
    attempt: int
    on: tuple[TaskId, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Unblocked:
    """A blocked task goes on."""

    task: TaskId
    attempt: int


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody no longer wants the task. `force` ends its process."""

    task: TaskId
    force: bool = False
    recursive: bool = True


@dataclass(frozen=True, slots=True)
class InterruptRequested:
    """Somebody pressed Stop: raise KeyboardInterrupt in the task, and take what it makes of it
    for its end. A task that does not run yet is cancelled."""

    task: TaskId


@dataclass(frozen=True, slots=True)
class KillRequested:
    """Somebody wants the actor's process ended, for good unless `restart`."""

    actor: ActorId
    restart: bool = False


@dataclass(frozen=True, slots=True)
class ActorReleased:
    """The last handle of the actor is gone: it ends after the calls it already has."""

    actor: ActorId


@dataclass(frozen=True, slots=True)
class TimeReached:
    """The time of an earlier `WakeAt` has come."""


Event: TypeAlias = (
    Submitted
    | ActorCreated
    | CallSubmitted
    | Finished
    | WorkerExited
    | Blocked
    | Unblocked
    | CancelRequested
    | InterruptRequested
    | KillRequested
    | ActorReleased
    | TimeReached
)

# ------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True)
class Run:
    """Run an attempt of the task on the worker.

    Attributes:
        new: start the worker first, pinned to `allocation`.
        last: the worker ends by itself after this task.
    """

    task: TaskId
    attempt: int
    worker: WorkerId
    allocation: Allocation
    new: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Raise KeyboardInterrupt in this attempt, if it still runs."""

    worker: WorkerId
    task: TaskId
    attempt: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Let an idle worker end."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker's process and its children at once."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Settle:
    """The task is over; said exactly once for each."""

    task: TaskId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ActorEnded:
    """The actor is over for good and has no process; said once for each, after all it settles.

    `outcome` is how later calls of it end.
    """

    actor: ActorId
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `TimeReached` at this time, instead of at any time named before."""

    time: float


Decision: TypeAlias = Run | Interrupt | Retire | Kill | Settle | ActorEnded | WakeAt
