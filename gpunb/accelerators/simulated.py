"""Devices without hardware: simulated ones with type and memory, and logical ones with neither.

Both are pinned like NVIDIA devices: code sees the ids of its devices, and frameworks search for
devices that do not exist.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeAlias

from gpunb.accelerators.base import Accelerator, Usage
from gpunb.scheduler.resources import GPU, Device, parse_size

_ITEM = re.compile(
    r"(?:(?P<plain>[0-9]+)|(?:(?P<count>[0-9]+)[xX])?(?P<type>[A-Za-z][\w.+-]*))"
    r"\s*(?::\s*(?P<memory>.*))?"
)
_SWAPPED = re.compile(r"(?P<type>.+?)(?:x|(?<=[0-9])X)(?P<count>[0-9]{1,2})")
"""A device with the count after the type."""

_LEAST = 2**20
"""The least bytes of memory; a smaller number was most likely meant in another unit."""

_RULE = (
    "write COUNTxTYPE:MEMORY, separated by commas, where the count and the memory may be left "
    "out, or only a count: such as '2xA100:40GiB,1xV100:16GiB', 'A100' or '4'"
)


_OTHER_KINDS = {
    "TPU": "tpu",
    "NPU": "ascend",
    "Ascend": "ascend",
    "HPU": "gaudi",
    "Intel-GAUDI": "gaudi",
    "neuron_cores": "neuron",
    "aws-neuron-core": "neuron",
    "RBLN": "rebellions",
    "TTNPU": "tenstorrent",
    "Tenstorrent": "tenstorrent",
    "FURIOSA": "furiosa",
    "MBLT": "mobilint",
    "MOBILINT": "mobilint",
}
"""Plug-ins of devices other than GPUs, by the first characters of the device's type."""

_Plugin: TypeAlias = type[Accelerator]


class Logical(Accelerator):
    """Devices without hardware: tasks get them and are pinned to them, detection finds none."""

    name: ClassVar[str] = "logical"
    variable: ClassVar[str | None] = "CUDA_VISIBLE_DEVICES"
    constants: ClassVar[Mapping[str, str]] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def devices(self) -> Sequence[Device]:
        return ()

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        return {device.key: Usage(memory_total=device.memory) for device in devices}


class Simulated(Logical):
    """Devices made from a text such as ``"2xA100:40GiB"``, for laptops and tests.

    Args:
        text: the devices, as for `parse_simulate`; None for none.

    Raises:
        ValueError: the text does not have the form that `parse_simulate` takes.
    """

    name: ClassVar[str] = "simulated"

    def __init__(self, text: str | None = None) -> None:
        self._devices = parse_simulate(text) if text is not None else ()

    def devices(self) -> Sequence[Device]:
        return self._devices


def logical(id: int) -> Device:
    """The logical device with this id, without type and memory."""
    return Device(key=f"logical:{id}", id=id, name="logical GPU", vendor=Logical.name, logical=True)


def parse_simulate(text: str) -> tuple[Device, ...]:
    """Simulated devices with the ids 0, 1, ... from a text such as ``"2xA100:40GiB,V100:16GiB"``.

    A count alone (``"4"``) makes devices without a type; devices without a size (``"2xH100"``)
    have no memory. A task that asks for a type, or for device memory, cannot run on them. A type
    of another kind than GPUs (``"4xTPU-V4"``), or the name of such a kind (``"8xNPU"``), makes
    devices of that kind, with its rules and its variable.

    Raises:
        ValueError: the text has another form, or names no device.
        TypeError: not a text.
    """
    if not isinstance(text, str):
        raise TypeError(f"simulate must be a text, not {text!r}: {_RULE}")
    kinds: list[tuple[str | None, int | None]] = []
    for item in text.split(","):
        count, type, memory = _parse_item(text, item.strip())
        kinds += [(type, memory)] * count
    devices: list[Device] = []
    counts: dict[str, int] = {}
    for type, memory in kinds:
        plugin = _kind(type)
        id = counts.get(plugin.resource, 0)
        counts[plugin.resource] = id + 1
        devices.append(_simulated(plugin, id, type, memory))
    return tuple(devices)


def _simulated(plugin: _Plugin, id: int, type: str | None, memory: int | None) -> Device:
    kind = plugin.resource
    return Device(
        key=f"sim:{id}" if kind == GPU else f"sim:{kind}:{id}",
        id=id,
        name=f"simulated {type or GPU}",
        type=None if type == kind else type,
        memory=memory,
        vendor=plugin.name,
        logical=True,
        resource=kind,
        whole=plugin.whole,
        counts=plugin.counts,
    )


def _kind(type: str | None) -> _Plugin:
    """The plug-in of devices of this type."""
    for begin, name in _OTHER_KINDS.items():
        if type is not None and type.startswith(begin):
            module = importlib.import_module(f"gpunb.accelerators.{name}")
            plugin: _Plugin = getattr(module, name.capitalize())
            return plugin
    return Simulated


def _parse_item(text: str, item: str) -> tuple[int, str | None, int | None]:
    match = _ITEM.fullmatch(item)
    if not match:
        raise ValueError(f"simulate={text!r}: {item!r} names no device: {_RULE}")
    count = int(match["plain"] or match["count"] or 1)
    if not count:
        raise ValueError(f"simulate={text!r}: {item!r} makes 0 devices: {_RULE}")
    if swapped := _SWAPPED.fullmatch(match["type"] or ""):
        meant = f"{swapped['count']}x{swapped['type']}"
        raise ValueError(f"simulate={text!r}: {item!r} should begin with {meant!r}: {_RULE}")
    if match["memory"] is None:
        return count, match["type"], None
    try:
        memory = parse_size(match["memory"], "memory")
    except ValueError as error:
        raise ValueError(f"simulate={text!r}: {item!r}: {error}; {_RULE}") from None
    if memory < _LEAST and match["memory"].strip().isdecimal():
        meant = f"{match['memory'].strip()}GiB"
        raise ValueError(
            f"simulate={text!r}: {item!r} has {memory} bytes of memory: write a unit, as in "
            f"{meant!r}; {_RULE}"
        )
    return count, match["type"], memory
