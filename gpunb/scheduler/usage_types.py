"""The values of the sampler: readings of devices, processes on them, and findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gpunb.scheduler.resources import Shares
from gpunb.scheduler.tasks import TaskId, WorkerId


class Seen(NamedTuple):
    """A process on a device; `line` has its id and those of its ancestors, nearest first."""

    pid: int
    memory: int | None
    line: tuple[int, ...] = ()
    user: str | None = None
    name: str | None = None
    since: float | None = None

    def __str__(self) -> str:
        what = f"process {self.pid}" + (f" ({self.name})" if self.name else "")
        return what + (f" of {self.user}" if self.user else "")


@dataclass(frozen=True, slots=True)
class Reading:
    """The measurements of a device at one moment; None for an unknown one."""

    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    processes: tuple[Seen, ...] | None = None
    power: int | None = None


@dataclass(slots=True, eq=False)
class Holder:
    """A worker with shares of devices.

    Attributes:
        job: the task or actor that the worker runs.
        label: the job in words, such as ``#7 train``.
        lasting: whether the job is an actor.
        busy: whether a task or call runs.
        now, peak: bytes in use by device key, as far as known.
        recent: as `peak`, since the last call began.
        reported: bytes that the worker's frameworks reported, by device key.
        pids: processes of the worker that were seen on devices.
        idle: time since which its devices do nothing; None if they work.
    """

    worker: WorkerId
    job: TaskId
    label: str
    shares: Shares
    pid: int | None = None
    lasting: bool = False
    busy: bool = True
    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    recent: dict[str, int] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    idle: float | None = None


class Exceeded(NamedTuple):
    """A worker uses more than its share."""

    worker: WorkerId
    job: TaskId
    text: str


class Remark(NamedTuple):
    """A text for the user; about a task, if one is named."""

    text: str
    job: TaskId | None = None


Finding: TypeAlias = Exceeded | Remark
