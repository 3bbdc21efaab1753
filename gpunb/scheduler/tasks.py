"""Specifications of tasks and actors, and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gpunb.scheduler.frozen import frozen
from gpunb.scheduler.resources import Demand

TaskId: TypeAlias = int
WorkerId: TypeAlias = int
ActorId: TypeAlias = int
"""An actor is known by the task id of its constructor."""


@dataclass(frozen=True, slots=True)
class AutoShare:
    """A share that comes from the earlier runs of the same code.

    Attributes:
        by_memory: whether the share is a number of bytes, the same on each device.
        code: the digest of the code; empty until it is known.
    """

    by_memory: bool = False
    code: str = ""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The options that all calls of one remote function share; made once.

    Attributes:
        name: for people; not unique.
        demand: resources that each call needs.
        function: identity of the code, for reuse of workers.
        max_calls: calls of this function after which a worker ends; 1 means a fresh process for
            every call, 0 that workers are reused without limit.
        max_retries: further attempts after a crash or a retryable exception; -1 without limit.
        timeout: seconds a call may run; None for ever.
        environment: (name, value) pairs that the worker's environment must hold.
        caps: whether frameworks are told to keep to the task's share of a device.
        owner: number of the kernel that submitted the task, in a head process. Workers are not
            reused for tasks of another owner.
        ray: more options for Ray, if the task runs there; the scheduler ignores them.
        group: the concurrency group in which a call of an actor runs; empty for the default one.
        auto: how earlier runs choose the share, if they do: until then the demand is for one whole
            device.
        priority: tasks of a higher one start first, of those that wait.
        expected: seconds that a call is expected to run; None if nothing is known.
        grow: whether a task that ran out of memory on a part of a device runs again on twice the
            part.
        capturable: whether the task runs in the placement group of its parent, if that one
            captures its child tasks.
        sees_group: whether the worker sees the devices of its whole placement group.
    """

    name: str
    demand: Demand = Demand()
    function: str = ""
    max_calls: int = 0
    max_retries: int = 0
    timeout: float | None = None
    environment: tuple[tuple[str, str], ...] = ()
    caps: bool = True
    owner: int = 0
    ray: Mapping[str, Any] | None = None
    group: str = ""
    auto: AutoShare | None = None
    grow: bool = False
    priority: int = 0
    expected: float | None = None
    capturable: bool = True
    sees_group: bool = False

    def __post_init__(self) -> None:
        if self.max_calls < 0 or self.max_retries < -1 or (self.timeout or 0) < 0:
            raise ValueError(f"{self!r} has a number that means nothing")

    @property
    def fresh(self) -> bool:
        return self.max_calls == 1

    @property
    def reuse_key(self) -> ReuseKey:
        """Workers with an equal key may run this task.

        Workers without devices serve any function; one that holds devices serves only the
        function and demand it was started for.
        """
        if self.demand.wants_device:
            return (self.function, self.demand, self.environment, self.caps, self.owner)
        return ("", None, self.environment, True, self.owner)


ReuseKey: TypeAlias = tuple[str, Demand | None, tuple[tuple[str, str], ...], bool, int]
"""(function, demand, environment, caps, owner)"""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """The options of an actor beyond the `TaskSpec` of its constructor.

    Attributes:
        max_restarts: how often the process is started again after a crash; -1 without limit.
        max_concurrency: calls that may be in flight at once, of those in no concurrency group.
        threads: whether each of these calls runs in a thread, which nothing can stop.
        groups: the name of each concurrency group, and its calls that may be in flight at once.
        bundles: the bundles of a placement group, which is an actor without a process.
    """

    max_restarts: int = 0
    max_concurrency: int = 1
    threads: bool = False
    groups: tuple[tuple[str, int], ...] = ()
    bundles: tuple[Demand, ...] = ()

    def __post_init__(self) -> None:
        if self.max_restarts < -1 or min(self.limits.values()) < 1:
            raise ValueError(f"{self!r} has a number that means nothing")

    @property
    def limits(self) -> dict[str, int]:
        """The number of calls that may be in flight at once in each group; the name of the default
        group is empty."""
        return {"": self.max_concurrency, **dict(self.groups)}


@frozen
class Succeeded:
    """The task returned. The sender of the report has its results; those of a `cell` may be an
    error, such as that of its interrupt."""

    cell: bool = False


@frozen
class Raised:
    """The task raised; `retry` if its `retry_exceptions` cover the exception.

    `spared` are the tasks that take only such results of it as are there all the same.
    """

    retry: bool = False
    spared: tuple[TaskId, ...] = ()


@frozen
class Interrupted:
    """The task ended by the KeyboardInterrupt of an `Interrupt`."""


@frozen
class Exited:
    """A call asked its actor to end, and the process ends by itself.

    `reason` says how, if not by `exit_actor`. After a `failed` exit, such as ``sys.exit(1)``, the
    actor may restart.
    """

    reason: str = ""
    failed: bool = False


@frozen
class Crashed:
    """The worker process ended before the task did. A task is not retried if it was `stopped` for
    something that it did: the retry would do the same."""

    reason: str
    out_of_memory: bool = False
    stopped: bool = False


@frozen
class Cancelled:
    """The task was cancelled, before or while it ran."""


@frozen
class TimedOut:
    """The task ran longer than its limit of `seconds`, and was stopped or, if `left`, abandoned."""

    seconds: float
    left: bool = False


@frozen
class UpstreamFailed:
    """The task never ran, because it takes the result of `task`, which failed."""

    task: TaskId


@frozen
class Refused:
    """The machine can never satisfy the demand."""

    reason: str


@frozen
class ActorDied:
    """The call's actor is gone; `task` is the failed constructor if that was the cause.

    `end` is "done" if the actor left by itself or had no handle left.
    """

    actor: ActorId
    reason: str
    task: TaskId | None = None
    end: Literal["done", "failed", "cancelled"] = field(default="failed", compare=False)

    @classmethod
    def after(cls, actor: ActorId, outcome: Outcome) -> ActorDied:
        """The outcome of an actor's calls after this outcome of its constructor."""
        reason, task = "its constructor failed", actor
        match outcome:
            case ActorDied() if outcome.actor == actor:
                return outcome
            case ActorDied():
                group = f"placement group #{outcome.actor}, in which it runs"
                reason = f"{group}, is gone: {outcome.reason}"
            case Crashed():
                reason = f"its process ended while it was made: {outcome.reason}"
            case Cancelled():
                reason = "it was cancelled before it was made"
            case Deadlocked():
                reason = f"it could not be made: {outcome.reason}"
            case Refused():
                reason = f"it can never be made: {outcome.reason}"
            case UpstreamFailed():
                task = outcome.task
        return cls(actor, reason, task)


@frozen
class ActorUnavailable:
    """The actor's process ended during the call, or the actor was restarting at the call."""

    actor: ActorId
    reason: str


@frozen
class Deadlocked:
    """The task could never run: tasks that wait for it hold the resources that it needs."""

    reason: str


Report: TypeAlias = Succeeded | Raised | Interrupted | Exited
"""How a task ended, in the words of its worker."""

Outcome: TypeAlias = (
    Succeeded
    | Raised
    | Crashed
    | Cancelled
    | TimedOut
    | UpstreamFailed
    | Refused
    | ActorDied
    | ActorUnavailable
    | Deadlocked
)
"""How a task ended for good; no retry follows."""
