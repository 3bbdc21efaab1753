"""What a task, an actor and an ending are, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gpunb.core.resources import Demand

TaskId: TypeAlias = int
WorkerId: TypeAlias = int
ActorId: TypeAlias = int
"""An actor is known by the task id of its constructor."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """All that the calls of one remote function have in common; made once, shared by its calls.

    Attributes:
        name: for people; not unique.
        demand: what each call needs.
        function: identity of the code, for reuse of workers.
        max_calls: calls of this function after which a worker ends; 1 means a fresh process for
            every call, 0 that workers are reused without limit.
        max_retries: further attempts after a crash or a retryable exception; -1 without limit.
        timeout: seconds a call may run; None for ever.
        environment: (name, value) pairs that the worker's environment must hold.
        caps: whether frameworks are told to keep to its share of a device.
        owner: whose task it is, where several kernels share the machine; workers are not reused
            for the task of another.
        ray: more options for Ray, where the task runs there; not looked at here.
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
"""What workers must have in common with a task; the last is its owner."""


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What an actor needs beyond its constructor's `TaskSpec`.

    Attributes:
        max_restarts: how often the process is started again after a crash; -1 without limit.
        max_concurrency: calls that may be in flight at once.
        threads: whether each of them has a thread, which nothing can stop.
    """

    max_restarts: int = 0
    max_concurrency: int = 1
    threads: bool = False


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The task returned; its results are with whoever reported this."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The task raised; `retry` if its `retry_exceptions` cover the exception."""

    retry: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The task ended by the KeyboardInterrupt that an `Interrupt` brought."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The call asked its actor to end, and the process ends by itself; `reason` says how, if it
    was not by `exit_actor`."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Crashed:
    """The worker process ended before the task did; `reason` says how, in words. One that was
    `stopped` for what it did is not tried again: it would do the same."""

    reason: str
    out_of_memory: bool = False
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task was cancelled, before or while it ran."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The task ran longer than its time-out of `seconds` and was stopped, or `left` to itself."""

    seconds: float
    left: bool = False


@dataclass(frozen=True, slots=True)
class UpstreamFailed:
    """The task was never run, because `task`, whose result it takes, failed."""

    task: TaskId


@dataclass(frozen=True, slots=True)
class Refused:
    """The machine can never satisfy the demand."""

    reason: str


@dataclass(frozen=True, slots=True)
class ActorDied:
    """The call's actor is gone; `task` is the failed constructor if that was the cause. `end` is
    how it has ended, as of a task: it is done if it left, or nobody wanted it any more."""

    actor: ActorId
    reason: str
    task: TaskId | None = None
    end: Literal["done", "failed", "cancelled"] = field(default="failed", compare=False)


@dataclass(frozen=True, slots=True)
class ActorUnavailable:
    """The call was in flight when its actor's process ended; the actor is started again."""

    actor: ActorId
    reason: str


@dataclass(frozen=True, slots=True)
class Deadlocked:
    """The task could never run: what it needs is held by tasks that wait for it."""

    reason: str


Report: TypeAlias = Succeeded | Raised | Interrupted | Exited
"""How a worker says that a task ended."""

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
"""How a task ended for good."""
