"""AWS Trainium and Inferentia, through neuron-ls. Each core of a device is given out by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, DetectionError
from gpunb.core.resources import Device


class Neuron(Accelerator):
    """Neuron cores, as the runtime counts them over all devices."""

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
            told = _told()
        except probing.ProbeError as error:
            told = [{"neuron_device": at, "nc_count": _cores(at)} for at in range(len(nodes))]
            unknown = f"the memory of the Neuron devices is not known ({error})"
            self.notes = (f"{unknown}: their cores are counted as the driver does",)
            if not all(each["nc_count"] for each in told):
                raise DetectionError(
                    f"{nodes[0]} is there, but neither the driver nor neuron-ls tells how many "
                    f"cores it has: {error}"
                ) from error
        found: list[Device] = []
        for chip in told:
            cores = int(chip.get("nc_count") or 0)
            memory = int(chip.get("memory_size") or 0) // max(1, cores)
            where = chip.get("bdf") or chip.get("neuron_device")
            for core in range(cores):
                device = self._core(len(found), f"neuron:{where}/{core}", memory)
                found.append(device)
        return found

    def ids_in(self, value: str) -> str:
        """Of "0-3,8" each core."""
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


def _told() -> list[dict[str, Any]]:
    """The devices that neuron-ls lists, in either of its JSON formats."""
    try:
        answer = probing.ask_json("neuron-ls", "--json-output")
    except probing.ProbeError:
        answer = probing.ask_json("neuron-ls", "--output-format", "json")
    if isinstance(answer, dict):
        answer = answer.get("neuron_devices", [])
    return [each for each in answer if isinstance(each, dict)]


def _cores(at: int) -> int:
    place = f"/sys/devices/virtual/neuron_device/neuron{at}"
    count = probing.number(probing.read(f"{place}/core_count"))
    return count or len(probing.listed(f"{place}/neuron_core[0-9]*"))
