"""Finds the devices that could serve a demand if nothing else ran."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gpunb.scheduler.resources import GPU, UNIT, Allocation, Demand, Device, Machine
from gpunb.scheduler.type_match import matches

Candidate: TypeAlias = tuple[int, int]
"""(position of a device, units the demand would take of it)"""


Candidates: TypeAlias = tuple[tuple[Candidate, ...], ...]
"""The devices that could hold (a part of) a demand, one group for each accepted type."""

Resources: TypeAlias = tuple[tuple[str, int], ...]
"""(name, units) pairs of resources"""


class Part(NamedTuple):
    """The part of a demand for devices of one kind.

    `units` is a multiple of `UNIT` for whole devices, else the share of one device; 0 if the share
    depends on the memory of the candidate.
    """

    name: str
    units: int
    candidates: Candidates

    @property
    def devices(self) -> int:
        """The number of devices that this part needs."""
        return max(1, self.units // UNIT)

    @property
    def positions(self) -> list[int]:
        """The positions of all candidates."""
        return [at for group in self.candidates for at, _ in group]

    def without(self, lost: Collection[int]) -> Part:
        """This part without lost devices among its candidates."""
        if not lost:
            return self
        groups = [tuple(e for e in group if e[0] not in lost) for group in self.candidates]
        return self._replace(candidates=tuple(group for group in groups if group))


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room that a demand must leave free: devices by position, and CPUs and resources."""

    devices: frozenset[int]
    spare: Allocation


NO_DEVICES: frozenset[int] = frozenset()
NOTHING = Reserved(NO_DEVICES, Allocation())


class Fit(NamedTuple):
    """How a demand fits on an empty machine.

    Attributes:
        parts: the parts of the demand that need devices.
        plain: resources that are mere numbers.
        least: units that must be free on one device or, from `UNIT` on, on wholly free devices
            together.
        refusal: why the machine can never meet the demand; None if it can.
    """

    parts: tuple[Part, ...]
    plain: Resources
    least: int
    refusal: str | None


def parts(demand: Demand, machine: Machine) -> tuple[Part, ...]:
    """The parts of a demand, one for each kind of devices."""
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
    """The units that the largest part needs: on one device, or on several whole ones."""
    return max(
        (
            part.units or min((units for group in part.candidates for _, units in group), default=0)
            for part in found
        ),
        default=0,
    )


def candidates(demand: Demand, machine: Machine) -> Candidates:
    """The GPUs that could hold the demand or a part of it, in groups by preferred type."""
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
    if demand.devices and device.key not in demand.devices:
        return None
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
    """Whether the demand accepts the type of the device.

    In a demand for GPUs and devices of other kinds, the types are those of the GPUs.
    """
    if not demand.types or (demand.wants_device and device.resource != GPU):
        return True
    return any(matches(wanted, device) for wanted in demand.types)


def allowed(units: int, device: Device) -> bool:
    """Whether the device may be given out in such a share, or as one of so many devices."""
    if units % UNIT:
        return not device.whole and units < UNIT
    return not device.counts or not units or units // UNIT in device.counts
