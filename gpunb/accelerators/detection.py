"""Finds the devices of all plug-ins, and reads their use and health."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gpunb.accelerators.base import Accelerator, DetectionError, Usage
from gpunb.accelerators.registry import find, load_installed, registered
from gpunb.accelerators.visibility import VARIABLE, Found, visible
from gpunb.scheduler.resources import GPU, Device


@dataclass(frozen=True, slots=True)
class Detection:
    """The devices that were found, and notes about them.

    Attributes:
        devices: the devices of all vendors that the visibility variables show, with the ids that
            the user knows, in the order of the variable if one is set.
        notes: texts for the user: why there are none, errors, and what to do.
        vendors: names of the plug-ins with hardware on this machine, visible or not.
        variable: the visibility variable that limits the devices.
        value: its value; None if it is not set, and so limits nothing.
        absent: for each other vendor without devices here, the reason.
    """

    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    vendors: tuple[str, ...] = ()
    variable: str = VARIABLE
    value: str | None = None
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Search:
    """The devices of one plug-in; `absent` without any, `broken` if the plug-in itself failed."""

    plugin: type[Accelerator]
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    absent: bool = False
    broken: bool = False


def detect(environ: Mapping[str, str] | None = None) -> Detection:
    """Find the devices of all vendors. Never raises: errors become notes.

    Args:
        environ: environment with the visibility variables; default: that of this process.
    """
    environ = os.environ if environ is None else environ
    notes = list(load_installed())
    searches = [_search(plugin) for plugin in registered()]
    found = [search for search in searches if search.devices]
    devices: list[Device] = []
    absent: list[str] = []
    for search in searches:
        # The absence of a vendor's devices is a note only if no device is found at all, and then
        # only for the first vendor.
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
    """The use of these devices now, by device key. Never raises: an error makes it unknown."""
    usage: dict[str, Usage] = {}
    for vendor, group in _by_vendor(devices):
        usage.update({device.key: Usage() for device in group})
        with suppress(Exception):
            usage.update(find(vendor)().usage(group))
    return usage


def ailing(devices: Iterable[Device]) -> dict[str, str]:
    """The faults of these devices, by device key, without the devices that have none. Never
    raises."""
    problems: dict[str, str] = {}
    for vendor, group in _by_vendor(devices):
        with suppress(Exception):
            health = find(vendor)().health(group)
            problems.update({key: text for key, text in health.items() if text})
    return problems


def _by_vendor(devices: Iterable[Device]) -> Iterable[tuple[str, list[Device]]]:
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.vendor, []).append(device)
    return groups.items()


def _search(plugin: type[Accelerator]) -> _Search:
    """The devices of the plug-in. Any exception becomes a note."""
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
    """The device with the plug-in's `resource`, `whole` and `counts`."""
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
    """The devices that the vendor's visibility variable shows."""
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
        # Without it CUDA puts the fastest device first, so an index may mean another device.
        note = (
            f"{plugin.variable}={value!r} is read with {', '.join(unset)}, which is not set: the "
            "devices of this machine differ, and other programs may count them in another order"
        )
        notes += (note,)
    return shown, notes
