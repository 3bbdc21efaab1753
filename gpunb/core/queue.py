"""Who waits: one line for each different demand, and the reservation that ends starvation.

A line is looked at again only when something was freed or its head changed, so that an event
costs the number of different demands, not the number of waiting tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gpunb.core.placement import Capacity
from gpunb.core.records import Task
from gpunb.core.resources import UNIT, Allocation, Demand


class Line:
    """Tasks of one demand, first come first served."""

    __slots__ = ("count", "demand", "open", "stuck", "tasks")

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.tasks: deque[Task] = deque()
        self.count = 0
        self.open = False
        self.stuck = False

    def head(self) -> Task | None:
        tasks = self.tasks
        while tasks and tasks[0].state != "queued":
            tasks.popleft()
        return tasks[0] if tasks else None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Task]:
        return (task for task in self.tasks if task.state == "queued")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is kept for a demand that has waited long: devices by position, CPUs and resources."""

    demand: Demand
    devices: frozenset[int]
    spare: Allocation


def _order(line: Line) -> int:
    return line.tasks[0].order


class Queue:
    """All lines, and at most one reservation."""

    def __init__(self, age: float) -> None:
        self.age = age
        self.lines: dict[Demand, Line] = {}
        self.reservation: Reservation | None = None
        self._open: list[Line] = []
        self._ages_at: float | None = None

    def __len__(self) -> int:
        return sum(line.count for line in self.lines.values())

    def push(self, task: Task, *, front: bool = False) -> None:
        demand = task.spec.demand
        line = self.lines.get(demand)
        if line is None:
            line = self.lines[demand] = Line(demand)
        task.state = "queued"
        line.count += 1
        if front:
            line.tasks.appendleft(task)
            line.stuck = False
        else:
            line.tasks.append(task)
        if not line.stuck:
            self._look_at(line)

    def _look_at(self, line: Line) -> None:
        line.stuck = False
        if not line.open:
            line.open = True
            self._open.append(line)

    def remove(self, task: Task) -> None:
        """Take a task out that starts or is cancelled; the caller has set its new state."""
        line = self.lines[task.spec.demand]
        line.count -= 1
        if self.reservation and self.reservation.demand == task.spec.demand:
            self.reservation = None
            self.freed()
        if not line.count:
            del self.lines[line.demand]
        elif line.tasks[0] is task:
            line.tasks.popleft()
            self._look_at(line)
        elif len(line.tasks) > 64 and line.count * 2 < len(line.tasks):
            line.tasks = deque(line)

    def freed(self) -> None:
        """Something became free: every line is worth a look."""
        for line in self.lines.values():
            self._look_at(line)

    def ready(self) -> list[Line]:
        """The lines worth a look, longest waiting head first; each is to be emptied or stuck."""
        lines = [line for line in self._open if line.head() is not None]
        for line in self._open:
            line.open = False
        self._open.clear()
        if len(lines) > 1:
            lines.sort(key=_order)
        return lines

    def stick(self, line: Line) -> None:
        """The line's head does not fit now."""
        line.stuck = True
        ages_at = line.tasks[0].since + self.age
        if self._ages_at is None or ages_at < self._ages_at:
            self._ages_at = ages_at

    def reserve(self, capacity: Capacity, now: float) -> None:
        """Make a reservation for the task that has waited longest, if any waited long enough."""
        if self.reservation or self._ages_at is None or now < self._ages_at:
            return
        heads = [head for line in self.lines.values() if line.stuck and (head := line.head())]
        self._ages_at = min((head.since + self.age for head in heads), default=None)
        aged = [head for head in heads if head.since + self.age <= now]
        if aged:
            task = min(aged, key=lambda head: head.order)
            self.reservation = _reservation(task, capacity)


def _reservation(task: Task, capacity: Capacity) -> Reservation:
    """Keep what is soonest enough: of the devices that could serve, those with the most free."""
    demand = task.spec.demand
    places = [each for group in capacity.candidates(demand) for each in group]
    places.sort(key=lambda each: (-capacity.shares[each[0]], each[0]))
    count = max(1, demand.gpus // UNIT) if demand.wants_device else 0
    return Reservation(
        demand,
        frozenset(at for at, _ in places[:count]),
        Allocation(cpus=demand.cpus, resources=demand.resources),
    )
