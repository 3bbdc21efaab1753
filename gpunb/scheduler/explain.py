"""Explains in words why a machine can never meet a demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpunb.scheduler.feasibility import allowed, candidates, suits
from gpunb.scheduler.resources import GPU, UNIT, Demand, Device, Machine, amount, size_text
from gpunb.scheduler.type_match import near

_NO_GPUS = (
    "there are no GPUs (`gpunb doctor` says why; gpunb.shutdown() and then gpunb.init(num_gpus=2) "
    "make logical ones)"
)

SHOWN = 4
"""Number of names in a text that may have many."""


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
    if not problems and machine.most is not None:
        shares = (units for group in candidates(demand, machine) for _, units in group)
        if (demand.gpus or min(shares, default=0)) > machine.most:
            problems.append(
                f"this session may have {amount(machine.most)} of the GPUs at once (max_gpus)"
            )
    if not problems:
        return None
    return f"a request for {demand} can never be met on this machine: " + "; ".join(problems)


def cpus_text(units: int) -> str:
    """A number of CPUs in words, such as ``"1 CPU"``."""
    return f"{amount(units)} CPU{'' if units == UNIT else 's'}"


def time_text(seconds: float) -> str:
    """A time in words, such as ``"45 s"``, ``"12 min"`` or ``"3.5 h"``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _kind_problems(demand: Demand, name: str, units: int, devices: list[Device]) -> Iterable[str]:
    """Why these devices of another kind than GPUs cannot meet their part of the demand."""
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
        return  # a type in the demand means these resources
    if not demand.wants_device and not demand.types:
        return
    gpus = [device for device in machine.devices if device.resource == GPU]
    others = kinds - {GPU}
    if not gpus and demand.wants_device:
        text = _NO_GPUS
        if others:
            name = min(others)
            text += f", but {describe(machine.devices)}: ask for resources={{{name!r}: 1}}"
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
    there = f"there are {describe(machine.devices)}"
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


def _hint(demand: Demand, devices: Iterable[Device]) -> str:
    found = near(demand.types, [each.type for each in devices if each.type])
    return f". Did you mean {' or '.join(map(repr, found))}?" if found else ""


def describe(devices: Iterable[Device]) -> str:
    """Devices in words, with the number of equal ones: ``"2 x A100 (40 GiB), 1 x logical GPU"``."""
    counts: dict[str, int] = {}
    for device in devices:
        label = device.type or (f"logical {device.resource}" if device.logical else device.name)
        if device.memory:
            label += f" ({size_text(device.memory)})"
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(f"{count} x {label}" for label, count in counts.items()) or "no GPUs"


def and_text(parts: Sequence[str]) -> str:
    """Words in a row, such as ``"a, b and c"``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def some_text(names: Sequence[str]) -> str:
    """The first names in a row, and the number of the others."""
    more = len(names) - SHOWN
    return and_text([*names[:SHOWN], f"{more} more"] if more > 0 else names)


def wait_text(names: Iterable[str]) -> str:
    """The verb for so many different names."""
    return "waits" if len(set(names)) == 1 else "wait"
