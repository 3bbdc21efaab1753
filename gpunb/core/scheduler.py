"""The scheduler: `handle(event, now)` answers with decisions, and is all there is to it.

Rules:
- A task is settled exactly once. What is late, doubled or stale changes nothing.
- What a worker holds is free again when `WorkerExited` says that it is gone.
- Time is an argument, so that a list of (event, now) replays any run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import assert_never

from gpunb.core import events as ev
from gpunb.core.actors import Actors
from gpunb.core.deadlines import Deadlines
from gpunb.core.deadlock import Deadlocks
from gpunb.core.outside import Outside
from gpunb.core.queue import Line, Queue
from gpunb.core.records import Task, Worker
from gpunb.core.resources import Demand, Machine
from gpunb.core.tasks import (
    Cancelled,
    Crashed,
    Exited,
    Interrupted,
    Outcome,
    Raised,
    Refused,
    Report,
    Succeeded,
    TaskId,
    UpstreamFailed,
)
from gpunb.core.workforce import Workforce

_FEW = 3
"""Lines that are sooner looked at than sifted."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's settings; times in seconds.

    Attributes:
        age: a request that waited this long gets a reservation.
        stop_grace: between the interrupt of a timed-out task and its end by force.
        exit_grace: for a worker to end after its last task.
        idle_limit: after which an idle worker is let go.
        max_workers: workers that may run tasks at once, blocked ones not counted.
        deadlock_after: tasks wait for others and others wait for room this long before it is
            looked whether they hold one another up.
    """

    age: float = 10.0
    stop_grace: float = 5.0
    exit_grace: float = 5.0
    idle_limit: float = 60.0
    max_workers: int = 256
    deadlock_after: float = 0.25


class Scheduler:
    """Decides what runs where and when. Not thread-safe: one thread feeds it."""

    def __init__(self, machine: Machine, policy: Policy | None = None) -> None:
        self.machine = machine
        self.policy = policy or Policy()
        self.workforce = Workforce(self, machine)
        self.capacity = self.workforce.capacity
        self.queue = Queue(self.policy.age, self.capacity, self.workforce.obtainable)
        self.tasks: dict[TaskId, Task] = {}
        self.deadlines = Deadlines(self)
        self.deadlocks = Deadlocks(self)
        self.actors = Actors(self)
        self.outside = Outside(self)
        self._children: dict[TaskId, set[TaskId]] = {}
        self._dependents: dict[TaskId, list[TaskId]] = {}
        self._order = itertools.count()
        self._out: list[ev.Decision] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        """What is to be done now that `event` has happened; `now` in seconds, never less than
        before."""
        out: list[ev.Decision] = []
        self._out = out
        match event:
            case ev.Finished():
                self._finished(event, now)
            case ev.Submitted():
                self.admit(Task(event.task, event.spec, now, event.parent), event.needs)
            case ev.WorkerExited():
                self._exited(event, now)
            case ev.Blocked():
                self._block(event.task, event.attempt, event)
            case ev.Unblocked():
                self._block(event.task, event.attempt, None)
            case ev.CallSubmitted():
                self.actors.call(event, now)
            case ev.ActorCreated():
                self.actors.create(event, now)
            case ev.CancelRequested():
                self._cancel(event.task, event.force, event.recursive)
            case ev.InterruptRequested():
                self._stop(event.task)
            case ev.KillRequested():
                self.actors.kill(event)
            case ev.ActorReleased():
                self.actors.release(event.actor)
            case (
                ev.ReleaseRequested()
                | ev.ShareExceeded()
                | ev.DeviceLost()
                | ev.OutsideChanged()
                | ev.LeaseRefused()
            ):
                self._take_back(event, now)
            case ev.TimeReached():
                self.deadlines.reached(now)
            case _:
                assert_never(event)
        self.actors.go_on(now)
        self._dispatch(now)
        self.deadlocks.watch(now)
        self.outside.watch()
        wake = self.deadlines.next()
        if wake is not None:
            out.append(ev.WakeAt(wake))
        return out

    def decide(self, decision: ev.Decision) -> None:
        self._out.append(decision)

    # ------------------------------------------------------------------------------- into the line

    def admit(self, task: Task, needs: tuple[TaskId, ...]) -> bool:
        """Book a new task and let it wait for its inputs, or in line. False if it is known, or
        over already."""
        if task.id in self.tasks:
            return False
        self.tasks[task.id] = task
        task.order = next(self._order)
        if task.parent is not None:
            self._children.setdefault(task.parent, set()).add(task.id)
            parent = self.tasks.get(task.parent)
            if parent is not None and parent.disowned:
                self.settle(task, Cancelled())
                return False
        if task.queues:
            reason = self.capacity.fit(task.spec.demand).refusal
            if reason:
                self.settle(task, Refused(reason))
                return False
        unfinished = {need for need in needs if need != task.id and self._is_open(need)}
        if unfinished:
            task.needs = unfinished
            for need in unfinished:
                self._dependents.setdefault(need, []).append(task.id)
        elif task.queues:
            self.queue.push(task)
        return True

    def _is_open(self, ident: TaskId) -> bool:
        task = self.tasks.get(ident)
        return task is not None and not task.settled

    def requeue(self, task: Task, now: float) -> None:
        """Let a task run again, before others of its kind."""
        task.worker, task.since = None, now
        self.queue.push(task, front=True)

    # ---------------------------------------------------------------------------------- out of it

    def _dispatch(self, now: float) -> None:
        queue, idle = self.queue, self.workforce.idle
        while lines := queue.ready(now):
            if not idle.warm:
                lines = queue.hopeful(lines, now)
            while lines:
                line = lines.pop()
                news = not line.stuck
                if self._start_from(line, now):
                    if queue.stale:
                        break  # a reservation ended: look again at those that stepped back for it
                    news = True
                    if len(lines) > _FEW and not idle.warm:
                        lines = queue.hopeful(lines, now)
                if news or queue.reservation is None:
                    queue.passed(line, now)

    def _start_from(self, line: Line, now: float) -> bool:
        """Start tasks of the line while there is room; whether there was for any."""
        queue, workforce = self.queue, self.workforce
        capacity, idle = workforce.capacity, workforce.idle
        least, cpus, started = line.least, line.cpus, False
        while line.count:
            kept = queue.kept_from(line)
            # Warm workers may hold what the capacity lacks; then only `hire` can tell.
            warm = least and idle.warm
            if not warm and capacity.hopeless(least, cpus, kept.devices):
                break
            hired = workforce.hire(line.tasks[0], kept, now)
            if hired is None:
                break
            line.stuck, started = False, True
            self._start(line.tasks[0], *hired, now)
        return started

    def _start(self, task: Task, worker: Worker, new: bool, now: float) -> None:
        task.state, task.waited = "running", task.since
        self.queue.remove(task)
        if worker.actor is not None:
            self.actors.starts(task, worker)
        self.launch(task, worker, now, new=new)

    def launch(self, task: Task, worker: Worker, now: float, *, new: bool) -> None:
        """Put the task's next attempt on the worker, whose state and room are settled."""
        task.state, task.since, task.worker = "running", now, worker.id
        task.attempt += 1
        last = self.workforce.assign(task, worker)
        self.deadlines.runs(task, now)
        self._out.append(
            ev.Run(task.id, task.attempt, worker.id, worker.allocation, new=new, last=last)
        )

    # -------------------------------------------------------------------------------- endings

    def _finished(self, event: ev.Finished, now: float) -> None:
        task = self.tasks.get(event.task)
        if task is None or task.state != "running":
            return
        if task.attempt != event.attempt or task.worker != event.worker:
            return
        worker = self.workforce.workers[event.worker]
        self._relieve(task, worker)
        if worker.actor is not None:
            self.actors.finished(task, event.report, now)
            return
        if isinstance(event.report, Exited):
            worker.key = None
        self.workforce.free(worker, now)
        if isinstance(event.report, Interrupted) and worker.state == "idle":
            # It may have hit an import, which would stay half done for whoever comes next.
            self.workforce.let_go(worker, now)
        if not self._retried(task, event.report, now):
            self.settle(task, task.outcome(event.report))

    def _exited(self, event: ev.WorkerExited, now: float) -> None:
        worker = self.workforce.workers.get(event.worker)
        if worker is None:
            return
        lost = [self.tasks[ident] for ident in sorted(worker.tasks)]
        for task in lost:
            self._relieve(task, worker)
        self.workforce.gone(worker)
        crash = worker.doom or Crashed(event.reason, event.out_of_memory)
        if worker.actor is not None:
            self.actors.exited(worker, crash, now)
            return
        for task in lost:
            if not self._retried(task, crash, now):
                self.settle(task, task.outcome(crash))

    def _relieve(self, task: Task, worker: Worker) -> None:
        self.workforce.relieve(task, worker)
        self.deadlocks.unblocked(task)

    def _retried(self, task: Task, report: Report | Crashed, now: float) -> bool:
        again = isinstance(report, Crashed) or (isinstance(report, Raised) and report.retry)
        if not again or not self.may_retry(task) or not self.feasible(task.spec.demand):
            return False
        if isinstance(report, Crashed) and report.stopped:
            return False
        task.retries += 1
        self.requeue(task, now)
        return True

    @staticmethod
    def may_retry(task: Task) -> bool:
        limit = task.spec.max_retries
        return task.stop is None and (limit < 0 or task.retries < limit)

    def settle(self, task: Task, outcome: Outcome) -> None:
        """End the task for good, and with it, unless it succeeded, all that need its result."""
        pending: list[tuple[Task, Outcome]] = [(task, outcome)]
        while pending:
            task, outcome = pending.pop()
            if task.state == "over":
                continue
            waited = task.state == "queued"
            task.state = "over"
            if waited:
                self.queue.remove(task)
            del self.tasks[task.id]
            if not task.settled:
                self._out.append(ev.Settle(task.id, outcome))
            if task.parent is not None and (siblings := self._children.get(task.parent)):
                siblings.discard(task.id)
                if not siblings:
                    del self._children[task.parent]
            if task.constructs and not isinstance(outcome, Succeeded):
                pending.extend(self.actors.bury(task.id, outcome))
            elif task.actor is not None:
                self.actors.drop(task)
            pending.extend(self.fed(task, outcome))

    def fed(self, task: Task, outcome: Outcome) -> list[tuple[Task, Outcome]]:
        """Let those go on that take the result of a task; those that never will, and why."""
        lost: list[tuple[Task, Outcome]] = []
        for ident in self._dependents.pop(task.id, ()):
            other = self.tasks.get(ident)
            if other is None or other.needs is None:
                continue
            if isinstance(outcome, Succeeded):
                other.needs.discard(task.id)
                if not other.needs:
                    self._inputs_ready(other)
            else:
                lost.append((other, UpstreamFailed(task.id)))
        return lost

    def _inputs_ready(self, task: Task) -> None:
        task.needs = None
        if task.queues:
            self.queue.push(task)
        else:
            self.actors.ready(task)

    # ------------------------------------------------------------------------------- interference

    def feasible(self, demand: Demand) -> bool:
        """Whether what is left of the machine can satisfy the demand."""
        return self.capacity.fit(demand).refusal is None

    def _take_back(
        self,
        event: ev.ReleaseRequested
        | ev.ShareExceeded
        | ev.DeviceLost
        | ev.OutsideChanged
        | ev.LeaseRefused,
        now: float,
    ) -> None:
        """Somebody is not to have any longer what he has of devices."""
        match event:
            case ev.ReleaseRequested():
                self.workforce.release(event.owner, now)
            case ev.DeviceLost():
                self._lost(event, now)
            case ev.OutsideChanged():
                self.outside.changed(event, now)
            case ev.LeaseRefused():
                self.outside.refused(event)
            case ev.ShareExceeded():
                worker = self.workforce.workers.get(event.worker)
                if worker is not None and worker.state != "leaving":
                    self.workforce.doom(worker, Crashed(event.reason, True, stopped=True), now)

    def _lost(self, event: ev.DeviceLost, now: float) -> None:
        at = self.capacity.position.get(event.device)
        if at is None or at in self.capacity.lost:
            return
        self.workforce.lose(at, event.reason, now)
        self.queue.refit()
        for task in list(self.tasks.values()):
            if task.queues and task.state in ("queued", "waiting"):
                reason = self.capacity.fit(task.spec.demand).refusal
                if reason:
                    self.settle(task, Refused(reason))

    def _cancel(self, ident: TaskId, force: bool, recursive: bool) -> None:
        todo, seen = [ident], {ident}
        while todo:
            ident = todo.pop()
            if recursive:
                children = self._children.get(ident, set()) - seen
                seen |= children
                todo.extend(sorted(children))
            task = self.tasks.get(ident)
            if task is None:
                continue
            if task.state != "running":
                self.settle(task, Cancelled())
                continue
            assert task.worker is not None
            if task.stop is None:
                task.stop = "cancel"
            task.disowned = task.disowned or recursive
            if force and task.queues:
                self.workforce.kill(task.worker)
            else:
                self.interrupt(task)

    def _stop(self, ident: TaskId) -> None:
        task = self.tasks.get(ident)
        if task is None:
            return
        if task.worker is None:
            self.settle(task, Cancelled())
        else:
            self.interrupt(task)

    def interrupt(self, task: Task) -> None:
        assert task.worker is not None
        self._out.append(ev.Interrupt(task.worker, task.id, task.attempt))

    def _block(self, ident: TaskId, attempt: int, event: ev.Blocked | None) -> None:
        """Let a task wait as the event says, or go on."""
        task = self.tasks.get(ident)
        if task is None or task.attempt != attempt or task.worker is None:
            return
        blocked = event is not None
        if task.blocked != blocked:
            self.workforce.blocks(self.workforce.workers[task.worker], blocked=blocked)
        if event is None:
            self.deadlocks.unblocked(task)
        else:
            self.deadlocks.blocked(task, event)
