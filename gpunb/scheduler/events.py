"""Events and decisions: the vocabulary of the scheduler.

An event that is late, doubled or meant for an attempt that is over changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from gpunb.scheduler.auto_share import Choice
from gpunb.scheduler.frozen import frozen
from gpunb.scheduler.resources import Allocation, Demand, Shares
from gpunb.scheduler.tasks import ActorId, ActorSpec, Outcome, Report, TaskId, TaskSpec, WorkerId

# ---------------------------------------------------------------------------------------- events


@frozen
class Submitted:
    """A task was submitted under a new id.

    `needs` are the unfinished tasks whose results it takes. `cleanup` means that its parent had
    been interrupted before: the task is not cancelled together with the parent. A worker may be
    sent the task ahead, while another one of the same `alike` runs there, which is not None.
    """

    task: TaskId
    spec: TaskSpec
    needs: tuple[TaskId, ...] = ()
    parent: TaskId | None = None
    cleanup: bool = False
    alike: Hashable = None


@frozen
class ActorCreated:
    """An actor was created; its constructor is the task of the same id."""

    actor: ActorId
    spec: TaskSpec
    rules: ActorSpec
    needs: tuple[TaskId, ...] = ()
    parent: TaskId | None = None
    cleanup: bool = False


@frozen
class CallSubmitted:
    """A method call was submitted by the task `parent`, or by the kernel.

    The calls of one caller start in the order of these events, unless the actor runs several at
    once. `alike` as of `Submitted`, for calls of the same caller.
    """

    task: TaskId
    actor: ActorId
    spec: TaskSpec
    needs: tuple[TaskId, ...] = ()
    parent: TaskId | None = None
    cleanup: bool = False
    alike: Hashable = None


@frozen
class Finished:
    """A worker reported the end of an attempt; `short` if the device had too little memory.

    If it is `steady`, the worker may be sent further tasks ahead.
    """

    task: TaskId
    attempt: int
    worker: WorkerId
    report: Report
    short: bool = False
    steady: bool = False


@frozen
class TakenBack:
    """A worker has begun the tasks that it was sent ahead, except for the last `count`, which it
    will not begin."""

    worker: WorkerId
    count: int


@frozen
class WorkerExited:
    """A worker's process and all its children are gone, or it could not be started."""

    worker: WorkerId
    reason: str
    out_of_memory: bool = False


@frozen
class Blocked:
    """A running task waits until `count` of the tasks `on` are over, and uses no CPU.

    If `on` is empty, the task waits for something that needs no task. If the wait is not `sure`,
    something else may let the task go on. Of several such events the last counts.
    """

    task: TaskId
    attempt: int
    on: tuple[TaskId, ...] = ()
    count: int = 0
    sure: bool = True


@frozen
class Unblocked:
    """A blocked task goes on."""

    task: TaskId
    attempt: int


@frozen
class CancelRequested:
    """A task must be cancelled. `force` kills its process; `recursive` cancels its children too."""

    task: TaskId
    force: bool = False
    recursive: bool = True


@frozen
class InterruptRequested:
    """A user pressed Stop: a running task gets a KeyboardInterrupt, a waiting task is cancelled."""

    task: TaskId


@frozen
class KillRequested:
    """The actor's process must be killed. The actor may then start again if `restart` is set."""

    actor: ActorId
    restart: bool = False


@frozen
class ActorReleased:
    """The last handle of the actor is gone: the actor ends after its submitted calls."""

    actor: ActorId


@frozen
class ParkRequested:
    """The actor is to be parked, if it is idle."""

    actor: ActorId


@frozen
class Parked:
    """A worker has given its device memory back, unless there was a problem."""

    worker: WorkerId
    problem: str = ""


PREPARED = -1
"""In `ReleaseRequested`: instead of an owner."""


@frozen
class ReleaseRequested:
    """Idle workers must end, because their devices are needed; None means those of all owners, and
    `PREPARED` the prepared workers, which get successors."""

    owner: int | None = None


@frozen
class ShareExceeded:
    """A worker uses more of its device than its share, and must be stopped."""

    worker: WorkerId
    reason: str


@frozen
class DeviceLost:
    """A device, by its key, cannot be used any more."""

    device: str
    reason: str


@frozen
class PeerShare:
    """The units of a device that other sessions hold; their actors hold the `lasting` part.

    `holder` is a text such as "held by another kernel (pid 4711)".
    """

    device: str
    units: int
    lasting: int = 0
    holder: str = "held by another kernel"


