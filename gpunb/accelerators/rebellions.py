"""Rebellions' NPUs, through their device nodes and rbln-stat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, Usage
from gpunb.scheduler.resources import Device


class Rebellions(Accelerator):
    """Rebellions NPUs; a process has whole ones."""

    name: ClassVar[str] = "rebellions"
    resource: ClassVar[str] = "RBLN"
    whole: ClassVar[bool] = True
    variable: ClassVar[str | None] = "RBLN_DEVICES"

    def devices(self) -> Sequence[Device]:
        nodes = probing.listed("/dev/rbln[0-9]*")
        if not nodes:
            self.notes = ("no Rebellions NPU: there is no /dev/rbln0",)
            return ()
        try:
            facts = _listed()
        except probing.ProbeError as error:
            self.notes = (f"the types and memory of the Rebellions NPUs are not known: {error}",)
            facts = [{"npu": id} for id in range(len(nodes))]
        return [self._device(each) for each in facts]

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        usage = super().usage(devices)
        try:
            memory = {_key(each): each.get("memory") or {} for each in _listed()}
        except probing.ProbeError:
            return usage
        for key in usage.keys() & memory.keys():
            used, total = (probing.number(str(memory[key].get(each))) for each in ("used", "total"))
            usage[key] = Usage(memory_used=used, memory_total=total or None)
        return usage

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        health = super().health(devices)
        try:
            states = {_key(each): str(each.get("status") or "normal") for each in _listed()}
        except probing.ProbeError:
            return health
        for key in health.keys() & states.keys():
            if states[key].casefold() not in ("normal", "ok"):
                health[key] = f"rbln-stat says of its status: {states[key]}"
        return health

    def _device(self, facts: dict[str, Any]) -> Device:
        kind = str(facts.get("name") or "") or None
        return Device(
            key=_key(facts),
            id=int(facts["npu"]),
            name=f"Rebellions {kind or 'NPU'}",
            type=kind,
            memory=probing.number(str((facts.get("memory") or {}).get("total"))) or None,
            vendor=self.name,
        )


def _listed() -> list[dict[str, Any]]:
    """The NPUs that Rebellions' tool lists."""
    tool = "rbln-stat" if probing.has("rbln-stat") else "rbln-smi"
    answer = probing.ask_json(tool, "-j")
    devices = answer.get("devices") if isinstance(answer, dict) else None
    return [each for each in devices or () if isinstance(each, dict) and "npu" in each]


def _key(facts: dict[str, Any]) -> str:
    return str(facts.get("uuid") or f"rbln:{facts['npu']}")
