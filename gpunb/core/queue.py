"""Who waits: one line for each different demand, and the reservation that ends starvation.

A line is looked at again only when something was freed or its head changed, so that an event
costs the number of different demands, not the number of waiting tasks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from gpunb.core.placement import NO_DEVICES, NOTHING, Capacity, Kept
from gpunb.core.records import Task
from gpunb.core.resources import UNIT, Allocation, Demand


class Line:
    """Tasks of one demand, first come first served; the first one is always there and queued.

    `stuck` once its head was found not to fit, which has waited long by `ages_at`, and came at
    its place in the `order` of all tasks. `least` is the same as in the demand's `Fit`, and
    `whole` says that wholly free devices count.
    """

    __slots__ = ("ages_at", "count", "cpus", "demand", "least", "order", "stuck", "tasks", "whole")

    def __init__(self, demand: Demand, least: int) -> None:
        self.demand = demand
        self.cpus = demand.cpus
        self.expect(least)
        self.tasks: deque[Task] = deque()
        self.count = 0
        self.stuck = False
        self.order = 0
        self.ages_at = math.inf

    def expect(self, least: int) -> None:
        """It takes at least so much."""
        self.least, self.whole = least, least >= UNIT

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Task]:
        return (task for task in self.tasks if task.state == "queued")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is kept for a line whose head has waited long."""

    line: Line
    kept: Kept


_order = attrgetter("order")


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
            if line.count == 1:
                self._headed(line)
            return
        line.tasks.appendleft(task)
        self._headed(line)

    def put_back(self, task: Task) -> None:
        """Let a task stand again where it stood: behind those that were handed in before it."""
        self.push(task, front=True)
        line = self.lines[task.spec.demand]
        tasks = line.tasks
        behind = 0
        for at, other in enumerate(tasks):
            if other.state == "queued" and other is not task:
                if other.order > task.order:
                    break
                behind = at
        if behind:
            tasks.popleft()
            tasks.insert(behind, task)
            self._headed(line)

    def _headed(self, line: Line) -> None:
        """Another task is the first of the line, which is worth a look for that."""
        head = line.tasks[0]
        line.order, line.ages_at = head.order, head.since + self.age
        if line.stuck:
            line.stuck = False
            self._open.append(line)

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
            self._headed(line)
        elif len(tasks) > 64 and line.count * 2 < len(tasks):
            line.tasks = deque(line)

    def freed(self) -> None:
        """Something became free: every line is worth a look."""
        self._all_open = True

    @property
    def stale(self) -> bool:
        """Every line is worth a look."""
        return self._all_open

    def ready(self, now: float) -> list[Line]:
        """The lines worth a look, longest waiting head last; each is to be `passed` in turn."""
        if now >= self._ages_at:
            self._grow_older(now)
        if self._all_open:
            lines = list(self.lines.values())
        elif self._open:
            lines = [line for line in self._open if line.count]
        else:
            return []
        self._open, self._all_open = [], False
        lines.sort(key=_order, reverse=True)
        return lines

    def hopeful(self, lines: list[Line], now: float) -> list[Line]:
        """These without those that are stuck as before: too large for what is free, and too
        young for a reservation or too late for one."""
        reservation, capacity = self.reservation, self._capacity
        if reservation is None:
            first, (share, whole) = None, capacity.room(NO_DEVICES)
        else:
            first, (share, whole) = reservation.line, capacity.room(reservation.kept.devices)
        cpus = max(0, capacity.cpus)  # those who went on may have taken more than there are
        return [
            line
            for line in lines
            if (line.least <= (whole if line.whole else share) and line.cpus <= cpus)
            or not line.stuck
            or line is first
            or (first is None and now >= line.ages_at)
        ]

    def passed(self, line: Line, now: float) -> None:
        """The line was looked at: it is empty, or its head does not fit now."""
        if not line.count:
            return
        line.stuck = True
        if now < line.ages_at:
            self._ages_at = min(self._ages_at, line.ages_at)
        elif self.reservation is None:
            least, obtainable = line.least, self._obtainable
            if not obtainable.hopeless(least, line.cpus, NO_DEVICES) and obtainable.place(
                line.demand
            ):
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
            line.expect(self._capacity.fit(line.demand).least)
        self.drop_reservation()

    def drop_reservation(self) -> None:
        """What was kept may be taken by anybody."""
        self.reservation = None
        self.freed()
