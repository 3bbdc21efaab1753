"""Intel's Gaudi accelerators (HPU), through sysfs and hl-smi.

Ids are module ids, which is what HABANA_VISIBLE_MODULES holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, Usage
from gpunb.scheduler.resources import Device, parse_size

_QUERY = ("-Q", "index,module_id,bus_id,uuid,name,memory.total", "-f", "csv,noheader")
_FIGURES = (
    "-Q",
    "uuid,bus_id,memory.used,memory.total,utilization.aip,temperature.aip",
    "-f",
    "csv,noheader",
)


class Gaudi(Accelerator):
    """Gaudi accelerators; a process has whole ones."""

    name: ClassVar[str] = "gaudi"
    resource: ClassVar[str] = "HPU"
    whole: ClassVar[bool] = True
    variable: ClassVar[str | None] = "HABANA_VISIBLE_MODULES"

    def devices(self) -> Sequence[Device]:
        cards = [
            path
            for path in probing.listed("/sys/class/accel/accel*")
            if probing.read(f"{path}/device/vendor") == "0x1da3"
        ] or probing.listed("/sys/class/habanalabs/hl[0-9]*")
        if not cards:
            self.notes = ("no Gaudi accelerator: the driver habanalabs lists none",)
            return ()
        try:
            found = [self._device(*row) for row in _rows()]
        except probing.ProbeError as error:
            unknown = f"the module ids of the Gaudi accelerators are not known ({error})"
            self.notes = (f"{unknown}: they are counted in the driver's order",)
            return [self._device(id, f"gaudi:{path}") for id, path in enumerate(cards)]
        return sorted(found, key=lambda device: device.id)

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        usage = super().usage(devices)
        try:
            text = probing.ask("hl-smi", *_FIGURES)
        except probing.ProbeError:
            return usage
        for line in text.splitlines():
            cells = [each.strip() for each in line.split(",")]
            if len(cells) == 6 and (key := cells[0] or f"gaudi:{cells[1]}") in usage:
                used, total = (_size(each) for each in cells[2:4])
                busy, heat = (_leading(each) for each in cells[4:])
                usage[key] = Usage(used, total, busy, heat)
        return usage

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        """As for any vendor. The driver reports the states of cards without module ids, so the
        state is known only if there is one card."""
        health = super().health(devices)
        states = [
            state
            for path in probing.listed("/sys/class/accel/accel*")
            if (state := probing.read(f"{path}/device/status")) is not None
        ]
        if len(devices) == len(states) == 1 and states[0].casefold() != "operational":
            health[devices[0].key] = f"the driver says of its state: {states[0]}"
        return health

    def _device(self, id: int, key: str, name: str = "Gaudi", size: str = "") -> Device:
        return Device(
            key=key,
            id=id,
            name=f"Intel {name}",
            type="Intel-GAUDI",
            memory=parse_size(size, "memory") if size else None,
            vendor=self.name,
        )


def _size(text: str) -> int | None:
    """Bytes of "768 MiB"; None for "N/A"."""
    count = _leading(text)
    return parse_size(text, "memory") if count else count


def _leading(text: str) -> int | None:
    """The number at the begin of a text such as "41 C"."""
    first = text.split()[:1]
    return probing.number(first[0].rstrip("%C")) if first else None


def _rows() -> list[tuple[int, str, str, str]]:
    """Module id, UUID or address, name and memory of each card, from hl-smi."""
    text = probing.ask("hl-smi", *_QUERY)
    cells = [[each.strip() for each in line.split(",")] for line in text.splitlines()]
    rows = [each for each in cells if len(each) == 6 and each[1].isdigit()]
    if not rows:
        raise probing.ProbeError("hl-smi lists no card")
    return [
        (int(module), uuid or f"gaudi:{bus}", name, size)
        for _, module, bus, uuid, name, size in rows
    ]
