"""Workers and their devices: the start of workers, their holdings and loans, their end.

The holdings of a worker are free again when its process is gone. A worker that is kept for reuse
gives back its CPUs and custom resources when its task is over, but not its devices. The worker of a
placement group has no process, and stays until the workers in its bundles are gone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from gpunb.scheduler import events as ev
from gpunb.scheduler.feasibility import Reserved
from gpunb.scheduler.groups import group_of
from gpunb.scheduler.idle_pool import IdlePool
from gpunb.scheduler.loans import Loans
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.resources import Allocation, Demand, Shares, of_cpus
from gpunb.scheduler.state import State, Task, Worker
from gpunb.scheduler.tasks import ActorId, Crashed, WorkerId
from gpunb.scheduler.timers import Timers


class Workers:
    """Starts and ends workers, and keeps account of the free room.

    `busy` counts workers that run tasks, except actors and lenders of CPUs; `running` the tasks.
    `prepared` has the idle worker with a context on each device, by the device's key.
    """

    def __init__(self, state: State, queue: Queue, timers: Timers, loans: Loans) -> None:
        self._state = state
        self._queue = queue
        self._timers = timers
        self._loans = loans
        self.idle = IdlePool(state.capacity)
        self.prepared: dict[str, Worker] = {}
        self.busy = 0
        self.running = 0
        self._next = itertools.count(1)
        self._has_idle_timer = False

    @property
    def full(self) -> bool:
        """Whether as many workers run tasks as the policy allows."""
        return self.busy >= self._state.policy.max_workers

    # ----------------------------------------------------------------------------- start of tasks

    def hire(self, task: Task, reserved: Reserved, now: float) -> tuple[Worker, bool] | None:
        """A worker for the task, and whether it is new; None if there is no room now, even if idle
        workers end for it."""
        if self.full:
            return None
        demand, capacity = task.spec.demand, self._state.capacity
        key = None if task.spec.fresh or task.actor is not None else task.spec.reuse_key
        if key and demand.resources and not demand.wants_device and capacity.fit(demand).parts:
            key = None  # a task with devices of another kind than GPUs gets a process of its own
        parked = self._parked(task.actor) if task.actor is not None else None
        worker = None if key is None else self.idle.find(key, reserved.devices)
        held = worker.allocation.shares if worker else ()
        if held and demand.within is not None and worker is not None:
            demand = replace(demand, within=worker.allocation.within)
        if self.prepared and worker is parked is None and capacity.fit(demand).parts:
            worker, held = self._prepared_for(demand, reserved)
        allocation = capacity.place(demand, reserved, held)
        if allocation is None:
            self._make_room(demand, reserved, now)
            return None
        if parked is not None:
            parked.allocation = replace(parked.allocation, shares=allocation.shares)
            capacity.take(allocation)
            self._take_obtainable(allocation)
            return parked, False
        new = worker is None
        if worker is None:
            worker = Worker(next(self._next), allocation, key, task.actor)
            self._state.workers[worker.id] = worker
        else:
            self.remove_idle(worker)
            capacity.give(worker.allocation)
            worker.allocation = allocation
            worker.key, worker.actor = key, task.actor
            worker.set_state("busy")
        capacity.take(allocation)
        worker.since = now
        if worker.actor is None:
            self.busy += 1
            if task.depth or worker.depth:
                worker.depth = task.depth
                self._loans.book(worker, +1)
        else:
            self._take_obtainable(allocation)
        return worker, new

    def _make_room(self, demand: Demand, reserved: Reserved, now: float) -> None:
        """End the idle workers that hold the devices that the demand needs."""
        if self.idle.warm and self._state.capacity.fit(demand).parts:
            workers = self._state.workers.values()
            leaving = [each.allocation for each in workers if each.state == "leaving"]
            for idle in self.idle.in_the_way(demand, reserved, leaving):
                self.end_idle(idle, now)

    def _prepared_for(self, demand: Demand, reserved: Reserved) -> tuple[Worker | None, Shares]:
        """The prepared worker of the device that the demand would get if no worker were prepared,
        and the share of it; None if it would get several devices, or one without such a worker."""
        capacity = self._state.capacity
        hope = capacity.copy()
        for worker in self.prepared.values():
            hope.give(worker.allocation)
        place = hope.place(demand, reserved)
        if place is None or len(place.shares) != 1 or place.bundles or place.within is not None:
            return None, ()
        ((key, units),) = place.shares
        found = self.prepared.get(key)
        # The other prepared workers count for `max_gpus` too.
        if found is None or units > capacity.budget + dict(found.allocation.shares)[key]:
            return None, ()
        return found, place.shares

    def _parked(self, ident: ActorId) -> Worker | None:
        """The worker of a parked actor; None for other actors."""
        actor = self._state.actors[ident]
        return (
            self._state.workers[actor.worker] if actor.state == "parked" and actor.worker else None
        )

    def give_up_devices(self, worker: Worker) -> None:
        """Free the devices of an actor's worker, which goes on without them."""
        given = Allocation(worker.allocation.shares)
        worker.allocation = replace(worker.allocation, shares=())
        self._state.capacity.give(given)
        self._state.obtainable.give(given)
        self._queue.room_freed = True

    def prepare(self, allocation: Allocation, now: float) -> Worker:
        """A new prepared worker on the only device of the allocation."""
        ((key, _),) = allocation.shares
        worker = Worker(
            next(self._next), allocation, (f"prepared {key}", None, (), False, ev.PREPARED)
        )
        worker.set_state("idle")
        worker.since, worker.prepared = now, True
        self._state.workers[worker.id] = self.prepared[key] = worker
        self._state.capacity.take(allocation)
        self.idle.add(worker)
        return worker

    def remove_idle(self, worker: Worker) -> None:
        """Note that a worker is not idle any more."""
        self.idle.remove(worker)
        if worker.prepared:
            ((key, _),) = worker.allocation.shares
            del self.prepared[key]

    def assign(self, task: Task, worker: Worker) -> bool:
        """Note that the worker runs the task. True if the worker ends after it."""
        worker.tasks.add(task.id)
        worker.last_task = task.id
        self.running += 1
        if worker.lends_cpus:
            self._update_loan(worker)
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

    def unassign(self, task: Task, worker: Worker) -> None:
        """Note that the worker no longer runs the task."""
        worker.tasks.discard(task.id)
        self.running -= 1
        if task.blocked:
            worker.blocked -= 1
            self._set_wait(task, None)
        if worker.blocked or worker.lends_cpus:
            self._update_loan(worker)

    # ------------------------------------------------------------------------------ end of workers

    def keep_or_end(self, worker: Worker, now: float) -> None:
        """After the worker's task: keep the worker for another task, or let it end by itself."""
        if self.full:
            self._queue.room_freed = True
        self.busy -= 1
        worker.since = now
        if worker.key is None or worker.killed:
            self._leave(worker, now)
            return
        worker.set_state("idle")
        self._loans.book(worker, -1)
        held = given = worker.allocation
        worker.allocation = of_cpus(0)
        if held.shares:
            given = Allocation((), held.cpus, held.resources, held.within)
            worker.allocation = Allocation(held.shares, within=held.within)
        self._state.capacity.give(given)
        self._queue.room_freed = True
        self.idle.add(worker)
        if self.is_wanted(worker):
            self.end_idle(worker, now)
        if not self.running and not self._queue.lines:
            self._loans.most = 0
        # Tasks that wait for each other will need as many workers again as they had at once.
        while surplus := self.idle.surplus(self._loans.most):
            self.end_idle(surplus, now)
        self._set_idle_timer(now)

    def is_wanted(self, worker: Worker) -> bool:
        """Whether other sessions wait for a device that the worker holds a share of."""
        wanted = self._state.wanted
        return bool(wanted) and any(key in wanted for key, _ in worker.allocation.shares)

    def end_idle(self, worker: Worker, now: float) -> None:
        self.remove_idle(worker)
        self.retire(worker, now)

    def end_idle_of(self, owner: int | None, now: float) -> None:
        """End all idle workers of this owner; None for all owners."""
        for worker in list(self.idle):
            if owner is None or (worker.key is not None and worker.key[-1] == owner):
                self.end_idle(worker, now)

    def end_long_idle(self, now: float) -> None:
        """End the workers that are idle for long, and set the timer for the others."""
        limit = self._state.policy.idle_limit
        kept = [each for each in self.idle if not each.prepared]
        for worker in [each for each in kept if each.since + limit <= now]:
            self.end_idle(worker, now)
        self._has_idle_timer = False
        first = min((each.since for each in kept if each.state == "idle"), default=None)
        if first is not None:
            self._set_idle_timer(first)

    def _set_idle_timer(self, since: float) -> None:
        """One timer is enough for all idle workers."""
        if not self._has_idle_timer:
            self._has_idle_timer = True
            self._timers.set_idle(since)

    def retire(self, worker: Worker, now: float) -> None:
        """Let a worker without a task end by itself."""
        self._leave(worker, now)
        if not worker.killed:
            self._state.decisions.append(ev.Retire(worker.id))

    def _leave(self, worker: Worker, now: float) -> None:
        worker.set_state("leaving")
        worker.since, worker.key = now, None
        self._timers.set_exit(worker, now)

    def kill(self, ident: WorkerId) -> None:
        worker = self._state.workers[ident]
        if worker.allocation.bundles and self._close(worker):
            return
        worker.killed = True
        self._state.decisions.append(ev.Kill(ident))

    def _close(self, holder: Worker) -> bool:
        """Place nothing in the bundles of a group any more, and end the workers there. True if
        there are any: then the group's own worker is killed after they are gone."""
        group = holder.actor
        assert group is not None
        self._state.capacity.closed.add(group)
        end = holder.forced_end or Crashed(f"placement group #{group} was removed")
        workers = self._state.workers.values()
        inside = [each for each in workers if group_of(each.allocation) == group]
        for worker in inside:
            self.force_end(worker, end)
        return bool(inside)

    def force_end(self, worker: Worker, end: Crashed) -> None:
        """Kill a worker; its tasks end with `end`."""
        worker.forced_end = worker.forced_end or end
        if worker.state == "idle":
            self.remove_idle(worker)
            worker.set_state("leaving")
            worker.key = None
        if not worker.killed:
            self.kill(worker.id)

    def lose_device(self, at: int, reason: str) -> None:
        """Stop using a device: every worker that holds a part of it ends."""
        state = self._state
        device = state.machine.devices[at]
        state.capacity.lose(at, reason)
        state.obtainable.lose(at, reason)
        end = Crashed(f"{device.resource} {device.id} was lost: {reason}")
        for worker in list(state.workers.values()):
            if device.key in dict(worker.allocation.shares):
                self.force_end(worker, end)

    def remove(self, worker: Worker) -> None:
        """Delete a worker whose process is gone; its holdings are free."""
        del self._state.workers[worker.id]
        self._loans.book(worker, -1)
        if worker.state == "idle":
            self.remove_idle(worker)
        elif worker.state == "busy" and worker.actor is None:
            self.busy -= 1
        capacity, obtainable, held = self._state.capacity, self._state.obtainable, worker.allocation
        capacity.give(held)
        if worker.actor is not None:
            obtainable.give(held)
            if held.bundles:
                capacity.remove(worker.actor)
                obtainable.remove(worker.actor)
        if held.within is not None and held.within.group in capacity.closed:
            self.kill(self._state.holder(held.within.group).id)
        self._queue.room_freed = True

    def open_group(self, group: ActorId) -> None:
        """Let tasks start in the bundles of a group, whose worker has its room."""
        bundles = self._state.holder(group).allocation.bundles
        for capacity in (self._state.capacity, self._state.obtainable):
            capacity.open(group, bundles)
        self._queue.room_freed = True

    # -------------------------------------------------------------------------------------- loans

    def set_blocked(self, task: Task, event: ev.Blocked | None) -> None:
        """Note that a running task waits, as the event says, or goes on."""
        if task.blocked != (event is not None):
            assert task.worker is not None
            worker = self._state.workers[task.worker]
            worker.blocked += 1 if event else -1
            self._update_loan(worker)
        self._set_wait(task, event)

    def _set_wait(self, task: Task, event: ev.Blocked | None) -> None:
        task.blocked = event is not None
        task.blocked_on, task.blocked_count = (event.on, event.count) if event else ((), 0)
        if event and event.on and event.sure and task.spec.timeout is None:
            self._state.waiters.add(task.id)
        else:
            self._state.waiters.discard(task.id)

    def _update_loan(self, worker: Worker) -> None:
        """Lend the worker's CPUs while all its tasks are blocked. Afterwards it takes them back,
        even if more CPUs are then in use than there are."""
        lends = bool(worker.tasks) and worker.blocked >= len(worker.tasks)
        if lends == worker.lends_cpus:
            return
        self._loans.lend(worker, lends)
        sign = 1 if lends else -1
        held = worker.allocation
        self._state.capacity.of(held).cpus += sign * held.cpus
        if worker.actor is None:
            self.busy -= sign
            if lends:
                self._take_obtainable(worker.not_lent)
            else:
                self._state.obtainable.give(worker.not_lent)
        if lends:
            self._queue.room_freed = True

    def _take_obtainable(self, allocation: Allocation) -> None:
        """Note room that is not free when tasks end: a reservation may not count on it."""
        self._state.obtainable.take(allocation)
        if self._queue.reservation:
            self._queue.drop_reservation()
