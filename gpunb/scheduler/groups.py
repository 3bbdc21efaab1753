"""Placement groups: bundles that are placed together or not at all.

A group is an actor without a process: its demand is a `Gang`, its worker stands for the room that
it holds. Tasks are placed in its bundles as on a machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self

from gpunb.scheduler import explain
from gpunb.scheduler.feasibility import NOTHING, Fit, Reserved
from gpunb.scheduler.resources import (
    UNIT,
    Allocation,
    Demand,
    Gang,
    Machine,
    Shares,
    Within,
    amount,
)
from gpunb.scheduler.tasks import ActorId

_TRIES = 100
"""Number of bundles that are taken back, to place them elsewhere, before a search ends."""


class Capacity(Protocol):
    """The free room of a machine or of a bundle: `placement.Capacity`."""

    machine: Machine
    cpus: int
    position: dict[str, int]

    def copy(self) -> Self: ...
    def whole(self) -> Self: ...
    def take(self, allocation: Allocation) -> None: ...
    def give(self, allocation: Allocation) -> None: ...
    def fit(self, demand: Demand) -> Fit: ...
    def place(
        self, demand: Demand, reserved: Reserved = NOTHING, *, held: Shares = ()
    ) -> Allocation | None: ...


class Strategy(ABC):
    """A value of the option `scheduling_strategy` that chooses a placement group."""

    @abstractmethod
    def place(self, demand: Demand) -> Demand:
        """The demand in the bundle that the strategy chooses.

        Raises:
            ValueError: the bundle is too small.
        """


def group_of(what: Demand | Allocation) -> ActorId | None:
    """The id of the placement group in which something is; None if it is in none."""
    return what.within.group if what.within is not None else None


def joined(fits: Sequence[Fit]) -> Fit:
    """The `Fit` of bundles together."""
    plain: dict[str, int] = {}
    for fit in fits:
        for name, units in fit.plain:
            plain[name] = plain.get(name, 0) + units
    parts = tuple([part for fit in fits for part in fit.parts])
    whole = sum(part.units for part in parts if part.units >= UNIT)
    least = whole or max((fit.least for fit in fits), default=0)
    return fits[0]._replace(parts=parts, plain=tuple(sorted(plain.items())), least=least)


def place(demand: Gang, capacity: Capacity, reserved: Reserved) -> Allocation | None:
    """Where all bundles of a group fit now together, or None.

    The bundles with the fewest possible devices are placed first, of these the largest. If there
    is no place for one, the bundle before it is placed on other devices.
    """
    if demand.cpus > capacity.cpus - reserved.spare.cpus:
        return None
    free, tries, avoid = capacity.copy(), _TRIES, reserved.devices
    order = sorted(range(len(demand.bundles)), key=lambda at: _choice(demand.bundles[at], free))
    placed: list[tuple[Allocation, frozenset[int]]] = []
    while len(placed) < len(order):
        bundle = demand.bundles[order[len(placed)]]
        found = free.place(bundle, replace(reserved, devices=avoid))
        if found is not None:
            free.take(found)
            placed.append((found, avoid))
            avoid = reserved.devices
            continue
        while placed:
            last, avoid = placed.pop()
            free.give(last)
            if last.shares:
                avoid |= {free.position[last.shares[0][0]]}
                break
        else:
            return None
        tries -= 1
        if not tries:
            return None
    in_order = sorted(zip(order, placed, strict=True))
    return together([allocation for _, (allocation, _) in in_order], free.position)


def _choice(bundle: Demand, capacity: Capacity) -> tuple[int, int]:
    fit = capacity.fit(bundle)
    return min((len(part.positions) for part in fit.parts), default=0), -fit.least


def together(bundles: Sequence[Allocation], position: Mapping[str, int]) -> Allocation:
    """The allocation of a group: the sum of its bundles, with the devices in their order."""
    shares: dict[str, int] = {}
    resources: dict[str, int] = {}
    for bundle in bundles:
        for key, units in bundle.shares:
            shares[key] = shares.get(key, 0) + units
        for name, units in bundle.resources:
            resources[name] = resources.get(name, 0) + units
    cpus = sum(bundle.cpus for bundle in bundles)
    ordered = sorted(shares.items(), key=lambda each: position[each[0]])
    return Allocation(
        tuple(ordered), cpus, tuple(sorted(resources.items())), bundles=tuple(bundles)
    )


def refusal(demand: Gang, capacity: Capacity) -> str | None:
    """Why the machine, without its lost devices, can never meet the demand, or None if it can."""
    for at, bundle in enumerate(demand.bundles):
        reason = capacity.fit(bundle).refusal
        if reason is not None:
            return f"bundle {at} of the placement group: {reason}"
    if capacity.whole().place(demand) is not None:
        return None
    machine = capacity.machine
    there = f"{explain.describe(machine.devices)}, {explain.cpus_text(machine.cpus)}"
    if machine.most is not None:
        there += f", and this session may have {amount(machine.most)} GPUs at once (max_gpus)"
    return f"{demand} can never be placed together on this machine: there are {there}"


def first(demand: Demand, bundles: Sequence[Capacity], held: Shares = ()) -> Allocation | None:
    """The place of a task in the first bundle that has room for it, or None."""
    within = demand.within
    assert within is not None
    plain = replace(demand, within=None)
    for at, bundle in enumerate(bundles, start=max(0, within.bundle)):
        found = bundle.place(plain, held=held)
        if found is not None:
            return replace(found, within=Within(within.group, at))
    return None


def check_fits(demand: Demand, bundles: Sequence[Demand], within: Within) -> None:
    """Raises ValueError if the demand of a task fits in no bundle where it may run."""
    if not -1 <= within.bundle < len(bundles):
        raise ValueError(
            f"placement_group_bundle_index={within.bundle} is no bundle of placement group "
            f"#{within.group}: there are 0 to {len(bundles) - 1}, and -1 for any"
        )
    there = bundles if within.bundle < 0 else bundles[within.bundle : within.bundle + 1]
    if all(lacks(demand, bundle) for bundle in there):
        has = " or ".join(dict.fromkeys(f"[{bundle}]" for bundle in there))
        raise ValueError(
            f"a task that asks for {demand} does not fit in {within}, which has {has}: ask for "
            "less (num_cpus=0 for no CPU), or make larger bundles"
        )


def lacks(demand: Demand, bundle: Demand) -> bool:
    """Whether a bundle is surely too small for the demand of a task.

    A share by memory and a share by number can be compared only when the bundle is placed.
    """
    amounts = dict(bundle.resources)
    return (
        demand.cpus > bundle.cpus
        or any(units > amounts.get(name, 0) for name, units in demand.resources)
        or (demand.wants_device and not bundle.wants_device)
        or (bool(bundle.gpus) and demand.gpus > bundle.gpus)
        or (bool(bundle.gpu_memory) and demand.gpu_memory > bundle.gpu_memory)
    )
