"""Huawei's Ascend NPUs, through their device nodes and npu-smi."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, Process, Usage
from gpunb.scheduler.resources import Device

MIB = 1024**2
_NUMBER = re.compile(r"\d+(\.\d+)?")
_CHIP = re.compile(r"(?P<bus>[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")


class _Chip(NamedTuple):
    """A chip in npu-smi's table.

    The health is "OK" or a warning; sizes are in bytes, `busy` in percent, `heat` in degrees
    Celsius; the place is NPU and chip, as "0/0".
    """

    model: str
    health: str
    address: str
    memory: int | None
    used: int | None
    busy: int | None
    heat: int | None
    place: str


class Ascend(Accelerator):
    """Ascend NPUs; each chip is a device."""

    name: ClassVar[str] = "ascend"
    resource: ClassVar[str] = "NPU"
    variable: ClassVar[str | None] = "ASCEND_RT_VISIBLE_DEVICES"

    def devices(self) -> Sequence[Device]:
        nodes = [path for path in probing.listed("/dev/davinci*") if path[-1].isdigit()]
        if not nodes:
            self.notes = ("no Ascend NPU: there is no /dev/davinci0",)
            return ()
        chips: Sequence[_Chip | None] = [None] * len(nodes)
        try:
            found = _chips(probing.ask("npu-smi", "info"))
            if len(found) == len(nodes):
                chips = found
            else:
                differ = f"npu-smi lists {len(found)} NPUs, and there are {len(nodes)} device nodes"
                self.notes = (f"{differ}: their types and memory are not known",)
        except probing.ProbeError as error:
            self.notes = (f"the types and memory of the Ascend NPUs are not known: {error}",)
        # The runtime numbers the container's NPUs from 0, whatever the names of the nodes are.
        return [self._device(id, *each) for id, each in enumerate(zip(nodes, chips, strict=True))]

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        usage = super().usage(devices)
        try:
            text = probing.ask("npu-smi", "info")
        except probing.ProbeError:
            return usage
        processes = _processes(text)
        for chip in _chips(text):
            key = f"ascend:{chip.address}"
            if key in usage:
                users = None if processes is None else tuple(processes.get(chip.place, ()))
                usage[key] = Usage(chip.used, chip.memory, chip.busy, chip.heat, users)
        return usage

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        health = super().health(devices)
        try:
            chips = _chips(probing.ask("npu-smi", "info"))
        except probing.ProbeError:
            return health
        for chip in chips:
            key = f"ascend:{chip.address}"
            if key in health and chip.health != "OK":
                health[key] = f"npu-smi says of its health: {chip.health}"
        return health

    def _device(self, id: int, node: str, chip: _Chip | None) -> Device:
        return Device(
            key=f"ascend:{chip.address}" if chip else f"ascend:{node}",
            id=id,
            name=f"Ascend {chip.model}" if chip else "Ascend NPU",
            type=f"Ascend{chip.model}" if chip else None,
            memory=chip.memory if chip else None,
            vendor=self.name,
        )


def _chips(text: str) -> list[_Chip]:
    """The chips in npu-smi's table. Each has two lines; model and health are in the first."""
    found: list[_Chip] = []
    first: list[str] = []
    for line in text.splitlines():
        cells = [each.strip() for each in line.strip().strip("|").split("|")]
        where = _CHIP.fullmatch(cells[1]) if len(cells) == 3 else None
        if where and first:
            npu, model = first[0].split()[0], first[0].split()[-1]
            # The largest of the memories; a chip without HBM has zeros in its column.
            sizes = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
            total, used = max(((int(size), int(part)) for part, size in sizes), default=(0, 0))
            found.append(
                _Chip(
                    model,
                    first[1],
                    where["bus"].lower(),
                    total * MIB or None,
                    used * MIB if total else None,
                    _figure(cells[2], 0),
                    _figure(first[2], 1),
                    f"{npu}/{cells[0].split()[0]}",
                )
            )
        first = cells if len(cells) == 3 else []
    return found


def _figure(cell: str, at: int) -> int | None:
    """The number at one position in a cell such as "92.8        46                0    / 0"."""
    words = cell.split()
    return round(float(words[at])) if at < len(words) and _NUMBER.fullmatch(words[at]) else None


def _processes(text: str) -> dict[str, list[Process]] | None:
    """The processes on each chip, from the table below the chips; None if there is no table."""
    _, title, table = text.partition("Process id")
    if not title:
        return None
    found: dict[str, list[Process]] = {}
    for line in table.splitlines():
        cells = [each.strip() for each in line.strip().strip("|").split("|")]
        place = cells[0].split()
        if len(cells) == 4 and len(place) == 2 and cells[1].isdigit():
            size = int(cells[3]) * MIB if cells[3].isdigit() else None
            found.setdefault("/".join(place), []).append(Process(int(cells[1]), size))
    return found
