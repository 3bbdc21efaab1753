"""Waiting calls of one actor: a queue for each caller, and the choice of the next call.

Only the first of a line can start, and only once its inputs are there, so that an event costs
nothing for the calls and callers that wait. Each concurrency group has its own lines and its own
number of turns, which are the calls that may run at once.

The worker of an actor that runs one call at a time may be sent calls ahead. These have left their
lines, and start before all others, in the order in which they were sent.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeAlias, TypeVar

from gpunb.scheduler.tasks import TaskId, TaskSpec

AHEAD = 8
"""Tasks or calls that a worker is sent ahead, at most."""

FEW = 2
"""A worker that has more than these is sent no others: several at once travel in one message."""


class Call(Protocol):
    """The fields of a task that the queue reads."""

    id: TaskId
    spec: TaskSpec
    order: int
    parent: TaskId | None
    needs: set[TaskId] | None
    alike: Hashable


T = TypeVar("T", bound=Call)

Line: TypeAlias = TaskId | tuple[str, TaskId | None] | None
"""The caller of calls that run in order, or the call if they need not; with the group if there are
several groups."""


class Calls(Generic[T]):
    """Calls that wait. In a group with one turn each caller has a line; in others each call has.

    Attributes:
        ahead: the calls that were sent ahead.
    """

    __slots__ = ("_free", "_heads", "_in_order", "_lines", "_one", "_tasks", "ahead", "limits")

    def __init__(self, limits: Mapping[str, int]) -> None:
        """`limits`: the number of turns of each group; the name of the default group is empty."""
        self.limits = limits
        self._one = len(limits) == 1
        self._in_order = limits[""] == 1
        self._free = dict(limits)
        self.ahead: deque[T] = deque()
        self._tasks: dict[TaskId, T] = {}
        self._lines: dict[Line, OrderedDict[TaskId, None]] = {}
        self._heads: dict[str, list[tuple[int, TaskId]]] = {group: [] for group in limits}

    def __len__(self) -> int:
        return len(self._tasks) + len(self.ahead)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain(self.ahead, self._tasks.values())

    def add(self, task: T, *, front: bool = False) -> bool:
        """Let the call wait behind those of its caller, or before them all. Whether it may start
        at once."""
        self._tasks[task.id] = task
        key = self._line(task)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = OrderedDict()
        line[task.id] = None
        if front:
            line.move_to_end(task.id, last=False)
        return self.ready(task)

    def ready(self, task: T) -> bool:
        """The call has its inputs now. Whether it may start at once."""
        if not self._can_start(task):
            return False
        group = self.group(task)
        heapq.heappush(self._heads[group], (task.order, task.id))
        return self._free[group] > 0

    def next(self) -> T | None:
        """Take out the call that starts next, and give it a turn of its group: of those that can
        start in a group, the one that came first."""
        if self.ahead:
            return self.begun() if self._free[""] > 0 else None
        for group, heads in self._heads.items():
            while heads and self._free[group] > 0:
                ident = heapq.heappop(heads)[1]
                if self._counts(ident):
                    task = self._tasks[ident]
                    self.drop(task)
                    self._free[group] -= 1
                    return task
        return None

    def send_ahead(self, started: T) -> list[T]:
        """Let the calls that come next leave their lines, and return them, as long as they are like
        the call that has just started. No call, if the actor may run several at once."""
        heads = self._heads[""] if self._one and self._in_order else []
        sent: list[T] = []
        if len(self.ahead) > FEW:
            return sent
        while heads and len(self.ahead) < AHEAD:
            ident = heads[0][1]
            task = self._tasks[ident] if self._counts(ident) else None
            if task is not None and not alike(task, started):
                break
            heapq.heappop(heads)
            if task is not None:
                self.drop(task)
                self.ahead.append(task)
                sent.append(task)
        return sent

    def take_back(self, count: int) -> None:
        """Put the last `count` of the calls that were sent ahead back into their lines."""
        for _ in range(min(count, len(self.ahead))):
            self.add(self.ahead.pop(), front=True)

    def begun(self) -> T:
        """Take out the first call that was sent ahead. It gets a turn even if none is free: its
        worker has begun it, and the end of the call before is about to be reported."""
        self._free[""] -= 1
        return self.ahead.popleft()

    def give_turn_back(self, task: T) -> None:
        """The call runs no more."""
        self._free[self.group(task)] += 1

    def give_turns_back(self) -> None:
        """No call runs any more."""
        self._free = dict(self.limits)

    def drop(self, task: T) -> None:
        """Take the call out, if it waits here."""
        if self._tasks.pop(task.id, None) is None:
            if task in self.ahead:
                self.ahead.remove(task)
            return
        key = self._line(task)
        line = self._lines[key]
        first = next(iter(line)) == task.id
        del line[task.id]
        if not line:
            del self._lines[key]
        elif first:
            self.ready(self._tasks[next(iter(line))])
        heads = self._heads[self.group(task)]
        if len(heads) > 64 + 2 * len(self._lines):
            heads[:] = [each for each in set(heads) if self._counts(each[1])]
            heapq.heapify(heads)

    def take_all(self) -> list[T]:
        """Take them all out, in the order in which they were handed in."""
        tasks = sorted(self, key=lambda task: task.order)
        self.ahead.clear()
        self._tasks.clear()
        self._lines.clear()
        for heads in self._heads.values():
            heads.clear()
        return tasks

    def lines(self) -> Iterator[Iterator[TaskId]]:
        """The calls that have to start one after another."""
        return (iter(line) for line in self._lines.values())

    def group(self, task: T) -> str:
        """The group of a call; the default group for a name that the actor does not have."""
        return "" if self._one or task.spec.group not in self.limits else task.spec.group

    def _line(self, task: T) -> Line:
        if self._one:
            return task.parent if self._in_order else task.id
        group = self.group(task)
        return group, task.parent if self.limits[group] == 1 else task.id

    def _counts(self, ident: TaskId) -> bool:
        task = self._tasks.get(ident)
        return task is not None and self._can_start(task)

    def _can_start(self, task: T) -> bool:
        return not task.needs and next(iter(self._lines[self._line(task)])) == task.id


def alike(task: Call, other: Call) -> bool:
    """Whether a worker that runs the other call may be sent this one ahead."""
    return task.alike is not None and (task.alike, task.parent) == (other.alike, other.parent)
