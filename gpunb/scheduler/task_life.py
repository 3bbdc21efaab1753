"""The begin and the end of tasks: books a new task, and settles each task once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

from gpunb.scheduler import events as ev
from gpunb.scheduler.loans import Loans
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.state import State, Task
from gpunb.scheduler.tasks import (
    ActorId,
    Cancelled,
    Outcome,
    Raised,
    Refused,
    Succeeded,
    TaskId,
    UpstreamFailed,
)


class ActorLife(Protocol):
    """The functions of `Actors` that follow the begin and the end of tasks."""

    def end_of_group(self, task: Task) -> Outcome | None: ...

    def constructor_failed(
        self, ident: ActorId, outcome: Outcome
    ) -> list[tuple[Task, Outcome]]: ...

    def call_changed(self, task: Task) -> None: ...


class TaskLife:
    """Books tasks, settles them, and lets the tasks go on that need their results.

    Attributes:
        children: the tasks that each task has submitted and that are not over.
        dependents: the tasks that wait for the result of each task.
        actors: set by the scheduler before the first event.
    """

    actors: ActorLife

    def __init__(
        self, state: State, queue: Queue, loans: Loans, children: dict[TaskId, set[TaskId]]
    ) -> None:
        self._state = state
        self._tasks, self._capacity = state.tasks, state.capacity
        self._queue = queue
        self._loans = loans
        self.children = children
        self.dependents: dict[TaskId, list[TaskId]] = {}
        self._order = itertools.count()

    def admit(self, task: Task, needs: tuple[TaskId, ...], *, cleanup: bool = False) -> bool:
        """Book a new task. False if its id is known or the task is settled at once."""
        if task.id in self._tasks:
            return False
        self._tasks[task.id] = task
        task.order = next(self._order)
        if task.parent is not None:
            self.children.setdefault(task.parent, set()).add(task.id)
            parent = self._tasks.get(task.parent)
            if parent is not None:
                task.depth = parent.depth + 1
                if parent.disowned and not cleanup:
                    self.settle(task, Cancelled())
                    return False
        is_call = task.is_call
        if not is_call:
            if task.spec.demand.within is not None and (end := self.actors.end_of_group(task)):
                self.settle(task, end)
                return False
            reason = self._capacity.fit(task.spec.demand).refusal
            if reason:
                self.settle(task, Refused(reason))
                return False
        unfinished = needs and {
            need for need in needs if need != task.id and self._state.is_unfinished(need)
        }
        if unfinished:
            task.needs = unfinished
            for need in unfinished:
                self.dependents.setdefault(need, []).append(task.id)
            if task.depth:
                self._loans.deepen(unfinished, task.depth)
        elif not is_call:
            self._queue.enter(task)
        return True

    def settle(self, task: Task, outcome: Outcome) -> None:
        """End the task for good and, unless it succeeded, all tasks that need its result."""
        pending: list[tuple[Task, Outcome]] = [(task, outcome)]
        while pending:
            task, outcome = pending.pop()
            if task.state == "over":
                continue
            queued = task.state == "queued"
            task.set_state("over")
            if queued:
                self._queue.remove(task)
            del self._tasks[task.id]
            if not task.settled:
                self._state.decisions.append(ev.Settle(task.id, outcome))
            if task.parent is not None and (siblings := self.children.get(task.parent)):
                siblings.discard(task.id)
                if not siblings:
                    del self.children[task.parent]
            if task.is_constructor and not isinstance(outcome, Succeeded):
                pending.extend(self.actors.constructor_failed(task.id, outcome))
            elif task.actor is not None:
                self.actors.call_changed(task)
            if task.id in self.dependents:
                pending.extend(self.update_dependents(task, outcome))

    def update_dependents(self, task: Task, outcome: Outcome) -> list[tuple[Task, Outcome]]:
        """Let tasks go on that need this result. Returns those that never can, to be settled."""
        lost: list[tuple[Task, Outcome]] = []
        spared = outcome.spared if isinstance(outcome, Raised) else ()
        for ident in self.dependents.pop(task.id, ()):
            other = self._tasks.get(ident)
            if other is None or other.needs is None:
                continue
            if not isinstance(outcome, Succeeded) and ident not in spared:
                lost.append((other, UpstreamFailed(task.id)))
                continue
            other.needs.discard(task.id)
            if not other.needs:
                other.needs = None
                if other.is_call:
                    self.actors.call_changed(other)
                else:
                    self._queue.enter(other)
        return lost

    def settle_refused(self, tasks: Iterable[Task]) -> None:
        """Settle the tasks that wait for room which there will never be."""
        for task in tasks:
            if not task.is_call and task.state in ("queued", "waiting"):
                reason = self._capacity.fit(task.spec.demand).refusal
                if reason:
                    self.settle(task, Refused(reason))
