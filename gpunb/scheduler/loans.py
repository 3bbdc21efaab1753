"""The CPUs that waiting tasks lend, and the tasks that may use them.

A task has a depth: it is deeper than each task that waits for it, and than its parent, which may
wait for it. A lent CPU is kept for tasks that are deeper than the lender. So tasks of one depth
never hold more CPUs together, running or waiting, than there are, and waiting tasks do not become
ever more processes.

The kept CPUs may lie idle:

1. All that a lender waits for runs already and needs no CPU, such as tasks on a device and calls of
   actors. Then its CPU is kept no more as soon as another task could use it.
2. Tasks may wait for signals of tasks that are not deeper. So that these can start, the CPU of the
   longest waiting lender is kept no more when it was idle for a short time, and a queued task that
   was held back for long may start once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from gpunb.scheduler.line import Line
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.state import State, Task, Worker
from gpunb.scheduler.tasks import TaskId, WorkerId
from gpunb.scheduler.timers import Timers

Path: TypeAlias = tuple[TaskId, Any]
"""A task, and the path to the task that waits for it, or None."""


class Loans:
    """Keeps lent CPUs for deeper tasks.

    Attributes:
        kept: lent CPUs that are kept for deeper tasks, by the depth of their lenders.
        used: CPUs of running tasks, by depth; without actors, and without tasks of depth 0.
        lenders: the workers whose lent CPUs are kept, the longest waiting first.
        let_go: waiting workers whose lent CPUs any task may use, because they were idle.
        most: number of workers that lent CPUs at once, since there was last nothing to do.
    """

    def __init__(
        self, state: State, queue: Queue, timers: Timers, children: Mapping[TaskId, set[TaskId]]
    ) -> None:
        self._state = state
        self._queue = queue
        self._timers = timers
        self._children = children
        self.kept: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.lenders: dict[WorkerId, Worker] = {}
        self.let_go: set[WorkerId] = set()
        self.most = 0
        self._idle_since: float | None = None
        self._idled = 0.0

    # ------------------------------------------------------------------------------------- account

    def book(self, worker: Worker, sign: int) -> None:
        """Add the CPUs of a worker to the account, or take them out of it before they change."""
        cpus = worker.allocation.cpus
        if worker.allocation.within is not None:
            return  # they are CPUs of its bundle
        if worker.lends_cpus and worker.keeps_loan:
            account = self.kept
        elif worker.depth and worker.actor is None and not worker.lends_cpus:
            account = self.used
        else:
            return
        units = account.get(worker.depth, 0) + sign * cpus
        if units:
            account[worker.depth] = units
        else:
            account.pop(worker.depth, None)

    def lend(self, worker: Worker, lends: bool) -> None:
        """Note that a worker lends its CPUs, or takes them back."""
        self.book(worker, -1)
        worker.lends_cpus = lends
        if lends:
            self._set_depth(worker)
            if worker.allocation.cpus and worker.allocation.within is None:
                self.lenders[worker.id] = worker
                self.most = max(self.most, len(self.lenders) + len(self.let_go))
        elif not worker.keeps_loan:
            worker.keeps_loan = True
            self.let_go.discard(worker.id)
        else:
            self.lenders.pop(worker.id, None)
        self.book(worker, +1)

    def _set_depth(self, worker: Worker) -> None:
        worker.depth = min(self._state.tasks[task].depth for task in worker.tasks)

    def deepen(self, tasks: Iterable[TaskId], depth: int) -> None:
        """Let tasks have at least this depth, and all tasks that they wait for in turn."""
        known = self._state.tasks
        todo: list[tuple[TaskId, int, Path | None]]
        todo = [(e, depth, None) for e in tasks if e in known and known[e].depth < depth]
        while todo:
            ident, depth, above = todo.pop()
            task = known.get(ident)
            if task is None or task.depth >= depth or _is_on(above, ident):
                continue
            self._move(task, depth)
            path = (ident, above)
            todo += [(each, depth, path) for each in task.needs or ()]
            todo += [(each, depth + 1, path) for each in task.blocked_on]
            todo += [(each, depth + 1, path) for each in self._children.get(ident, ())]
            if task.actor is not None and task.is_call:
                todo.append((task.actor, depth, path))

    def _move(self, task: Task, depth: int) -> None:
        if task.state == "queued":
            self._queue.move(task, depth)
            return
        task.depth = depth
        if task.worker is not None:
            worker = self._state.workers[task.worker]
            self.book(worker, -1)
            self._set_depth(worker)
            self.book(worker, +1)
            self._queue.room_freed = True

    # -------------------------------------------------------------------------------- who may start

    def holds_back(self, line: Line, now: float) -> bool:
        """Whether the first task of the line must wait, because the CPUs that are free, or are
        free soon, are kept for deeper tasks."""
        line.held = False
        while line.cpus and not line.held and (depth := self._lacks_for(line)) is not None:
            lenders = (each for each in self.lenders.values() if each.depth == depth)
            unused = next((each for each in lenders if not self._may_be_used(each)), None)
            line.held = unused is None
            if unused is not None:
                self._keep_no_more(unused)
        if not line.held:
            return False
        line.held_since = min(line.held_since, now)
        return now < line.held_since + line.patience

    def _may_be_used(self, lender: Worker) -> bool:
        """Whether the lender may soon need its CPUs, or a task that it waits for may need them."""
        known = self._state.tasks
        for task in lender.tasks:
            awaited = known[task].blocked_on
            if not awaited:
                return True  # it waits for something else
            for other in map(known.get, awaited):
                if other is None or other.state != "running":
                    return True
                if other.spec.demand.cpus and not other.is_call:
                    return True
        return False

    def _keep_no_more(self, lender: Worker) -> None:
        self.book(lender, -1)
        lender.keeps_loan = False
        del self.lenders[lender.id]
        self._queue.room_freed = True

    def _lacks_for(self, line: Line) -> int | None:
        """The depth of lenders that keep CPUs which the line needs; None if there are none."""
        free = self._state.capacity.cpus
        for depth, units in self.kept.items():
            if depth >= line.depth:
                used = sum(each for deeper, each in self.used.items() if deeper > depth)
                if line.cpus > free - units + used:
                    return depth
        return None

    def started(self, line: Line, now: float) -> None:
        """Note that the first task of a line has started that was held back before."""
        if line.held:  # its patience was over
            line.held_since = now
            line.patience *= 2
        else:
            line.held_since = math.inf
            line.patience = self._state.policy.age

    # ------------------------------------------------------------------------------ idle kept CPUs

    def update_clock(self, now: float) -> None:
        """After each event: measure for how long CPUs are idle that are kept."""
        if self._idle_since is not None:
            if self._waiting_line() is None:
                self._idled += now - self._idle_since
                self._stop_clock()
        elif self.kept and self._waiting_line() is not None:
            policy = self._state.policy
            pause = min(policy.lend_limit, policy.lend_after * 2 ** min(len(self.let_go), 30))
            self._idle_since = now
            self._timers.set_loan_check(now + max(0.0, pause - self._idled))

    def _stop_clock(self) -> None:
        self._idle_since = self._timers.loan_check = None

    def _waiting_line(self) -> Line | None:
        """The line that was held back longest, of those for which enough CPUs are free."""
        free = self._state.capacity.cpus
        if free <= 0 or not self.kept:
            return None
        held = [line for line in self._queue.lines.values() if line.held and line.cpus <= free]
        return min(held, key=lambda line: line.held_since, default=None)

    def stop_keeping(self) -> None:
        """Let any task use the CPUs of the lender that waits longest, of those that hold a task
        back. A task of another function goes first: one of the same would probably wait, too."""
        self._stop_clock()
        self._idled = 0.0
        line = self._waiting_line()
        if line is None:
            return
        depth = self._lacks_for(line)
        if depth is None:
            line.held = False
            return
        worker = next(each for each in self.lenders.values() if each.depth == depth)
        self._keep_no_more(worker)
        self.let_go.add(worker.id)
        waiting = [each for each in self._state.workers.values() if each.lends_cpus]
        tasks = [self._state.tasks[task] for each in waiting for task in each.tasks]
        self._queue.prefer_others(line, {task.spec.function for task in tasks})


def _is_on(path: Path | None, ident: TaskId) -> bool:
    """Whether the path goes through this task: then tasks wait for each other."""
    while path is not None:
        task, path = path
        if task == ident:
            return True
    return False
