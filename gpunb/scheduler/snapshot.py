"""The frozen view of the scheduler for people and programs.

Amounts are floats here, because they leave the scheduler: 1.0 is one device or CPU.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeAlias

from gpunb.scheduler.frozen import frozen
from gpunb.scheduler.groups import group_of
from gpunb.scheduler.resources import GPU, TYPE_PREFIX, UNIT, Allocation
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.state import Actor, Task, Worker
from gpunb.scheduler.tasks import ActorId, TaskId, WorkerId
from gpunb.scheduler.waiting import kept_devices, why_task_waits

VERSION = 1
"""Version of the schema; raised when a field is removed or changes its meaning."""

SHOWN_PER_LINE = 20
"""Number of waiting tasks that are listed for each demand; the others are only counted."""


@frozen
class DeviceView:
    """A device of the kind `resource`; `memory` in bytes, `free` a share, `held` pairs of (task,
    share). `kept` says for which task it is kept, None if for none."""

    id: int | str
    key: str
    name: str
    type: str | None
    memory: int | None
    logical: bool
    free: float
    held: tuple[tuple[TaskId, float], ...]
    resource: str = GPU
    vendor: str = "logical"
    capability: str | None = None
    kept: str | None = None


Holding: TypeAlias = tuple[str, int | str, float]
"""(resource, id, share) of a device"""


@frozen
class JobView:
    """A task; `seconds` in its present state, `gpus` pairs of (id, share)."""

    id: TaskId
    name: str
    state: str
    seconds: float
    attempt: int
    parent: TaskId | None
    worker: int | None
    gpus: tuple[tuple[int | str, float], ...]
    devices: tuple[Holding, ...]
    cpus: float
    waits_for: str | None
    priority: int


@frozen
class ActorView:
    """An actor that has not ended; `waiting` and `running` count its calls. `gpus` and `devices` as
    of a job.

    Its state is "queued" while its constructor waits, then "starting", "alive", "parking",
    "parked", "restarting" or "ending".
    """

    id: ActorId
    name: str
    state: str
    restarts: int
    worker: int | None
    gpus: tuple[tuple[int | str, float], ...]
    devices: tuple[Holding, ...]
    waiting: int
    running: int


@frozen
class Snapshot:
    """The session at one moment. `queued` counts all waiting tasks, `waiting` lists the first, and
    `unmet` is the sum of their demands."""

    devices: tuple[DeviceView, ...]
    cpus: float
    cpus_free: float
    total: dict[str, float]
    available: dict[str, float]
    running: tuple[JobView, ...]
    waiting: tuple[JobView, ...]
    queued: int
    workers: int
    actors: tuple[ActorView, ...] = ()
    unmet: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as dicts, lists, texts and numbers only."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return [_plain(each) for each in value]
    if kind is dict:
        return dict(value)
    if kind in _VIEWS:  # `dataclasses.asdict` takes ten times as long
        return {name: _plain(getattr(value, name)) for name in kind.__slots__}
    return value


_VIEWS = frozenset({DeviceView, JobView, ActorView, Snapshot})


def snapshot(scheduler: Scheduler, now: float) -> Snapshot:
    """The view at time `now`, in seconds on the scheduler's clock."""
    machine, capacity = scheduler.machine, scheduler.capacity
    holders = _holders(scheduler)
    free = _free_shares(scheduler)
    reserved, kept = kept_devices(scheduler, now)
    devices = tuple(
        DeviceView(
            each.id,
            each.key,
            each.name,
            each.type,
            each.memory,
            each.logical,
            free[at] / UNIT,
            tuple((task, units / UNIT) for task, units in sorted(holders.get(at, {}).items())),
            each.resource,
            each.vendor,
            each.capability,
            kept if at in reserved else None,
        )
        for at, each in enumerate(machine.devices)
    )
    running = [task for task in scheduler.tasks.values() if task.state == "running"]
    waiting = list(_waiting(scheduler, holders, now))
    listed = sum(line.count for line in scheduler.queue.lines.values())
    unlisted = sum(task.state == "waiting" for task in scheduler.tasks.values())
    return Snapshot(
        devices=devices,
        cpus=machine.cpus / UNIT,
        cpus_free=max(0, capacity.cpus) / UNIT,
        total=machine.totals(),
        available=available(scheduler),
        running=tuple(_job(scheduler, task, now) for task in running),
        waiting=tuple(waiting),
        queued=listed + unlisted,
        workers=len(scheduler.state.workers),
        actors=tuple(_actor(scheduler, actor) for actor in scheduler.state.actors.values()),
        unmet=unmet(scheduler),
    )


