"""Intel's GPUs on cards of their own (Data Center GPU, Arc), through sysfs and xpu-smi.

Ids number all Intel GPUs by PCI address, as Level Zero does under ZE_ENABLE_PCI_ID_DEVICE_ORDER. A
processor's own graphics is counted, but not listed. A card with several tiles is one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator
from gpunb.scheduler.resources import Device

_NAMES = {
    "0x0bd5": "Intel Data Center GPU Max 1550",
    "0x0bd6": "Intel Data Center GPU Max 1550",
    "0x0b69": "Intel Data Center GPU Max 1450",
    "0x0bda": "Intel Data Center GPU Max 1100",
    "0x56c0": "Intel Data Center GPU Flex 170",
    "0x56c1": "Intel Data Center GPU Flex 140",
    "0x56a0": "Intel Arc A770",
    "0x56a1": "Intel Arc A750",
    "0xe20b": "Intel Arc B580",
    "0xe20c": "Intel Arc B570",
}
_TYPES = {
    "0x0bd5": "Intel-GPU-Max-1550",
    "0x0bd6": "Intel-GPU-Max-1550",
    "0x0bda": "Intel-GPU-Max-1100",
}
_DRIVERS = ("i915", "xe")


class Intel(Accelerator):
    """Intel GPUs that are cards of their own."""

    name: ClassVar[str] = "intel"
    variable: ClassVar[str | None] = "ZE_AFFINITY_MASK"
    # An empty mask shows every device; one that names none that exists hides all.
    nothing: ClassVar[str] = "65535"
    constants: ClassVar[Mapping[str, str]] = {
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
        "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",  # an index is a card, not one of its tiles
    }

    def devices(self) -> Sequence[Device]:
        cards = [card for card in probing.pci("0x8086", kinds=("0x03",)) if card.driver in _DRIVERS]
        found = [_device(id, card) for id, card in enumerate(cards) if not _built_in(card)]
        if not found:
            self.notes = ("no Intel GPU on a card of its own that the driver i915 or xe has",)
        return found

    def ids_in(self, value: str) -> str:
        """The cards in a value such as "0.1,2", without the tiles."""
        return ",".join(dict.fromkeys(each.partition(".")[0] for each in value.split(",")))


def _built_in(card: probing.PciDevice) -> bool:
    """Whether the GPU is a part of the processor: on the first bus."""
    return card.address.startswith("0000:00:")


def _device(id: int, card: probing.PciDevice) -> Device:
    facts = _discovered(card.address)
    name = facts.get("device_name") or _NAMES.get(card.device, f"Intel GPU {card.device}")
    name = str(name).replace("(R)", "").replace("(TM)", "")
    size = probing.number(str(facts.get("memory_physical_size_byte") or ""))
    if size is None:
        for path in probing.listed(f"/sys/bus/pci/devices/{card.address}/drm/*/lmem_total_bytes"):
            size = probing.number(probing.read(path))
    return Device(
        key=str(facts.get("uuid") or f"intel:{card.address}"),
        id=id,
        name=name,
        type=_TYPES.get(card.device) or "-".join(name.split()),
        memory=size or None,
        vendor=Intel.name,
    )


def _discovered(address: str) -> dict[str, Any]:
    """The facts about a card from xpu-smi; empty if the tool fails or is not installed."""
    try:
        answer = probing.ask_json("xpu-smi", "discovery", "-d", address, "-j")
    except probing.ProbeError:
        return {}
    return answer if isinstance(answer, dict) else {}
