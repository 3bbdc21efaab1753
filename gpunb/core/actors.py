"""The lives of actors: start, calls in order, restart, end.

An actor is a worker that is kept: its constructor waits in line like any task, its calls go
straight to its process, and what it holds is free again when that process is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunb.core import events as ev
from gpunb.core.records import Actor, Task, Worker
from gpunb.core.tasks import (
    ActorDied,
    ActorId,
    Cancelled,
    Crashed,
    Outcome,
    Raised,
    Report,
    Succeeded,
    UpstreamFailed,
)

if TYPE_CHECKING:
    from gpunb.core.scheduler import Scheduler


class Actors:
    """Owns every actor that is not dead."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._core = scheduler
        self.book: dict[ActorId, Actor] = {}
        self._touched: set[ActorId] = set()

    # ------------------------------------------------------------------------------------- events

    def create(self, event: ev.ActorCreated, now: float) -> None:
        if event.actor in self.book:
            return
        self.book[event.actor] = Actor(event.actor, event.spec, event.rules)
        task = Task(event.actor, event.spec, now, event.parent, event.actor)
        if not self._core.admit(task, event.needs):
            self.book.pop(event.actor, None)

    def call(self, event: ev.CallSubmitted, now: float) -> None:
        core = self._core
        if event.task in core.tasks:
            return
        task = Task(event.task, event.spec, now, event.parent, event.actor)
        core.admit(task, event.needs)
        actor = self.book.get(event.actor)
        if actor is None or actor.state == "ending":
            core.settle(task, ActorDied(event.actor, "it has ended"))
            return
        actor.calls.append(task)
        self.touch(actor.id)

    def kill(self, event: ev.KillRequested) -> None:
        core, actor = self._core, self.book.get(event.actor)
        if actor is None:
            return
        constructor = core.tasks.get(actor.id)
        worker = constructor.worker if constructor else actor.worker
        if not event.restart:
            killed = ActorDied(actor.id, "it was killed")
            if constructor is not None and constructor.state != "running":
                core.settle(constructor, killed)
                return
            actor.state = "ending"
            self._fail(self._take_calls(actor), killed)
        if worker is not None:
            core.kill(worker)

    def release(self, ident: ActorId) -> None:
        actor = self.book.get(ident)
        if actor is not None:
            actor.released = True
            self.touch(ident)

    def touch(self, ident: ActorId) -> None:
        """A call of the actor may have got its turn, or the actor may be done."""
        self._touched.add(ident)

    def go_on(self, now: float) -> None:
        """Start what has got its turn, once all that an event settles is settled."""
        for ident in sorted(self._touched):
            actor = self.book.get(ident)
            if actor is not None:
                self._pump(actor, now)
                self._end_if_done(actor, now)
        self._touched.clear()

    def finished(self, task: Task, report: Report, now: float) -> None:
        assert task.actor is not None
        actor = self.book[task.actor]
        if task.constructs:
            self._constructed(actor, task, report, now)
            return
        actor.running.discard(task.id)
        again = isinstance(report, Raised) and report.retry and task.stop is None
        if again and self._core.may_retry(task, actor.rules.max_task_retries):
            self._again(actor, task)
        else:
            self._core.settle(task, task.outcome(report))
        self.touch(actor.id)

    def exited(self, worker: Worker, crash: Crashed, now: float) -> None:
        """The actor's process is gone."""
        core = self._core
        assert worker.actor is not None
        actor = self.book.get(worker.actor)
        if actor is None:
            return
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
            if task.stop is None and core.may_retry(task, actor.rules.max_task_retries):
                self._again(actor, task)
            else:
                core.settle(task, _lost_outcome(actor, task, crash))
        if constructor is None:
            constructor = Task(actor.id, actor.spec, now, actor=actor.id, again=True)
            constructor.attempt = actor.restarts
            core.tasks[actor.id] = constructor
        core.requeue(constructor, now)

    # ------------------------------------------------------------------------------------- inside

    def _constructed(self, actor: Actor, task: Task, report: Report, now: float) -> None:
        core = self._core
        assert task.worker is not None
        outcome = task.outcome(report)
        if isinstance(outcome, Succeeded):
            actor.worker = task.worker
            if actor.state == "starting":
                actor.state = "alive"
        else:
            core.retire(core.workers[task.worker], now)
        core.settle(task, outcome)

    def bury(self, ident: ActorId, outcome: Outcome) -> list[tuple[Task, Outcome]]:
        """The constructor failed for good; what becomes of the calls that wait."""
        actor = self.book.pop(ident, None)
        if actor is None:
            return []
        reason, task = "its constructor failed", ident
        if isinstance(outcome, ActorDied):
            return [(call, outcome) for call in self._take_calls(actor)]
        if isinstance(outcome, Crashed):
            reason = f"its process ended while it was made: {outcome.reason}"
        elif isinstance(outcome, Cancelled):
            reason = "it was cancelled before it was made"
        elif isinstance(outcome, UpstreamFailed):
            task = outcome.task
        died = ActorDied(ident, reason, task)
        return [(call, died) for call in self._take_calls(actor)]

    def _may_restart(self, actor: Actor, constructor: Task | None) -> bool:
        if actor.state == "ending" or (constructor is not None and constructor.stop):
            return False
        limit = actor.rules.max_restarts
        return limit < 0 or actor.restarts < limit

    def _died(
        self, actor: Actor, constructor: Task | None, lost: list[Task], crash: Crashed
    ) -> None:
        core = self._core
        for task in lost:
            core.settle(task, _lost_outcome(actor, task, crash))
        if constructor is not None and not constructor.again:
            killed = actor.state == "ending"
            core.settle(constructor, _died(actor, crash) if killed else constructor.outcome(crash))
            return
        calls = self._take_calls(actor)
        del self.book[actor.id]
        if constructor is not None:
            core.settle(constructor, _died(actor, crash))
        self._fail(calls, _died(actor, crash))

    def _pump(self, actor: Actor, now: float) -> None:
        """Start the calls whose turn it is."""
        if actor.state != "alive" or actor.worker is None:
            return
        worker = self._core.workers[actor.worker]
        if worker.killed:
            return
        while actor.calls and len(actor.running) < actor.rules.max_concurrency:
            task = actor.calls[0]
            if task.state == "over":
                actor.calls.popleft()
                continue
            if task.needs:
                return
            actor.calls.popleft()
            actor.running.add(task.id)
            self._core.launch(task, worker, now, new=False)

    def _again(self, actor: Actor, task: Task) -> None:
        task.retries += 1
        task.state, task.worker, task.blocked = "waiting", None, False
        actor.calls.appendleft(task)

    def _end_if_done(self, actor: Actor, now: float) -> None:
        if actor.released and actor.state == "alive" and not actor.calls and not actor.running:
            actor.state = "ending"
            assert actor.worker is not None
            self._core.retire(self._core.workers[actor.worker], now)

    def _take_calls(self, actor: Actor) -> list[Task]:
        calls = [task for task in actor.calls if task.state != "over"]
        actor.calls.clear()
        return calls

    def _fail(self, tasks: list[Task], outcome: Outcome) -> None:
        for task in tasks:
            self._core.settle(task, outcome)


def _died(actor: Actor, crash: Crashed) -> ActorDied:
    return ActorDied(actor.id, "it was killed" if actor.state == "ending" else crash.reason)


def _lost_outcome(actor: Actor, task: Task, crash: Crashed) -> Outcome:
    return _died(actor, crash) if task.stop is None else task.outcome(crash)
