"""Which devices could serve a demand when nothing else runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias

from gpunb.core.kinds import matches
from gpunb.core.resources import GPU, UNIT, Demand, Device, Machine

Candidate: TypeAlias = tuple[int, int]
"""(position of a device, units the demand would take of it)"""


Candidates: TypeAlias = tuple[tuple[Candidate, ...], ...]
"""The devices that could hold (a part of) a demand, one group for each accepted type."""

Resources: TypeAlias = tuple[tuple[str, int], ...]
"""(name, units) pairs of resources"""


class Part(NamedTuple):
    """What a demand needs of the devices of one kind.

    `units` is a multiple of `UNIT` for whole devices, else the share of one; 0 if each candidate
    has a share of its own, worked out from its memory.
    """

    name: str
    units: int
    candidates: Candidates

    @property
    def devices(self) -> int:
        """The number of devices it takes."""
        return max(1, self.units // UNIT)

    @property
    def positions(self) -> list[int]:
        """The devices that could serve."""
        return [at for group in self.candidates for at, _ in group]

    def without(self, lost: Collection[int]) -> Part:
        """The same, if these devices cannot be had."""
        if not lost:
            return self
        groups = [tuple(e for e in group if e[0] not in lost) for group in self.candidates]
        return self._replace(candidates=tuple(group for group in groups if group))


def parts(demand: Demand, machine: Machine) -> tuple[Part, ...]:
    """What the demand needs of devices, one part for each kind of them."""
    found = []
    if demand.wants_device:
        found.append(Part(GPU, demand.gpus, candidates(demand, machine)))
    kinds = {device.resource for device in machine.devices} if demand.resources else ()
    for name, units in demand.resources:
        if name in kinds:
            group = tuple(
                (at, min(units, UNIT))
                for at, device in enumerate(machine.devices)
                if device.resource == name and allowed(units, device) and suits(demand, device)
            )
            found.append(Part(name, units, (group,) if group else ()))
    return tuple(found)


def least_of(found: Iterable[Part]) -> int:
    """The most that one part needs: on one device, or on several whole ones."""
    return max(
        (
            part.units or min((units for group in part.candidates for _, units in group), default=0)
            for part in found
        ),
        default=0,
    )


def candidates(demand: Demand, machine: Machine) -> Candidates:
    """The GPUs that could hold (a part of) the demand, in order of preference."""
    groups: list[tuple[Candidate, ...]] = []
    taken: set[int] = set()
    for wanted in dict.fromkeys(demand.types) or (None,):
        group = []
        for at, device in enumerate(machine.devices):
            if device.resource != GPU or at in taken:
                continue
            if wanted is not None and not matches(wanted, device):
                continue
            units = _units_on(demand, device)
            if units is not None:
                group.append((at, units))
        if group:
            groups.append(tuple(group))
            taken.update(at for at, _ in group)
    return tuple(groups)


def _units_on(demand: Demand, device: Device) -> int | None:
    if demand.min_memory and (device.memory is None or device.memory < demand.min_memory):
        return None
    if not demand.gpu_memory:
        return min(demand.gpus, UNIT) if allowed(demand.gpus, device) else None
    if device.memory is None or demand.gpu_memory > device.memory:
        return None
    if device.whole:
        return UNIT
    return max(1, -(-demand.gpu_memory * UNIT // device.memory))


def suits(demand: Demand, device: Device) -> bool:
    """Whether the device is of a type that the demand accepts.

    Types are those of the GPUs, where it asks for GPUs beside devices of other kinds.
    """
    if not demand.types or (demand.wants_device and device.resource != GPU):
        return True
    return any(matches(wanted, device) for wanted in demand.types)


def allowed(units: int, device: Device) -> bool:
    """Whether the device may be one of so many, or be given out in such a part."""
    if units % UNIT:
        return not device.whole and units < UNIT
    return not device.counts or not units or units // UNIT in device.counts
