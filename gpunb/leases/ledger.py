"""The ledger of leases: which session of this machine holds how much of each device.

All sessions write into one file, each its own record, while they hold its lock (flock).
A lease lasts until the session gives it back or its last process is gone (`liveness`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpunb.leases import liveness, records
from gpunb.leases.membership import Membership
from gpunb.leases.records import SessionRecord, Stake, digest
from gpunb.leases.report import as_dict, circle_text, owners_text
from gpunb.scheduler.resources import UNIT

NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The other sessions, as one session sees them.

    Attributes:
        outside: for each device of which units are not available: their number, the part of them
            that no end of a task frees, and a text that names their owners.
        wanted: the devices that other sessions wait for.
        circle: a text if this session and others wait for each other; else empty.
        twice: for each device of which sessions together hold more than there is, a text that
            names the owners. It needs a removal of the ledger's files that was not seen in time.
    """

    outside: Mapping[str, tuple[int, int, str]]
    wanted: frozenset[str]
    circle: str
    twice: Mapping[str, str]


class Ledger(Membership):
    """The leases of one session. Used by one thread."""

    def __init__(
        self,
        path: Path,
        devices: Iterable[str],
        about: Mapping[str, Any],
        *,
        patient: bool = False,
        make: Callable[[], object] | None = None,
    ) -> None:
        """Enter the session in the ledger for these devices; see `Membership`."""
        self._keys = {digest(key): key for key in devices}
        self._numbers = {key: number for number, key in self._keys.items()}
        self._abouts: dict[bytes, Mapping[str, Any]] = {}
        self._given: set[int] = set()
        super().__init__(path, about, patient=patient, make=make)

    # ------------------------------------------------------------------------------------- leases

    def take(self, shares: Mapping[str, int], *, lasting: bool, job: str) -> bool:
        """Lease these units of devices, all or none; False if others hold them or come first.

        Raises:
            Busy: the ledger cannot be used now.
        """
        me = self.record
        wanted = {self._numbers[key]: units for key, units in shares.items()}
        if len(me.stakes | wanted) > records.MOST_STAKES:
            return False
        now = time.monotonic()
        with self._locked as known:
            others = known
            self._settle(others)
            if not records.may_take(me, others, wanted, now):
                living = self._without_the_dead(others)
                if len(living) == len(others) or not records.may_take(me, living, wanted, now):
                    return False
                others = living
            if me.waits and any(me.wanted(number) for number in wanted):
                # This session has had its turn: it gets a new ticket, behind all others.
                me.ticket, me.asked = records.next_ticket([*others, me]), now
            for number, units in wanted.items():
                stake = me.stakes.setdefault(number, Stake())
                stake.since = stake.since if stake.held else time.time()
                stake.held += units
                stake.lasting += units if lasting else 0
                stake.job = job
            try:
                self._write()
            except OSError:
                # The lease is in no file, and the caller does not get it.
                self.give(shares, lasting=lasting)
                raise
        self._ring_next(others, wanted)
        return True

    def give(self, shares: Mapping[str, int], *, lasting: bool) -> None:
        """Give leases back. Others see that after `publish`, or another call that writes."""
        for key, units in shares.items():
            number = self._numbers[key]
            stake = self.record.stakes[number]
            stake.held -= units
            stake.lasting -= units if lasting else 0
            stake.stuck = min(stake.stuck, stake.held)
            if stake.empty:
                del self.record.stakes[number]
            self._given.add(number)

    def publish(self) -> None:
        """Write this session's record, and wake the sessions whose turn it is now.

        Raises:
            Busy: the ledger cannot be used now.
        """
        with self._locked as others:
            self._write()
        self._ring_next(others, self._given)
        self._given = set()

    def claim(
        self,
        wanted: Mapping[str, int] | None,
        lacks: Mapping[str, int] = NONE,
        stuck: Mapping[str, int] = NONE,
    ) -> None:
        """Publish that this session waits, or with None that it does not wait any more.

        Args:
            wanted: units of each device, with those that the session holds already; empty to be
                woken for every change.
            lacks, stuck: as in `Stake`.

        Raises:
            Busy: the ledger cannot be used now.
        """
        me, now = self.record, time.monotonic()
        totals = {self._numbers[key]: units for key, units in (wanted or {}).items()}
        with self._locked as others:
            before = {number: stake.wanted for number, stake in me.stakes.items() if stake.wanted}
            if wanted is None:
                me.ticket = 0
            elif not me.waits:
                me.ticket, me.asked = records.next_ticket(others), now
            for key, number in self._numbers.items():
                if number in totals or key in lacks:
                    me.stakes.setdefault(number, Stake())
                if (stake := me.stakes.get(number)) is None:
                    continue
                stake.wanted = min(UNIT, totals.get(number, 0))
                stake.lacks = min(UNIT, lacks.get(key, 0))
                stake.stuck = min(stake.held, stuck.get(key, 0))
                if stake.empty:
                    del me.stakes[number]
            self._write()
        touched = before.keys() | totals.keys()
        self._ring(each for each in others if any(map(each.held, touched)))
        self._ring(records.find_circle(me, others))
        fewer = {number for number, units in before.items() if me.wanted(number) < units}
        self._ring_next(others, fewer)

    # ------------------------------------------------------------------------------------- others

    def look(self) -> LedgerView:
        """Return the present view of the other sessions, and write a sign that this one lives.

        Raises:
            Busy: the ledger cannot be used now, or a living session is not in it.
        """
        now = time.monotonic()
        with self._locked as known:
            if not liveness.is_in_folder(self._folder, self.record.id, self.fifo):
                self._ensure_fifo()
            # A session without leases or wishes makes no difference, whether it lives or not.
            others = self._without_the_dead([each for each in known if each.stakes])
            self._write()
            self._settle(self._others())
        outside: dict[str, tuple[int, int, str]] = {}
        wanted, twice = set(), {}
        totals = records.held_totals([self.record, *others])
        for number, key in self._keys.items():
            mine = self.record.held(number)
            held = sum(each.held(number) for each in others)
            left = records.room(self.record, others, number, now, totals=totals)
            away = min(UNIT, UNIT - mine - left)
            if away > 0:
                stakes = [each.stakes[number] for each in others if number in each.stakes]
                lasting = min(away, sum(stake.lasting for stake in stakes))
                words = owners_text(others, number, self._about, reserved=away > held)
                outside[key] = away, lasting, words
                if mine and mine + held > UNIT:
                    twice[key] = words
            if any(each.waits and each.wanted(number) for each in others):
                wanted.add(key)
        circle = circle_text(records.find_circle(self.record, others), self._about)
        return LedgerView(outside, frozenset(wanted), circle, twice)

    def clear_fifo(self) -> None:
        """Remove the bytes from the FIFO, before `look`."""
        if self.fifo >= 0:
            liveness.clear(self.fifo)

    def peers(self) -> list[bytes]:
        """Return the sessions that held or wanted devices of this session at the last look."""
        ours = self._keys.keys()
        return [each.id for each in self._others() if not ours.isdisjoint(each.stakes)]

    def pids(self) -> set[int]:
        """Return the pids of all kernels in the ledger, with this one."""
        return {each.pid for each in [self.record, *self._read_others()]}

    def others(self, key: str) -> list[dict[str, Any]]:
        """Return the leases that other sessions hold of a device, as in a snapshot."""
        number = digest(key)
        return [
            as_dict(each, each.stakes[number], self._about(each))
            for each in self._read_others()
            if each.held(number) and self._is_alive(each)
        ]

    def _ring_next(self, others: Sequence[SessionRecord], devices: Iterable[int]) -> None:
        """Wake the sessions whose turn it may be after a change on these devices."""
        if any(each.waits for each in others):
            everybody = [self.record, *others]
            found = records.next_in_turn(everybody, devices, time.monotonic())
            self._ring(each for each in found if each is not self.record)

    def _ring(self, sessions: Iterable[SessionRecord]) -> None:
        liveness.notify(self._folder, [each.id for each in sessions])

    def _about(self, record: SessionRecord) -> Mapping[str, Any]:
        known = self._abouts.get(record.id)
        if known is None:
            if len(self._abouts) >= records.MOST_RECORDS:
                self._abouts.clear()  # most of them are of dead sessions
            known = self._abouts[record.id] = liveness.about(self._folder, record.id)
        return known
