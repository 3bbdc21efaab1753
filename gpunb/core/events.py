"""The vocabulary: events say what happened, decisions say what is to be done.

An event that is late, doubled or meant for an attempt that is over changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gpunb.core.resources import Allocation, Shares
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
class ReleaseRequested:
    """Somebody else wants what idle workers hold: let them go; only those of `owner`, if said."""

    owner: int | None = None


@dataclass(frozen=True, slots=True)
class ShareExceeded:
    """A worker takes more of its device than its share, and is to be stopped for it."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A device can be used no more, by its key; said of one that is lost already, it changes
    nothing."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outside:
    """So many `units` of a device are not ours to give out; the part of them that is `lasting` is
    held by actors. `whose` says in words who has them: "held by another kernel (pid 4711)"."""

    device: str
    units: int
    lasting: int = 0
    whose: str = "held by another kernel"


@dataclass(frozen=True, slots=True)
class OutsideChanged:
    """How things are between the kernels of this machine; what was said last counts.

    `wanted` are the devices of which others wait for a share, so that no idle worker is to keep
    one; `used` those that processes outside gpunb use, to be avoided if there is a choice.
    `circle` says in words that we and others wait for each other, if that is so.
    """

    outside: tuple[Outside, ...] = ()
    wanted: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()
    circle: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """A new worker was not started, because others have what it was to hold."""

    worker: WorkerId


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
    | ReleaseRequested
    | ShareExceeded
    | DeviceLost
    | OutsideChanged
    | LeaseRefused
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


@dataclass(frozen=True, slots=True)
class Claim:
    """Let the other kernels know what is waited for that they have, instead of what was said
    before.

    `shares` are totals, with what is held there already; if there are none, nothing is to be left
    for us, but news is welcome. None: nothing is waited for. `lacks` are totals too, of what
    no end of a task elsewhere will free. `stuck` is what our own actors hold, and our tasks that
    wait for others: as long as we wait, it is not free.
    """

    shares: Shares | None
    lacks: Shares = ()
    stuck: Shares = ()


Decision: TypeAlias = Run | Interrupt | Retire | Kill | Settle | ActorEnded | Claim | WakeAt
