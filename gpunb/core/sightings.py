"""What is seen on devices, who holds them, and what may be found: the values of the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gpunb.core.resources import Shares
from gpunb.core.tasks import TaskId, WorkerId


class Seen(NamedTuple):
    """A process on a device: `line` is its id and those of its ancestors, nearest first."""

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
    """A device at one moment; None for what is not known, as in the plug-ins."""

    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    processes: tuple[Seen, ...] | None = None


@dataclass(slots=True, eq=False)
class Holder:
    """A worker with shares of devices, and the task or actor that it has them for.

    Attributes:
        label: in words, such as ``#7 train``.
        busy: whether it runs something; an actor may only be kept.
        now, peak: bytes by device key, as far as known.
        recent: as `peak`, since its call began.
        said: what its frameworks say of their memory, where the device does not tell.
        pids: its processes that were seen on devices.
        idle: since when its devices do nothing; None if they do.
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
    said: dict[str, int] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    idle: float | None = None


class Exceeded(NamedTuple):
    """A worker takes more than its share."""

    worker: WorkerId
    job: TaskId
    text: str


class Remark(NamedTuple):
    """Something the user may want to know; about a task, if one is named."""

    text: str
    job: TaskId | None = None


Finding: TypeAlias = Exceeded | Remark
