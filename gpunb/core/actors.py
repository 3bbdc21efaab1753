"""The lives of actors: start, calls in order, restart, end.

An actor is a worker that is kept: its constructor waits in line like any task, its calls go
straight to its process, and what it holds is free again when that process is gone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpunb.core import events as ev
from gpunb.core.calls import Calls
from gpunb.core.records import Actor, Task, Worker
from gpunb.core.tasks import (
    ActorDied,
    ActorId,
    ActorUnavailable,
    Cancelled,
    Crashed,
    Deadlocked,
    Exited,
    Interrupted,
    Outcome,
    Raised,
    Refused,
    Report,
    Succeeded,
    TimedOut,
    UpstreamFailed,
)

if TYPE_CHECKING:
    from gpunb.core.scheduler import Scheduler


class Actors:
    """Owns every actor until it is over for good and its process is gone."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._core = scheduler
        self.book: dict[ActorId, Actor] = {}
        self._touched: set[ActorId] = set()
        self._ended: list[Actor] = []

    # ------------------------------------------------------------------------------------- events

    def create(self, event: ev.ActorCreated, now: float) -> None:
        if event.actor in self.book:
            return
        calls = Calls(in_order=event.rules.max_concurrency == 1)
        self.book[event.actor] = Actor(event.actor, event.spec, event.rules, calls)
        task = Task(event.actor, event.spec, now, event.parent, event.actor)
        if not self._core.admit(task, event.needs):
            self.book.pop(event.actor, None)

    def call(self, event: ev.CallSubmitted, now: float) -> None:
        core = self._core
        task = Task(event.task, event.spec, now, event.parent, event.actor)
        if not core.admit(task, event.needs):
            return
        actor = self.book.get(event.actor)
        if actor is None or actor.end is not None:
            end = actor.end if actor is not None else None
            core.settle(task, end or ActorDied(event.actor, "it has ended"))
            return
        actor.calls.add(task)
        self.touch(actor.id)

    def kill(self, event: ev.KillRequested) -> None:
        core, actor = self._core, self.book.get(event.actor)
        if actor is None:
            return
        if not event.restart:
            killed = ActorDied(actor.id, "it was killed", end="cancelled")
            constructor = core.tasks.get(actor.id)
            if constructor is not None and constructor.state != "running":
                core.settle(constructor, killed)
                return
            self._end(actor, killed)
        if actor.worker is not None:
            core.workforce.kill(actor.worker)

    def release(self, ident: ActorId) -> None:
        actor = self.book.get(ident)
        if actor is not None:
            actor.released = True
            self.touch(ident)

    def touch(self, ident: ActorId) -> None:
        """A call of the actor may have got its turn, or the actor may be done."""
        self._touched.add(ident)

    def ready(self, task: Task) -> None:
        """A call has its inputs now."""
        assert task.actor is not None
        actor = self.book.get(task.actor)
        if actor is not None:
            actor.calls.ready(task)
            self.touch(actor.id)

    def drop(self, task: Task) -> None:
        """A call is over, whether it ran or not."""
        assert task.actor is not None
        actor = self.book.get(task.actor)
        if actor is not None:
            actor.calls.drop(task)
            self.touch(actor.id)

    def go_on(self, now: float) -> None:
        """Start what has got its turn, and say who has ended, once all that an event settles is
        settled."""
        if not self._touched and not self._ended:
            return
        for ident in sorted(self._touched):
            actor = self.book.get(ident)
            if actor is not None:
                self._pump(actor, now)
                self._end_if_done(actor, now)
        self._touched.clear()
        for actor in self._ended:
            assert actor.end is not None
            self._core.decide(ev.ActorEnded(actor.id, actor.end))
        self._ended.clear()

    def starts(self, task: Task, worker: Worker) -> None:
        """The constructor is given a process."""
        self.book[task.id].worker = worker.id

    def finished(self, task: Task, report: Report, now: float) -> None:
        assert task.actor is not None
        core, actor = self._core, self.book[task.actor]
        if task.constructs:
            self._constructed(actor, task, report, now)
            return
        actor.running.discard(task.id)
        if isinstance(report, Exited):
            self._exit(actor, task, report, now)
        elif not (isinstance(report, Raised) and report.retry and core.may_retry(task)):
            core.settle(task, task.outcome(report))
        elif actor.end is not None:
            core.settle(task, actor.end)
        else:
            self._again(actor, task)
        self.touch(actor.id)

    def leave(self, task: Task) -> bool:
        """Settle a task that is to stop and cannot, as it is a call in a thread; False for others.
        It keeps its place until it is over, and nobody waits for it any more."""
        core = self._core
        actor = None if task.queues or task.actor is None else self.book.get(task.actor)
        if actor is None or not actor.rules.threads:
            return False
        assert actor.worker is not None
        if task.blocked:
            core.workforce.blocks(core.workforce.workers[actor.worker], blocked=False)
            core.deadlocks.unblocked(task)
        outcome = task.outcome(Interrupted())
        if isinstance(outcome, TimedOut):
            outcome = replace(outcome, left=True)
        task.settled = True
        core.decide(ev.Settle(task.id, outcome))
        for other, failure in core.fed(task, outcome):
            core.settle(other, failure)
        return True

    def exited(self, worker: Worker, crash: Crashed, now: float) -> None:
        """The actor's process is gone."""
        core = self._core
        assert worker.actor is not None
        actor = self.book[worker.actor]
        actor.worker = None
        constructor = core.tasks.get(actor.id)
        lost = sorted((core.tasks[ident] for ident in actor.running), key=lambda task: task.order)
        actor.running.clear()
        if not self._may_restart(actor, constructor):
            self._died(actor, constructor, lost, crash)
            return
        actor.restarts += 1
        actor.state = "starting"
        for task in reversed(lost):
            if core.may_retry(task):
                self._again(actor, task)
            else:
                gone = ActorUnavailable(actor.id, crash.reason)
                core.settle(task, gone if task.stop is None else task.outcome(crash))
        if constructor is None:
            constructor = Task(actor.id, actor.spec, now, actor=actor.id, settled=True)
            constructor.attempt = actor.restarts
            core.tasks[actor.id] = constructor
        core.requeue(constructor, now)

    def refused(self, constructor: Task) -> None:
        """The actor's process could not be started, because others have what it was to hold."""
        core = self._core
        actor = self.book[constructor.id]
        actor.worker = None
        over = actor.state == "ending" or constructor.stop is not None
        if over or not core.feasible(actor.spec.demand):
            self._died(actor, constructor, [], Crashed("it was not started"))
        else:
            core.outside.again(constructor)

    # ------------------------------------------------------------------------------------- inside

    def _constructed(self, actor: Actor, task: Task, report: Report, now: float) -> None:
        outcome = task.outcome(report)
        if not isinstance(outcome, Succeeded):
            self._retire(actor, now)
        elif actor.state == "starting":
            actor.state = "alive"
        self._core.settle(task, outcome)

    def bury(self, ident: ActorId, outcome: Outcome) -> list[tuple[Task, Outcome]]:
        """The constructor failed for good; what becomes of the calls that wait."""
        actor = self.book.get(ident)
        if actor is None:
            return []
        calls = self._over(actor, _never_made(ident, outcome))
        assert actor.end is not None
        return [(call, actor.end) for call in calls]

    def _may_restart(self, actor: Actor, constructor: Task | None) -> bool:
        if actor.state == "ending" or (constructor is not None and constructor.stop):
            return False
        if not self._core.feasible(actor.spec.demand):
            return False
        limit = actor.rules.max_restarts
        return limit < 0 or actor.restarts < limit

    def _died(
        self, actor: Actor, constructor: Task | None, lost: list[Task], crash: Crashed
    ) -> None:
        core = self._core
        end = actor.end or ActorDied(actor.id, crash.reason)
        for task in lost:
            core.settle(task, end if task.stop is None else task.outcome(crash))
        if constructor is None:
            self._end(actor, end)
        elif constructor.settled:
            core.settle(constructor, end)
        else:
            core.settle(constructor, actor.end or constructor.outcome(crash))

    def _exit(self, actor: Actor, task: Task, report: Exited, now: float) -> None:
        """A call asked for the end of its actor: it runs no others, and its process ends."""
        outcome = task.outcome(report)
        reason = report.reason or "it called exit_actor()"
        calls = self._over(actor, ActorDied(actor.id, reason, end="done"))
        for each in (task, *calls):
            self._core.settle(each, outcome if each is task else actor.end or outcome)
        self._retire(actor, now)

    def _end(self, actor: Actor, end: Outcome) -> None:
        for call in self._over(actor, end):
            self._core.settle(call, actor.end or end)

    def _over(self, actor: Actor, end: Outcome) -> list[Task]:
        """The actor is over for good. Its calls that still wait are the caller's to settle."""
        actor.state = "ending"
        actor.end = actor.end or end
        if actor.worker is None and self.book.pop(actor.id, None) is not None:
            self._ended.append(actor)
        return actor.calls.take_all()

    def _retire(self, actor: Actor, now: float) -> None:
        assert actor.worker is not None
        worker = self._core.workforce.workers[actor.worker]
        if worker.state != "leaving":
            self._core.workforce.retire(worker, now)

    def _pump(self, actor: Actor, now: float) -> None:
        """Start the calls whose turn it is."""
        if actor.state != "alive" or actor.worker is None or not actor.calls:
            return
        worker = self._core.workforce.workers[actor.worker]
        if worker.killed:
            return
        while len(actor.running) < actor.rules.max_concurrency:
            task = actor.calls.next()
            if task is None:
                return
            actor.running.add(task.id)
            self._core.launch(task, worker, now, new=False)

    @staticmethod
    def _again(actor: Actor, task: Task) -> None:
        task.retries += 1
        task.state, task.worker = "waiting", None
        actor.calls.add(task, front=True)

    def _end_if_done(self, actor: Actor, now: float) -> None:
        if actor.released and actor.state == "alive" and not actor.calls and not actor.running:
            self._over(actor, ActorDied(actor.id, "its last handle is gone", end="done"))
            self._retire(actor, now)


def _never_made(ident: ActorId, outcome: Outcome) -> Outcome:
    """How calls of an actor end whose constructor ended like this."""
    reason, task = "its constructor failed", ident
    if isinstance(outcome, ActorDied):
        return outcome
    if isinstance(outcome, Crashed):
        reason = f"its process ended while it was made: {outcome.reason}"
    elif isinstance(outcome, Cancelled):
        reason = "it was cancelled before it was made"
    elif isinstance(outcome, Deadlocked):
        reason = f"it could not be made: {outcome.reason}"
    elif isinstance(outcome, Refused):
        reason = f"it can never be made: {outcome.reason}"
    elif isinstance(outcome, UpstreamFailed):
        task = outcome.task
    return ActorDied(ident, reason, task)
