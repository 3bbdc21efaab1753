"""Starts queued tasks: tries the lines of the queue while there is room."""

from __future__ import annotations

import math

from gpunb.scheduler import events as ev
from gpunb.scheduler.line import Line
from gpunb.scheduler.loans import Loans
from gpunb.scheduler.queue import Queue, in_turn
from gpunb.scheduler.state import State, Task, Worker
from gpunb.scheduler.timers import Timers
from gpunb.scheduler.workers import Workers

_FEW_LINES = 3
"""Up to this number of lines, trying all of them is cheaper than filtering first."""


class Starts:
    """Starts attempts of tasks, on new workers or on idle ones."""

    def __init__(
        self, state: State, queue: Queue, workers: Workers, timers: Timers, loans: Loans
    ) -> None:
        self._state = state
        self._queue = queue
        self._workers = workers
        self._timers = timers
        self._loans = loans

    def start_queued(self, now: float) -> None:
        """After each event: start the queued tasks for which there is room."""
        queue, idle = self._queue, self._workers.idle
        while lines := queue.take_changed(now):
            if len(lines) > _FEW_LINES and not idle.warm:
                lines = queue.that_may_fit(lines, now)
            lines.sort(key=in_turn, reverse=True)  # the longest waiting one last
            while lines:
                line, kept = lines.pop(), queue.reservation
                tried, started = not line.stuck, self._start_from(line, now)
                if started and queue.room_freed:
                    break  # a reservation ended: other lines may have room again
                if tried or started or line.held or kept is None:
                    queue.mark_tried(line, now)
                less_room = started or queue.reservation is not kept
                if less_room and len(lines) > _FEW_LINES and not idle.warm:
                    lines = queue.that_may_fit(lines, now)

    def _start_from(self, line: Line, now: float) -> bool:
        """Start tasks of the line while there is room. True if any started."""
        queue, workers, capacity = self._queue, self._workers, self._state.capacity
        loans, least, cpus, started = self._loans, line.least, line.cpus, False
        while line.count:
            if (loans.kept or line.held) and loans.holds_back(line, now):
                break
            reserved = queue.reserved_against(line)
            # Warm workers may hold the devices that lack; then only `hire` can tell.
            warm = least and workers.idle.warm
            if not warm and capacity.surely_lacks(least, cpus, reserved.devices):
                break
            task = line.tasks[0]
            hired = workers.hire(task, reserved, now)
            if hired is None:
                break
            if line.held_since < math.inf:
                loans.started(line, now)
            line.stuck, started = False, True
            worker, new = hired
            task.set_state("running")
            task.queued_since = task.since
            queue.take(line, task)
            if worker.actor is not None:
                self._state.actors[task.id].worker = worker.id
            self.launch(task, worker, now, new=new)
        return started

    def launch(
        self, task: Task, worker: Worker, now: float, *, new: bool, ahead: bool = False
    ) -> None:
        """Start the next attempt of a task, whose state is "running" already."""
        task.since, task.worker = now, worker.id
        task.attempt += 1
        last = self._workers.assign(task, worker)
        prepared, worker.prepared = worker.prepared, False
        if task.id == worker.actor and (actor := self._state.actors[task.id]).state == "parked":
            actor.restores = task.attempt
            self._state.decisions.append(
                ev.Restore(task.id, task.attempt, worker.id, worker.allocation)
            )
            return
        self._timers.set_timeout(task, now)
        self._state.decisions.append(
            ev.Run(task.id, task.attempt, worker.id, worker.allocation, new, last, prepared, ahead)
        )
