"""Chooses the devices of a session, by the visibility variable and the options of `init`.

Pure functions. They read the variable as the CUDA driver does: the list ends at its first invalid
entry, and all entries are of one kind, indices or UUIDs. A note tells the user which entries are
left out.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from gpunb.accelerators.base import in_order
from gpunb.accelerators.simulated import logical
from gpunb.scheduler.resources import GPU, UNIT, Device, amount

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
        devices: the devices that the vendor's plug-in found, in its order. If it found none,
            indices become logical devices, and UUIDs become devices without further facts.
        value: the variable's value; None if it is not set, which shows all devices.
        variable: the variable's name, for the notes.
        vendor: the plug-in that pins devices which were not found.

    The id of each device is its entry in the value: an int for an index, else the text, also if
    it is only the beginning of a UUID.
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
    """The first `num_gpus` GPUs by ascending id, with logical ones added if there are fewer, and
    then all devices of other kinds.

    Args:
        devices: the devices that `visible` returned.
        num_gpus: number of GPUs; None for all.
        value: the value of the visibility variable; None if it is not set.
        variable: the variable's name, for the error.

    Raises:
        ValueError: `num_gpus` is not a whole number >= 0, or more than the variable names.
        TypeError: `num_gpus` is not a number.
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
    """The devices; of a kind other than GPUs only as many as the user declared as a resource.

    Args:
        resources: the declared amounts in units. Entries for devices are removed.

    Raises:
        ValueError: a declared amount is more than the machine has, or not whole.
    """
    kinds = {device.resource for device in devices} - {GPU}
    left = {name: resources.pop(name) for name in kinds & resources.keys()}
    for name, units in left.items():
        found = sum(device.resource == name for device in devices)
        if units % UNIT or units > found * UNIT:
            raise ValueError(
                f"resources={{{name!r}: {amount(units)}}}, but this machine has {found} {name}: "
                "declare a whole number of them, or leave it out to use all"
            )
    chosen: list[Device] = []
    for device in devices:
        if device.resource in left:
            left[device.resource] -= UNIT
            if left[device.resource] < 0:
                continue
        chosen.append(device)
    return tuple(chosen)


def _entries(value: str) -> list[str]:
    """The entries of the value without spaces; empty if it names no device."""
    text = value.strip().removesuffix(",")
    if text in ("", "NoDevFiles"):
        return []
    return [entry.strip() for entry in text.split(",")]


def _kind(entry: str) -> str | None:
    return next((kind for kind, form in _KINDS.items() if form.fullmatch(entry)), None)


def _named(entry: str, kind: str | None, devices: Sequence[Device], vendor: str) -> Device | str:
    """The device of an entry, or the reason why the entry is invalid."""
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
    """The note for devices that the variable names, but that were not found."""
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
