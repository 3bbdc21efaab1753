"""Who waits: one line for each different demand, and the reservation that ends starvation.

A line is looked at again only when something was freed or its head changed, so that an event
costs the number of different demands, not the number of waiting tasks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gpunb.core.placement import NOTHING, Capacity, Kept
from gpunb.core.records import Task
from gpunb.core.resources import Allocation, Demand


class Line:
    """Tasks of one demand, first come first served; the first one is always there and queued.

    `stuck` once its head was found not to fit; `least` is the same as in the demand's `Fit`.
    """

    __slots__ = ("count", "demand", "least", "stuck", "tasks")

    def __init__(self, demand: Demand, least: int) -> None:
        self.demand = demand
        self.least = least
        self.tasks: deque[Task] = deque()
        self.count = 0
        self.stuck = False

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Task]:
        return (task for task in self.tasks if task.state == "queued")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is kept for a line whose head has waited long."""

    line: Line
    kept: Kept


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
        self._all_open = False
        self._ages_at = math.inf

    def __len__(self) -> int:
        return sum(line.count for line in self.lines.values())

    def push(self, task: Task, *, front: bool = False) -> None:
        demand = task.spec.demand
        line = self.lines.get(demand)
        if line is None:
            line = self.lines[demand] = Line(demand, self._capacity.fit(demand).least)
            self._open.append(line)
        task.state = "queued"
        line.count += 1
        if not front:
            line.tasks.append(task)
            return
        line.tasks.appendleft(task)
        if line.stuck:
            line.stuck = False
            self._open.append(line)

    def put_back(self, task: Task) -> None:
        """Let a task stand again where it stood: behind those that were handed in before it."""
        self.push(task, front=True)
        tasks = self.lines[task.spec.demand].tasks
        behind = 0
        for at, other in enumerate(tasks):
            if other.state == "queued" and other is not task:
                if other.order > task.order:
                    break
                behind = at
        if behind:
            tasks.popleft()
            tasks.insert(behind, task)

    def remove(self, task: Task) -> None:
        """Take a task out that starts or is cancelled; the caller has set its new state."""
        line = self.lines[task.spec.demand]
        tasks = line.tasks
        line.count -= 1
        if self.reservation and self.reservation.line is line:
            self.drop_reservation()
        if not line.count:
            del self.lines[line.demand]
            tasks.clear()
        elif tasks[0] is task:
            while tasks[0].state != "queued":
                tasks.popleft()
        elif len(tasks) > 64 and line.count * 2 < len(tasks):
            line.tasks = deque(line)

    def freed(self) -> None:
        """Something became free: every line is worth a look."""
        self._all_open = True

    def ready(self, now: float) -> list[Line]:
        """The lines worth a look, longest waiting head first; each is to be `passed` in turn."""
        if now >= self._ages_at:
            self._grow_older(now)
        if self._all_open:
            lines = list(self.lines.values())
        elif self._open:
            lines = [line for line in self._open if line.count]
        else:
            return []
        self._open, self._all_open = [], False
        lines.sort(key=_order)
        return lines

    def passed(self, line: Line, now: float) -> None:
        """The line was looked at: it is empty, or its head does not fit now."""
        if not line.count:
            return
        line.stuck = True
        ages_at = line.tasks[0].since + self.age
        if now < ages_at:
            self._ages_at = min(self._ages_at, ages_at)
        elif self.reservation is None and self._obtainable.place(line.demand):
            self.reservation = self._reservation(line)

    def _grow_older(self, now: float) -> None:
        """See who of those that are stuck has waited long enough by now."""
        self._ages_at = math.inf
        for line in sorted((line for line in self.lines.values() if line.stuck), key=_order):
            self.passed(line, now)

    def kept_from(self, line: Line) -> Kept:
        """What the line must leave alone, because it is reserved for another."""
        reservation = self.reservation
        return NOTHING if reservation is None or reservation.line is line else reservation.kept

    def _reservation(self, line: Line) -> Reservation:
        """Keep what is soonest enough: of the devices that can serve, those with most room."""
        demand = line.demand
        shares, obtainable = self._capacity.shares, self._obtainable.shares
        fit = self._capacity.fit(demand)
        devices: list[int] = []
        for part in fit.parts:
            places = [
                (units - shares[at], at)
                for group in part.candidates
                for at, units in group
                if units <= obtainable[at]
            ]
            devices += [at for _, at in sorted(places)[: part.devices]]
        spare = Allocation(cpus=demand.cpus, resources=fit.plain)
        return Reservation(line, Kept(frozenset(devices), spare))

    def refit(self) -> None:
        """What fits where has changed."""
        for line in self.lines.values():
            line.least = self._capacity.fit(line.demand).least
        self.drop_reservation()

    def drop_reservation(self) -> None:
        """What was kept may be taken by anybody."""
        self.reservation = None
        self.freed()
