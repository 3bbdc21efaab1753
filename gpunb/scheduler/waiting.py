"""Explains in words why a task waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from gpunb.scheduler.explain import cpus_text, some_text, time_text
from gpunb.scheduler.feasibility import Part
from gpunb.scheduler.groups import group_of
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.reservation import Reservation
from gpunb.scheduler.resources import GPU, UNIT, Demand, Gang, amount, size_text
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.state import Task
from gpunb.scheduler.tasks import ActorId, TaskId

_NEXT = "is next in line"


def why_task_waits(
    scheduler: Scheduler, task: Task, busy: dict[int, list[TaskId]], now: float
) -> str:
    """The reason why a task does not run. `busy` maps positions of devices to the tasks there."""
    text, priority = _why(scheduler, task, busy, now), task.spec.priority
    return f"priority {priority}; {text}" if priority else text


def _why(scheduler: Scheduler, task: Task, busy: dict[int, list[TaskId]], now: float) -> str:
    if task.needs:
        shown = ", ".join(f"#{need}" for need in sorted(task.needs)[:4])
        return f"takes the result of {shown}" + (" and others" if len(task.needs) > 4 else "")
    if task.actor is not None and task.is_call:
        return _why_call_waits(scheduler, task.actor, busy, now)
    if task.state == "waiting" and task.actor is None:
        return _NEXT  # a worker was sent it ahead
    if task.state == "waiting":
        crashes = scheduler.state.actors[task.id].failed_starts
        times = "once" if crashes == 1 else f"{crashes} times"
        return f"starts again after a pause, as its process has ended {times} while it was made"
    text = why_demand_waits(task.spec.demand, scheduler.capacity, busy)
    if (group := group_of(task.spec.demand)) is not None:
        return _why_group_waits(scheduler, group, busy, now) or text
    if text != _NEXT:
        others = scheduler.peers.why(task.spec.demand)
        return f"{text}; {others}" if others else text
    line = scheduler.queue.line_of(task)
    if line is not None and line.held:
        return "the free CPUs are lent by tasks that wait, and kept for what they wait for"
    kept = scheduler.queue.reservation
    if kept and kept.line.demand != task.spec.demand:
        return _why_room_is_kept(scheduler, kept, now)
    if scheduler.workers.full:
        most = scheduler.state.policy.max_workers
        return f"{most} worker processes run, which is the most allowed"
    return text


def _why_room_is_kept(scheduler: Scheduler, kept: Reservation, now: float) -> str:
    """For whom the free room is kept, and the price of that so far, in words."""
    devices = [scheduler.machine.devices[at] for at in sorted(kept.reserved.devices)]
    where = some_text([f"{each.resource} {each.id}" for each in devices])
    what = f"{where} {'are' if len(devices) > 1 else 'is'}" if devices else "what is free is"
    line = kept.line
    text = f"{what} kept for #{line.tasks[0].id} ({line.demand}), which has waited longest"
    return f"{text}{_cost_text(scheduler, kept, now)}"


def _cost_text(scheduler: Scheduler, kept: Reservation, now: float) -> str:
    cost = scheduler.queue.costs.of(kept, now) / UNIT
    if cost < 1 or not kept.reserved.devices:
        return ""
    kind = scheduler.machine.devices[min(kept.reserved.devices)].resource
    return f"; {time_text(cost)} of {kind} time so far"


def kept_devices(scheduler: Scheduler, now: float) -> tuple[frozenset[int], str]:
    """The positions of the devices that are kept for a task, and the task, the time for which they
    are and the price so far, in words."""
    kept = scheduler.queue.reservation
    if kept is None:
        return frozenset(), ""
    task, since = kept.line.tasks[0].id, time_text(now - kept.since)
    cost = _cost_text(scheduler, kept, now)
    return kept.reserved.devices, f"kept for #{task} for {since}{cost}"


def _why_group_waits(
    scheduler: Scheduler, group: ActorId, busy: dict[int, list[TaskId]], now: float
) -> str | None:
    """The reason why nothing runs in a placement group; None if the group is placed."""
    if group in scheduler.capacity.closed:
        return f"waits for the end of placement group #{group}, which is removed"
    constructor = scheduler.tasks.get(group)
    if constructor is None:
        return None
    waits = f"waits for placement group #{group} to be placed"
    if constructor.state == "running":
        return waits
    return f"{waits}: {why_task_waits(scheduler, constructor, busy, now)}"


def _why_call_waits(
    scheduler: Scheduler, actor: ActorId, busy: dict[int, list[TaskId]], now: float
) -> str:
    constructor = scheduler.tasks.get(actor)
    if constructor is None:
        return f"waits for its turn in actor #{actor}"
    parked = scheduler.state.actors[actor].state == "parked"
    starts = f"waits for actor #{actor} to {'have its devices again' if parked else 'start'}"
    if constructor.state == "running":
        return starts
    return f"{starts}: {why_task_waits(scheduler, constructor, busy, now)}"


def why_demand_waits(
    demand: Demand, capacity: Capacity, holders: Mapping[int, Collection[int]] | None = None
) -> str:
    """The part of a demand that does not fit now, and the tasks that hold it, by position."""
    if isinstance(demand, Gang):
        return _why_gang_waits(demand, capacity, holders)
    where = capacity.where(demand)
    if where is not capacity:
        text = why_demand_waits(replace(demand, within=None), where, holders)
        return text if text == _NEXT else f"in {demand.within}: {text}"
    fit = capacity.fit(demand)
    found = [_why_part_waits(demand, part, capacity, holders or {}) for part in fit.parts]
    reasons = [reason for reason in found if reason]
    if demand.cpus and demand.cpus > capacity.cpus:
        reasons.append(
            f"needs {cpus_text(demand.cpus)}; {amount(max(0, capacity.cpus))} of "
            f"{amount(capacity.whole().cpus)} are free"
        )
    for name, units in fit.plain:
        if units > capacity.resources.get(name, 0):
            free = amount(capacity.resources.get(name, 0))
            reasons.append(f"needs {amount(units)} of {name!r}; {free} is free")
    return "; ".join(reasons) or _NEXT


def _why_gang_waits(
    gang: Gang, capacity: Capacity, holders: Mapping[int, Collection[int]] | None
) -> str:
    """The first bundle that has no place beside those before it, and why."""
    free = capacity.copy()
    for at, bundle in enumerate(gang.bundles):
        place = free.place(bundle)
        if place is None:
            text = why_demand_waits(bundle, free, holders)
            return f"all {len(gang.bundles)} bundles are placed at once; bundle {at} {text}"
        free.take(place)
    return _NEXT


def _why_part_waits(
    demand: Demand, part: Part, capacity: Capacity, holders: Mapping[int, Collection[int]]
) -> str | None:
    everything = capacity.whole()  # of a bundle its share of the devices
    places = [at for at in part.positions if everything.shares[at] > 0]
    if capacity.choose(part) is not None or not places:
        return None
    most = capacity.machine.most
    if most is not None and part.name == GPU and (part.units or 1) > capacity.budget:
        return (
            f"needs {amount(part.units) if part.units else 'a part'} of the GPUs, and this session "
            f"has {amount(most - capacity.budget)} of the {amount(most)} that it may have at once "
            "(max_gpus)"
        )
    kind = part.name
    if kind == GPU:
        words = [" or ".join(demand.types)] if demand.types else []
        kind = " ".join([*words, GPU])
    if part.units >= UNIT:
        free = [at for at in places if capacity.shares[at] == UNIT]
        text = (
            f"needs {part.devices} whole {kind}{'s' if part.devices > 1 else ''}; "
            f"{len(free)} of {len(places)} {'is' if len(free) == 1 else 'are'} wholly free"
        )
        busy = sorted({task for at in places for task in holders.get(at, ())})
        return text + _held_by(busy)
    devices = capacity.machine.devices
    room = {at: capacity.shares[at] for at in places}
    by_memory = part.name == GPU and demand.gpu_memory
    if by_memory:
        room = {at: share * (devices[at].memory or 0) // UNIT for at, share in room.items()}
    at = max(room, key=lambda each: (room[each], -each))
    asked, left = amount(part.units), amount(room[at])
    if by_memory:
        asked, left = size_text(demand.gpu_memory), size_text(room[at])
    return (
        f"needs {asked} of one {kind}; the largest free share is {left} "
        f"on {part.name} {devices[at].id}" + _held_by(sorted(holders.get(at, ())))
    )


def _held_by(tasks: Collection[int]) -> str:
    if not tasks:
        return ""
    shown = ", ".join(f"#{task}" for task in list(tasks)[:4])
    return f", held by {shown}" + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")
