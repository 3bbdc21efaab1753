"""What happens when nothing else does: time-outs, exits that take too long, idleness, deadlocks.

Nothing is cancelled. A timer whose target is gone is dropped when it comes first, or with all
others of its kind when there are too many.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Literal, TypeAlias

from gpunb.core.records import Task, Worker
from gpunb.core.tasks import Crashed

if TYPE_CHECKING:
    from gpunb.core.scheduler import Scheduler

Timer: TypeAlias = tuple[float, Literal["timeout", "overdue", "exit", "idle", "stuck"], int, int]
"""(time, kind, id of a task or worker, attempt)"""

_MANY = 1024
_NO_TASK = ("exit", "idle", "stuck")


class Deadlines:
    """Owns the times at which something must be looked at again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._core = scheduler
        self.heap: list[Timer] = []
        self._limit = _MANY
        self._announced: float | None = None
        self._thinning = False

    # ------------------------------------------------------------------------------------ setting

    def runs(self, task: Task, now: float) -> None:
        """An attempt of the task starts."""
        if task.spec.timeout is not None:
            self._add((now + task.spec.timeout, "timeout", task.id, task.attempt))

    def leaves(self, worker: Worker, now: float) -> None:
        """The worker is to end by itself."""
        self._add((now + self._core.policy.exit_grace, "exit", worker.id, 0))

    def idles(self, since: float) -> None:
        """A worker is idle; one timer is enough for all."""
        if not self._thinning:
            self._thinning = True
            self._add((since + self._core.policy.idle_limit, "idle", 0, 0))

    def doubts(self, due: float) -> None:
        """It is to be looked then whether tasks hold one another up."""
        self._add((due, "stuck", 0, 0))

    def forget(self, task: Task) -> None:
        """The attempt that was to start never did."""
        if task.spec.timeout is not None:
            self.heap = [each for each in self.heap if each[2] != task.id or each[1] in _NO_TASK]
            heapq.heapify(self.heap)

    def _add(self, timer: Timer) -> None:
        heapq.heappush(self.heap, timer)
        if len(self.heap) > self._limit:
            self.heap = [each for each in self.heap if self.matters(each)]
            heapq.heapify(self.heap)
            self._limit = max(_MANY, 2 * len(self.heap))

    def matters(self, timer: Timer) -> bool:
        """Whether its target is still there."""
        due, kind, ident, attempt = timer
        if kind == "idle":
            return True
        if kind == "stuck":
            return due == self._core.deadlocks.due
        if kind == "exit":
            worker = self._core.workforce.workers.get(ident)
            return worker is not None and worker.state == "leaving"
        task = self._core.tasks.get(ident)
        return task is not None and task.attempt == attempt and task.worker is not None

    # ---------------------------------------------------------------------------------- going off

    def next(self) -> float | None:
        """The next time, if it was not announced before."""
        while self.heap and not self.matters(self.heap[0]):
            heapq.heappop(self.heap)
        if not self.heap:
            return None
        first = self.heap[0][0]
        if self._announced is not None and self._announced <= first:
            return None
        self._announced = first
        return first

    def reached(self, now: float) -> None:
        """Do what is due."""
        self._announced = None
        while self.heap and self.heap[0][0] <= now:
            timer = heapq.heappop(self.heap)
            if self.matters(timer):
                self._go_off(timer, now)

    def _go_off(self, timer: Timer, now: float) -> None:
        _, kind, ident, _ = timer
        if kind == "exit":
            self._core.workforce.kill(ident)
        elif kind == "idle":
            self._thin(now)
        elif kind == "stuck":
            self._core.deadlocks.look(now)
        elif kind == "timeout":
            self._time_out(self._core.tasks[ident], now)
        else:
            self._overdue(self._core.tasks[ident], now)

    def _time_out(self, task: Task, now: float) -> None:
        core = self._core
        task.stop = task.stop or "timeout"
        core.interrupt(task)
        if not core.actors.leave(task):
            self._add((now + core.policy.stop_grace, "overdue", task.id, task.attempt))

    def _overdue(self, task: Task, now: float) -> None:
        """The task did not stop. Others that run in its process are told why they end too."""
        core = self._core
        assert task.worker is not None
        reason = (
            f"gpunb ended its process, because #{task.id} ({task.spec.name}) did not stop within "
            f"{core.policy.stop_grace:g} s of its timeout of {task.spec.timeout or 0.0:g} s"
        )
        core.workforce.doom(core.workforce.workers[task.worker], Crashed(reason), now)

    def _thin(self, now: float) -> None:
        """Let workers go that were idle for long; look again while there are any."""
        workforce, limit = self._core.workforce, self._core.policy.idle_limit
        idle = workforce.idle
        for worker in [each for each in idle if each.since + limit <= now]:
            workforce.let_go(worker, now)
        self._thinning = False
        longest = idle.idle_since()
        if longest is not None:
            self.idles(longest)
