"""The frozen view of the scheduler that people and programs see.

Amounts are floats here, because this is where they leave the core: 1.0 is one device or CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gpunb.core.reasons import why_waiting
from gpunb.core.records import Actor, Task, Worker
from gpunb.core.resources import GPU, TYPE_PREFIX, UNIT
from gpunb.core.scheduler import Scheduler
from gpunb.core.tasks import ActorId, TaskId, WorkerId

VERSION = 1
"""Of the form of a snapshot: higher when something is taken out of it or changes its meaning."""

SHOWN_PER_LINE = 20
"""Waiting tasks listed one by one for each demand; the rest is counted."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device; `memory` in bytes, `free` a share, `held` pairs of (task, share). It counts as
    `resource`: "GPU", or what devices of another kind are called."""

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


Holding: TypeAlias = tuple[str, int | str, float]
"""What is held of a device: (resource, id, share)"""


@dataclass(frozen=True, slots=True)
class JobView:
    """A task; `seconds` in its present state, `gpus` pairs of (id, share), `devices` those of every
    kind as (resource, id, share)."""

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


@dataclass(frozen=True, slots=True)
class ActorView:
    """An actor that has not ended; `waiting` and `running` count its calls. `gpus` and `devices` as
    of a job.

    Its state is "queued" while its constructor waits, then "starting", "alive", "restarting" or
    "ending".
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment. `queued` counts all waiting tasks, `waiting` lists the first, and
    `unmet` is what they ask for together."""

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
        """The same as dicts, lists, texts and numbers only."""
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
        )
        for at, each in enumerate(machine.devices)
    )
    running = [task for task in scheduler.tasks.values() if task.state == "running"]
    waiting = list(_waiting(scheduler, holders, now))
    listed = sum(len(line) for line in scheduler.queue.lines.values())
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
        workers=len(scheduler.workforce.workers),
        actors=tuple(_actor(scheduler, actor) for actor in scheduler.actors.book.values()),
        unmet=unmet(scheduler),
    )


def available(scheduler: Scheduler) -> dict[str, float]:
    """What is free, as `available_resources()` shows it."""
    capacity, shares = scheduler.capacity, _free_shares(scheduler)
    free: dict[str, float] = {}
    if capacity.cpus > 0:
        free["CPU"] = capacity.cpus / UNIT
    for at, device in enumerate(scheduler.machine.devices):
        if shares[at]:
            free[device.resource] = free.get(device.resource, 0.0) + shares[at] / UNIT
    if GPU in free and not (gpus := min(round(free[GPU] * UNIT), _budget(scheduler))):
        del free[GPU]
    elif GPU in free:
        free[GPU] = gpus / UNIT
    for at, device in enumerate(scheduler.machine.devices):
        if device.type and shares[at]:
            name = TYPE_PREFIX + device.type
            free[name] = free.get(name, 0.0) + shares[at] / UNIT
    free.update({name: units / UNIT for name, units in capacity.resources.items() if units > 0})
    return free


def assigned(scheduler: Scheduler, ident: TaskId) -> dict[str, float]:
    """What the process of a running task holds, by resource name; empty if it does not run."""
    task = scheduler.tasks.get(ident)
    if task is None or task.worker is None:
        return {}
    allocation = scheduler.workforce.workers[task.worker].allocation
    held = {"CPU": allocation.cpus / UNIT} if allocation.cpus else {}
    for name, _, share in _devices(scheduler, task.worker):
        held[name] = held.get(name, 0.0) + share
    return held | {name: units / UNIT for name, units in allocation.resources}


def unmet(scheduler: Scheduler) -> dict[str, float]:
    """What the tasks in line ask for together, by resource name; whole numbers are one device.

    Devices of a type count under ``accelerator_type:`` and the type, too: the one of this machine
    that the request would rather have. Tasks that wait for their inputs do not count.
    """
    wanted: dict[str, int] = {}
    devices = scheduler.machine.devices
    for demand, line in scheduler.queue.lines.items():
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
                wanted[name] = wanted.get(name, 0) + units * len(line)
    return {name: units / UNIT for name, units in wanted.items()}


def _free_shares(scheduler: Scheduler) -> list[int]:
    """The units free on each device; what idle workers hold counts, because they make room. Of a
    device that is lost nothing is."""
    capacity = scheduler.capacity
    shares = capacity.shares.copy()
    for worker in scheduler.workforce.idle:
        for key, units in worker.allocation.shares:
            shares[capacity.position[key]] += units
    for at in capacity.lost:
        shares[at] = 0
    return [max(0, each) for each in shares]


def _budget(scheduler: Scheduler) -> int:
    """The units of GPUs that may still be given out, those of idle workers among them."""
    budget = scheduler.capacity.copy()
    for worker in scheduler.workforce.idle:
        budget.give(worker.allocation)
    return budget.budget


def why(scheduler: Scheduler, ident: TaskId) -> str | None:
    """What the task waits for, in words; None if it does not wait."""
    task = scheduler.tasks.get(ident)
    if task is None or task.state == "running":
        return None
    return _reason(scheduler, task, _busy(_holders(scheduler)))


def _holders(scheduler: Scheduler) -> dict[int, dict[TaskId, int]]:
    """For each device position, the units that each task's worker holds there."""
    position = scheduler.capacity.position
    found: dict[int, dict[TaskId, int]] = {}
    for worker in scheduler.workforce.workers.values():
        name = _holder(worker)
        if name is None:
            continue
        for key, units in worker.allocation.shares:
            at = found.setdefault(position[key], {})
            at[name] = at.get(name, 0) + units
    return found


