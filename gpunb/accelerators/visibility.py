"""Which devices a session may use: the visibility variable's, and as many as it asked for.

Pure functions. The variable's value is read as the CUDA driver reads it: the list ends at its
first invalid entry, and all entries are of one kind, indices or UUIDs. Whatever is left out is
noted in words for the user.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from gpunb.accelerators.base import in_order
from gpunb.accelerators.simulated import logical
from gpunb.core.resources import GPU, UNIT, Device, amount

Found: TypeAlias = tuple[tuple[Device, ...], tuple[str, ...]]
"""Devices, and notes for the user."""

VARIABLE = "CUDA_VISIBLE_DEVICES"

_KINDS = {
    "index": re.compile("[0-9]{1,9}"),
    "GPU UUID": re.compile("GPU-.*"),
    "MIG id": re.compile("MIG-.*"),
}


def visible(
    devices: Sequence[Device],
    value: str | None,
    *,
    variable: str = VARIABLE,
    vendor: str = "nvidia",
) -> Found:
    """The devices that the value of a visibility variable names, in the order written there.

    Args:
        devices: what the vendor's plug-in found, in its order; empty if it found nothing. Then
            indices become logical devices, and UUIDs are taken as they stand, with nothing known.
        value: the variable's value; None if it is not set, which names all devices.
        variable: its name, for the notes.
        vendor: the plug-in that pins devices which only the value names.

    Each device has the id written in the value: an int for an index, else the text, also where it
    is the beginning of a UUID.
    """
    if value is None:
        return tuple(devices), ()
    setting = f"{variable}={value!r}"
    entries = _entries(value)
    if not entries or entries[0].startswith("-"):
        return (), (f"{setting} hides all devices: change or unset it to use some",)
    kind = _kind(entries[0])
    chosen: dict[str, Device] = {}
    notes = []
    for position, entry in enumerate(entries):
        device = _named(entry, kind, devices, vendor)
        if isinstance(device, str):
            rest = ", ".join(entries[position:])
            notes.append(f"{setting}: {entry!r} {device}; ignored from there on: {rest}")
            break
        if device.key in chosen:
            notes.append(f"{setting} names a device twice: the second {entry!r} is ignored")
        chosen.setdefault(device.key, device)
    if chosen and not devices:
        notes.append(_unconfirmed(setting, chosen.values()))
    return tuple(chosen.values()), tuple(notes)


def take(
    devices: Sequence[Device],
    num_gpus: float | None,
    value: str | None,
    *,
    variable: str = VARIABLE,
) -> Found:
    """The first `num_gpus` GPUs, by ascending id; beyond what there is, logical ones. After them
    all devices of other kinds.

    Args:
        devices: what `visible` returned.
        num_gpus: how many; None for all.
        value: the value of the visibility variable; None if it is not set.
        variable: its name, for the error.

    Raises:
        ValueError: not a whole number >= 0, or more than the visibility variable names.
        TypeError: not a number.
    """
    others = tuple(device for device in devices if device.resource != GPU)
    devices = tuple(device for device in devices if device.resource == GPU)
    if num_gpus is None:
        return (*in_order(devices), *others), ()
    count = _whole(num_gpus)
    if count <= len(devices):
        return (*in_order(devices[:count]), *others), ()
    if value is not None:
        named = f"only {_counted(len(devices))}" if devices else "no device"
        if len(devices) < len(_entries(value)):
            named += " that is here" if len(devices) <= 1 else " that are here"
        raise ValueError(
            f"num_gpus={count}, but {variable}={value!r} names {named}: "
            "lower the one or change the other"
        )
    start = max((device.id for device in devices if isinstance(device.id, int)), default=-1) + 1
    added = [logical(start + offset) for offset in range(count - len(devices))]
    note = (
        f"num_gpus={count}, but {_counted(len(devices))} found: {_ids(added)} logical, in the "
        "books only, without hardware and without memory"
    )
    return (*in_order(devices), *added, *others), (note,)


def declared(devices: Sequence[Device], resources: dict[str, int]) -> tuple[Device, ...]:
    """The devices, of other kinds than GPUs only as many as the user declared as a resource.

    Args:
        resources: what was declared, in units; what stands for devices is taken out of it.

    Raises:
        ValueError: more than there are, or a part of one.
    """
    kinds = {device.resource for device in devices} - {GPU}
    left = {name: resources.pop(name) for name in kinds & resources.keys()}
    for name, units in left.items():
        there = sum(device.resource == name for device in devices)
        if units % UNIT or units > there * UNIT:
            raise ValueError(
                f"resources={{{name!r}: {amount(units)}}}, but this machine has {there} {name}: "
                "declare a whole number of them, or leave it out to use all"
            )
    kept: list[Device] = []
    for device in devices:
        if device.resource in left:
            left[device.resource] -= UNIT
            if left[device.resource] < 0:
                continue
        kept.append(device)
    return tuple(kept)


def _entries(value: str) -> list[str]:
    """The entries of the value, without spaces; none if it names no device at all."""
    text = value.strip().removesuffix(",")
    if text in ("", "NoDevFiles"):
        return []
    return [entry.strip() for entry in text.split(",")]


def _kind(entry: str) -> str | None:
    return next((kind for kind, form in _KINDS.items() if form.fullmatch(entry)), None)


def _named(entry: str, kind: str | None, devices: Sequence[Device], vendor: str) -> Device | str:
    """The device of an entry, or what is wrong with the entry."""
    if entry.startswith("-"):
        return "ends the list"
    if _kind(entry) is None:
        return "is neither an index nor a UUID"
    if _kind(entry) != kind:
        return f"is no {kind}, and the first entry is one"
    if kind == "index":
        return _indexed(int(entry), devices)
    if devices and (kind == "GPU UUID" or any(device.part_of for device in devices)):
        return _identified(entry, devices)
    name = "MIG slice" if kind == "MIG id" else "GPU"
    return Device(key=entry, id=entry, name=name, vendor=vendor)


def _indexed(index: int, devices: Sequence[Device]) -> Device | str:
    if not devices:
        return logical(index)
    for device in devices:
        if device.id == index:
            return device
    return f"is not the index of a device: this machine has {_counted(len(devices))}, from 0"


def _identified(entry: str, devices: Sequence[Device]) -> Device | str:
    """The device whose UUID begins with the entry."""
    matches = [each for each in devices if each.key.lower().startswith(entry.lower())]
    if len(matches) == 1:
        return replace(matches[0], id=entry)
    return "fits more than one device" if matches else "is the UUID of no device here"


def _unconfirmed(setting: str, devices: Iterable[Device]) -> str:
    """The note for devices that are named, but were not found."""
    if any(device.logical for device in devices):
        return (
            f"{setting}, but no such hardware was found: {_ids(devices)} logical, in the books "
            "only, without hardware and without memory"
        )
    return f"{setting} is taken as it stands: no driver library was there to look it up"


def _whole(num_gpus: float) -> int:
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, numbers.Real):
        raise TypeError(f"num_gpus must be a whole number, not {num_gpus!r}")
    if num_gpus < 0 or num_gpus != num_gpus // 1:
        raise ValueError(f"num_gpus={num_gpus!r} must be a whole number, 0 or more, of devices")
    return int(num_gpus)


def _counted(number: int) -> str:
    return f"{number} device" if number == 1 else f"{number} devices"


def _ids(devices: Iterable[Device]) -> str:
    """For example "id 3 is" or "ids 2, 3 and 5 are"."""
    ids = [str(device.id) for device in devices]
    if len(ids) == 1:
        return f"id {ids[0]} is"
    return f"ids {', '.join(ids[:-1])} and {ids[-1]} are"
