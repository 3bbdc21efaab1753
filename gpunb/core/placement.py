"""Where a demand fits: the free capacity of a machine, and the rules of placing.

Fractions go to the fitting device with the least room left, lowest position on ties, and are
never split. Whole devices take wholly free ones, lowest positions first. Accepted types are tried
in their order of preference.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gpunb.core.resources import (
    TYPE_PREFIX,
    UNIT,
    Allocation,
    Demand,
    Device,
    Machine,
    Shares,
    amount,
    size_text,
)

Candidate: TypeAlias = tuple[int, int]
"""(position of a device, units the demand would take of it)"""


Candidates: TypeAlias = tuple[tuple[Candidate, ...], ...]
"""The devices that could hold (a part of) a demand, one group for each accepted type."""

REMEMBERED = 256
"""Demands whose `Fit` is kept, so that a session of many different ones stays small."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to be left alone: devices by position, CPUs and resources."""

    devices: frozenset[int]
    spare: Allocation


NOTHING = Kept(frozenset(), Allocation())


class Fit(NamedTuple):
    """What a machine can do for a demand when nothing else runs.

    `least` is the number of units that must be free on one device, or from `UNIT` on, on wholly
    free devices together.
    """

    candidates: Candidates
    least: int
    refusal: str | None


class Capacity:
    """What is free on a machine right now."""

    def __init__(self, machine: Machine, fits: dict[Demand, Fit] | None = None) -> None:
        self.machine = machine
        self.shares = [UNIT] * len(machine.devices)
        self.cpus = machine.cpus
        self.resources = dict(machine.resources)
        self.position = {device.key: at for at, device in enumerate(machine.devices)}
        self._fits: dict[Demand, Fit] = {} if fits is None else fits
        self._rooms: dict[frozenset[int], tuple[int, int]] = {}

    def copy(self) -> Capacity:
        other = Capacity(self.machine, self._fits)
        other.shares = self.shares.copy()
        other.cpus = self.cpus
        other.resources = self.resources.copy()
        return other

    def whole(self) -> Capacity:
        """The same machine when nothing runs."""
        return Capacity(self.machine, self._fits)

    def take(self, allocation: Allocation) -> None:
        self._move(allocation, -1)

    def give(self, allocation: Allocation) -> None:
        self._move(allocation, +1)

    def _move(self, allocation: Allocation, sign: int) -> None:
        self.cpus += sign * allocation.cpus
        if allocation.shares:
            self._rooms.clear()
        for key, units in allocation.shares:
            self.shares[self.position[key]] += sign * units
        for name, units in allocation.resources:
            self.resources[name] = self.resources.get(name, 0) + sign * units

    def fit(self, demand: Demand) -> Fit:
        known = self._fits.get(demand)
        if known is None:
            if len(self._fits) >= REMEMBERED:
                self._fits.clear()
            groups = candidates(demand, self.machine)
            part = min((units for group in groups for _, units in group), default=0)
            least = demand.gpus if demand.gpus >= UNIT else part
            known = self._fits[demand] = Fit(groups, least, refusal(demand, self.machine))
        return known

    def hopeless(self, least: int, cpus: int, avoid: frozenset[int]) -> bool:
        """A quick look that may save `place`: True only if what needs this does not fit now."""
        if cpus and cpus > self.cpus:
            return True
        if not least:
            return False
        room = self._rooms.get(avoid)
        if room is None:
            room = self._rooms[avoid] = self._room(avoid)
        return least > room[least >= UNIT]

    def _room(self, avoid: Collection[int]) -> tuple[int, int]:
        """The largest free share, and the units on wholly free devices."""
        shares = self.shares
        if avoid:
            shares = [share for at, share in enumerate(shares) if at not in avoid]
        return max(shares, default=0), shares.count(UNIT) * UNIT

    def place(self, demand: Demand, kept: Kept = NOTHING, held: Shares = ()) -> Allocation | None:
        """Where the demand fits now beside what is kept, or None. Nothing is taken.

        `held` are the devices, if they are chosen already.
        """
        if demand.cpus and demand.cpus > self.cpus - kept.spare.cpus:
            return None
        if demand.resources and not self._has(demand.resources, kept.spare):
            return None
        shares = held
        if demand.wants_device and not held:
            found = self.choose(demand, kept.devices)
            if found is None:
                return None
            devices = self.machine.devices
            shares = tuple([(devices[at].key, units) for at, units in found])
        return Allocation(shares, demand.cpus, demand.resources)

    def _has(self, wanted: tuple[tuple[str, int], ...], spare: Allocation) -> bool:
        kept = dict(spare.resources)
        free = self.resources
        return all(units <= free.get(name, 0) - kept.get(name, 0) for name, units in wanted)

    def choose(self, demand: Demand, avoid: Collection[int] = ()) -> list[Candidate] | None:
        """The devices the demand would take of those free now, in order, or None."""
        shares = self.shares
        if demand.gpus >= UNIT:
            count = demand.gpus // UNIT
            free = [
                each
                for group in self.fit(demand).candidates
                for each in group
                if shares[each[0]] == UNIT and each[0] not in avoid
            ]
            return sorted(free[:count]) if len(free) >= count else None
        for group in self.fit(demand).candidates:
            best, best_left = None, UNIT + 1
            for each in group:
                left = shares[each[0]] - each[1]
                if 0 <= left < best_left and each[0] not in avoid:
                    best, best_left = each, left
            if best is not None:
                return [best]
        return None


