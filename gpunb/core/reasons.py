"""Why a demand can never be met, and what it waits for, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from gpunb.core.fitting import Part, allowed, candidates, suits
from gpunb.core.kinds import near
from gpunb.core.resources import GPU, UNIT, Demand, Device, Machine, amount, size_text

if TYPE_CHECKING:
    from gpunb.core.placement import Capacity

_NO_GPUS = (
    "there are no GPUs (`gpunb doctor` says why; gpunb.shutdown() and then gpunb.init(num_gpus=2) "
    "make logical ones)"
)


def refusal(demand: Demand, machine: Machine) -> str | None:
    """Why this machine can never satisfy the demand, or None if it can."""
    problems = [*_device_problems(demand, machine)]
    if demand.cpus > machine.cpus:
        are = "is" if machine.cpus == UNIT else "are"
        there = amount(machine.cpus) if machine.cpus else "none"
        problems.append(f"it asks for {cpus_text(demand.cpus)} and there {are} {there}")
    has = dict(machine.resources)
    for name, units in demand.resources:
        of_kind = [device for device in machine.devices if device.resource == name]
        if of_kind:
            problems.extend(_kind_problems(demand, name, units, of_kind))
        elif units > has.get(name, 0):
            there = f"{amount(has[name])}" if name in has else "none"
            problems.append(
                f"it asks for {amount(units)} of the resource {name!r}: there is {there}"
            )
    if not problems and machine.most is not None and _least_gpus(demand, machine) > machine.most:
        problems.append(
            f"this session may have {amount(machine.most)} of the GPUs at once (max_gpus)"
        )
    if not problems:
        return None
    return f"a request for {demand} can never be met on this machine: " + "; ".join(problems)


def cpus_text(units: int) -> str:
    """So many CPUs, in words."""
    return f"{amount(units)} CPU{'' if units == UNIT else 's'}"


def _least_gpus(demand: Demand, machine: Machine) -> int:
    """The fewest units of GPUs that will do."""
    units = [units for group in candidates(demand, machine) for _, units in group]
    return demand.gpus or min(units, default=0)


def _kind_problems(demand: Demand, name: str, units: int, devices: list[Device]) -> Iterable[str]:
    """What is wrong with asking for so much of the devices of another kind than GPUs."""
    of_type = [device for device in devices if suits(demand, device)]
    there = f"there are {describe(devices)}"
    if not of_type:
        types = " or ".join(demand.types)
        yield f"no {name} device is of type {types}: {there}{_hint(demand, devices)}"
        return
    if units % UNIT and (units > UNIT or all(device.whole for device in of_type)):
        yield f"{name} devices are given out whole: ask for a whole number"
        return
    counts = sorted({count for device in of_type for count in device.counts})
    fitting = [device for device in of_type if allowed(units, device)]
    if not fitting:
        numbers = ", ".join(map(str, counts))
        yield f"{amount(units)} {name} devices cannot be used together: ask for one of {numbers}"
    elif len(fitting) * UNIT < units:
        asks = f"it asks for {amount(units)} {name}"
        if len(fitting) < len(of_type):
            yield f"{asks}, and only {len(fitting)} can be used so many at a time: {there}"
        elif len(of_type) < len(devices):
            yield f"{asks}, and too few are of the type: {there}"
        else:
            yield f"{asks} and there are {len(devices)}"


def _device_problems(demand: Demand, machine: Machine) -> Iterable[str]:
    kinds = {device.resource for device in machine.devices}
    if not demand.wants_device and any(name in kinds for name, _ in demand.resources):
        return  # the type, if it asks for one, is theirs
    if not demand.wants_device and not demand.types:
        return
    gpus = [device for device in machine.devices if device.resource == GPU]
    others = kinds - {GPU}
    if not gpus and demand.wants_device:
        text = _NO_GPUS
        if others:
            name = min(others)
            text += f", but {_whole_machine(machine)}: ask for resources={{{name!r}: 1}}"
        yield text
        return
    if not machine.devices:
        yield _NO_GPUS
        return
    of_type = [
        device
        for device in (gpus if demand.wants_device else machine.devices)
        if suits(demand, device)
    ]
    there = f"there are {_whole_machine(machine)}"
    if not of_type:
        yield f"no device is of type {' or '.join(demand.types)}: {there}{_hint(demand, gpus)}"
        return
    such = "such " if demand.types else ""
    roomy = [each for each in of_type if (each.memory or 0) >= demand.min_memory]
    groups = candidates(demand, machine)
    if not roomy:
        yield f"no {such}device has {size_text(demand.min_memory)} of memory: {there}"
    elif demand.gpu_memory and not groups:
        if not any(each.memory is not None for each in of_type):
            yield f"the devices have no known memory: {there}; ask for num_gpus instead"
        else:
            yield f"no {such}device has that much memory: {there}"
    elif demand.wants_device and sum(map(len, groups)) < max(1, demand.gpus // UNIT):
        yield from _too_few(demand, roomy, there)


def _too_few(demand: Demand, devices: list[Device], there: str) -> Iterable[str]:
    """Why these devices, of the right type and size, are not enough."""
    fitting = sum(allowed(demand.gpus, device) for device in devices)
    if fitting == len(devices):
        asked = [
            text
            for text, given in (
                ("of the type", demand.types),
                (f"of {size_text(demand.min_memory)} or more", demand.min_memory),
            )
            if given
        ]
        yield f"too few are {' and '.join(asked)}: {there}" if asked else there
    elif demand.gpus % UNIT:
        yield f"the devices are given out whole: {there}"
    else:
        sliced = any(device.part_of for device in devices)
        why = " (a process can use one MIG slice only)" if sliced else ""
        count = demand.gpus // UNIT
        yield f"only {fitting} of them can be used {count} at a time{why}: {there}"


def _whole_machine(machine: Machine) -> str:
    return describe(machine.devices)


def _hint(demand: Demand, devices: Iterable[Device]) -> str:
    found = near(demand.types, [each.type for each in devices if each.type])
    return f". Did you mean {' or '.join(map(repr, found))}?" if found else ""


def describe(devices: Iterable[Device]) -> str:
    """Devices in words, alike ones counted: ``"2 x A100 (40 GiB), 1 x logical GPU"``."""
    counts: dict[str, int] = {}
    for device in devices:
        label = device.type or (f"logical {device.resource}" if device.logical else device.name)
        if device.memory:
            label += f" ({size_text(device.memory)})"
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(f"{count} x {label}" for label, count in counts.items()) or "no GPUs"


def why_waiting(
    demand: Demand, capacity: Capacity, holders: Mapping[int, Collection[int]] | None = None
) -> str:
    """What a demand that does not fit now waits for. `holders` maps positions to task ids."""
    fit = capacity.fit(demand)
    found = [_why_devices(demand, part, capacity, holders or {}) for part in fit.parts]
    reasons = [reason for reason in found if reason]
    if demand.cpus and demand.cpus > capacity.cpus:
        reasons.append(
            f"needs {_plural(demand.cpus, 'CPU')}; {amount(max(0, capacity.cpus))} of "
            f"{amount(capacity.machine.cpus)} are free"
        )
    for name, units in fit.plain:
        if units > capacity.resources.get(name, 0):
            free = amount(capacity.resources.get(name, 0))
            reasons.append(f"needs {amount(units)} of {name!r}; {free} is free")
    return "; ".join(reasons) or "is next in line"


def _why_devices(
    demand: Demand, part: Part, capacity: Capacity, holders: Mapping[int, Collection[int]]
) -> str | None:
    places = part.positions
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
        return text + _held(busy)
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
        f"on {part.name} {devices[at].id}" + _held(sorted(holders.get(at, ())))
    )


def _held(tasks: Collection[int]) -> str:
    if not tasks:
        return ""
    shown = ", ".join(f"#{task}" for task in list(tasks)[:4])
    return f", held by {shown}" + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")


def _plural(units: int, word: str) -> str:
    return f"{amount(units)} {word}{'' if units == UNIT else 's'}"
