"""The workers: who gets one, what it holds and lends, and how it leaves.

What a worker holds is free again when its process is gone. One that is kept for reuse gives its
CPUs and custom resources back when its task is over, but not its devices.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from gpunb.core import events as ev
from gpunb.core.idle import Idle
from gpunb.core.placement import Capacity, Kept
from gpunb.core.records import Task, Worker
from gpunb.core.resources import Allocation, Demand, Machine
from gpunb.core.tasks import Crashed, WorkerId

if TYPE_CHECKING:
    from gpunb.core.scheduler import Scheduler


class Workforce:
    """Owns every worker until its process is gone, and all that they may hold.

    `capacity` is free now. `obtainable` will be once the tasks that run have ended, without those
    that wait for others. `busy` workers run tasks; neither actors nor those that lend their CPUs
    are counted. `running` counts the tasks.
    """

    def __init__(self, scheduler: Scheduler, machine: Machine) -> None:
        self._core = scheduler
        self.capacity = Capacity(machine)
        self.obtainable = Capacity(machine)
        self.workers: dict[WorkerId, Worker] = {}
        self.idle = Idle(self.capacity)
        self.busy = 0
        self.running = 0
        self._next = itertools.count(1)

    @property
    def full(self) -> bool:
        """As many workers run tasks as may."""
        return self.busy >= self._core.policy.max_workers

    # ------------------------------------------------------------------------------------- coming

    def hire(self, task: Task, kept: Kept, now: float) -> tuple[Worker, bool] | None:
        """A worker for the task, and whether it is new; None if there is no room for it now,
        beside what is kept for others."""
        if self.full:
            return None
        demand = task.spec.demand
        key = None if task.spec.fresh or task.actor is not None else task.spec.reuse_key
        if key and demand.resources and not demand.wants_device and self.capacity.fit(demand).parts:
            key = None  # it has devices of another kind, and so a process of its own
        worker = None if key is None else self.idle.find(key, kept.devices)
        held = worker.allocation.shares if worker else ()
        allocation = self.capacity.place(demand, kept, held)
        if allocation is None:
            if self.idle.warm and self.capacity.fit(demand).parts:
                self._make_room(demand, kept, now)
            return None
        new = worker is None
        if worker is None:
            worker = Worker(next(self._next), allocation, key, task.actor)
            self.workers[worker.id] = worker
        else:
            self.idle.remove(worker)
            self.capacity.give(worker.allocation)
            worker.allocation = allocation
        self.capacity.take(allocation)
        worker.state = "busy"
        if worker.actor is None:
            self.busy += 1
        else:
            self._set_apart(allocation)
        return worker, new

    def assign(self, task: Task, worker: Worker) -> bool:
        """The worker runs the task; whether it ends after it."""
        worker.tasks.add(task.id)
        worker.last = task.id
        self.running += 1
        self._relend(worker)
        if worker.actor is not None:
            return False
        if worker.key is None:
            return True
        if not task.spec.max_calls:
            return False
        function = task.spec.function
        calls = worker.calls[function] = worker.calls.get(function, 0) + 1
        if calls < task.spec.max_calls:
            return False
        worker.key = None
        return True

    def relieve(self, task: Task, worker: Worker) -> None:
        """The worker no longer runs the task."""
        worker.tasks.discard(task.id)
        worker.blocked -= task.blocked
        self.running -= 1
        self._relend(worker)

    def _make_room(self, demand: Demand, kept: Kept, now: float) -> None:
        """Let idle workers go that hold devices which the demand could have."""
        going = [each.allocation for each in self.workers.values() if each.state == "leaving"]
        for worker in self.idle.in_the_way(demand, kept, going):
            self.let_go(worker, now)

    # ------------------------------------------------------------------------------------ leaving

    def free(self, worker: Worker, now: float) -> None:
        """The worker's task is over: it ends by itself, or is kept for another."""
        if self.full:
            self._core.queue.freed()
        self.busy -= 1
        worker.since = now
        if worker.key is None or worker.killed:
            worker.state = "leaving"
            self._core.deadlines.leaves(worker, now)
            return
        worker.state = "idle"
        held = worker.allocation
        worker.allocation = Allocation(held.shares)
        self.capacity.give(Allocation((), held.cpus, held.resources))
        self._core.queue.freed()
        self.idle.add(worker)
        surplus = worker if self._core.outside.wants(worker) else self.idle.surplus()
        if surplus is not None:
            self.let_go(surplus, now)
        self._core.deadlines.idles(now)

    def let_go(self, worker: Worker, now: float) -> None:
        """An idle worker is no longer kept."""
        self.idle.remove(worker)
        self.retire(worker, now)

    def release(self, owner: int | None, now: float) -> None:
        """No idle worker of this owner is kept any more; None for all owners."""
        for worker in list(self.idle):
            if owner is None or (worker.key is not None and worker.key[-1] == owner):
                self.let_go(worker, now)

    def retire(self, worker: Worker, now: float) -> None:
        worker.state, worker.since, worker.key = "leaving", now, None
        self._core.deadlines.leaves(worker, now)
        if not worker.killed:
            self._core.decide(ev.Retire(worker.id))

    def kill(self, worker: WorkerId) -> None:
        self.workers[worker].killed = True
        self._core.decide(ev.Kill(worker))

    def doom(self, worker: Worker, end: Crashed, now: float) -> None:
        """End a worker for a reason of its own, which its tasks are told."""
        worker.doom = worker.doom or end
        if worker.state == "idle":
            self.idle.remove(worker)
            worker.state, worker.since, worker.key = "leaving", now, None
        if not worker.killed:
            self.kill(worker.id)

    def lose(self, at: int, reason: str, now: float) -> None:
        """A device can be used no more: whoever holds a part of it ends."""
        device = self.capacity.machine.devices[at]
        for capacity in (self.capacity, self.obtainable):
            capacity.lose(at, reason)
        end = Crashed(f"{device.resource} {device.id} was lost: {reason}")
        for worker in list(self.workers.values()):
            if device.key in dict(worker.allocation.shares):
                self.doom(worker, end, now)

    def gone(self, worker: Worker) -> None:
        """The worker's process is gone, and what it held is free."""
        del self.workers[worker.id]
        if worker.state == "idle":
            self.idle.remove(worker)
        elif worker.state == "busy" and worker.actor is None:
            self.busy -= 1
        self.capacity.give(worker.allocation)
        if worker.actor is not None:
            self.obtainable.give(worker.allocation)
        self._core.queue.freed()

    # ------------------------------------------------------------------------------------ lending

    def blocks(self, worker: Worker, *, blocked: bool) -> None:
        """One of the worker's tasks waits for others, or goes on."""
        worker.blocked += 1 if blocked else -1
        self._relend(worker)

    def _relend(self, worker: Worker) -> None:
        """A worker all of whose tasks are blocked lends its CPUs; it takes them back even if that
        is too many."""
        lent = bool(worker.tasks) and worker.blocked >= len(worker.tasks)
        if lent == worker.lent:
            return
        worker.lent = lent
        sign = 1 if lent else -1
        held = worker.allocation
        self.capacity.cpus += sign * held.cpus
        if worker.actor is None:
            self.busy -= sign
            waits_with = Allocation(held.shares, 0, held.resources)
            if lent:
                self._set_apart(waits_with)
            else:
                self.obtainable.give(waits_with)
        if lent:
            self._core.queue.freed()

    def _set_apart(self, allocation: Allocation) -> None:
        """This will not be free when tasks end; a reservation must no longer count on it."""
        self.obtainable.take(allocation)
        if self._core.queue.reservation:
            self._core.queue.drop_reservation()