def _holder(worker: Worker) -> TaskId | None:
    if worker.actor is not None:
        return worker.actor
    if worker.tasks:
        return min(worker.tasks)
    return worker.last if worker.state == "leaving" else None


def _busy(holders: dict[int, dict[TaskId, int]]) -> dict[int, list[TaskId]]:
    return {at: sorted(tasks) for at, tasks in holders.items()}


def _waiting(
    scheduler: Scheduler, holders: dict[int, dict[TaskId, int]], now: float
) -> list[JobView]:
    busy = _busy(holders)
    jobs: list[JobView] = []
    for line in scheduler.queue.lines.values():
        reason: str | None = None
        for task in itertools.islice(line, SHOWN_PER_LINE):
            reason = reason or _reason(scheduler, task, busy)
            jobs.append(_job(scheduler, task, now, reason))
    unready = (task for task in scheduler.tasks.values() if task.state == "waiting")
    jobs.extend(
        _job(scheduler, task, now, _reason(scheduler, task, busy))
        for task in itertools.islice(unready, SHOWN_PER_LINE)
    )
    return sorted(jobs, key=lambda job: job.id)


def _reason(scheduler: Scheduler, task: Task, busy: dict[int, list[TaskId]]) -> str:
    if task.needs:
        shown = ", ".join(f"#{need}" for need in sorted(task.needs)[:4])
        return f"takes the result of {shown}" + (" and others" if len(task.needs) > 4 else "")
    if task.actor is not None and not task.constructs:
        return _reason_of_call(scheduler, task.actor, busy)
    text = why_waiting(task.spec.demand, scheduler.capacity, busy)
    if text != "is next in line" and (others := scheduler.outside.why(task.spec.demand)):
        return f"{text}; {others}"
    kept = scheduler.queue.reservation
    if kept and kept.line.demand != task.spec.demand and text == "is next in line":
        return (
            f"what is free is kept for a request for {kept.line.demand}, which has waited longest"
        )
    if text == "is next in line" and scheduler.workforce.full:
        return f"{scheduler.policy.max_workers} worker processes run, which is the most allowed"
    return text


def _reason_of_call(scheduler: Scheduler, actor: ActorId, busy: dict[int, list[TaskId]]) -> str:
    constructor = scheduler.tasks.get(actor)
    if constructor is None:
        return f"waits for its turn in actor #{actor}"
    starts = f"waits for actor #{actor} to start"
    if constructor.state == "running":
        return starts
    return f"{starts}: {_reason(scheduler, constructor, busy)}"


def actor_text(actor: Mapping[str, Any]) -> str:
    """An actor of a snapshot in words: its class, and the name that it may have. A session of cells
    says its name by itself."""
    kind, name = actor["class"] or "", actor["name"]
    return kind if name is None or kind == f"session {name}" else f"{kind} {name}"


def _actor(scheduler: Scheduler, actor: Actor) -> ActorView:
    constructor = scheduler.tasks.get(actor.id)
    state: str = actor.state
    if state == "starting" and actor.restarts:
        state = "restarting"
    elif constructor is not None and constructor.state != "running":
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
    """What the worker holds."""
    if ident is None:
        return ()
    known, position = scheduler.machine.devices, scheduler.capacity.position
    shares = scheduler.workforce.workers[ident].allocation.shares
    devices = ((known[position[key]], units) for key, units in shares)
    return tuple([(each.resource, each.id, units / UNIT) for each, units in devices])


def _gpus(devices: tuple[Holding, ...]) -> tuple[tuple[int | str, float], ...]:
    return tuple([(ident, share) for kind, ident, share in devices if kind == GPU])


def _job(scheduler: Scheduler, task: Task, now: float, waits_for: str | None = None) -> JobView:
    worker = scheduler.workforce.workers.get(task.worker) if task.worker is not None else None
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
    )
