"""The scheduler: `handle(event, now)` answers with decisions, and is all there is to it.

Rules:
- A task is settled exactly once. What is late, doubled or stale changes nothing.
- What a worker holds is free again when `WorkerExited` says that it is gone. One that is kept for
  reuse gives its CPUs and custom resources back when its task is over, but not its devices.
- Time is an argument, so that a list of (event, now) replays any run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import assert_never

from gpunb.core import events as ev
from gpunb.core.actors import Actors
from gpunb.core.deadlines import Deadlines
from gpunb.core.idle import Idle
from gpunb.core.placement import Capacity, Kept
from gpunb.core.queue import Line, Queue
from gpunb.core.records import Task, Worker
from gpunb.core.resources import Allocation, Demand, Machine
from gpunb.core.tasks import (
    Cancelled,
    Crashed,
    Outcome,
    Raised,
    Refused,
    Report,
    Succeeded,
    TaskId,
    TaskSpec,
    UpstreamFailed,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's settings; times in seconds.

    Attributes:
        age: a request that waited this long gets a reservation.
        stop_grace: between the interrupt of a timed-out task and its end by force.
        exit_grace: for a worker to end after its last task.
        idle_limit: after which an idle worker is let go.
        max_workers: workers that may run tasks at once, blocked ones not counted.
    """

    age: float = 10.0
    stop_grace: float = 5.0
    exit_grace: float = 5.0
    idle_limit: float = 60.0
    max_workers: int = 256


