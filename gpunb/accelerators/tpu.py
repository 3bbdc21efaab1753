"""Google's TPU chips, through the PCI bus. Each chip is a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, DetectionError
from gpunb.scheduler.resources import Device

_TYPES = {
    "0x0027": "TPU-V3",
    "0x005e": "TPU-V4",
    "0x0062": "TPU-V5P",
    "0x0063": "TPU-V5LITEPOD",
    "0x006f": "TPU-V6E",
    "0x0076": "TPU-V7X",
}
_V2 = "0x004e"
"""The subsystem id of generation 2; its other ids are those of generation 3."""

_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""The arrangement of the chips of one process, by their number."""


class Tpu(Accelerator):
    """TPU chips; a process has 1, 2, 4 or 8 of them."""

    name: ClassVar[str] = "tpu"
    resource: ClassVar[str] = "TPU"
    whole: ClassVar[bool] = True
    counts: ClassVar[tuple[int, ...]] = tuple(_BOUNDS)
    variable: ClassVar[str | None] = "TPU_VISIBLE_CHIPS"

    def devices(self) -> Sequence[Device]:
        chips = probing.pci("0x1ae0", devices=_TYPES)
        if not chips:
            self.notes = ("no TPU on the bus",)
            return ()
        nodes = probing.listed("/dev/accel[0-9]*") + probing.listed("/dev/vfio/[0-9]*")
        if not nodes:
            raise DetectionError(
                f"TPU chips are on the bus, the first at {chips[0].address}, but there is no "
                "/dev/accel0 or /dev/vfio/0: load the driver, or start the container with access "
                "to them (--privileged)"
            )
        return [
            Device(
                key=f"tpu:{chip.address}",
                id=id,
                name=f"Google {_type(chip)}",
                type=_type(chip),
                vendor=self.name,
            )
            for id, chip in enumerate(chips)
        ]

    def environment(self, ids: Sequence[int | str]) -> dict[str, str]:
        """As for any vendor, with the arrangement of the chips, which libtpu needs."""
        environment = super().environment(ids)
        bounds = _BOUNDS.get(len(ids))
        if bounds is not None:
            environment |= {"TPU_CHIPS_PER_HOST_BOUNDS": bounds, "TPU_HOST_BOUNDS": "1,1,1"}
        if not ids:
            # libtpu takes all chips where the variable is empty; JAX must not even load it.
            environment["JAX_PLATFORMS"] = "cpu"
        return environment


def _type(chip: probing.PciDevice) -> str:
    return "TPU-V2" if chip.subsystem == _V2 else _TYPES[chip.device]
