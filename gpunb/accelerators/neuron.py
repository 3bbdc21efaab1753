"""AWS Trainium and Inferentia, through neuron-ls. Each core of a chip is a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, DetectionError, Process, Usage
from gpunb.scheduler.resources import Device

_DRIVER = "/sys/devices/virtual/neuron_device"
_UNCORRECTED = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")


class Neuron(Accelerator):
    """Neuron cores, numbered over all chips as in the runtime."""

    name: ClassVar[str] = "neuron"
    resource: ClassVar[str] = "neuron_cores"
    whole: ClassVar[bool] = True
    variable: ClassVar[str | None] = "NEURON_RT_VISIBLE_CORES"

    def devices(self) -> Sequence[Device]:
        nodes = probing.listed("/dev/neuron[0-9]*")
        if not nodes:
            self.notes = ("no Neuron device: there is no /dev/neuron0",)
            return ()
        try:
            chips = _chips()
        except probing.ProbeError as error:
            chips = [{"neuron_device": at, "nc_count": _cores(at)} for at in range(len(nodes))]
            unknown = f"the memory of the Neuron devices is not known ({error})"
            self.notes = (f"{unknown}: their cores are counted as the driver does",)
            if not all(each["nc_count"] for each in chips):
                raise DetectionError(
                    f"{nodes[0]} is there, but neither the driver nor neuron-ls tells how many "
                    f"cores it has: {error}"
                ) from error
        found: list[Device] = []
        for chip in chips:
            cores = int(chip.get("nc_count") or 0)
            memory = int(chip.get("memory_size") or 0) // max(1, cores)
            where = chip.get("bdf") or chip.get("neuron_device")
            for core in range(cores):
                device = self._core(len(found), f"neuron:{where}/{core}", memory)
                found.append(device)
        return found

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        """As for any vendor: bytes from the driver's counters, processes from neuron-ls."""
        usage = super().usage(devices)
        totals = {device.key: device.memory for device in devices}
        for chip, core, key in _listed_cores():
            if key in usage:
                at = chip.get("neuron_device")
                place = f"{_DRIVER}/neuron{at}/neuron_core{core}/stats/memory_usage"
                used = probing.number(probing.read(f"{place}/device_mem/present"))
                usage[key] = Usage(used, totals[key], processes=_processes(chip, core))
        return usage

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        health = super().health(devices)
        for chip, _, key in _listed_cores():
            place = f"{_DRIVER}/neuron{chip.get('neuron_device')}/stats/hardware"
            counts = [probing.number(probing.read(f"{place}/{name}")) for name in _UNCORRECTED]
            if key in health and (lost := sum(count or 0 for count in counts)):
                health[key] = f"{lost} memory errors that could not be corrected: reset the device"
        return health

    def ids_in(self, value: str) -> str:
        """Each core in a value such as "0-3,8"."""
        found: list[str] = []
        for each in value.split(","):
            first, _, last = each.strip().partition("-")
            if first.isdigit() and last.isdigit():
                found += map(str, range(int(first), int(last) + 1))
            else:
                found.append(each)
        return ",".join(found)

    def _core(self, id: int, key: str, memory: int) -> Device:
        return Device(
            key=key,
            id=id,
            name=f"Neuron core {id}",
            type="aws-neuron-core",
            memory=memory or None,
            vendor=self.name,
        )


def _chips() -> list[dict[str, Any]]:
    """The chips that neuron-ls lists, in either of its JSON formats.

    Raises:
        ProbeError: neuron-ls is not installed, or fails.
    """
    try:
        answer = probing.ask_json("neuron-ls", "--json-output")
    except probing.ProbeError:
        answer = probing.ask_json("neuron-ls", "--output-format", "json")
    if isinstance(answer, dict):
        answer = answer.get("neuron_devices", [])
    return [each for each in answer if isinstance(each, dict)]


def _cores(at: int) -> int:
    place = f"{_DRIVER}/neuron{at}"
    count = probing.number(probing.read(f"{place}/core_count"))
    return count or len(probing.listed(f"{place}/neuron_core[0-9]*"))


def _listed_cores() -> list[tuple[dict[str, Any], int, str]]:
    """Each core that neuron-ls lists: its chip, its index in the chip, and its key."""
    try:
        chips = _chips()
    except probing.ProbeError:
        return []
    return [
        (chip, core, f"neuron:{chip.get('bdf') or chip.get('neuron_device')}/{core}")
        for chip in chips
        for core in range(int(chip.get("nc_count") or 0))
    ]


def _processes(chip: dict[str, Any], core: int) -> tuple[Process, ...] | None:
    """The processes on a core; None if neuron-ls does not list the cores of each process."""
    listed = chip.get("neuron_processes")
    first = _first_core(chip)
    if not isinstance(listed, list) or first is None:
        return None
    found = []
    for each in listed:
        cores = each.get("neuroncore_ids") if isinstance(each, dict) else None
        if not isinstance(cores, list) or not isinstance(each.get("pid"), int):
            return None
        if first + core in cores:
            found.append(Process(each["pid"], None))
    return tuple(found)


def _first_core(chip: dict[str, Any]) -> int | None:
    """The number of the chip's first core over all chips, which have equal numbers of cores."""
    at, count = chip.get("neuron_device"), chip.get("nc_count")
    return at * count if isinstance(at, int) and isinstance(count, int) else None
