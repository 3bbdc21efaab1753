"""The queue of waiting tasks: one line for each different demand, depth and priority, and a
reservation.

A line is looked at again only when something became free or another task is its first, so that
the cost of an event depends on the number of different demands, not on the number of tasks.

A task that has waited long gets a reservation: tasks that came later leave it room. `reservation`
says for how long.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections import deque
from collections.abc import Collection
from operator import attrgetter

from gpunb.scheduler.feasibility import NO_DEVICES, NOTHING, Reserved
from gpunb.scheduler.line import Key, Line, key_of
from gpunb.scheduler.reservation import Costs, Reservation
from gpunb.scheduler.resources import Allocation, Gang
from gpunb.scheduler.state import State, Task
from gpunb.scheduler.tasks import TaskSpec
from gpunb.scheduler.timers import Timers

in_turn = attrgetter("order")
_rank = attrgetter("rank")


class Queue:
    """All lines, and at most one reservation.

    A reservation is for obtainable room only: one of more could keep room free for ever.
    """

    def __init__(self, state: State, timers: Timers) -> None:
        self.lines: dict[Key, Line] = {}
        self.reservation: Reservation | None = None
        self.costs = Costs(state)
        self._timers = timers
        self._state = state
        self._age = state.policy.age
        self._capacity = state.capacity
        self._obtainable = state.obtainable
        self._changed: list[Line] = []
        self._ages_at = math.inf
        self._expected, self._mean = 0, 0.0  # count and mean of the expected times
        self._unknown, self._places = 0.0, itertools.count()
        self._seen: tuple[Reservation | None, int, int] | None = None
        self.room_freed = False
        """Whether room became free, so that any line may fit now."""

    def settle(self, now: float) -> None:
        """After each event: set the time at which the reservation is given up, unless that is set
        for an earlier time."""
        kept, capacity = self.reservation, self._capacity
        if kept is not None and not self._contested:
            kept = None
        seen = kept, capacity.moves, capacity.cpus
        if seen != self._seen:
            self._seen = seen
            end = self.costs.look(now, kept)
            if end < (self._timers.reservation_end or math.inf):
                self._timers.set_reservation_end(end)

    @property
    def _contested(self) -> bool:
        """Whether others wait than the line with the reservation."""
        return len(self.lines) > 1 or bool(self._state.wanted)

    def enter(self, task: Task) -> None:
        """Add a task that waits for nothing but room from now on."""
        task.rank = self._turn(task.spec, self._state.now), next(self._places)
        self.push(task)

    def _turn(self, spec: TaskSpec, since: float) -> float:
        """The first part of the rank of a task that waits since then.

        It goes later the longer it is expected to run, unless it has a priority. One of which
        nothing is known counts as a usual one, and those of which nothing is known stay in order.
        """
        policy, late = self._state.policy, spec.expected
        if late is not None:
            self._expected += 1
            self._mean += (late - self._mean) / self._expected
        if spec.priority > 0:
            late = 0.0
        elif late is None:
            self._unknown = max(self._unknown, since + policy.short_first * self._mean)
            return self._unknown - policy.priority_step * spec.priority
        return since + policy.short_first * late - policy.priority_step * spec.priority

    def push(self, task: Task, *, front: bool = False) -> None:
        """Add a task to its line."""
        task.set_state("queued")
        self._join(task, front=front)

    def _join(self, task: Task, *, front: bool) -> None:
        line = self.lines.get(key := key_of(task))
        if line is None:
            least = self._capacity.fit(task.spec.demand).least
            line = self.lines[key] = Line(key, least, self._age)
            self._changed.append(line)
        line.count += 1
        tasks = line.tasks
        if front:
            tasks.appendleft(task)
        elif not tasks or tasks[-1].rank < task.rank:
            tasks.append(task)
        else:
            tasks.insert(bisect(tasks, task.rank, key=_rank), task)
        if tasks[0] is task:
            self._first_changed(line)

    def line_of(self, task: Task) -> Line | None:
        """The line in which a task waits, if it is queued."""
        return self.lines.get(key_of(task))

    def push_again(self, task: Task, now: float) -> None:
        """Add a task for another attempt, before all others of its line."""
        task.worker, task.since = None, now
        self.push(task, front=True)

    def put_back(self, task: Task) -> None:
        """Give a task that did not start its place in the line again."""
        task.worker, task.since = None, task.queued_since
        self.push(task)

    def _first_changed(self, line: Line) -> None:
        first = line.tasks[0]
        line.order, line.ages_at = first.rank, first.since + self._age
        if line.stuck:
            line.stuck = False
            self._changed.append(line)

    def remove(self, task: Task) -> None:
        """Take out a task that is cancelled; the caller has set its new state."""
        self.take(self.lines[key_of(task)], task)

    def move(self, task: Task, depth: int) -> None:
        """Let a queued task be the last in the line of another, greater depth."""
        line = self.lines[key_of(task)]
        task.depth = depth
        self.take(line, task)
        self._join(task, front=False)

    def change(self, task: Task, spec: TaskSpec) -> None:
        """Let a queued task ask for something else, in the place that its expected time gives."""
        line, depth = self.lines[key_of(task)], task.depth
        if line.tasks[0] is not task:
            line.tasks.remove(task)
        task.depth = -1  # it is not in this line any more
        self.take(line, task)
        if spec.expected is not None and spec.expected != task.spec.expected:
            task.rank = self._turn(spec, task.since), task.rank[1]
        task.depth, task.spec = depth, spec
        self._join(task, front=False)

    def prefer_others(self, line: Line, functions: Collection[str]) -> None:
        """Let the first task of the line be one that calls none of these functions, if any does."""
        first = next((task for task in line if task.spec.function not in functions), None)
        if first is not None and first is not line.tasks[0]:
            line.tasks.remove(first)
            line.tasks.appendleft(first)
            self._first_changed(line)

    def take(self, line: Line, task: Task) -> None:
        """Take a task that starts out of its line; the caller has set its new state."""
        tasks = line.tasks
        line.count -= 1
        if self.reservation and self.reservation.line is line:
            self.drop_reservation()
        if not line.count:
            del self.lines[line.demand, line.depth, line.priority]
            tasks.clear()
        elif tasks[0] is task:
            while not line.has(tasks[0]):
                tasks.popleft()
            self._first_changed(line)
        if len(tasks) > 64 and line.count * 2 < len(tasks):
            line.tasks = deque(line)

    def take_changed(self, now: float) -> list[Line]:
        """The lines to try now, in any order; the caller marks each as tried."""
        if now >= self._ages_at:
            self.costs.elapse(now)
            # The first tasks of some stuck lines have waited long by now.
            self._ages_at = math.inf
            for line in sorted((line for line in self.lines.values() if line.stuck), key=in_turn):
                self.mark_tried(line, now)
        if self.room_freed:
            lines = list(self.lines.values())
        elif self._changed:
            lines = [line for line in self._changed if line.count]
        else:
            return []
        self._changed, self.room_freed = [], False
        self.costs.elapse(now)
        return lines

    def that_may_fit(self, lines: list[Line], now: float) -> list[Line]:
        """Leave out lines that stay stuck: too large for the free room, and without a reservation
        now, because they are too young or another line has one."""
        reservation, capacity = self.reservation, self._capacity
        free = capacity.room(NO_DEVICES)
        cpus = max(0, capacity.cpus)  # below 0 if tasks go on that had lent their CPUs
        if reservation is None:
            may_begin = self.costs.cpus.may_begin, self.costs.devices.may_begin
            return [
                line
                for line in lines
                if (line.least <= free and line.cpus <= cpus)
                or not line.stuck
                or (now >= line.ages_at and may_begin[line.least > 0])
            ]
        first, turn = reservation.line, reservation.line.order
        beside = capacity.room(reservation.reserved.devices)
        return [
            line
            for line in lines
            if (
                line.least <= free
                and line.cpus <= cpus
                and (line.least <= beside or line.order < turn)
            )
            or not line.stuck
            or line is first
        ]

    def mark_tried(self, line: Line, now: float) -> None:
        """Note that the line is empty or stuck. A line that has waited long gets a reservation,
        unless it waits for the end of loans."""
        if not line.count:
            return
        line.stuck = True
        if now < line.ages_at:
            self._ages_at = min(self._ages_at, line.ages_at)
        elif line.held:
            if self.reservation and self.reservation.line is line:
                self.drop_reservation()
        elif line.demand.within is None and (self.reservation is None or self._goes_before(line)):
            obtainable = self._obtainable
            if (
                self._affordable(line)
                and not obtainable.surely_lacks(line.least, line.cpus, NO_DEVICES)
                and obtainable.place(line.demand)
            ):
                self.room_freed = self.room_freed or self.reservation is not None
                self.reservation = Reservation(line, self._room_for(line), now)

    def reserved_against(self, line: Line) -> Reserved:
        """The room that the line must leave for another line."""
        reservation = self.reservation if line.demand.within is None else None
        if reservation is None or line.order <= reservation.line.order:
            return NOTHING
        return reservation.reserved

    def _goes_before(self, line: Line) -> bool:
        """Whether the priority of the line puts it before the line that has the reservation."""
        kept = self.reservation.line if self.reservation is not None else line
        return line.priority > kept.priority and line.order < kept.order

    def _affordable(self, line: Line) -> bool:
        """Whether room may be kept for the line, by the price of all kept room so far."""
        return (self.costs.devices if line.least else self.costs.cpus).may_begin

    def end_reservation(self, now: float) -> None:
        """Give the kept room up, if it has become too dear."""
        self.costs.elapse(now)
        kept, self._timers.reservation_end, self._seen = self.reservation, None, None
        if kept and self._contested and self.costs.account(kept.reserved).left < 1:
            self.drop_reservation()

    def _room_for(self, line: Line) -> Reserved:
        """Choose the devices with most room, of those that can serve: they are free soonest."""
        demand = line.demand
        shares, obtainable = self._capacity.shares, self._obtainable.shares
        fit = self._capacity.fit(demand)
        spare = Allocation(cpus=demand.cpus, resources=fit.plain)
        devices: list[int] = []
        if isinstance(demand, Gang):
            idle = self._obtainable.copy()
            idle.shunned |= {at for at, units in enumerate(obtainable) if shares[at] < units}
            placed = idle.place(demand) or Allocation()
            devices = [idle.position[key] for key, _ in placed.shares]
        for part in () if isinstance(demand, Gang) else fit.parts:
            places = [
                (units - shares[at], at)
                for group in part.candidates
                for at, units in group
                if units <= obtainable[at]
            ]
            devices += [at for _, at in sorted(places)[: part.devices]]
        return Reserved(frozenset(devices), spare)

    def refit(self) -> None:
        """Compute again how much each line needs, after a device was lost."""
        for line in self.lines.values():
            line.least = self._capacity.fit(line.demand).least
        self.drop_reservation()

    def drop_reservation(self) -> None:
        """Let every line use the room that was kept for one."""
        self.reservation = self._timers.reservation_end = None
        self.room_freed = True
