"""The facts about devices in the status of a session, as plain values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpunb.engine.device_history import DeviceHistory
from gpunb.scheduler.resources import UNIT, Device, Shares, merged
from gpunb.scheduler.shares import hint
from gpunb.scheduler.tasks import TaskId

if TYPE_CHECKING:
    from gpunb.engine.prepared import PreparedWorkers
    from gpunb.engine.share_checks import ShareChecks
    from gpunb.leases.leases import Leases

_USAGE = ("memory_used", "memory_total", "utilization", "temperature", "power")
_MEMORY = ("now", "peak")
_OTHER = ("pid", "user", "notebook", "job", "share", "memory", "since", "kind")


class DeviceStatus:
    """Describes devices, and shares of them; on the loop's thread."""

    def __init__(
        self,
        devices: Iterable[Device],
        sampler: ShareChecks,
        leases: Leases,
        prepared: PreparedWorkers,
    ) -> None:
        self._devices = {each.key: each for each in devices}
        self._sampler = sampler
        self._leases = leases
        self._prepared = prepared
        self._history = DeviceHistory()

    def held(self, shares: Shares) -> list[list[Any]]:
        """Return shares of devices as lists of resource, id and part of the device, one for each
        device; from any thread."""
        devices = ((self._devices[key], units) for key, units in shares)
        return merged([each.resource, each.id, units / UNIT] for each, units in devices)

    def share(self, shares: Shares) -> int | None:
        """Return shares of devices in bytes of their memory; None if it is not known."""
        sizes = [(self._devices[key].memory, units) for key, units in shares]
        if not sizes or any(memory is None for memory, _ in sizes):
            return None
        return sum((memory or 0) * units // UNIT for memory, units in sizes)

    def memory(self, ident: TaskId, shares: Shares) -> dict[str, Any]:
        """Return the device memory of a job or an actor with these shares."""
        known = self._sampler.memory(ident) if shares else {}
        return {**{name: known.get(name) for name in _MEMORY}, "share": self.share(shares)}

    def hint(self, shares: Shares, peak: int | None, *, ended: bool = True) -> str | None:
        """Return a better share for a job with this peak of memory, in words; None if there is
        none."""
        if peak is None or len(shares) != 1:
            return None
        ((key, units),) = shares
        memory = self._devices[key].memory
        return hint(peak, units, memory, ended=ended) if memory else None

    def complete(self, facts: Mapping[str, Any]) -> None:
        """Add measurements, other users and the history to the devices of a snapshot."""
        for device in facts["devices"]:
            device.update(self._measured(device["key"]))
        self._history.note(facts["time"], facts["devices"])
        for device in facts["devices"]:
            device["history"] = self._history.of(device["key"])

    def _measured(self, key: str) -> dict[str, Any]:
        sampler, ledger = self._sampler, self._leases.ledger
        usage = sampler.usage(key)
        leases = ledger.others(key) if ledger is not None else []
        return {
            "usage": {name: usage.get(name) for name in _USAGE},
            "others": [*self._prepared.facts(key), *joined(leases, sampler.others(key))],
            "health": sampler.health(key),
            "leased": self._leases.shares(key),
        }


def joined(
    leases: Iterable[Mapping[str, Any]], seen: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the other users of a device: the leases of other kernels, and processes seen there."""
    found: dict[Any, dict[str, Any]] = {}
    for each in itertools.chain(leases, seen):
        known = found.setdefault(each.get("pid"), dict.fromkeys(_OTHER))
        known.update({name: each[name] for name in _OTHER if each.get(name) is not None})
    for each in leases:
        found[each.get("pid")]["kind"] = "kernel"
    for known in found.values():
        known["kind"] = known["kind"] or "outsider"
    return list(found.values())
