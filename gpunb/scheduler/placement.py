"""Chooses devices for a demand: the free capacity of a machine, and the rules of placing.

A fraction goes to the fitting device with the least room left, lowest position on ties, and is
never split. Whole devices are wholly free ones, lowest positions first. Accepted types are tried
in their order of preference.

A demand has a part for each kind of device: GPUs, and resources that stand for devices of another
kind on this machine, such as "TPU". Each part is placed by the same rules.

The bundles of a placed group are capacities of their own, in which tasks of the group are placed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from gpunb.scheduler import groups
from gpunb.scheduler.explain import refusal
from gpunb.scheduler.feasibility import (
    NOTHING,
    Candidate,
    Fit,
    Part,
    Reserved,
    least_of,
    parts,
)
from gpunb.scheduler.resources import (
    GPU,
    UNIT,
    Allocation,
    Demand,
    Gang,
    Machine,
    Shares,
    Within,
    of_cpus,
)

REMEMBERED = 256
"""Number of `Fit` values that are kept, which bounds the memory of a session with many demands."""


class Capacity:
    """The free room of a machine.

    Attributes:
        shares: free units of each device; below 0 while other sessions hold more than we know.
        position: the position of each device by its key.
        budget: units of GPUs that may still be given out (`Machine.most`).
        shunned: positions of devices that are given out only if there is no choice.
        lost: the reason for each device, by position, that must not be used any more.
        rooms: the results of `room` since shares changed last.
        moves: number of changes of shares so far.
        groups: the bundles of each placed group.
        closed: groups in which nothing is placed any more.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.lost: dict[int, str] = {}
        self._fits: dict[Demand, Fit] = {}
        self._keys = [device.key for device in machine.devices]
        self.position = {key: at for at, key in enumerate(self._keys)}
        self._counts = [device.resource == GPU for device in machine.devices]
        self._most = sum(self._counts) * UNIT if machine.most is None else machine.most
        self.closed: set[int] = set()
        self._all: Allocation | None = None
        self.shares = [UNIT] * len(self._keys)
        self.cpus, self.resources = machine.cpus, dict(machine.resources)
        self.budget = self._most
        self.rooms: dict[frozenset[int], int] = {}
        self.moves = 0
        self.shunned: frozenset[int] = frozenset()
        self.groups: dict[int, tuple[Capacity, ...]] = {}

    def _but(self, **attributes: Any) -> Capacity:
        """Another capacity with these attributes; all others are the same objects."""
        other = Capacity.__new__(Capacity)
        other.__dict__.update(self.__dict__, rooms={}, **attributes)
        return other

    def copy(self) -> Capacity:
        groups = self.groups.items()
        return self._but(
            shares=self.shares.copy(),
            resources=self.resources.copy(),
            groups={group: tuple([each.copy() for each in all_]) for group, all_ in groups},
        )

    def whole(self) -> Capacity:
        """The capacity of the machine, or of the bundle, when no task runs there."""
        if self._all is not None:
            return self.bundle(self._all)
        groups = self.groups.items()
        return self._but(
            shares=[UNIT] * len(self._keys),
            cpus=self.machine.cpus,
            resources=dict(self.machine.resources),
            budget=self._most,
            shunned=frozenset(),
            groups={group: tuple([each.whole() for each in all_]) for group, all_ in groups},
        )

    def open(self, group: int, bundles: Sequence[Allocation]) -> None:
        """Let tasks be placed in the bundles of a group, which are taken from this capacity."""
        self.groups[group] = tuple(map(self.bundle, bundles))
        self._fits.clear()

    def remove(self, group: int) -> None:
        """Forget the bundles of a group that has ended."""
        self.groups.pop(group, None)
        self.closed.discard(group)

    def bundle(self, allocation: Allocation) -> Capacity:
        """A capacity that has this allocation and nothing else."""
        bundle = self._but(
            shares=[0] * len(self._keys),
            cpus=0,
            resources={},
            budget=0,
            shunned=frozenset(),
            groups={},
            closed=set(),
            _all=allocation,
        )
        bundle.give(allocation)
        return bundle

    def of(self, allocation: Allocation) -> Capacity:
        """The capacity from which the allocation is taken: this one, or one of its bundles."""
        within = allocation.within
        return self if within is None else self.groups[within.group][within.bundle]

    def lose(self, at: int, reason: str) -> None:
        """Place nothing on this device any more."""
        self.lost[at] = reason
        self._fits.clear()
        self.rooms.clear()

    def take(self, allocation: Allocation) -> None:
        self._move(allocation, -1)

    def give(self, allocation: Allocation) -> None:
        self._move(allocation, +1)

    def _move(self, allocation: Allocation, sign: int) -> None:
        it = self if allocation.within is None else self.of(allocation)
        it.cpus += sign * allocation.cpus
        if allocation.shares:
            it.rooms.clear()
            it.moves += 1
        for key, units in allocation.shares:
            at = self.position[key]
            it.shares[at] += sign * units
            if self._counts[at]:
                it.budget += sign * units
        for name, units in allocation.resources:
            it.resources[name] = it.resources.get(name, 0) + sign * units

    def shift(self, at: int, units: int) -> None:
        """Change the free units of a device by the units that other sessions give back."""
        self.rooms.clear()
        self.moves += 1
        self.shares[at] += units

    def fit(self, demand: Demand) -> Fit:
        known = self._fits.get(demand)
        if known is None:
            if len(self._fits) >= REMEMBERED:
                self._fits.clear()
            found = self._fit(demand)
            known = self._fits[demand] = found._replace(refusal=self._refusal(demand))
        return known

    def _fit(self, demand: Demand) -> Fit:
        if isinstance(demand, Gang):
            return groups.joined([self._fit(bundle) for bundle in demand.bundles])
        found = tuple([each.without(self.lost) for each in parts(demand, self.machine)])
        kinds = {part.name for part in found}
        plain = tuple((name, units) for name, units in demand.resources if name not in kinds)
        # No quick check knows the room in a bundle.
        return Fit(found, plain, least_of(found) if demand.within is None else 0, None)

    def feasible(self, demand: Demand) -> bool:
        """Whether the machine, without its lost devices, can ever meet the demand. A task of a
        group that is gone has no place."""
        if demand.within is not None:
            group = demand.within.group
            if group not in self.groups or group in self.closed:
                return False
        return self.fit(demand).refusal is None

    def _refusal(self, demand: Demand) -> str | None:
        if isinstance(demand, Gang):
            return groups.refusal(demand, self)
        reason = refusal(demand, self.machine)
        if reason is None and demand.within is not None:
            bundles = self._bundles(demand.within)
            if bundles and groups.first(demand, [each.whole() for each in bundles]) is None:
                return f"a request for {demand} can never be met, because the bundle is smaller"
        if reason or not self.lost:
            return reason
        left = [each for at, each in enumerate(self.machine.devices) if at not in self.lost]
        reason = refusal(demand, replace(self.machine, devices=tuple(left)))
        if reason is None:
            return None
        devices = self.machine.devices
        gone = [f"{devices[at].resource} {devices[at].id} ({why})" for at, why in self.lost.items()]
        return f"{reason}; out of service: {', '.join(gone)}"

    def surely_lacks(self, least: int, cpus: int, avoid: frozenset[int]) -> bool:
        """A quick check before `place`: True only if a demand of this size does not fit now."""
        if cpus and cpus > self.cpus:
            return True
        return least > 0 and least > self.room(avoid)

    def room(self, avoid: frozenset[int]) -> int:
        """What `Fit.least` must not exceed, beside some devices: the units on all wholly free ones
        or, if there is none, the largest free share."""
        room = self.rooms.get(avoid)
        if room is None:
            shares = self.shares
            if avoid or self.lost:
                shares = shares.copy()
                for at in (*avoid, *self.lost):
                    shares[at] = 0
            whole = shares.count(UNIT)
            room = self.rooms[avoid] = whole * UNIT or max((0, *shares))
        return room

    def place(
        self, demand: Demand, reserved: Reserved = NOTHING, held: Shares = ()
    ) -> Allocation | None:
        """Where the demand fits now beside the reserved room, or None. Nothing is taken.

        `held` are the devices, if they are chosen already.
        """
        if demand.within is not None:
            bundles = () if demand.within.group in self.closed else self._bundles(demand.within)
            return groups.first(demand, bundles, held)
        if isinstance(demand, Gang):
            return groups.place(demand, self, reserved)
        if demand.cpus and demand.cpus > self.cpus - reserved.spare.cpus:
            return None
        if not demand.resources and not demand.wants_device:
            return of_cpus(demand.cpus)
        fit = self.fit(demand)
        if fit.plain:
            kept, free = dict(reserved.spare.resources), self.resources
            if any(units > free.get(name, 0) - kept.get(name, 0) for name, units in fit.plain):
                return None
        shares = held
        if fit.parts and not held:
            found: list[Candidate] = []
            for part in fit.parts:
                chosen = self.choose(part, reserved.devices)
                if chosen is None:
                    return None
                found += chosen
            keys = self._keys
            shares = tuple([(keys[at], units) for at, units in sorted(found)])
        return Allocation(shares, demand.cpus, fit.plain)

    def where(self, demand: Demand) -> Capacity:
        """The capacity that the demand needs: this one, or its bundle, once that is placed."""
        bundles = self._bundles(demand.within) if demand.within is not None else ()
        return bundles[0] if bundles else self

    def _bundles(self, within: Within) -> tuple[Capacity, ...]:
        """The bundle, or all bundles of the group; none before the group is placed."""
        bundles = self.groups.get(within.group, ())
        return bundles if within.bundle < 0 else bundles[within.bundle : within.bundle + 1]

    def choose(self, part: Part, avoid: Collection[int] = ()) -> list[Candidate] | None:
        """The free devices that this part of a demand would take now, in order, or None."""
        shares, shunned = self.shares, self.shunned
        budget = self.budget if part.name == GPU else UNIT * len(shares)
        if part.units >= UNIT:
            if part.units > budget:
                return None
            count = part.units // UNIT
            if shares.count(UNIT) < count:
                return None
            free = [
                each
                for group in part.candidates
                for each in group
                if shares[each[0]] == UNIT and each[0] not in avoid
            ]
            if shunned:
                free.sort(key=lambda each: each[0] in shunned)
            return sorted(free[:count]) if len(free) >= count else None
        for group in part.candidates:
            best, least = None, 3 * UNIT
            for each in group:
                at, units = each
                left = shares[at] - units
                if left < 0 or at in avoid or units > budget:
                    continue
                if at in shunned:
                    left += 2 * UNIT
                if left < least:
                    best, least = each, left
            if best is not None:
                return [best]
        return None
