"""Who waits: one line for each different demand, and the reservation that ends starvation.

A line is looked at again only when something was freed or its head changed, so that an event
costs the number of different demands, not the number of waiting tasks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gpunb.core.placement import Capacity
from gpunb.core.records import Task
from gpunb.core.resources import UNIT, Allocation, Demand


class Line:
    """Tasks of one demand, first come first served.

    `open` while it is to be looked at, `stuck` once its head was found not to fit.
    """

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
    """All lines, and at most one reservation.

    `obtainable` is what will be free once the tasks that run have ended, without those that wait
    for others. A reservation of more than that could keep things free for ever.
    """

    def __init__(self, age: float, capacity: Capacity, obtainable: Capacity) -> None:
        self.age = age
        self.lines: dict[Demand, Line] = {}
        self.reservation: Reservation | None = None
        self._capacity = capacity
        self._obtainable = obtainable
        self._open: list[Line] = []
        self._ages_at = math.inf

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
        if self.reservation and self.reservation.demand == line.demand:
            self.drop_reservation()
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
        """The lines worth a look, longest waiting head first; each is to be `passed` in turn."""
        lines = []
        for line in self._open:
            if line.head() is None:
                line.open = False
            else:
                lines.append(line)
        self._open.clear()
        if len(lines) > 1:
            lines.sort(key=_order)
        return lines

    def passed(self, line: Line, now: float) -> None:
        """The line was looked at: it is empty, or its head does not fit now.

        It counts as open until here, so that what happens during the look (a task of it starts,
        which may end a reservation) does not call for another.
        """
        line.open = False
        if line.head() is not None:
            line.stuck = True
            self._consider(line, now)

    def grow_older(self, now: float) -> None:
        """See who has waited long enough by now."""
        if now >= self._ages_at:
            self._ages_at = math.inf
            stuck = [line for line in self.lines.values() if line.stuck and line.head()]
            for line in sorted(stuck, key=_order):
                self._consider(line, now)

    def _consider(self, line: Line, now: float) -> None:
        ages_at = line.tasks[0].since + self.age
        if now < ages_at:
            self._ages_at = min(self._ages_at, ages_at)
        elif self.reservation is None and self._obtainable.place(line.demand):
            self.reservation = self._reservation(line.demand)

    def _reservation(self, demand: Demand) -> Reservation:
        """Keep what is soonest enough: of the devices that can serve, those with most room."""
        shares, obtainable = self._capacity.shares, self._obtainable.shares
        places = [
            (units - shares[at], at)
            for group in self._capacity.candidates(demand)
            for at, units in group
            if units <= obtainable[at]
        ]
        count = max(1, demand.gpus // UNIT) if demand.wants_device else 0
        return Reservation(
            demand,
            frozenset(at for _, at in sorted(places)[:count]),
            Allocation(cpus=demand.cpus, resources=demand.resources),
        )

    def drop_reservation(self) -> None:
        """What was kept may be taken by anybody."""
        self.reservation = None
        self.freed()
