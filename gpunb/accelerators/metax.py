"""MetaX GPUs, through mx-smi or the library pymxsml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, DetectionError
from gpunb.scheduler.resources import Device

_LINE = re.compile(
    r"GPU#(?P<id>\d+)\s+(?P<name>\S+)\s+(?P<address>[0-9a-fA-F:.]+)\s+(?P<state>\w+)"
    r"\s*\(UUID: (?P<uuid>[^)]+)\)"
)
_LIBRARY = """
import pymxsml
pymxsml.mxSmlInit()
found = [
    [id, pymxsml.mxSmlGetDeviceInfo(id).deviceName] for id in range(pymxsml.mxSmlGetDeviceCount())
]
"""


class Metax(Accelerator):
    """MetaX GPUs; their software is CUDA's, with its variable."""

    name: ClassVar[str] = "metax"
    variable: ClassVar[str | None] = "CUDA_VISIBLE_DEVICES"

    def devices(self) -> Sequence[Device]:
        on_bus = probing.pci("0x9999")
        if not on_bus:
            self.notes = ("no MetaX GPU on the bus",)
            return ()
        try:
            if probing.has("mx-smi"):
                return self._listed(probing.ask("mx-smi", "-L"))
            answer = probing.ask_python("pymxsml", _LIBRARY)
        except probing.ProbeError as error:
            raise DetectionError(
                f"a MetaX GPU is on the bus at {on_bus[0].address}, but its software does not "
                f"answer: {error}"
            ) from error
        return [self._device(id, name, f"metax:{id}") for id, name in answer]

    def _listed(self, text: str) -> list[Device]:
        lines = [match for match in map(_LINE.search, text.splitlines()) if match]
        if not lines:
            raise probing.ProbeError("mx-smi -L lists no GPU")
        away = [each["id"] for each in lines if each["state"] != "Available"]
        if away:
            self.notes = (f"MetaX device {', '.join(away)} is not available, and left out",)
        return [
            self._device(int(each["id"]), each["name"], each["uuid"])
            for each in lines
            if each["state"] == "Available"
        ]

    def _device(self, id: int, name: str, key: str) -> Device:
        kind = name.partition("-")[0] or None
        return Device(key=key, id=id, name=f"MetaX {name}", type=kind, vendor=self.name)
