"""Tenstorrent's cards, through the files of their driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator
from gpunb.scheduler.resources import Device


class Tenstorrent(Accelerator):
    """Tenstorrent devices; a process has whole ones."""

    name: ClassVar[str] = "tenstorrent"
    resource: ClassVar[str] = "TTNPU"
    whole: ClassVar[bool] = True
    variable: ClassVar[str | None] = "TT_VISIBLE_DEVICES"

    def devices(self) -> Sequence[Device]:
        nodes = probing.listed("/dev/tenstorrent/[0-9]*")
        if not nodes:
            self.notes = ("no Tenstorrent device: there is no /dev/tenstorrent/0",)
        return [self._device(int(path.rpartition("/")[2])) for path in nodes]

    def _device(self, id: int) -> Device:
        place = f"/sys/class/tenstorrent/tenstorrent!{id}"
        kind = probing.read(f"{place}/tt_card_type")
        serial = probing.read(f"{place}/tt_serial")
        return Device(
            # The chips of one card have one serial number.
            key=f"tenstorrent:{serial}/{id}" if serial else f"tenstorrent:{id}",
            id=id,
            name=f"Tenstorrent {kind or 'device'}",
            type=f"Tenstorrent-{kind}" if kind else None,
            vendor=self.name,
        )
