"""FuriosaAI's NPUs, through their device nodes and furiosa-smi."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator
from gpunb.scheduler.resources import Device


class Furiosa(Accelerator):
    """Furiosa NPUs; a process has whole ones."""

    name: ClassVar[str] = "furiosa"
    resource: ClassVar[str] = "FURIOSA"
    whole: ClassVar[bool] = True
    variable: ClassVar[str | None] = "FURIOSA_DEVICES"

    def devices(self) -> Sequence[Device]:
        nodes = probing.listed("/dev/rngd/npu[0-9]*mgmt")
        if not nodes:
            self.notes = ("no Furiosa NPU: there is no /dev/rngd/npu0mgmt",)
            return ()
        try:
            infos = probing.ask_json("furiosa-smi", "info", "--format", "json")
            sizes = probing.ask_json("furiosa-smi", "status", "--format", "json")
        except probing.ProbeError as error:
            self.notes = (f"the types and memory of the Furiosa NPUs are not known: {error}",)
            ids = [int(re.findall(r"\d+", path)[0]) for path in nodes]
            return [self._device({"dev_name": f"npu{id}"}, {}) for id in ids]
        by_name = {each.get("device"): each for each in sizes}
        return [self._device(each, by_name.get(each["dev_name"], {})) for each in infos]

    def environment(self, ids: Sequence[int | str]) -> dict[str, str]:
        """The environment variables; the devices are written as "npu:0,npu:1"."""
        return super().environment([f"npu:{id}" for id in ids])

    def ids_in(self, value: str) -> str:
        return value.replace("npu:", "")

    def _device(self, info: dict[str, Any], status: dict[str, Any]) -> Device:
        id = int(str(info["dev_name"]).removeprefix("npu"))
        kind = str(info.get("arch") or "").upper()
        memory = ((status.get("memory") or {}).get("DRAM") or {}).get("total_size")
        return Device(
            key=str(info.get("device_uuid") or f"furiosa:{id}"),
            id=id,
            name=f"Furiosa {kind or 'NPU'}",
            type=f"FURIOSA_{kind}" if kind else None,
            memory=int(memory) if memory else None,
            vendor=self.name,
        )
