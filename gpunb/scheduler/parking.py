"""Parking: an idle actor gives its devices back, and keeps its process and its state.

A parked actor holds no devices. Its next call needs the same shares of the same devices again: a
task with the id of the actor's constructor waits for them in the queue, like that of an actor that
starts again. When it has them, the worker restores its device memory, and the calls go on.
"""

from __future__ import annotations

from dataclasses import replace

from gpunb.scheduler import events as ev
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.state import Actor, State, Task
from gpunb.scheduler.tasks import ActorId
from gpunb.scheduler.timers import Timers
from gpunb.scheduler.workers import Workers


class Parking:
    """Parks actors, and lets parked ones wait for their devices."""

    def __init__(self, state: State, queue: Queue, workers: Workers, timers: Timers) -> None:
        self._state = state
        self._queue = queue
        self._workers = workers
        self._timers = timers

    def park(self, ident: ActorId) -> None:
        """Let the worker of an idle actor give its device memory back. Others are not parked."""
        actor = self._state.actors.get(ident)
        if actor is None or why_not(actor) or actor.worker is None:
            return
        worker = self._state.workers[actor.worker]
        if worker.allocation.shares and not worker.killed:
            actor.set_state("parking")
            self._state.decisions.append(ev.Park(worker.id))

    def parked(self, event: ev.Parked) -> Actor | None:
        """Note the report of a worker. Returns its actor, the calls of which may go on."""
        worker = self._state.workers.get(event.worker)
        actor = self._state.actors.get(worker.actor or 0) if worker is not None else None
        if worker is None or actor is None or actor.state != "parking" or worker.killed:
            return None
        if event.problem:
            actor.set_state("alive")
            actor.parkable = False
            return actor
        actor.set_state("parked")
        actor.parked = worker.allocation.shares
        self._workers.give_up_devices(worker)
        return actor

    def wake(self, actor: Actor, now: float) -> None:
        """Let a parked actor wait for its devices, if it does not yet."""
        assert actor.worker is not None
        if actor.id in self._state.tasks or self._state.workers[actor.worker].killed:
            return
        keys = tuple(key for key, _ in actor.parked)
        known = actor.spec.demand
        plain = self._state.capacity.fit(known).plain
        resources = tuple(each for each in known.resources if each not in plain)
        demand = replace(known, cpus=0, resources=resources, types=(), min_memory=0, devices=keys)
        spec = replace(actor.spec, demand=demand, timeout=None, max_retries=0)
        task = Task(actor.id, spec, now, actor=actor.id, settled=True)
        task.attempt = actor.restores
        self._state.tasks[actor.id] = task
        self._queue.push(task)

    def forget(self, actor: Actor) -> None:
        """Let a parked actor wait for its devices no more."""
        task = self._state.tasks.get(actor.id) if actor.state == "parked" else None
        if task is not None:
            queued = task.state == "queued"
            task.set_state("over")
            if queued:
                self._queue.remove(task)
            del self._state.tasks[actor.id]

    def refused(self, actor: Actor, task: Task) -> None:
        """Other sessions hold the devices: the task of a parked actor waits again."""
        assert actor.worker is not None
        self._workers.give_up_devices(self._state.workers[actor.worker])
        self._queue.put_back(task)

    def set_timer(self, actor: Actor, now: float) -> None:
        """Note that an actor is idle from now on."""
        if self._state.policy.park_after is not None and not why_not(actor) and actor.parkable:
            actor.idle_since = now
            self._timers.set_park(actor, now)

    def of_device(self, key: str) -> list[Actor]:
        """The parked actors with memory of this device."""
        actors = self._state.actors.values()
        return [each for each in actors if each.state == "parked" and key in dict(each.parked)]


def why_not(actor: Actor) -> str | None:
    """Why an actor cannot be parked now; None if it can."""
    if actor.state in ("parking", "parked"):
        return "it is parked already"
    if actor.state != "alive":
        return "it has not started yet, or ends"
    if actor.running or actor.calls:
        return "it runs a call, or calls wait for it"
    if actor.rules.bundles or actor.spec.demand.within is not None:
        return "it belongs to a placement group, which keeps its devices"
    return None
