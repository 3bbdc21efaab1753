"""Mobilint's NPUs, through their device nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator
from gpunb.scheduler.resources import Device

_TYPES = {"/dev/aries": "MOBILINT_ARIES", "/dev/regulus": "MOBILINT_REGULUS"}


class Mobilint(Accelerator):
    """Mobilint NPUs; a process has whole ones."""

    name: ClassVar[str] = "mobilint"
    resource: ClassVar[str] = "MBLT"
    whole: ClassVar[bool] = True
    variable: ClassVar[str | None] = "QBRUNTIME_VISIBLE_DEVICES"

    def devices(self) -> Sequence[Device]:
        nodes = [
            (path, kind) for begin, kind in _TYPES.items() for path in probing.listed(f"{begin}*")
        ]
        if not nodes:
            self.notes = ("no Mobilint NPU: there is no /dev/aries0 or /dev/regulus-npu",)
        return [
            Device(
                key=f"mobilint:{path}",
                id=id,
                name=kind.replace("_", " ").title(),
                type=kind,
                vendor=self.name,
            )
            for id, (path, kind) in enumerate(nodes)
        ]