class Scheduler:
    """Decides what runs where and when. Not thread-safe: one thread feeds it."""

    def __init__(self, machine: Machine, policy: Policy | None = None) -> None:
        self.machine = machine
        self.policy = policy or Policy()
        self.capacity = Capacity(machine)
        self.obtainable = Capacity(machine)
        self.queue = Queue(self.policy.age, self.capacity, self.obtainable)
        self.tasks: dict[TaskId, Task] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.idle = Idle(self.capacity)
        self.deadlines = Deadlines(self)
        self.actors = Actors(self)
        self._children: dict[TaskId, set[TaskId]] = {}
        self._dependents: dict[TaskId, list[TaskId]] = {}
        self._order = itertools.count()
        self._next_worker = itertools.count(1)
        self._busy = 0
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
                self._block(event.task, event.attempt, blocked=True)
            case ev.Unblocked():
                self._block(event.task, event.attempt, blocked=False)
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
            case ev.TimeReached():
                self.deadlines.reached(now)
            case _:
                assert_never(event)
        self.actors.go_on(now)
        self._dispatch(now)
        wake = self.deadlines.next()
        if wake is not None:
            out.append(ev.WakeAt(wake))
        return out

    # ------------------------------------------------------------------------------- into the line

    def admit(self, task: Task, needs: tuple[TaskId, ...]) -> bool:
        """Book a new task and let it wait for its inputs, or in line. False if refused."""
        if task.id in self.tasks:
            return False
        self.tasks[task.id] = task
        task.order = next(self._order)
        if task.parent is not None:
            self._children.setdefault(task.parent, set()).add(task.id)
        if task.actor is None or task.constructs:
            reason = self.capacity.fit(task.spec.demand).refusal
            if reason:
                self.settle(task, Refused(reason))
                return False
        unfinished = {need for need in needs if need in self.tasks and need != task.id}
        if unfinished:
            task.needs = unfinished
            for need in unfinished:
                self._dependents.setdefault(need, []).append(task.id)
        elif task.actor is None or task.constructs:
            self.queue.push(task)
        return True

    def requeue(self, task: Task, now: float) -> None:
        """Let a task run again, before others of its kind."""
        task.worker, task.blocked, task.since = None, False, now
        self.queue.push(task, front=True)

    # ---------------------------------------------------------------------------------- out of it

    def _dispatch(self, now: float) -> None:
        queue, capacity, idle = self.queue, self.capacity, self.idle
        # More than one round only if a reservation ended, for those that had to step back for it.
        while lines := queue.ready(now):
            for line in lines:
                least, cpus, news = line.least, line.demand.cpus, not line.stuck
                while line.count:
                    kept = queue.kept_from(line)
                    # Warm workers may hold what the capacity lacks; then only `_start` can tell.
                    warm = least and idle.warm
                    if not warm and capacity.hopeless(least, cpus, kept.devices):
                        break
                    if not self._start(line.tasks[0], kept, now):
                        break
                    news = True
                if news or queue.reservation is None:
                    queue.passed(line, now)

    def _start(self, task: Task, kept: Kept, now: float) -> bool:
        """Run the task if there is room for it now, beside what is kept for others."""
        if self.full:
            return False
        demand = task.spec.demand
        key = None if task.spec.fresh or task.actor is not None else task.spec.reuse_key
        worker = None if key is None else self.idle.find(key, kept.devices)
        held = worker.allocation.shares if worker else ()
        allocation = self.capacity.place(demand, kept, held)
        if allocation is None:
            if self.idle.warm and demand.wants_device:
                self._make_room(demand, kept, now)
            return False
        new = worker is None
        if worker is None:
            worker = Worker(next(self._next_worker), allocation, key, task.actor)
            self.workers[worker.id] = worker
        else:
            self.idle.remove(worker)
            self.capacity.give(worker.allocation)
            worker.allocation = allocation
        self.capacity.take(allocation)
        self._run(task, worker, now, new=new)
        return True

    def _run(self, task: Task, worker: Worker, now: float, *, new: bool) -> None:
        if worker.actor is None:
            self._busy += 1
        else:
            self._set_apart(worker.allocation)
        worker.state = "busy"
        task.state = "running"
        self.queue.remove(task)
        self.launch(task, worker, now, new=new)

    def launch(self, task: Task, worker: Worker, now: float, *, new: bool) -> None:
        """Put the task's next attempt on the worker, whose state and room are settled."""
        spec = task.spec
        task.state, task.since, task.worker = "running", now, worker.id
        task.attempt += 1
        worker.tasks.add(task.id)
        worker.last = task.id
        self._relend(worker)
        last = worker.actor is None and self._is_last(spec, worker)
        if last:
            worker.key = None
        self.deadlines.runs(task, now)
        self._out.append(
            ev.Run(task.id, task.attempt, worker.id, worker.allocation, new=new, last=last)
        )

    @staticmethod
    def _is_last(spec: TaskSpec, worker: Worker) -> bool:
        if not spec.max_calls:
            return False
        calls = worker.calls[spec.function] = worker.calls.get(spec.function, 0) + 1
        return calls >= spec.max_calls

    def _make_room(self, demand: Demand, kept: Kept, now: float) -> None:
        """Let idle workers go that hold devices which the demand could have."""
        going = [each.allocation for each in self.workers.values() if each.state == "leaving"]
        for worker in self.idle.in_the_way(demand, kept, going):
            self.let_go(worker, now)

    # -------------------------------------------------------------------------------- endings

    def _finished(self, event: ev.Finished, now: float) -> None:
        task = self.tasks.get(event.task)
        if task is None or task.state != "running":
            return
        if task.attempt != event.attempt or task.worker != event.worker:
            return
        worker = self.workers[event.worker]
        worker.tasks.discard(task.id)
        worker.blocked -= task.blocked
        task.blocked = False
        self._relend(worker)
        if worker.actor is not None:
            self.actors.finished(task, event.report, now)
            return
        if self.full:
            self.queue.freed()
        self._busy -= 1
        self._leave(worker, now)
        if not self._retried(task, event.report, now):
            self.settle(task, task.outcome(event.report))

    def _leave(self, worker: Worker, now: float) -> None:
        """The worker's task is over: it ends by itself, or is kept for another."""
        worker.since = now
        if worker.key is None or worker.killed:
            worker.state = "leaving"
            self.deadlines.leaves(worker, now)
            return
        worker.state = "idle"
        held = worker.allocation
        worker.allocation = Allocation(held.shares)
        self.capacity.give(Allocation((), held.cpus, held.resources))
        self.queue.freed()
        self.idle.add(worker)
        surplus = self.idle.surplus()
        if surplus is not None:
            self.let_go(surplus, now)
        self.deadlines.idles(now)

    def let_go(self, worker: Worker, now: float) -> None:
        self.idle.remove(worker)
        self.retire(worker, now)

    def retire(self, worker: Worker, now: float) -> None:
        worker.state, worker.since, worker.key = "leaving", now, None
        self.deadlines.leaves(worker, now)
        if not worker.killed:
            self._out.append(ev.Retire(worker.id))

    def _exited(self, event: ev.WorkerExited, now: float) -> None:
        worker = self.workers.pop(event.worker, None)
        if worker is None:
            return
        if worker.state == "idle":
            self.idle.remove(worker)
        lost = [self.tasks[ident] for ident in sorted(worker.tasks)]
        worker.tasks.clear()
        self._relend(worker)
        self.capacity.give(worker.allocation)
        self.queue.freed()
        if not lost and worker.actor is None:
            return
        crash = Crashed(event.reason, event.out_of_memory)
        if worker.actor is not None:
            self.obtainable.give(worker.allocation)
            self.actors.exited(worker, crash, now)
            return
        self._busy -= 1
        for task in lost:
            if not self._retried(task, crash, now):
                self.settle(task, task.outcome(crash))

    def _retried(self, task: Task, report: Report | Crashed, now: float) -> bool:
        again = isinstance(report, Crashed) or (isinstance(report, Raised) and report.retry)
        if not again or task.stop or not self.may_retry(task, task.spec.max_retries):
            return False
        task.retries += 1
        self.requeue(task, now)
        return True

    @staticmethod
    def may_retry(task: Task, limit: int) -> bool:
        return limit < 0 or task.retries < limit

    def settle(self, task: Task, outcome: Outcome) -> None:
        """End the task for good, and with it, unless it succeeded, all that need its result."""
        pending: list[tuple[Task, Outcome]] = [(task, outcome)]
        while pending:
            task, outcome = pending.pop()
            if task.state == "over":
                continue
            waited = task.state == "queued" and (task.actor is None or task.constructs)
            task.state = "over"
            if waited:
                self.queue.remove(task)
            del self.tasks[task.id]
            if not task.again:
                self._out.append(ev.Settle(task.id, outcome))
            if task.parent is not None and (siblings := self._children.get(task.parent)):
                siblings.discard(task.id)
                if not siblings:
                    del self._children[task.parent]
            if task.constructs and not isinstance(outcome, Succeeded):
                pending.extend(self.actors.bury(task.id, outcome))
            elif task.actor is not None:
                self.actors.touch(task.actor)
            for ident in self._dependents.pop(task.id, ()):
                other = self.tasks.get(ident)
                if other is None or other.needs is None:
                    continue
                if isinstance(outcome, Succeeded):
                    other.needs.discard(task.id)
                    if not other.needs:
                        self._inputs_ready(other)
                else:
                    pending.append((other, UpstreamFailed(task.id)))

    def _inputs_ready(self, task: Task) -> None:
        task.needs = None
        if task.actor is None or task.constructs:
            self.queue.push(task)
        else:
            self.actors.touch(task.actor)

    # ------------------------------------------------------------------------------- interference

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
            if force and (task.actor is None or task.constructs):
                self.kill(task.worker)
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

    def kill(self, worker: WorkerId) -> None:
        self.workers[worker].killed = True
        self._out.append(ev.Kill(worker))

    def _block(self, ident: TaskId, attempt: int, *, blocked: bool) -> None:
        """Lend a waiting task's CPUs to others, or take them back even if that is too many."""
        task = self.tasks.get(ident)
        if task is None or task.attempt != attempt or task.state != "running":
            return
        if task.blocked == blocked or task.worker is None:
            return
        task.blocked = blocked
        worker = self.workers[task.worker]
        worker.blocked += 1 if blocked else -1
        self._relend(worker)

    def _relend(self, worker: Worker) -> None:
        """A worker all of whose tasks are blocked lends its CPUs."""
        lent = bool(worker.tasks) and worker.blocked >= len(worker.tasks)
        if lent == worker.lent:
            return
        worker.lent = lent
        sign = 1 if lent else -1
        held = worker.allocation
        self.capacity.cpus += sign * held.cpus
        if worker.actor is None:
            self._busy -= sign
            waits_with = Allocation(held.shares, 0, held.resources)
            if lent:
                self._set_apart(waits_with)
            else:
                self.obtainable.give(waits_with)
        if lent:
            self.queue.freed()

    def _set_apart(self, allocation: Allocation) -> None:
        """This will not be free when tasks end; a reservation must no longer count on it."""
        self.obtainable.take(allocation)
        if self.queue.reservation:
            self.queue.drop_reservation()

    @property
    def full(self) -> bool:
        """As many workers run tasks as may."""
        return self._busy >= self.policy.max_workers

    def lines(self) -> list[Line]:
        return list(self.queue.lines.values())
