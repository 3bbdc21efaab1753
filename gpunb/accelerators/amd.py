"""AMD GPUs, through the files of the kernel's driver (amdgpu with its compute part, kfd).

Ids count the nodes of the kfd topology, as HIP does. HIP_VISIBLE_DEVICES alone is set: HIP counts
it within ROCR_VISIBLE_DEVICES, so setting both hides devices twice. Where the user has set that
one, it holds for the workers too, so only the devices it leaves are listed, counted anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, DetectionError, Lost, Process, Usage
from gpunb.scheduler.resources import Device

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_NAMES = "/usr/share/libdrm/amdgpu.ids"
_LEAST = 2 * 1024**3
"""The least bytes of memory of a GPU; a processor's own graphics has less."""

_TYPES = {
    "0x738c": "AMD-Instinct-MI100",
    "0x738e": "AMD-Instinct-MI100",
    "0x7408": "AMD-Instinct-MI250X",
    "0x740c": "AMD-Instinct-MI250X-MI250",
    "0x740f": "AMD-Instinct-MI210",
    "0x74a0": "AMD-Instinct-MI300A",
    "0x74a1": "AMD-Instinct-MI300X-OAM",
    "0x74a2": "AMD-Instinct-MI308X",
    "0x74a9": "AMD-Instinct-MI300X-HF",
    "0x74a5": "AMD-Instinct-MI325X-OAM",
    "0x75a0": "AMD-Instinct-MI350X-OAM",
    "0x75a3": "AMD-Instinct-MI355X-OAM",
    "0x6798": "AMD-Radeon-R9-200-HD-7900",
    "0x679a": "AMD-Radeon-HD-7900",
}
_NO_DRIVER = (
    "an AMD GPU is on the bus at {}, but the driver's compute part is not there ({} is missing): "
    "install ROCm's kernel driver, or start the container with --device /dev/kfd"
)


class _Node(NamedTuple):
    """A GPU of the kfd topology: its folder, its properties, and its bytes of memory."""

    place: str
    facts: dict[str, str]
    memory: int

    @property
    def uuid(self) -> str | None:
        unique = probing.number(self.facts.get("unique_id"))
        return f"GPU-{unique:016x}" if unique else None

    @property
    def address(self) -> str:
        where = int(self.facts.get("location_id", 0))
        domain = int(self.facts.get("domain", 0))
        return f"{domain:04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 0x1F:02x}.{where & 7:x}"

    @property
    def device(self) -> str:
        """The folder of the card in sysfs."""
        return f"/sys/class/drm/renderD{self.facts.get('drm_render_minor')}/device"


class Amd(Accelerator):
    """AMD GPUs with at least 2 GiB of memory, their own or a share of the machine's."""

    name: ClassVar[str] = "amd"
    variable: ClassVar[str | None] = "HIP_VISIBLE_DEVICES"
    # HIP treats an empty value like an unset variable, and shows every device.
    nothing: ClassVar[str] = "-1"

    def devices(self) -> Sequence[Device]:
        nodes = list(enumerate(_visible(_nodes())))
        keys = {node.place: key for key, node in _by_key().items()}
        if not nodes:
            on_bus = probing.pci("0x1002", kinds=("0x0302", "0x0380", "0x12"))
            if on_bus and not probing.listed(f"{_NODES}/*"):
                raise DetectionError(_NO_DRIVER.format(on_bus[0].address, _NODES))
            self.notes = ("no AMD GPU: the kernel's driver lists none",)
            return ()
        found = [_device(id, node, keys[node.place]) for id, node in nodes if node.memory >= _LEAST]
        small = [id for id, node in nodes if node.memory < _LEAST]
        if small:
            ids = ", ".join(map(str, small))
            self.notes = (f"AMD device {ids} is a processor's own graphics, and is left out",)
        return found

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        usage = super().usage(devices)
        for key, node in _by_key().items():
            if key in usage:
                usage[key] = _usage(node)
        return usage

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        health = super().health(devices)
        found = _by_key()
        for device in devices:
            node = found.get(device.key)
            if node is None:
                health[device.key] = Lost("the driver does not list it any more: see 'sudo dmesg'")
            elif lost := _uncorrected(node):
                health[device.key] = f"{lost} memory errors that could not be corrected: reset it"
        return health


