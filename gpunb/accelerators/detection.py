"""What this machine has, through every plug-in, and what it does with it now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpunb.accelerators.base import Accelerator, DetectionError, Usage
from gpunb.accelerators.registry import find, load_installed, registered
from gpunb.accelerators.visibility import VARIABLE, Found, visible
from gpunb.core.resources import GPU, Device


@dataclass(frozen=True, slots=True)
class Detection:
    """The devices found, and what there is to say about them.

    Attributes:
        devices: those that the visibility variables leave, of all vendors, with the ids the user
            knows them by, in the order of the variable if one is set.
        notes: why there are none, what failed, and what to do; for the user.
        vendors: the plug-ins with hardware on this machine, visible or not.
        variable: the visibility variable that limits the devices.
        value: its value; None if it is not set, so that nothing limits them.
        absent: what was looked for beside that and is not here, a line for each vendor.
    """

    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ()
    variable: str = VARIABLE
    value: str | None = None
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Search:
    """What one plug-in found; whether there was simply nothing, or the plug-in itself failed."""

    plugin: type[Accelerator]
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    absent: bool = False
    broken: bool = False


def detect(environ: Mapping[str, str] | None = None) -> Detection:
    """Look for the devices of all vendors. Never raises: what fails is a note.

    Args:
        environ: where the visibility variables are; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    notes = list(load_installed())
    searches = [_search(plugin) for plugin in registered()]
    found = [search for search in searches if search.devices]
    devices: list[Device] = []
    absent: list[str] = []
    for search in searches:
        # That a vendor has nothing here is of interest only where no device is found, and then
        # the first vendor's word will do.
        if search.absent and (found or absent):
            absent += search.notes
        else:
            notes += search.notes
            absent += () if search.devices else search.notes
        if search.devices:
            shown, more = _limited(search, environ)
            devices += shown
            notes += more
    limit = _limit(found or searches, environ)
    if not found and limit:
        shown, more = visible((), limit[1], variable=limit[0], vendor=limit[2])
        devices += shown
        notes += more
    return Detection(
        tuple(devices),
        tuple(dict.fromkeys(notes)),
        tuple(search.plugin.name for search in searches if not (search.absent or search.broken)),
        limit[0] if limit else VARIABLE,
        limit[1] if limit else None,
        tuple(note for note in dict.fromkeys(absent) if note not in notes),
    )


def measure(devices: Iterable[Device]) -> dict[str, Usage]:
    """The use of these devices now, by device key. Never raises: what fails is unknown."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.vendor, []).append(device)
    usage: dict[str, Usage] = {}
    for vendor, group in groups.items():
        usage.update({device.key: Usage() for device in group})
        with suppress(Exception):
            usage.update(find(vendor)().usage(group))
    return usage


def ailing(devices: Iterable[Device]) -> dict[str, str]:
    """What is wrong with these devices, by device key; those that are fine are not in it. Never
    raises."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.vendor, []).append(device)
    problems: dict[str, str] = {}
    for vendor, group in groups.items():
        with suppress(Exception):
            told = find(vendor)().health(group)
            problems.update({key: text for key, text in told.items() if text})
    return problems


def _search(plugin: type[Accelerator]) -> _Search:
    """What the plug-in finds; whatever it raises becomes a note."""
    try:
        accelerator = plugin()
        devices = tuple(accelerator.devices())
        if wrong := [each for each in devices if not isinstance(each, Device)]:
            raise TypeError(f"it lists {wrong[0]!r}, which is no Device")
        devices = tuple(_of_kind(plugin, each) for each in devices)
        keys = [each.key for each in devices]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"it lists {twice[0]!r} twice")
        return _Search(plugin, devices, tuple(accelerator.notes), absent=not devices)
    except DetectionError as error:
        return _Search(plugin, notes=(str(error),))
    except Exception as error:  # noqa: BLE001 - a plug-in may fail in any way, and detection goes on
        text = f"the accelerator plug-in {plugin.name!r} failed: {type(error).__name__}: {error}"
        return _Search(plugin, notes=(text,), broken=True)


def _of_kind(plugin: type[Accelerator], device: Device) -> Device:
    """The device with what holds for all devices of the plug-in."""
    return replace(
        device,
        resource=plugin.resource,
        whole=device.whole or plugin.whole,
        counts=device.counts or plugin.counts,
    )


def _limit(searches: Sequence[_Search], environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first visibility variable of GPUs that is set, its value and its vendor."""
    for search in searches:
        variable = search.plugin.variable
        if search.plugin.resource == GPU and variable is not None and variable in environ:
            return variable, environ[variable], search.plugin.name
    return None


def _limited(search: _Search, environ: Mapping[str, str]) -> Found:
    """The devices that the vendor's visibility variable leaves."""
    plugin = search.plugin
    if plugin.variable is None or plugin.variable not in environ:
        return search.devices, ()
    value = environ[plugin.variable]
    shown, notes = visible(
        search.devices, plugin().ids_in(value), variable=plugin.variable, vendor=plugin.name
    )
    unset = [f"{key}={each}" for key, each in plugin.constants.items() if environ.get(key) != each]
    indexed = any(isinstance(device.id, int) for device in shown)
    if unset and indexed and len({device.name for device in search.devices}) > 1:
        # Without it CUDA puts the fastest device first, so that an index may mean another one.
        note = (
            f"{plugin.variable}={value!r} is read with {', '.join(unset)}, which is not set: the "
            "devices of this machine differ, and other programs may count them in another order"
        )
        notes += (note,)
    return shown, notes
