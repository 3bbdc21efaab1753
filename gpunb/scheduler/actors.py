"""The life of actors: start, calls in order, restart, end.

An actor is a worker that is kept. Its constructor is queued like any task, its calls go straight
to its process, and its holdings are free again when that process is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpunb.scheduler import events as ev
from gpunb.scheduler.actor_queue import Calls
from gpunb.scheduler.groups import group_of
from gpunb.scheduler.parking import Parking
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.resources import Gang
from gpunb.scheduler.starts import Starts
from gpunb.scheduler.state import Actor, State, Task, Worker
from gpunb.scheduler.task_life import TaskLife
from gpunb.scheduler.tasks import (
    ActorDied,
    ActorId,
    ActorUnavailable,
    Crashed,
    Exited,
    Interrupted,
    Outcome,
    Raised,
    Report,
    Succeeded,
    TimedOut,
)
from gpunb.scheduler.timers import Timers
from gpunb.scheduler.workers import Workers


@dataclass(slots=True, eq=False)
class Actors:
    """Starts, restarts and ends actors, and starts their calls in order."""

    _state: State
    _queue: Queue
    _workers: Workers
    _timers: Timers
    _starts: Starts
    _life: TaskLife
    parking: Parking
    _changed: set[ActorId] = field(default_factory=set)
    _ended: list[Actor] = field(default_factory=list)

    def create(self, event: ev.ActorCreated, now: float) -> None:
        if event.actor in self._state.actors:
            return
        calls: Calls[Task] = Calls(event.rules.limits)
        spec = event.spec
        if event.rules.bundles:
            spec = replace(spec, demand=Gang.of(event.rules.bundles))
        self._state.actors[event.actor] = Actor(event.actor, spec, event.rules, calls)
        task = Task(event.actor, spec, now, event.parent, event.actor)
        if not self._life.admit(task, event.needs, cleanup=event.cleanup):
            self._state.actors.pop(event.actor, None)

    def call(self, event: ev.CallSubmitted, now: float) -> None:
        task = Task(event.task, event.spec, now, event.parent, event.actor)
        task.alike = None if event.spec.max_retries else event.alike
        if not self._life.admit(task, event.needs, cleanup=event.cleanup):
            return
        actor = self._state.actors.get(event.actor)
        if actor is None or actor.end is not None or actor.rules.bundles:
            end = actor and actor.end
            self._life.settle(task, end or ActorDied(event.actor, "it has ended"))
        elif actor.restarting and not task.may_retry:
            self._life.settle(task, ActorUnavailable(actor.id, actor.reason))
        elif actor.calls.add(task):
            self._changed.add(actor.id)

    def handle(
        self, event: ev.KillRequested | ev.ActorReleased | ev.ParkRequested | ev.Parked
    ) -> None:
        """Handle an event about a single actor."""
        match event:
            case ev.KillRequested():
                self._kill(event)
            case ev.ActorReleased():
                actor = self._state.actors.get(event.actor)
                if actor is not None:
                    actor.released = True
                    self._changed.add(actor.id)
            case ev.ParkRequested():
                self.parking.park(event.actor)
            case ev.Parked():
                actor = self.parking.parked(event)
                if actor is not None:
                    self._changed.add(actor.id)

    def restores(self, task: Task) -> bool:
        """Whether the task stands for a parked actor that needs its devices again."""
        return task.is_constructor and self._state.actors[task.id].state == "parked"

    def _kill(self, event: ev.KillRequested) -> None:
        actor = self._state.actors.get(event.actor)
        if actor is None:
            return
        self._stay_parked(actor)
        constructor = self._state.tasks.get(actor.id)
        if event.restart and actor.worker is None and self._may_restart(actor, constructor):
            actor.restarts += 1
            actor.reason = "it was killed"
        elif not event.restart or actor.worker is None:
            reason = "it was removed" if actor.rules.bundles else "it was killed"
            killed = ActorDied(actor.id, reason, end="cancelled")
            if constructor is not None and constructor.state != "running":
                self._life.settle(constructor, killed)
                return
            self._end(actor, killed)
        if actor.worker is not None:
            self._workers.kill(actor.worker)

    def call_changed(self, task: Task) -> None:
        """A call has its inputs now, or is over, whether it ran or not."""
        assert task.actor is not None
        actor = self._state.actors.get(task.actor)
        if actor is not None:
            (actor.calls.drop if task.state == "over" else actor.calls.ready)(task)
            self._changed.add(actor.id)

    def start_calls(self, now: float) -> None:
        """After each event: start the calls that may run now, and report actors that have ended."""
        if not self._changed and not self._ended:
            return
        while self._changed:
            changed, self._changed = sorted(self._changed), set()
            for actor in filter(None, map(self._state.actors.get, changed)):
                self._start_calls_of(actor, now)
                self._end_if_unused(actor, now)
        for actor in self._ended:
            assert actor.end is not None
            self._state.decisions.append(ev.ActorEnded(actor.id, actor.end))
        self._ended.clear()

    def taken_back(self, ident: ActorId, count: int, now: float) -> None:
        """The calls that were sent ahead have begun, except for the last `count`."""
        actor = self._state.actors[ident]
        actor.steady = False
        actor.calls.take_back(count)
        while actor.calls.ahead:
            self._start(actor, actor.calls.begun(), now, ahead=True)

    def finished(self, task: Task, event: ev.Finished, now: float) -> None:
        """The constructor or a call has finished."""
        assert task.actor is not None
        actor, report = self._state.actors[task.actor], event.report
        actor.steady = event.steady
        if task.is_constructor:
            self._constructed(actor, task, report, now)
            return
        if task.id in actor.running:
            actor.running.discard(task.id)
            actor.calls.give_turn_back(task)
        if isinstance(report, Exited):
            self._exit(actor, task, report, now)
        elif not (isinstance(report, Raised) and report.retry and task.may_retry):
            self._life.settle(task, task.outcome(report))
        elif actor.end is not None:
            self._life.settle(task, actor.end)
        else:
            self._retry(actor, task)
        self._changed.add(actor.id)

    def abandon(self, task: Task) -> bool:
        """Settle a call that must stop and cannot, because it runs in a thread; False for others.

        The call keeps its place in the actor until it is over, but no task waits for it any more.
        """
        if task.actor is None or not task.is_call:
            return False
        actor = self._state.actors.get(task.actor)
        if actor is None or not actor.rules.threads:
            return False
        self._workers.set_blocked(task, None)
        outcome = task.outcome(Interrupted())
        if isinstance(outcome, TimedOut):
            outcome = replace(outcome, left=True)
        task.settled = True
        self._state.decisions.append(ev.Settle(task.id, outcome))
        for other, failure in self._life.update_dependents(task, outcome):
            self._life.settle(other, failure)
        return True

    def process_exited(self, worker: Worker, crash: Crashed, now: float) -> None:
        """The actor's process is gone."""
        tasks = self._state.tasks
        assert worker.actor is not None
        actor = self._state.actors[worker.actor]
        self.parking.forget(actor)
        actor.worker = None
        constructor = tasks.get(actor.id)
        lost = sorted((tasks[ident] for ident in actor.running), key=lambda task: task.order)
        actor.calls.take_back(len(actor.calls.ahead))
        actor.running.clear()
        actor.calls.give_turns_back()
        if not self._may_restart(actor, constructor, lost):
            self._died(actor, constructor, lost, crash)
            return
        actor.restarts += 1
        if actor.state != "leaving":
            actor.reason = crash.reason
        actor.set_state("starting")
        self._retry_or_fail(actor, lost, crash)
        if constructor is None:
            constructor = Task(actor.id, actor.spec, now, actor=actor.id, settled=True)
            constructor.attempt = actor.restarts
            tasks[actor.id] = constructor
            self._queue.push_again(constructor, now)
            return
        # The constructor would probably end the process again: a pause keeps the machine free.
        policy, actor.failed_starts = self._state.policy, actor.failed_starts + 1
        doublings = min(actor.failed_starts - 1, 30)
        pause = min(policy.restart_limit, policy.restart_after * 2**doublings)
        constructor.set_state("waiting")
        constructor.worker, constructor.since = None, now
        self._timers.set_restart(constructor, now + pause)

    def not_started(self, constructor: Task) -> None:
        """The actor's process could not be started: other sessions hold its devices."""
        actor = self._state.actors[constructor.id]
        actor.worker = None
        over = actor.state == "ending" or constructor.stop is not None
        if over or not self._state.capacity.feasible(actor.spec.demand):
            self._died(actor, constructor, [], Crashed("it was not started"))
        else:
            self._queue.put_back(constructor)

    def device_lost(self, key: str, reason: str) -> None:
        """End the parked actors that have memory of this device: it cannot be restored."""
        for actor in self.parking.of_device(key):
            self._stay_parked(actor)
            assert actor.worker is not None
            end = Crashed(f"its device was lost while it was parked: {reason}")
            self._workers.force_end(self._state.workers[actor.worker], end)

    def constructor_failed(self, ident: ActorId, outcome: Outcome) -> list[tuple[Task, Outcome]]:
        """End an actor that was never made. Returns its waiting calls with their outcomes."""
        actor = self._state.actors.get(ident)
        if actor is None:
            return []
        parked = actor.state == "parked"
        calls = self._close(actor, ActorDied.after(ident, outcome))
        assert actor.end is not None
        if parked and actor.worker is not None and not self._state.workers[actor.worker].killed:
            self._workers.kill(actor.worker)
        return [(call, actor.end) for call in calls]

    def _constructed(self, actor: Actor, task: Task, report: Report, now: float) -> None:
        outcome = task.outcome(report)
        if not isinstance(outcome, Succeeded):
            self._retire(actor, now)
        elif actor.state in ("starting", "parked"):
            actor.set_state("alive")
            actor.failed_starts = 0
            if actor.rules.bundles:
                self._workers.open_group(actor.id)
                self._life.settle_refused(self._tasks_within(actor))
        self._life.settle(task, outcome)

    def _may_restart(
        self, actor: Actor, constructor: Task | None, lost: Sequence[Task] = ()
    ) -> bool:
        if actor.state == "ending" or (constructor is not None and constructor.stop):
            return False
        if actor.released and not actor.calls and not any(task.may_retry for task in lost):
            return False
        if not self._state.capacity.feasible(actor.spec.demand):
            return False
        limit = actor.rules.max_restarts
        if limit >= 0:
            return actor.restarts < limit
        # With no handle left nobody can kill the actor, and its calls may be lost refs: a
        # constructor that always crashes must not start for ever.
        return constructor is None or not actor.released or not actor.failed_starts

    def _retry_or_fail(self, actor: Actor, lost: Sequence[Task], crash: Crashed) -> None:
        """Retry the calls that ran when the process of a restarting actor ended, or settle them."""
        for task in reversed(lost):
            if task.may_retry:
                self._retry(actor, task)
            else:
                gone = ActorUnavailable(actor.id, actor.reason)
                self._life.settle(task, gone if task.stop is None else task.outcome(crash))

    def _died(
        self, actor: Actor, constructor: Task | None, lost: list[Task], crash: Crashed
    ) -> None:
        end = actor.end or ActorDied(actor.id, crash.reason)
        for task in lost:
            self._life.settle(task, end if task.stop is None else task.outcome(crash))
        if constructor is None:
            self._end(actor, end)
        elif constructor.settled:
            if actor.end is None and actor.state == "starting":
                end = ActorDied(actor.id, ActorDied.after(actor.id, crash).reason)
            self._life.settle(constructor, end)
        else:
            self._life.settle(constructor, actor.end or constructor.outcome(crash))

    def _exit(self, actor: Actor, task: Task, report: Exited, now: float) -> None:
        """End the process of an actor, as a call asked for."""
        if report.failed and self._may_restart(actor, None, [task]):
            actor.set_state("leaving")
            actor.reason = report.reason
            self._retry_or_fail(actor, [task], Crashed(report.reason))
            self._retire(actor, now)
            return
        outcome = task.outcome(report)
        reason = report.reason or "it called exit_actor()"
        calls = self._close(actor, ActorDied(actor.id, reason, end="done"))
        self._life.settle(task, outcome)
        for call in calls:
            self._life.settle(call, actor.end or outcome)
        self._retire(actor, now)

    def _end(self, actor: Actor, end: Outcome) -> None:
        for call in self._close(actor, end):
            self._life.settle(call, actor.end or end)

    def _close(self, actor: Actor, end: Outcome) -> list[Task]:
        """Let the actor run no more calls. Returns the waiting calls, for the caller to settle: of
        a placement group the tasks that wait for room in it."""
        if actor.end is None:
            actor.set_state("ending")
            actor.end = end
        if actor.worker is None and self._state.actors.pop(actor.id, None) is not None:
            self._ended.append(actor)
        return [*actor.calls.take_all(), *self._tasks_within(actor)]

    def _tasks_within(self, actor: Actor) -> list[Task]:
        """The tasks that wait for room in a placement group; none of another actor."""
        if not actor.rules.bundles:
            return []
        waiting = [task for task in self._state.tasks.values() if task.state != "running"]
        return [task for task in waiting if group_of(task.spec.demand) == actor.id]

    def end_of_group(self, task: Task) -> Outcome | None:
        """The outcome of a task whose placement group is gone; None if it is there."""
        group = group_of(task.spec.demand)
        assert group is not None
        actor = self._state.actors.get(group)
        if actor is None or not actor.rules.bundles:
            return ActorDied(group, "it has ended")
        return actor.end

    def _retire(self, actor: Actor, now: float) -> None:
        assert actor.worker is not None
        worker = self._state.workers[actor.worker]
        if actor.rules.bundles:
            self._workers.kill(worker.id)
        elif worker.state != "leaving":
            self._workers.retire(worker, now)

    def _start_calls_of(self, actor: Actor, now: float) -> None:
        if actor.state == "parked":
            if actor.calls:
                self.parking.wake(actor, now)
            else:
                self._stay_parked(actor)
            return
        if actor.state != "alive" or actor.worker is None:
            return
        if not actor.calls:
            self.parking.set_timer(actor, now)
            return
        if self._state.workers[actor.worker].killed:
            return
        started: Task | None = None
        while actor.calls:
            ahead = bool(actor.calls.ahead)
            task = actor.calls.next()
            if task is None:
                break
            started = task
            self._start(actor, task, now, ahead=ahead)
        if started is not None and actor.steady:
            # Behind this one only: a call that started earlier may be over in the worker, while
            # its report waits and those of others are handled.
            sent = tuple((each.id, each.attempt + 1) for each in actor.calls.send_ahead(started))
            if sent:
                self._state.decisions.append(ev.SendAhead(actor.worker, sent))

    def _start(self, actor: Actor, task: Task, now: float, *, ahead: bool) -> None:
        assert actor.worker is not None
        actor.running.add(task.id)
        task.set_state("running")
        worker = self._state.workers[actor.worker]
        self._starts.launch(task, worker, now, new=False, ahead=ahead)

    def _stay_parked(self, actor: Actor) -> None:
        """Nobody needs a parked actor, unless it is just being restored."""
        task = self._state.tasks.get(actor.id)
        if task is not None and task.state == "queued":
            self.parking.forget(actor)

    @staticmethod
    def _retry(actor: Actor, task: Task) -> None:
        task.retries += 1
        task.set_state("waiting")
        task.worker = None
        actor.calls.add(task, front=True)

    def _end_if_unused(self, actor: Actor, now: float) -> None:
        if not actor.released or actor.calls or actor.running:
            return
        end = ActorDied(actor.id, "its last handle is gone", end="done")
        restoring = actor.state == "parked" and actor.id in self._state.tasks
        if actor.state in ("alive", "parked") and not restoring:
            self._end(actor, end)
            self._retire(actor, now)
        elif actor.restarting and actor.worker is None:  # nobody needs its new process
            self._life.settle(self._state.tasks[actor.id], end)