def available(scheduler: Scheduler) -> dict[str, float]:
    """The free resources by name, as `available_resources()` shows them."""
    capacity, shares = scheduler.capacity, _free_shares(scheduler)
    free: dict[str, float] = {}
    if capacity.cpus > 0:
        free["CPU"] = capacity.cpus / UNIT
    for at, device in enumerate(scheduler.machine.devices):
        if shares[at]:
            free[device.resource] = free.get(device.resource, 0.0) + shares[at] / UNIT
    if GPU in free:
        with_idle = capacity.copy()
        for worker in scheduler.workers.idle:
            with_idle.give(worker.allocation)
        free[GPU] = min(round(free[GPU] * UNIT), with_idle.budget) / UNIT
        if not free[GPU]:
            del free[GPU]
    for at, device in enumerate(scheduler.machine.devices):
        if device.type and shares[at]:
            name = TYPE_PREFIX + device.type
            free[name] = free.get(name, 0.0) + shares[at] / UNIT
    free.update({name: units / UNIT for name, units in capacity.resources.items() if units > 0})
    return free


def assigned(scheduler: Scheduler, ident: TaskId) -> dict[str, float]:
    """The resources of a running task's process, by name; empty if the task does not run."""
    task = scheduler.tasks.get(ident)
    if task is None or task.worker is None:
        return {}
    allocation = scheduler.state.workers[task.worker].allocation
    held = {"CPU": allocation.cpus / UNIT} if allocation.cpus else {}
    for name, _, share in _devices(scheduler, task.worker):
        held[name] = held.get(name, 0.0) + share
    return held | {name: units / UNIT for name, units in allocation.resources}


def unmet(scheduler: Scheduler) -> dict[str, float]:
    """The sum of the demands of queued tasks, by resource name; 1.0 is one device.

    Devices of a type count under ``accelerator_type:`` and the type, too: the preferred one of
    those on this machine. Tasks that wait for their inputs do not count.
    """
    wanted: dict[str, int] = {}
    devices = scheduler.machine.devices
    for line in scheduler.queue.lines.values():
        demand = line.demand
        if demand.within is not None:
            continue  # its group has the resources, or waits for them itself
        fit = scheduler.capacity.fit(demand)
        amounts = [("CPU", demand.cpus), *fit.plain]
        for part in fit.parts:
            at, units = part.candidates[0][0] if part.candidates else (None, 0)
            units = part.units or units
            amounts.append((part.name, units))
            if demand.types and at is not None and devices[at].resource == part.name:
                amounts.append((f"{TYPE_PREFIX}{devices[at].type}", units))
        for name, units in amounts:
            if units:
                wanted[name] = wanted.get(name, 0) + units * line.count
    return {name: units / UNIT for name, units in wanted.items()}


def _free_shares(scheduler: Scheduler) -> list[int]:
    """The free units of each device, with those of workers without a task, which make room; 0 if
    lost."""
    capacity = scheduler.capacity
    shares = capacity.shares.copy()
    for worker in scheduler.state.workers.values():
        if _holder(worker) is None and worker.allocation.within is None:
            for key, units in worker.allocation.shares:
                shares[capacity.position[key]] += units
    for at in capacity.lost:
        shares[at] = 0
    return [max(0, each) for each in shares]


def devices_of_group(scheduler: Scheduler, allocation: Allocation) -> list[str]:
    """The keys of the devices of the group in which an allocation is: the first device of each
    bundle, then the second ones, so that the device with the number of a bundle is in it."""
    state = scheduler.state
    group = state.actors.get(group_of(allocation) or 0)
    holder = state.workers.get(group.worker or 0) if group is not None else None
    bundles = holder.allocation.bundles if holder is not None else ()
    places = itertools.zip_longest(*(each.shares for each in bundles))
    return [share[0] for place in places for share in place if share is not None]


def why(scheduler: Scheduler, ident: TaskId, now: float) -> str | None:
    """The reason why a task waits at time `now`, in words; None if it does not wait."""
    task = scheduler.tasks.get(ident)
    if task is None or task.state == "running":
        return None
    return why_task_waits(scheduler, task, _busy(_holders(scheduler)), now)


