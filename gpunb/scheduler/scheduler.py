"""The scheduler: `handle(event, now)` returns decisions.

Rules:
- A task is settled exactly once. An event that is late, doubled or stale changes nothing.
- The holdings of a worker are free again when `WorkerExited` reports that its process is gone.
- Time is an argument, so that a list of (event, now) replays any run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from gpunb.scheduler import events as ev
from gpunb.scheduler.actors import Actors
from gpunb.scheduler.ahead import TasksAhead
from gpunb.scheduler.auto_share import grown
from gpunb.scheduler.deadlock import Deadlocks
from gpunb.scheduler.loans import Loans
from gpunb.scheduler.parking import Parking
from gpunb.scheduler.peers import Peers
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.prepared import Prepared
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.resources import Allocation, Machine
from gpunb.scheduler.starts import Starts
from gpunb.scheduler.state import State, Task
from gpunb.scheduler.task_life import TaskLife
from gpunb.scheduler.tasks import (
    Cancelled,
    Crashed,
    Exited,
    Interrupted,
    Raised,
    Report,
    TaskId,
)
from gpunb.scheduler.timers import Timers
from gpunb.scheduler.workers import Workers


class Scheduler:
    """Decides where and when each task runs. Not thread-safe: one thread feeds it."""

    def __init__(self, machine: Machine, policy: Policy | None = None) -> None:
        self.machine = machine
        self.state = state = State(machine, policy or Policy())
        self.tasks, self.capacity = state.tasks, state.capacity
        self.timers = timers = Timers(state)
        self.queue = queue = Queue(state, timers)
        children: dict[TaskId, set[TaskId]] = {}
        self.loans = loans = Loans(state, queue, timers, children)
        self.life = life = TaskLife(state, queue, loans, children)
        self.workers = workers = Workers(state, queue, timers, loans)
        self.deadlocks = Deadlocks(state, queue, workers, timers, life.settle)
        self.starts = starts = Starts(state, queue, workers, timers, loans)
        self.ahead = TasksAhead(state, queue, timers, loans, starts)
        parking = Parking(state, queue, workers, timers)
        self.actors = life.actors = Actors(state, queue, workers, timers, starts, life, parking)
        self.peers = Peers(state, queue, workers)
        self.prepared = Prepared(state, queue, workers)

    def handle(  # noqa: C901 - one case for each event
        self, event: ev.Event, now: float
    ) -> list[ev.Decision]:
        """The decisions that follow from an event; `now` in seconds, never less than before."""
        decisions: list[ev.Decision] = []
        self.state.decisions, self.state.now = decisions, now
        match event:
            case ev.Finished():
                self._finished(event, now)
            case ev.Submitted():
                task = Task(event.task, event.spec, now, event.parent, alike=event.alike)
                self.life.admit(task, event.needs, cleanup=event.cleanup)
            case ev.TakenBack():
                self._taken_back(event, now)
            case ev.WorkerExited():
                self._worker_exited(event, now)
            case ev.Blocked():
                self._set_blocked(event.task, event.attempt, event)
            case ev.Unblocked():
                self._set_blocked(event.task, event.attempt, None)
            case ev.CallSubmitted():
                self.actors.call(event, now)
            case ev.ActorCreated():
                self.actors.create(event, now)
            case ev.CancelRequested():
                self._cancel(event.task, event.force, event.recursive)
            case ev.InterruptRequested():
                self._interrupt_or_cancel(event.task)
            case ev.KillRequested() | ev.ActorReleased() | ev.ParkRequested() | ev.Parked():
                self.actors.handle(event)
            case ev.TimeReached():
                self._time_reached(now)
            case ev.Chosen():
                self._choose(event)
            case _:
                self._devices_changed(event, now)
        self.actors.start_calls(now)
        self.starts.start_queued(now)
        if self.ahead.steady is not None:
            self.ahead.send(now)
        self.queue.settle(now)
        if self.loans.kept or self.timers.loan_check is not None:
            self.loans.update_clock(now)
        if self.prepared.places:
            self.prepared.start_missing(now)
        if self.state.waiters or self.timers.deadlock_check is not None:
            self.deadlocks.update_timer(now)
        if self.peers.held or self.peers.claimed:
            self.peers.update_claim()
        wake = self.timers.next_wake()
        if wake is not None:
            decisions.append(ev.WakeAt(wake))
        return decisions

    # -------------------------------------------------------------------------------- endings

    def _finished(self, event: ev.Finished, now: float) -> None:
        task = self.tasks.get(event.task)
        if task is None or task.state != "running":
            return
        if task.attempt != event.attempt or task.worker != event.worker:
            return
        worker = self.state.workers[event.worker]
        self.workers.unassign(task, worker)
        if worker.actor is not None:
            self.actors.finished(task, event, now)
            return
        if isinstance(event.report, Exited):
            worker.key = None
        if event.steady:
            self.ahead.steady = worker
        if worker.ahead and worker.key is not None:
            self.ahead.begin_next(worker, now)
        elif not worker.tasks:
            self.workers.keep_or_end(worker, now)
        if isinstance(event.report, Interrupted) and worker.state == "idle":
            # The interrupt may have hit an import: later tasks would find the module half loaded.
            self.workers.end_idle(worker, now)
        again = event.short and self._grown(task, worker.allocation, now)
        if not again and not self._retried(task, event.report, now):
            self.life.settle(task, task.outcome(event.report))

    def _taken_back(self, event: ev.TakenBack, now: float) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is not None and worker.actor is not None:
            self.actors.taken_back(worker.actor, event.count, now)
        elif worker is not None:
            self.ahead.taken_back(worker, event.count, now)

    def _worker_exited(self, event: ev.WorkerExited, now: float) -> None:
        worker = self.state.workers.get(event.worker)
        if worker is None:
            return
        self.prepared.ended(worker)
        self.ahead.take_back(worker, len(worker.ahead))
        lost = [self.tasks[ident] for ident in sorted(worker.tasks)]
        for task in lost:
            self.workers.unassign(task, worker)
        self.workers.remove(worker)
        if not lost and worker.actor is None:
            return
        crash = worker.forced_end or Crashed(event.reason, event.out_of_memory)
        if worker.actor is not None:
            self.actors.process_exited(worker, crash, now)
            return
        short = crash.stopped and crash.out_of_memory  # it was ended for more than its share
        for task in lost:
            again = short and self._grown(task, worker.allocation, now)
            if not again and not self._retried(task, crash, now):
                self.life.settle(task, task.outcome(crash))

    def _retried(self, task: Task, report: Report | Crashed, now: float) -> bool:
        if isinstance(report, Crashed):
            again = not report.stopped
        else:
            again = isinstance(report, Raised) and report.retry
        if not again or not task.may_retry or not self.capacity.feasible(task.spec.demand):
            return False
        task.retries += 1
        self.queue.push_again(task, now)
        return True

    def _grown(self, task: Task, held: Allocation, now: float) -> bool:
        """Let a task that ran out of device memory wait for a larger share, if it may have one."""
        if not task.spec.grow or task.stop is not None or len(held.shares) != 1:
            return False
        ((key, units),) = held.shares
        memory = self.machine.devices[self.capacity.position[key]].memory
        demand = grown(task.spec.demand, units, memory)
        if demand is None or not self.capacity.feasible(demand):
            return False
        task.spec = replace(task.spec, demand=demand)
        self.state.decisions.append(ev.Grown(task.id, held.shares, demand))
        self.queue.push_again(task, now)
        return True

    def _choose(self, event: ev.Chosen) -> None:
        """Let a task that has never started ask for a share that was chosen anew."""
        task, demand = self.tasks.get(event.task), event.choice.demand
        if task is None or task.state not in ("queued", "waiting") or task.attempt:
            return
        if task.is_call or not self.capacity.feasible(demand):
            return
        spec = event.choice.applied(task.spec)
        if task.state == "queued":
            self.queue.change(task, spec)
        else:
            task.spec = spec
        self.state.decisions.append(event)

    # ----------------------------------------------------------------------------------- requests

    def _cancel(self, ident: TaskId, force: bool, recursive: bool) -> None:
        todo, seen = [ident], {ident}
        while todo:
            ident = todo.pop()
            if recursive:
                children = self.life.children.get(ident, set()) - seen
                seen |= children
                todo.extend(sorted(children))
            task = self.tasks.get(ident)
            if task is None or self.actors.restores(task):
                continue
            if task.state != "running":
                self.life.settle(task, Cancelled())
                continue
            assert task.worker is not None
            kill = force and not task.is_call
            if task.stop != "timeout":
                task.stop = "kill" if kill else task.stop or "cancel"
            task.disowned = task.disowned or recursive
            if kill:
                self.workers.kill(task.worker)
            else:
                self._interrupt(task)

    def _interrupt_or_cancel(self, ident: TaskId) -> None:
        task = self.tasks.get(ident)
        if task is None or self.actors.restores(task):
            return
        if task.worker is None:
            self.life.settle(task, Cancelled())
        else:
            self._interrupt(task)

    def _interrupt(self, task: Task) -> None:
        assert task.worker is not None
        self.state.decisions.append(ev.Interrupt(task.worker, task.id, task.attempt))

    def _set_blocked(self, ident: TaskId, attempt: int, event: ev.Blocked | None) -> None:
        """Note that a running task waits, as the event says, or goes on."""
        task = self.tasks.get(ident)
        if task is not None and task.attempt == attempt and task.worker is not None:
            self.workers.set_blocked(task, event)
            if event is not None:
                self.loans.deepen(event.on, task.depth + 1)

    # ------------------------------------------------------------------------- devices and timers

    def _devices_changed(self, event: ev.DeviceEvent, now: float) -> None:
        match event:
            case ev.ReleaseRequested():
                self.workers.end_idle_of(event.owner, now)
                if event.owner is None:
                    self.prepared.pause()
            case ev.DeviceLost():
                self._device_lost(event)
            case ev.PeersChanged():
                self.peers.update(event, now)
                self.prepared.resume()
            case ev.LeaseRefused():
                self._lease_refused(event)
            case ev.ShareExceeded():
                worker = self.state.workers.get(event.worker)
                if worker is not None and worker.state != "leaving":
                    end = Crashed(event.reason, True, stopped=True)
                    self.workers.force_end(worker, end)
            case _:
                assert_never(event)

    def _device_lost(self, event: ev.DeviceLost) -> None:
        at = self.capacity.position.get(event.device)
        if at is None or at in self.capacity.lost:
            return
        self.workers.lose_device(at, event.reason)
        self.actors.device_lost(event.device, event.reason)
        self.queue.refit()
        self.life.settle_refused(list(self.tasks.values()))

    def _lease_refused(self, event: ev.LeaseRefused) -> None:
        """The worker was never started: its task waits again as if it had not been run."""
        worker = self.state.workers.get(event.worker)
        if worker is None:
            return
        if worker.prepared:
            self.prepared.refused(worker)
            self.workers.remove(worker)
            return
        (task,) = (self.tasks[ident] for ident in worker.tasks)
        self.workers.unassign(task, worker)
        if (
            worker.actor is not None
            and (actor := self.state.actors[worker.actor]).state == "parked"
        ):
            task.attempt -= 1
            self.actors.parking.refused(actor, task)
            return
        self.workers.remove(worker)
        self.timers.drop_timeout(task)
        task.attempt -= 1
        if task.actor is not None:
            self.actors.not_started(task)
        elif task.stop is not None or not self.capacity.feasible(task.spec.demand):
            self.life.settle(task, task.outcome(worker.forced_end or Crashed("it was not started")))
        else:
            self.queue.put_back(task)

    def _time_reached(self, now: float) -> None:
        for _, kind, ident, _ in self.timers.pop_due(now):
            match kind:
                case "exit":
                    self.workers.kill(ident)
                case "idle":
                    self.workers.end_long_idle(now)
                case "stuck":
                    self.deadlocks.check(now)
                case "loan":
                    self.loans.stop_keeping()
                case "kept":
                    self.queue.end_reservation(now)
                case "ahead":
                    self.timers.ahead_end = None  # they were taken back before this event
                case "again":
                    self.queue.push_again(self.tasks[ident], now)
                case "park":
                    self.actors.parking.park(ident)
                case "timeout":
                    self._time_out(self.tasks[ident], now)
                case "overdue":
                    self._end_overdue(self.tasks[ident])
                case _:
                    assert_never(kind)

    def _time_out(self, task: Task, now: float) -> None:
        task.stop = task.stop or "timeout"
        self._interrupt(task)
        if not self.actors.abandon(task):
            self.timers.set_overdue(task, now)

    def _end_overdue(self, task: Task) -> None:
        """End the process of a task that did not stop. Other tasks there get the same reason."""
        assert task.worker is not None
        reason = (
            f"gpunb ended its process, because #{task.id} ({task.spec.name}) did not stop within "
            f"{self.state.policy.stop_grace:g} s of its timeout of {task.spec.timeout or 0.0:g} s"
        )
        self.workers.force_end(self.state.workers[task.worker], Crashed(reason))