def candidates(demand: Demand, machine: Machine) -> Candidates:
    """The devices that could hold (a part of) the demand, in order of preference."""
    groups: list[tuple[Candidate, ...]] = []
    for wanted in dict.fromkeys(demand.types) or (None,):
        group = []
        for at, device in enumerate(machine.devices):
            if wanted is not None and device.type != wanted:
                continue
            units = _units_on(demand, device)
            if units is not None:
                group.append((at, units))
        if group:
            groups.append(tuple(group))
    return tuple(groups)


def _units_on(demand: Demand, device: Device) -> int | None:
    if not demand.gpu_memory:
        return min(demand.gpus, UNIT)
    if device.memory is None or demand.gpu_memory > device.memory:
        return None
    return max(1, -(-demand.gpu_memory * UNIT // device.memory))


def refusal(demand: Demand, machine: Machine) -> str | None:
    """Why this machine can never satisfy the demand, or None if it can."""
    problems = [*_device_problems(demand, machine)]
    if demand.cpus > machine.cpus:
        problems.append(
            f"it asks for {amount(demand.cpus)} CPUs and there are {amount(machine.cpus)}"
        )
    has = dict(machine.resources)
    for name, units in demand.resources:
        if units > has.get(name, 0):
            there = f"{amount(has[name])}" if name in has else "none"
            problems.append(
                f"it asks for {amount(units)} of the resource {name!r}: there is {there}"
            )
    if not problems:
        return None
    return f"a request for {demand} can never be met on this machine: " + "; ".join(problems)


def _device_problems(demand: Demand, machine: Machine) -> Iterable[str]:
    if not demand.wants_device and not demand.types:
        return
    if not machine.devices:
        yield "there are no GPUs (init(num_gpus=N) makes logical ones)"
        return
    there = f"there are {describe(machine.devices)}"
    groups = candidates(demand, machine)
    if not groups and demand.types:
        typed = {each.type for each in machine.devices}
        if not typed.intersection(demand.types):
            yield f"no device is of type {' or '.join(demand.types)}: {there}{_hint(demand, typed)}"
            return
    if demand.gpu_memory and not groups:
        sizes = [each.memory for each in machine.devices if each.memory is not None]
        if not sizes:
            yield f"the devices have no known memory: {there}; ask for num_gpus instead"
        else:
            yield f"no {'such ' if demand.types else ''}device has that much memory: {there}"
    elif demand.gpus >= UNIT and sum(map(len, groups)) * UNIT < demand.gpus:
        yield there if not demand.types else f"too few are of the type: {there}"


def _hint(demand: Demand, types: Iterable[str | None]) -> str:
    known = [each for each in types if each]
    by_fold = {each.casefold(): each for each in known}
    for wanted in demand.types:
        near = difflib.get_close_matches(wanted.casefold(), by_fold, n=1)
        if near:
            return f". Did you mean {by_fold[near[0]]!r}?"
    return ""


def describe(devices: Iterable[Device]) -> str:
    """Devices in words, alike ones counted: ``"2 x A100 (40 GiB), 1 x logical GPU"``."""
    counts: dict[str, int] = {}
    for device in devices:
        label = device.type or ("logical GPU" if device.logical else device.name)
        if device.memory:
            label += f" ({size_text(device.memory)})"
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(f"{count} x {label}" for label, count in counts.items()) or "no GPUs"


def why_waiting(
    demand: Demand, capacity: Capacity, holders: Mapping[int, Collection[int]] | None = None
) -> str:
    """What a demand that does not fit now waits for. `holders` maps positions to task ids."""
    reasons = []
    if demand.wants_device and (reason := _why_devices(demand, capacity, holders or {})):
        reasons.append(reason)
    if demand.cpus and demand.cpus > capacity.cpus:
        reasons.append(
            f"needs {_plural(demand.cpus, 'CPU')}; {amount(max(0, capacity.cpus))} of "
            f"{amount(capacity.machine.cpus)} are free"
        )
    for name, units in demand.resources:
        if units > capacity.resources.get(name, 0):
            free = amount(capacity.resources.get(name, 0))
            reasons.append(f"needs {amount(units)} of {name!r}; {free} is free")
    return "; ".join(reasons) or "is next in line"


def _why_devices(
    demand: Demand, capacity: Capacity, holders: Mapping[int, Collection[int]]
) -> str | None:
    places = [each for group in capacity.fit(demand).candidates for each in group]
    if capacity.choose(demand) is not None or not places:
        return None
    kind = " or ".join(demand.types) + " " if demand.types else ""
    if demand.gpus >= UNIT:
        free = [at for at, _ in places if capacity.shares[at] == UNIT]
        text = (
            f"needs {demand.gpus // UNIT} whole {kind}GPU{'s' if demand.gpus > UNIT else ''}; "
            f"{len(free)} of {len(places)} {'is' if len(free) == 1 else 'are'} wholly free"
        )
        busy = sorted({task for at, _ in places for task in holders.get(at, ())})
        return text + _held(busy)
    devices = capacity.machine.devices
    room = {at: capacity.shares[at] for at, _ in places}
    if demand.gpu_memory:
        room = {at: share * (devices[at].memory or 0) // UNIT for at, share in room.items()}
    at = max(room, key=lambda each: (room[each], -each))
    asked, left = amount(demand.gpus), amount(room[at])
    if demand.gpu_memory:
        asked, left = size_text(demand.gpu_memory), size_text(room[at])
    return (
        f"needs {asked} of one {kind}GPU; the largest free share is {left} "
        f"on GPU {devices[at].id}" + _held(sorted(holders.get(at, ())))
    )


def _held(tasks: Collection[int]) -> str:
    if not tasks:
        return ""
    shown = ", ".join(f"#{task}" for task in list(tasks)[:4])
    return f", held by {shown}" + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")


def _plural(units: int, word: str) -> str:
    return f"{amount(units)} {word}{'' if units == UNIT else 's'}"


def type_resource(name: str) -> str | None:
    """The accelerator type that a resource name such as ``accelerator_type:A100`` stands for."""
    return name.removeprefix(TYPE_PREFIX) if name.startswith(TYPE_PREFIX) else None
