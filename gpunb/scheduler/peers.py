"""The device shares that other sessions hold, and the claims of this session to them.

A share of another session is not free until that session reports that it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpunb.scheduler import events as ev
from gpunb.scheduler.line import Line
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.resources import UNIT, Demand, Gang, Shares, amount
from gpunb.scheduler.state import State
from gpunb.scheduler.workers import Workers

_SHOWN = 2


@dataclass(slots=True, eq=False)
class Peers:
    """The other sessions, as the last report describes them.

    `held` maps positions of devices to the shares of other sessions, and `claimed` is the last
    claim to some of them, None if there is none. The part of a share that actors hold is not
    obtainable. The rest is, like the shares of our own tasks: it is free when tasks end.
    """

    _state: State
    _queue: Queue
    _workers: Workers
    report: ev.PeersChanged = field(default_factory=ev.PeersChanged)
    held: dict[int, ev.PeerShare] = field(default_factory=dict)
    claimed: ev.Claim | None = None

    def update(self, report: ev.PeersChanged, now: float) -> None:
        """Take over a report about the other sessions."""
        state, position = self._state, self._state.capacity.position
        self.report = report
        self._give_back(+1)
        self.held = {position[each.device]: each for each in report.shares if each.units}
        self._give_back(-1)
        if self._queue.reservation:
            self._queue.drop_reservation()
        used = frozenset(position[key] for key in report.used & position.keys())
        state.capacity.shunned = used
        state.wanted = report.wanted
        for worker in [each for each in self._workers.idle if self._workers.is_wanted(each)]:
            self._workers.end_idle(worker, now)
        self._queue.room_freed = True

    def _give_back(self, sign: int) -> None:
        """Add the shares of the other sessions to the free room, or take them out of it."""
        for at, each in self.held.items():
            self._state.capacity.shift(at, sign * each.units)
            self._state.obtainable.shift(at, sign * each.lasting)

    def update_claim(self) -> None:
        """After each event, while other sessions hold shares or this one has claimed some: decide a
        `Claim` if the shares that this session waits for have changed."""
        claim = self._claim() if self.held else None
        if claim != self.claimed:
            self.claimed = claim
            self._state.decisions.append(claim or ev.Claim(None))

    def _claim(self) -> ev.Claim | None:
        """The total shares that the first fitting line needs of devices that others use."""
        capacity = self._state.capacity
        lines = [
            line
            for line in self._queue.lines.values()
            if line.demand.within is None and capacity.fit(line.demand).parts
        ]
        if not lines:
            return None
        lines.sort(key=lambda line: line.order)
        own = self._free_without_idle()
        passing, whole = own.copy(), own.copy()
        for at, each in self.held.items():
            passing.shift(at, each.units - each.lasting)
            whole.shift(at, each.units)
        lacks: Shares | None = None
        for line in lines:
            wanted = self._reserved_for(line)
            if not wanted:
                if own.place(line.demand) is not None:
                    continue  # it waits for tasks of this session
                place = passing.place(line.demand)
                if place is None:
                    if lacks is None and (place := whole.place(line.demand)):
                        lacks = self._totals(place.shares, own)
                    continue
                wanted = self._totals(place.shares, own)
            if wanted:
                return ev.Claim(wanted, (), self._own_lasting())
        return None if lacks is None else ev.Claim((), lacks, self._own_lasting())

    def _free_without_idle(self) -> Capacity:
        """The free room after the end of all idle and leaving workers."""
        free = self._state.capacity.copy()
        for worker in self._state.workers.values():
            if worker.state != "busy":
                free.give(worker.allocation)
        return free

    def _totals(self, shares: Shares, own: Capacity) -> Shares:
        """These shares together with our tasks' shares, on devices that others use too."""
        wanted = [(key, units, own.position[key]) for key, units in shares]
        return tuple(
            (key, min(UNIT, UNIT - own.shares[at] - self.held[at].units + units))
            for key, units, at in wanted
            if at in self.held
        )

    def _reserved_for(self, line: Line) -> Shares | None:
        """The total shares that are reserved for the line, on devices that others use too."""
        reservation = self._queue.reservation
        if reservation is None or reservation.line is not line or isinstance(line.demand, Gang):
            return None
        devices = self._state.machine.devices
        whole = line.least >= UNIT
        wanted = [
            (devices[at].key, UNIT if whole else min(UNIT, self._lasting(at) + line.least))
            for at in sorted(reservation.reserved.devices)
            if at in self.held
        ]
        return tuple(wanted)

    def _own_lasting(self) -> Shares:
        """The shares of our actors, and of our tasks that wait for other tasks."""
        devices = self._state.machine.devices
        found = [(device.key, self._lasting(at)) for at, device in enumerate(devices)]
        return tuple((key, units) for key, units in found if units > 0)

    def _lasting(self, at: int) -> int:
        """The units of a device that our actors hold, and our tasks that wait for other tasks."""
        theirs = self.held[at].lasting if at in self.held else 0
        return UNIT - self._state.obtainable.shares[at] - theirs

    def why(self, demand: Demand) -> str:
        """The shares of other sessions on devices that could serve a demand, in words."""
        devices = self._state.machine.devices
        places = {at for part in self._state.capacity.fit(demand).parts for at in part.positions}
        found = []
        for at in sorted(places & self.held.keys()):
            each, device = self.held[at], devices[at]
            found.append(f"{amount(each.units)} of {device.resource} {device.id} is {each.holder}")
        if (more := len(found) - _SHOWN) > 0:
            found[_SHOWN:] = [f"so are parts of {more} more"]
        if found and self.report.circle:
            found.append(self.report.circle)
        return "; ".join(found)