def _nodes() -> list[_Node]:
    """The GPUs that this process may use, in kfd's order."""
    found = []
    for place in probing.listed(f"{_NODES}/*"):
        # The properties of a node that the container may not use cannot be read.
        text = probing.read(f"{place}/properties") or ""
        facts = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        if int(facts.get("simd_count", 0)) and int(facts.get("gfx_target_version", 0)):
            found.append(_Node(place, facts, _memory(place)))
    return found


def _by_key() -> dict[str, _Node]:
    """The GPUs by UUID or address, with a number added where partitions of a card share it."""
    found: dict[str, _Node] = {}
    for node in _nodes():
        key = node.uuid or node.address
        found[f"{key}/{len(found)}" if key in found else key] = node
    return found


def _memory(place: str) -> int:
    """The bytes in the node's own memory banks (heaps 1 and 2), without memory of the host."""
    total = 0
    for bank in probing.listed(f"{place}/mem_banks/*/properties"):
        text = probing.read(bank) or ""
        facts = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        if facts.get("heap_type") in ("1", "2"):
            total += int(facts.get("size_in_bytes", 0))
    return total


def _visible(nodes: list[_Node]) -> list[_Node]:
    """The nodes that ROCR_VISIBLE_DEVICES names by index or UUID. The list ends at the first entry
    that is neither."""
    value = os.environ.get("ROCR_VISIBLE_DEVICES")
    if value is None:
        return nodes
    known = {str(at): node for at, node in enumerate(nodes)}
    known |= {node.uuid.casefold(): node for node in nodes if node.uuid}
    visible: list[_Node] = []
    for entry in value.split(","):
        node = known.get(entry.strip().casefold())
        if node is None:
            break
        visible.append(node)
    return visible


def _device(id: int, node: _Node, key: str) -> Device:
    product = f"0x{int(node.facts.get('device_id', 0)):04x}"
    name = probing.read(f"{node.device}/product_name") or _marketing_name(node, product)
    kind = _TYPES.get(product)
    if kind is None and name:
        kind = "-".join(name.replace("(TM)", "").split())
    major, step = divmod(int(node.facts["gfx_target_version"]), 10_000)
    return Device(
        key=key,
        id=id,
        name=name or (kind or "AMD GPU").replace("-", " "),
        type=kind,
        memory=node.memory,
        vendor=Amd.name,
        capability=f"gfx{major}{step // 100:x}{step % 100:x}",
    )


def _marketing_name(node: _Node, product: str) -> str | None:
    """The name in libdrm's table, as in the line "744C, C8, AMD Radeon RX 7900 XTX"."""
    revision = probing.number(probing.read(f"{node.device}/revision"))
    for line in (probing.read(_NAMES) or "").splitlines():
        entry = [each.strip() for each in line.split(",", 2)]
        if len(entry) == 3 and f"0x{entry[0].lower()}" == product:
            name, of_revision = entry[2], probing.number(f"0x{entry[1]}")
            if revision in (None, of_revision):
                return name
    return None


def _usage(node: _Node) -> Usage:
    def reading(name: str) -> int | None:
        return probing.number(probing.read(f"{node.device}/{name}"))

    heat = None
    for path in probing.listed(f"{node.device}/hwmon/*/temp1_input"):
        heat = probing.number(probing.read(path))
    total = reading("mem_info_vram_total")
    return Usage(
        memory_used=reading("mem_info_vram_used"),
        memory_total=total or node.memory or None,
        utilization=reading("gpu_busy_percent"),
        temperature=None if heat is None else heat // 1000,
        processes=_processes(node),
    )


def _processes(node: _Node) -> tuple[Process, ...] | None:
    """The processes on the GPU, with the bytes that kfd counts for each."""
    ident = probing.read(f"{node.place}/gpu_id")
    if not probing.listed("/sys/class/kfd/kfd/proc"):
        return None
    found = []
    for path in probing.listed(f"/sys/class/kfd/kfd/proc/*/vram_{ident}"):
        pid, used = probing.number(path.split("/")[-2]), probing.number(probing.read(path))
        if pid and used:
            found.append(Process(pid, used))
    return tuple(found)


def _uncorrected(node: _Node) -> int:
    """The number of uncorrectable memory errors ("ue: 0" in the driver's counters)."""
    text = probing.read(f"{node.device}/ras/umc_err_count") or ""
    counts = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return probing.number(counts.get("ue")) or 0
