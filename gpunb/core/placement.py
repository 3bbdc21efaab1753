"""Where a demand fits: the free capacity of a machine, and the rules of placing.

Fractions go to the fitting device with the least room left, lowest position on ties, and are
never split. Whole devices take wholly free ones, lowest positions first. Accepted types are tried
in their order of preference.

A demand has a part for each kind of device: GPUs, and resources that stand for devices of another
kind on this machine, such as "TPU". Each part is placed by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpunb.core.fitting import Candidate, Part, Resources, least_of, parts
from gpunb.core.reasons import refusal
from gpunb.core.resources import GPU, UNIT, Allocation, Demand, Machine, Shares

REMEMBERED = 256
"""Demands whose `Fit` is kept, so that a session of many different ones stays small."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to be left alone: devices by position, CPUs and resources."""

    devices: frozenset[int]
    spare: Allocation


NO_DEVICES: frozenset[int] = frozenset()
NOTHING = Kept(NO_DEVICES, Allocation())


class Fit(NamedTuple):
    """What a machine can do for a demand when nothing else runs.

    `parts` are what it needs of devices, `plain` of resources that are mere numbers. `least` is
    the number of units that must be free on one device, or from `UNIT` on, on wholly free devices
    together.
    """

    parts: tuple[Part, ...]
    plain: Resources
    least: int
    refusal: str | None


class Capacity:
    """What is free on a machine right now.

    `budget` is how much more of its GPUs may be given out at once. Those `shunned`, by position,
    come last.
    `lost` are the devices, by position, that can be used no more, each with the reason.
    """

    def __init__(
        self,
        machine: Machine,
        fits: dict[Demand, Fit] | None = None,
        lost: dict[int, str] | None = None,
    ) -> None:
        self.machine = machine
        self.lost: dict[int, str] = {} if lost is None else lost
        self.shares = [UNIT] * len(machine.devices)
        self.cpus = machine.cpus
        self.resources = dict(machine.resources)
        self._keys = [device.key for device in machine.devices]
        self.position = {key: at for at, key in enumerate(self._keys)}
        self._fits: dict[Demand, Fit] = {} if fits is None else fits
        self._rooms: dict[frozenset[int], tuple[int, int]] = {}
        self.shunned: frozenset[int] = frozenset()
        self._counts = [device.resource == GPU for device in machine.devices]
        self.budget = sum(self._counts) * UNIT if machine.most is None else machine.most

    def copy(self) -> Capacity:
        other = Capacity(self.machine, self._fits, self.lost)
        other.shares = self.shares.copy()
        other.cpus = self.cpus
        other.resources = self.resources.copy()
        other.shunned, other.budget = self.shunned, self.budget
        return other

    def whole(self) -> Capacity:
        """The same machine when nothing runs."""
        return Capacity(self.machine, self._fits, self.lost)

    def lose(self, at: int, reason: str) -> None:
        """Place nothing on this device any more."""
        self.lost[at] = reason
        self._fits.clear()
        self._rooms.clear()

    def take(self, allocation: Allocation) -> None:
        self._move(allocation, -1)

    def give(self, allocation: Allocation) -> None:
        self._move(allocation, +1)

    def _move(self, allocation: Allocation, sign: int) -> None:
        self.cpus += sign * allocation.cpus
        if allocation.shares:
            self._rooms.clear()
        for key, units in allocation.shares:
            at = self.position[key]
            self.shares[at] += sign * units
            if self._counts[at]:
                self.budget += sign * units
        for name, units in allocation.resources:
            self.resources[name] = self.resources.get(name, 0) + sign * units

    def shift(self, at: int, units: int) -> None:
        """So many units of a device are to be had beyond those before, or fewer: others have
        them. What is more than there is, for a moment, makes room for nobody."""
        self._rooms.clear()
        self.shares[at] += units

    def shun(self, devices: Collection[int]) -> None:
        """Give these devices out only where there is no choice."""
        self.shunned = frozenset(devices)

    def fit(self, demand: Demand) -> Fit:
        known = self._fits.get(demand)
        if known is None:
            if len(self._fits) >= REMEMBERED:
                self._fits.clear()
            found = tuple([each.without(self.lost) for each in parts(demand, self.machine)])
            kinds = {part.name for part in found}
            plain = tuple((name, units) for name, units in demand.resources if name not in kinds)
            known = self._fits[demand] = Fit(found, plain, least_of(found), self._refusal(demand))
        return known

    def _refusal(self, demand: Demand) -> str | None:
        """As `refusal`, of what is left of the machine."""
        reason = refusal(demand, self.machine)
        if reason or not self.lost:
            return reason
        left = [each for at, each in enumerate(self.machine.devices) if at not in self.lost]
        reason = refusal(demand, replace(self.machine, devices=tuple(left)))
        if reason is None:
            return None
        devices = self.machine.devices
        gone = [f"{devices[at].resource} {devices[at].id} ({why})" for at, why in self.lost.items()]
        return f"{reason}; out of service: {', '.join(gone)}"

    def hopeless(self, least: int, cpus: int, avoid: frozenset[int]) -> bool:
        """A quick look that may save `place`: True only if what needs this does not fit now."""
        if cpus and cpus > self.cpus:
            return True
        return least > self.room(avoid)[least >= UNIT] if least else False

    def room(self, avoid: frozenset[int]) -> tuple[int, int]:
        """The largest free share beside these devices, and the units on wholly free ones."""
        room = self._rooms.get(avoid)
        if room is None:
            shares = self.shares
            if avoid or self.lost:
                shares = shares.copy()
                for at in (*avoid, *self.lost):
                    shares[at] = 0
            largest = max(shares) if shares else 0  # below 0 if others hold more than there is
            room = self._rooms[avoid] = max(largest, 0), shares.count(UNIT) * UNIT
        return room

    def place(self, demand: Demand, kept: Kept = NOTHING, held: Shares = ()) -> Allocation | None:
        """Where the demand fits now beside what is kept, or None. Nothing is taken.

        `held` are the devices, if they are chosen already.
        """
        if demand.cpus and demand.cpus > self.cpus - kept.spare.cpus:
            return None
        if not demand.resources and not demand.wants_device:
            return Allocation((), demand.cpus)
        fit = self.fit(demand)
        if fit.plain and not self._has(fit.plain, kept.spare):
            return None
        shares = held
        if fit.parts and not held:
            found: list[Candidate] = []
            for part in fit.parts:
                chosen = self.choose(part, kept.devices)
                if chosen is None:
                    return None
                found += chosen
            keys = self._keys
            shares = tuple([(keys[at], units) for at, units in sorted(found)])
        return Allocation(shares, demand.cpus, fit.plain)

    def _has(self, wanted: Resources, spare: Allocation) -> bool:
        kept = dict(spare.resources)
        free = self.resources
        return all(units <= free.get(name, 0) - kept.get(name, 0) for name, units in wanted)

    def choose(self, part: Part, avoid: Collection[int] = ()) -> list[Candidate] | None:
        """The devices that this part of a demand would take of those free now, in order, or
        None."""
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
