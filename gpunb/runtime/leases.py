"""Takes and gives back leases for the scheduler's workers, and tells it of the other kernels.

The scheduler decides what it would like to run where; the ledger says whether other kernels leave
room for it. What they have, and what they wait for, comes back as events.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpunb.core import events as ev
from gpunb.core.resources import UNIT, Machine, Shares
from gpunb.core.sightings import Seen
from gpunb.core.tasks import WorkerId
from gpunb.exceptions import GpunbError
from gpunb.runtime import origin
from gpunb.runtime.book import MOST_STAKES
from gpunb.runtime.ledger import VARIABLE, Busy, Ledger, View, ledger_folder

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver

SIGN = 5.0
"""Seconds between two signs that we still wait."""

GLANCE = 0.02
"""Seconds that the first task with a device waits to hear who else uses it. Its worker has to
boot meanwhile."""

_RETRY = 0.05
_HELD_UP = "held up: a process that was stopped has the ledger of leases locked"


def shared(machine: Machine) -> list[str]:
    """The devices that other sessions may want too: all that there really are, and logical ones
    if a folder for the ledger was named."""
    everything = bool(os.environ.get(VARIABLE))
    return [each.key for each in machine.devices if everything or not each.logical]


class Leases:
    """The leases of one session; on the loop's thread, but for `enter`.

    `problem` says why there is no ledger although there should be one.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.ledger: Ledger | None = None
        self.problem: str | None = None
        self._shared: frozenset[str] = frozenset()
        self._held: dict[WorkerId, tuple[dict[str, int], bool]] = {}
        self._said = ev.OutsideChanged()
        self._claim: ev.Claim | None = None
        self._warned = ""
        self._glanced = False
        self._peers: dict[bytes, int] = {}
        self._ticking = False
        self._retrying = False

    def enter(self, machine: Machine) -> None:
        """Have a part in the ledger, if there are devices to share. A session goes without, and
        says so, where that is impossible."""
        keys = shared(machine)
        keys, beyond = keys[:MOST_STAKES], keys[MOST_STAKES:]
        if not keys:
            return
        try:
            self.ledger = Ledger(ledger_folder(), keys, origin.about())
        except (GpunbError, OSError, Busy) as error:
            self.problem = (
                "other sessions do not know which devices this one uses, and may use them too: "
                f"{str(error) or _HELD_UP}"
            )
            return
        self._shared = frozenset(keys)
        if beyond:
            self.problem = (
                f"other sessions know of {len(keys)} of this one's devices, the most that the "
                f"ledger of leases has room for, and may use the other {len(beyond)} too: leave "
                "some to each by init(num_gpus=...) or the visibility variable"
            )

    @property
    def kept(self) -> int | None:
        """The descriptor that all processes of the session are to have, as long as they live."""
        return self.ledger.bell if self.ledger is not None else None

    def open(self) -> None:
        if self.ledger is not None:
            self._driver.loop.watch(self.ledger.bell, self._rung)
            self._driver.sampler.usage(min(self._shared))  # has all looked at, soon

    def close(self) -> None:
        """Leave the ledger; after the end of all processes."""
        if self.ledger is None:
            return
        for peer in list(self._peers):
            self._unwatch(peer)
        self._driver.loop.unwatch(self.ledger.bell)
        self.ledger.close()
        self.ledger = None

    def forked(self) -> None:
        """In a child that was forked off the kernel: this is the parent's."""
        if self.ledger is not None:
            self.ledger.forked()

    # ------------------------------------------------------------------------------------- leases

    def take(self, run: ev.Run, name: str, *, lasting: bool) -> bool:
        """Have what a new worker is to hold. If others have it, the scheduler is told."""
        if self.ledger is None:
            return True
        shares = {key: units for key, units in run.allocation.shares if key in self._shared}
        if not shares:
            return True
        if not self._glanced and self._finds_used(shares):
            self._driver.feed(ev.LeaseRefused(run.worker))
            return False
        try:
            if self.ledger.take(shares, lasting=lasting, job=name):
                self._held[run.worker] = shares, lasting
                return True
            self._look()
        except (Busy, OSError):
            self._held_up(shares)
        if self._said == self._driver.scheduler.outside.known:
            # It knew that, so nobody knows why. Not again at once, or it might go on for ever.
            self._held_up(shares)
        self._driver.feed(ev.LeaseRefused(run.worker))
        return False

    def _finds_used(self, shares: Mapping[str, int]) -> bool:
        """Whether a first look finds that processes outside gpunb use one of these."""
        self._glanced = True
        before = self._said.used
        self._driver.sampler.glance(GLANCE)
        return not shares.keys().isdisjoint(self._said.used - before)

    def gone(self, worker: WorkerId) -> None:
        """A worker's process is gone, and what it held is anybody's."""
        shares, lasting = self._held.pop(worker, (None, False))
        if shares and self.ledger is not None:
            self.ledger.give(shares, lasting=lasting)
            self._tell()
            if self._said.outside:
                self.look()

    def _tell(self) -> None:
        if self.ledger is None:
            return
        try:
            self.ledger.tell()
        except (Busy, OSError):
            self._driver.loop.after(_RETRY, self._tell)

    def _held_up(self, shares: dict[str, int]) -> None:
        """Nothing can be had of these for a moment."""
        known = {each.device: each for each in self._said.outside}
        for key in shares:
            known[key] = ev.Outside(key, UNIT - self._own(key), whose=_HELD_UP)
        self._say(replace(self._said, outside=tuple(known.values())))
        self._later()

    def _own(self, key: str) -> int:
        return sum(shares.get(key, 0) for shares, _ in self._held.values())

    def _later(self) -> None:
        if not self._retrying:
            self._retrying = True
            self._driver.loop.after(_RETRY, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        self.look()

    # ------------------------------------------------------------------------------------- others

    def seen(self, processes: Mapping[str, Sequence[Seen]]) -> None:
        """Which processes that are not this session's were seen on each device. Where one is of
        no session at all, nothing tells what it will take: such a device comes last."""
        kernels = self.ledger.pids() if self.ledger is not None else set()
        used = frozenset(
            key
            for key, found in processes.items()
            if any(kernels.isdisjoint((each.pid, *each.line)) for each in found)
        )
        if used != self._said.used:
            self._say(replace(self._said, used=used))

    def claim(self, claim: ev.Claim) -> None:
        """Let the others know what is waited for, and hear of it when they give something back."""
        self._claim = claim if claim.shares is not None else None
        if self.ledger is None:
            return
        wanted = None if claim.shares is None else self._of_shared(claim.shares)
        try:
            self.ledger.claim(wanted, self._of_shared(claim.lacks), self._of_shared(claim.stuck))
        except (Busy, OSError):
            self._driver.loop.after(_RETRY, lambda: self._claim_again(claim))
            return
        if claim.shares is None:
            self._warned = ""
            for peer in list(self._peers):
                self._unwatch(peer)
            return
        self.look()
        if not self._ticking:
            self._ticking = True
            self._driver.loop.after(SIGN, self._tick)

    def _claim_again(self, claim: ev.Claim) -> None:
        if self._claim == (claim if claim.shares is not None else None):
            self.claim(claim)

    def _of_shared(self, shares: Shares) -> dict[str, int]:
        return {key: units for key, units in shares if key in self._shared}

    def _tick(self) -> None:
        """While we wait: show that we still do, and see whether those who came before us do."""
        self._ticking = self._claim is not None and self.ledger is not None
        if self._ticking:
            self.look()
            self._driver.loop.after(SIGN, self._tick)

    def _rung(self) -> None:
        if self.ledger is not None:
            self.ledger.heard()
            self.look()

    def look(self) -> None:
        """See how things are with the other kernels, and tell the scheduler if that is news."""
        if self.ledger is None:
            return
        try:
            self._look()
        except (Busy, OSError):
            self._later()

    def _look(self) -> None:
        assert self.ledger is not None
        if self._claim is not None:
            self._watch()
        self._say(_event(self.ledger.look(), self._said.used))

    def _say(self, event: ev.OutsideChanged) -> None:
        if event != self._said:
            self._said = event
            if event.circle and event.circle != self._warned:
                self._warned = event.circle
                self._driver.sampler.warn(event.circle)
            self._driver.feed(event)

    def _watch(self) -> None:
        """Hear of the end of those who have what we wait for."""
        assert self.ledger is not None
        for peer in self.ledger.peers():
            if peer not in self._peers:
                descriptor = self.ledger.watch(peer)
                if descriptor is not None:
                    self._peers[peer] = descriptor
                    self._driver.loop.watch(descriptor, lambda peer=peer: self._ended(peer))  # type: ignore[misc]
                    # Not what is written there, which is for others: only the end.
                    self._driver.loop.pause(descriptor, True)

    def _ended(self, peer: bytes) -> None:
        self._unwatch(peer)
        self.look()

    def _unwatch(self, peer: bytes) -> None:
        descriptor = self._peers.pop(peer, None)
        if descriptor is not None:
            self._driver.loop.unwatch(descriptor)
            os.close(descriptor)


def _event(view: View, used: frozenset[str]) -> ev.OutsideChanged:
    outside = [
        ev.Outside(key, units, lasting, whose)
        for key, (units, lasting, whose) in view.outside.items()
    ]
    return ev.OutsideChanged(tuple(outside), view.wanted, used, view.circle)
