"""Timers: time limits of tasks, slow exits, idle workers, restarts, checks for deadlocks and loans.

No timer is cancelled. A timer without a target is dropped when its turn comes, or together with
all others of this sort once there are many.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal, TypeAlias

from gpunb.scheduler.state import Actor, State, Task, Worker

Kind: TypeAlias = Literal[
    "timeout", "overdue", "exit", "idle", "stuck", "again", "loan", "park", "kept", "ahead"
]
"""Of timers that go off at the same time, the first in the alphabet does so first."""

Timer: TypeAlias = tuple[float, Kind, int, int]
"""(time, kind, id of a task or worker, attempt)"""

AHEAD_FOR = 0.05
"""Seconds for which a task that was sent ahead may wait for the tasks before it."""

_MANY = 1024


class Timers:
    """The timers of a scheduler; `deadlock_check` and `loan_check` are times of the next checks,
    `reservation_end` is the end of the time for which room is kept, `ahead_end` that for which
    workers may keep tasks that they were sent ahead."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.heap: list[Timer] = []
        self.deadlock_check: float | None = None
        self.loan_check: float | None = None
        self.reservation_end: float | None = None
        self.ahead_end: float | None = None
        self._limit = _MANY
        self._announced: float | None = None

    def set_timeout(self, task: Task, now: float) -> None:
        """Limit the time of the attempt that starts now."""
        if task.spec.timeout is not None:
            self._add((now + task.spec.timeout, "timeout", task.id, task.attempt))

    def set_overdue(self, task: Task, now: float) -> None:
        """Limit the time in which an interrupted attempt has to stop."""
        self._add((now + self._state.policy.stop_grace, "overdue", task.id, task.attempt))

    def set_exit(self, worker: Worker, now: float) -> None:
        """Limit the time in which a leaving worker has to end."""
        self._add((now + self._state.policy.exit_grace, "exit", worker.id, 0))

    def set_idle(self, since: float) -> None:
        """Look for workers that are idle for long; `since` is when the first of them was idle."""
        self._add((since + self._state.policy.idle_limit, "idle", 0, 0))

    def set_deadlock_check(self, due: float) -> None:
        """Set the time of the next check for deadlocks."""
        self.deadlock_check = due
        self._add((due, "stuck", 0, 0))

    def set_loan_check(self, due: float) -> None:
        """Set the time at which kept CPUs have been idle for too long."""
        self.loan_check = due
        self._add((due, "loan", 0, 0))

    def set_reservation_end(self, due: float) -> None:
        """Set the end of the time for which room is kept."""
        self.reservation_end = due
        self._add((due, "kept", 0, 0))

    def set_ahead_end(self, now: float) -> None:
        """Set the end of the time for which workers may keep tasks that they were sent ahead."""
        self.ahead_end = now + AHEAD_FOR
        self._add((self.ahead_end, "ahead", 0, 0))

    def set_restart(self, constructor: Task, due: float) -> None:
        """Start the constructor of an actor again at that time."""
        self._add((due, "again", constructor.id, constructor.attempt))

    def set_park(self, actor: Actor, now: float) -> None:
        """Park an actor if it is idle for long from now on."""
        self._add((now + (self._state.policy.park_after or 0.0), "park", actor.id, 0))

    def drop_timeout(self, task: Task) -> None:
        """Drop the time limit of an attempt that did not start."""
        if task.spec.timeout is not None:
            kinds = ("timeout", "overdue", "again")
            self.heap = [each for each in self.heap if each[2] != task.id or each[1] not in kinds]
            heapq.heapify(self.heap)

    def _add(self, timer: Timer) -> None:
        heapq.heappush(self.heap, timer)
        if len(self.heap) > self._limit:
            self.heap = [each for each in self.heap if self.matters(each)]
            heapq.heapify(self.heap)
            self._limit = max(_MANY, 2 * len(self.heap))

    def matters(self, timer: Timer) -> bool:
        """Whether the target of a timer is still there."""
        due, kind, ident, attempt = timer
        if kind == "exit":
            worker = self._state.workers.get(ident)
            return worker is not None and worker.state == "leaving"
        if kind == "idle":
            return True
        if kind == "stuck":
            return due == self.deadlock_check
        if kind == "loan":
            return due == self.loan_check
        if kind == "kept":
            return due == self.reservation_end
        if kind == "ahead":
            return due == self.ahead_end
        if kind == "park":
            actor, limit = self._state.actors.get(ident), self._state.policy.park_after or 0.0
            idle = actor is not None and actor.state == "alive" and not actor.running
            return actor is not None and idle and due >= actor.idle_since + limit
        task = self._state.tasks.get(ident)
        if task is None or task.attempt != attempt:
            return False
        return task.state == "waiting" if kind == "again" else task.worker is not None

    def next_wake(self) -> float | None:
        """The time of the first timer; None if it was announced already."""
        while self.heap and not self.matters(self.heap[0]):
            heapq.heappop(self.heap)
        if not self.heap:
            return None
        first = self.heap[0][0]
        if self._announced is not None and self._announced <= first:
            return None
        self._announced = first
        return first

    def pop_due(self, now: float) -> Iterator[Timer]:
        """Take out the timers that go off now, one by one: each may end the next one's target."""
        self._announced = None
        while self.heap and self.heap[0][0] <= now:
            timer = heapq.heappop(self.heap)
            if self.matters(timer):
                yield timer