@frozen
class PeersChanged:
    """The other sessions of this machine hold or want other devices than before.

    Attributes:
        shares: the shares that the other sessions hold.
        wanted: devices that other sessions wait for; idle workers must not keep them.
        used: devices that processes outside gpunb use; they are given out last.
        circle: a text if this session and others wait for each other.
    """

    shares: tuple[PeerShare, ...] = ()
    wanted: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()
    circle: str = ""


@frozen
class LeaseRefused:
    """A new worker was not started, because other sessions hold its devices."""

    worker: WorkerId


@frozen
class TimeReached:
    """The time of a `WakeAt` is reached."""


@frozen
class Chosen:
    """Earlier runs are known now that choose another share for a task. As a decision: the task was
    still waiting, and asks for this share."""

    task: TaskId
    choice: Choice


DeviceEvent: TypeAlias = ReleaseRequested | ShareExceeded | DeviceLost | PeersChanged | LeaseRefused

Event: TypeAlias = (
    Submitted
    | ActorCreated
    | CallSubmitted
    | Finished
    | TakenBack
    | WorkerExited
    | Blocked
    | Unblocked
    | CancelRequested
    | InterruptRequested
    | KillRequested
    | ActorReleased
    | ParkRequested
    | Parked
    | Chosen
    | DeviceEvent
    | TimeReached
)

DISTURBING = (
    CancelRequested,
    InterruptRequested,
    KillRequested,
    ShareExceeded,
    DeviceLost,
    TimeReached,
)
"""Events that may end a task that waits, or a process. Before these all tasks that were sent ahead
must be taken back; before a `WorkerExited` those of the worker; and before a `Blocked`, where a
task may wait for one of them, all but the calls of actors."""

# ------------------------------------------------------------------------------------- decisions


@frozen
class Run:
    """Run an attempt of the task on the worker.

    Attributes:
        new: start the worker first, pinned to `allocation`.
        last: the worker ends by itself after this task.
        prepared: the worker was prepared, and holds a smaller share of the device until now.
        ahead: the worker was sent the task ahead, and begins it by itself.
    """

    task: TaskId
    attempt: int
    worker: WorkerId
    allocation: Allocation
    new: bool
    last: bool
    prepared: bool = False
    ahead: bool = False


@frozen
class SendAhead:
    """Send a worker tasks that it may begin after those that it has, unless they are taken back.

    Attributes:
        tasks: each with its attempt, which is that of the `Run` that follows.
    """

    worker: WorkerId
    tasks: tuple[tuple[TaskId, int], ...]


@frozen
class Prepare:
    """Start a worker that makes a context on its only device, and then waits for a task."""

    worker: WorkerId
    allocation: Allocation


@frozen
class Park:
    """Let the worker of an idle actor move its device memory to the host."""

    worker: WorkerId


@frozen
class Restore:
    """Let the worker of a parked actor take its device memory again, on the same devices.

    The report is that of an attempt of the task.
    """

    task: TaskId
    attempt: int
    worker: WorkerId
    allocation: Allocation


@frozen
class Interrupt:
    """Raise KeyboardInterrupt in this attempt, if it still runs."""

    worker: WorkerId
    task: TaskId
    attempt: int


@frozen
class Retire:
    """Let an idle worker end."""

    worker: WorkerId


@frozen
class Kill:
    """End a worker's process and its children at once."""

    worker: WorkerId


@frozen
class Settle:
    """The task is over. Decided exactly once for each task."""

    task: TaskId
    outcome: Outcome


@frozen
class Grown:
    """The attempt ran out of memory on these shares; the task waits again, with a larger demand."""

    task: TaskId
    shares: Shares
    demand: Demand


@frozen
class ActorEnded:
    """The actor is over for good and has no process. Decided once, after all its calls are settled.

    `outcome` is the outcome of later calls.
    """

    actor: ActorId
    outcome: Outcome


@frozen
class WakeAt:
    """Send `TimeReached` at this time, and not at a time of an earlier `WakeAt`."""

    time: float


@frozen
class Claim:
    """Tell the other sessions which of their devices this session waits for, from now on.

    The shares are totals, with the units that this session holds already.

    Attributes:
        shares: the shares to leave free; none if only a report is wanted; None for no wait.
        lacks: shares that do not become free when tasks of other sessions end.
        stuck: shares of this session's actors and blocked tasks, which stay while it waits.
    """

    shares: Shares | None
    lacks: Shares = ()
    stuck: Shares = ()


Decision: TypeAlias = (
    Run
    | SendAhead
    | Prepare
    | Park
    | Restore
    | Interrupt
    | Retire
    | Kill
    | Settle
    | Grown
    | Chosen
    | ActorEnded
    | Claim
    | WakeAt
)
