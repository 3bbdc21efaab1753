"""The calls that wait for one actor: a line for each caller, and who is next of them all.

Only the first of a line can start, and only once its inputs are there, so that an event costs
nothing for the calls and callers that wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpunb.core.tasks import TaskId

if TYPE_CHECKING:
    from gpunb.core.records import Task


class Calls:
    """Calls that wait. If they need no order, each stands in a line of its own."""

    __slots__ = ("_heads", "_in_order", "_lines", "_tasks")

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._tasks: dict[TaskId, Task] = {}
        self._lines: dict[TaskId | None, OrderedDict[TaskId, None]] = {}
        self._heads: list[tuple[int, TaskId]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def add(self, task: Task, *, front: bool = False) -> None:
        """Let the call wait behind those of its caller, or before them all."""
        self._tasks[task.id] = task
        line = self._lines.setdefault(self._caller(task), OrderedDict())
        line[task.id] = None
        if front:
            line.move_to_end(task.id, last=False)
        self.ready(task)

    def ready(self, task: Task) -> None:
        """The call has its inputs now."""
        if self._can_start(task):
            heapq.heappush(self._heads, (task.order, task.id))

    def next(self) -> Task | None:
        """Take out the call that starts next: of those that can, the one that came first."""
        while self._heads:
            ident = heapq.heappop(self._heads)[1]
            if self._counts(ident):
                task = self._tasks[ident]
                self.drop(task)
                return task
        return None

    def drop(self, task: Task) -> None:
        """Take the call out, if it waits here."""
        if self._tasks.pop(task.id, None) is None:
            return
        caller = self._caller(task)
        line = self._lines[caller]
        first = next(iter(line)) == task.id
        del line[task.id]
        if not line:
            del self._lines[caller]
        elif first:
            self.ready(self._tasks[next(iter(line))])
        if len(self._heads) > 64 + 2 * len(self._lines):
            heads = [each for each in set(self._heads) if self._counts(each[1])]
            heapq.heapify(heads)
            self._heads = heads

    def take_all(self) -> list[Task]:
        """Take them all out, in the order in which they were handed in."""
        tasks = sorted(self, key=lambda task: task.order)
        self._tasks.clear()
        self._lines.clear()
        self._heads.clear()
        return tasks

    def lines(self) -> Iterator[Iterator[TaskId]]:
        """The calls that have to start one after another."""
        return (iter(line) for line in self._lines.values())

    def _caller(self, task: Task) -> TaskId | None:
        return task.parent if self._in_order else task.id

    def _counts(self, ident: TaskId) -> bool:
        task = self._tasks.get(ident)
        return task is not None and self._can_start(task)

    def _can_start(self, task: Task) -> bool:
        return not task.needs and next(iter(self._lines[self._caller(task)])) == task.id