def _holders(scheduler: Scheduler) -> dict[int, dict[TaskId, int]]:
    """The units that each task's worker holds of each device, by the device's position. A placement
    group holds what no task in it holds."""
    position = scheduler.capacity.position
    found: dict[int, Counter[TaskId]] = {}
    for worker in scheduler.state.workers.values():
        name, group = _holder(worker), group_of(worker.allocation)
        if name is None:
            continue
        for key, units in worker.allocation.shares:
            at = found.setdefault(position[key], Counter())
            at[name] += units
            if group is not None:
                at[group] -= units
    return {at: {task: held for task, held in each.items() if held} for at, each in found.items()}


def _holder(worker: Worker) -> TaskId | None:
    if worker.actor is not None:
        return worker.actor
    if worker.tasks:
        return min(worker.tasks)
    return worker.last_task if worker.state == "leaving" else None


def _busy(holders: dict[int, dict[TaskId, int]]) -> dict[int, list[TaskId]]:
    return {at: sorted(tasks) for at, tasks in holders.items()}


def _waiting(
    scheduler: Scheduler, holders: dict[int, dict[TaskId, int]], now: float
) -> list[JobView]:
    """The first waiting tasks of each kind: those that wait for room in the order in which they
    start if all fit, then the others."""
    busy = _busy(holders)
    queued: list[tuple[Task, str]] = []
    for line in scheduler.queue.lines.values():
        reason: str | None = None
        for task in itertools.islice(line, SHOWN_PER_LINE):
            reason = reason or why_task_waits(scheduler, task, busy, now)
            queued.append((task, reason))
    queued.sort(key=lambda each: each[0].rank)
    unready = (task for task in scheduler.tasks.values() if task.state == "waiting")
    others = [
        (task, why_task_waits(scheduler, task, busy, now))
        for task in itertools.islice(unready, SHOWN_PER_LINE)
    ]
    return [_job(scheduler, task, now, reason) for task, reason in (*queued, *others)]


def actor_text(actor: Mapping[str, Any]) -> str:
    """The class and the name of an actor in words; a session of cells has its name as class."""
    kind, name = actor["class"] or "", actor["name"]
    return kind if name is None or kind == f"session {name}" else f"{kind} {name}"


def _actor(scheduler: Scheduler, actor: Actor) -> ActorView:
    constructor = scheduler.tasks.get(actor.id)
    state: str = actor.state
    if actor.restarting:
        state = "restarting"
    elif state == "starting" and constructor is not None and constructor.state != "running":
        state = "queued"
    devices = _devices(scheduler, actor.worker)
    return ActorView(
        id=actor.id,
        name=actor.spec.name,
        state=state,
        restarts=actor.restarts,
        worker=actor.worker,
        gpus=_gpus(devices),
        devices=devices,
        waiting=len(actor.calls),
        running=len(actor.running),
    )


def _devices(scheduler: Scheduler, ident: WorkerId | None) -> tuple[Holding, ...]:
    """The devices of a worker."""
    if ident is None:
        return ()
    known, position = scheduler.machine.devices, scheduler.capacity.position
    shares = scheduler.state.workers[ident].allocation.shares
    devices = ((known[position[key]], units) for key, units in shares)
    return tuple([(each.resource, each.id, units / UNIT) for each, units in devices])


def _gpus(devices: tuple[Holding, ...]) -> tuple[tuple[int | str, float], ...]:
    return tuple([(ident, share) for kind, ident, share in devices if kind == GPU])


def _job(scheduler: Scheduler, task: Task, now: float, waits_for: str | None = None) -> JobView:
    worker = scheduler.state.workers.get(task.worker) if task.worker is not None else None
    devices = _devices(scheduler, task.worker)
    return JobView(
        id=task.id,
        name=task.spec.name,
        state="running" if task.state == "running" else "queued",
        seconds=max(0.0, now - task.since),
        attempt=task.attempt,
        parent=task.parent,
        worker=task.worker,
        gpus=_gpus(devices),
        devices=devices,
        cpus=worker.allocation.cpus / UNIT if worker else task.spec.demand.cpus / UNIT,
        waits_for=waits_for,
        priority=task.spec.priority,
    )
