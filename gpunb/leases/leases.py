"""Takes and gives back leases for the scheduler's workers, and feeds it events on other sessions.

The scheduler decides which task it would start on which device; the ledger knows whether other
sessions leave room for it. Their leases and waits are fed to the scheduler as events.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpunb.leases.ledger import Ledger, LedgerView
from gpunb.leases.ledger_file import VARIABLE, Busy, ledger_folder, ledger_path
from gpunb.leases.records import MOST_STAKES
from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import UNIT, Machine, Shares
from gpunb.scheduler.tasks import WorkerId
from gpunb.scheduler.usage_types import Seen
from gpunb.system import process_info

if TYPE_CHECKING:
    from gpunb.engine.share_checks import ShareChecks
    from gpunb.engine.state import EngineState

SIGN = 1.0
"""Seconds between two looks of a session that waits. It is woken only for its turn; these looks are
signs that it lives, and keep its texts on who holds what up to date."""

GLANCE = 0.02
"""Seconds that the first task with a device waits for the processes on it to be known. Its worker
boots meanwhile."""

_RETRY = 0.05
_SELDOM = 0.5
"""Seconds until a failed step is tried again: the first pause, and the longest one."""

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1
"""Seconds for which a session that waits does not listen, after it was woken in vain: twice the
first pause, and twice as long each further time until it takes a lease."""

_WATCHED = 64
"""The number of sessions whose end is watched."""


def shared(machine: Machine) -> list[str]:
    """Return the devices that other sessions may want, too: all real ones, and logical ones if
    GPUNB_LEDGER_DIR names a folder."""
    everything = bool(os.environ.get(VARIABLE))
    return [each.key for each in machine.devices if everything or not each.logical]


class Leases:
    """The leases of one session; on the loop's thread, except `enter`.

    While the session is not in the ledger, or the ledger cannot be used, no shared device is given
    to a task.
    """

    def __init__(self, engine: EngineState, sampler: ShareChecks) -> None:
        self._engine = engine
        self._sampler = sampler
        self.ledger: Ledger | None = None
        self._too_many: str | None = None
        self._twice: Mapping[str, str] = {}
        self._shared: frozenset[str] = frozenset()
        self._held: dict[WorkerId, list[tuple[dict[str, int], bool]]] = {}
        self._reported = ev.PeersChanged()
        self._claim: ev.Claim | None = None
        self._warned = ""
        self._checked_use = False
        self._peers: dict[bytes, int] = {}
        self._watched_fifo = -1
        self._woken = 0  # times in which it has waited, since its last lease
        self._ticking = False
        self._retrying = False
        self._wait = _RETRY
        self._unpublished = False
        self._unclaimed: ev.Claim | None = None
        self._problem: str | None = None

    def enter(self, machine: Machine) -> None:
        """Enter the ledger if there are shared devices: now, or as soon as that is possible."""
        keys = shared(machine)
        keys, beyond = keys[:MOST_STAKES], keys[MOST_STAKES:]
        if not keys:
            return
        make = functools.partial(ledger_folder, make=True)
        self.ledger = Ledger(ledger_path(), keys, process_info.about(), patient=True, make=make)
        self._shared = frozenset(keys)
        if beyond:
            self._too_many = (
                f"other sessions know of {len(keys)} of this one's devices, the most that the "
                f"ledger of leases has room for, and may use the other {len(beyond)} too: leave "
                "some to each by init(num_gpus=...) or the visibility variable"
            )

    @property
    def problems(self) -> list[str]:
        """Texts on what is wrong between this session and the others."""
        texts = [] if self._too_many is None else [self._too_many]
        if self._problem is not None and self.ledger is not None and not self.ledger.settled:
            texts.append(f"no device is given out: {self._problem}")
        devices = {each.key: each for each in self._engine.scheduler.machine.devices}
        for key, holders in self._twice.items():
            texts.append(
                f"{devices[key].resource} {devices[key].id} is held twice, because the files of "
                f"the ledger of leases were removed while it was in use: {holders}"
            )
        return texts

    @property
    def inherited(self) -> int | None:
        """The descriptor that all processes of the session inherit; see `Membership.life`."""
        return self.ledger.life if self.ledger is not None else None

    def open(self) -> None:
        if self.ledger is not None:
            self._sampler.usage(min(self._shared))  # starts the sampler, which reads all devices
            self.look()

    def close(self) -> None:
        """Leave the ledger, after the end of all worker processes."""
        if self.ledger is None:
            return
        for peer in list(self._peers):
            self._unwatch_peer(peer)
        self._engine.loop.unwatch(self._watched_fifo)
        self._watched_fifo = -1
        self.ledger.close()
        self.ledger = None

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        ledger, self.ledger = self.ledger, None
        if ledger is not None:
            ledger.forked()
        while self._peers:
            os.close(self._peers.popitem()[1])

    # ------------------------------------------------------------------------------------- leases

    def take(self, run: ev.Run | ev.Prepare | ev.Restore, name: str, *, lasting: bool) -> bool:
        """Lease the shares of a worker, beyond those that it has. On a failure feed `LeaseRefused`
        and return False."""
        if self.ledger is None:
            return True
        held = {
            key: units
            for lease, _ in self._held.get(run.worker, ())
            for key, units in lease.items()
        }
        shares = {
            key: units - held.get(key, 0)
            for key, units in run.allocation.shares
            if key in self._shared and units > held.get(key, 0)
        }
        if not shares:
            return True
        if not self._checked_use and self._finds_other_use(shares):
            self._engine.feed(ev.LeaseRefused(run.worker))
            return False
        try:
            if self.ledger.take(shares, lasting=lasting, job=name):
                self._held.setdefault(run.worker, []).append((shares, lasting))
                self._woken = 0
                self._watch_fifo()
                return True
            self._look()
        except (Busy, OSError) as error:
            self._hold_up(error)
        else:
            if self._reported == self._engine.scheduler.peers.report:
                # The view has not changed, so an immediate retry could fail for ever.
                self._hold_up(Busy("others change what they hold at this moment"))
        self._engine.feed(ev.LeaseRefused(run.worker))
        return False

    def _finds_other_use(self, shares: Mapping[str, int]) -> bool:
        """Whether the first sample finds processes outside gpunb on these devices."""
        self._checked_use = True
        before = self._reported.used
        self._sampler.glance(GLANCE)
        return not shares.keys().isdisjoint(self._reported.used - before)

    def gone(self, worker: WorkerId) -> None:
        """Give back the leases of a worker that has ended."""
        leases = self._held.pop(worker, ())
        if leases and self.ledger is not None:
            for shares, lasting in leases:
                self.ledger.give(shares, lasting=lasting)
            self._publish()
            if self._reported.shares:
                self.look()

    def _publish(self) -> None:
        if self.ledger is None:
            return
        try:
            self.ledger.publish()
        except (Busy, OSError):
            self._unpublished = True
            self._retry_later()
        else:
            self._unpublished = False

    def _hold_up(self, error: Busy | OSError) -> None:
        """Tell the scheduler that no shared device is free for a moment."""
        why = str(error)
        if isinstance(error, OSError):
            why = f"the ledger of leases ({ledger_path()}) cannot be used: {error.strerror}"
        self._problem = why
        holder = f"held up: {why}"
        shares = tuple(
            ev.PeerShare(key, UNIT - self._held_here(key), holder=holder)
            for key in sorted(self._shared)
        )
        self._report(replace(self._reported, shares=shares))
        self._retry_later()

    def _held_here(self, key: str) -> int:
        return sum(shares.get(key, 0) for leases in self._held.values() for shares, _ in leases)

    def _retry_later(self) -> None:
        """Try the steps that have failed again, after a pause."""
        if not self._retrying:
            self._retrying = True
            self._engine.loop.after(self._wait, self._retry)
            self._wait = min(_SELDOM, 2 * self._wait)

    def _retry(self) -> None:
        self._retrying = False
        if self._unpublished:
            self._publish()
        if self._unclaimed is not None:
            self.claim(self._unclaimed)
        self.look()

    # ------------------------------------------------------------------------------------- others

    def seen(self, processes: Mapping[str, Sequence[Seen]]) -> None:
        """Note the processes of others on each device. A device with a process of no session is
        used last, because nobody knows how much memory the process will take."""
        kernels = self.ledger.pids() if self.ledger is not None else set()
        used = frozenset(
            key
            for key, there in processes.items()
            if any(kernels.isdisjoint((each.pid, *each.line)) for each in there)
        )
        if used != self._reported.used:
            self._report(replace(self._reported, used=used))

    def claim(self, claim: ev.Claim) -> None:
        """Publish the shares that this session waits for, and watch for their return."""
        self._claim = claim if claim.shares is not None else None
        self._unclaimed = None
        if self._claim is None:
            self._woken = 0
        if self.ledger is None:
            return
        wanted = None if claim.shares is None else self._of_shared(claim.shares)
        try:
            self.ledger.claim(wanted, self._of_shared(claim.lacks), self._of_shared(claim.stuck))
        except (Busy, OSError):
            self._unclaimed = claim
            self._retry_later()
            return
        if claim.shares is None:
            self._warned = ""
            for peer in list(self._peers):
                self._unwatch_peer(peer)
            return
        if self._problem is None:
            self.look()
        # Else `_retry` looks soon. A look now could find room that the ledger refuses again, which
        # would lead to another claim, and so on for ever.
        if not self._ticking:
            self._ticking = True
            self._engine.loop.after(SIGN, self._tick)

    def shares(self, key: str) -> bool:
        """Whether other sessions may want this device, too."""
        return key in self._shared

    def _of_shared(self, shares: Shares) -> dict[str, int]:
        return {key: units for key, units in shares if key in self._shared}

    def _tick(self) -> None:
        """Write a sign and read the ledger from time to time, while this session waits."""
        self._ticking = self._claim is not None and self.ledger is not None
        if self._ticking:
            self.look()
            self._engine.loop.after(SIGN, self._tick)

    def _on_fifo(self) -> None:
        if self.ledger is None:
            return
        self.ledger.clear_fifo()
        if self._claim is not None:
            self._woken += 1
        self.look()
        if self._woken and self._watched_fifo >= 0:
            # While others take and give back what is of no use here, looks could take all the time.
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._woken, 10))
            self._engine.loop.pause(self._watched_fifo, True)
            self._engine.loop.after(pause, functools.partial(self._listen, self._watched_fifo))

    def _listen(self, fifo: int) -> None:
        if fifo == self._watched_fifo:
            self._engine.loop.pause(fifo, False)

    def look(self) -> None:
        """Read the ledger, and feed the scheduler the changes of other sessions."""
        if self.ledger is None:
            return
        try:
            self._look()
        except (Busy, OSError) as error:
            if self.ledger.settled:
                self._retry_later()
            else:
                self._hold_up(error)

    def _look(self) -> None:
        assert self.ledger is not None
        view = self.ledger.look()
        if self._claim is not None and not self._watch_peers():
            view = self.ledger.look()
        self._watch_fifo()
        self._problem, self._wait, self._twice = None, _RETRY, view.twice
        self._report(_event(view, self._reported.used))

    def _watch_fifo(self) -> None:
        """Watch the present FIFO; a new one is made when the ledger's files were removed."""
        if self.ledger is None or self.ledger.fifo == self._watched_fifo:
            return
        if self._watched_fifo >= 0:
            self._engine.loop.unwatch(self._watched_fifo)
        self._watched_fifo = -1
        self.ledger.close_old_fifos()
        try:
            self._engine.loop.watch(self.ledger.fifo, self._on_fifo)
        except OSError:
            self._retry_later()  # calls `look`, which tries this again
        else:
            self._watched_fifo = self.ledger.fifo

    def _report(self, event: ev.PeersChanged) -> None:
        if event != self._reported:
            self._reported = event
            if event.circle and event.circle != self._warned:
                self._warned = event.circle
                self._sampler.warn(event.circle)
            self._engine.feed(event)

    def _watch_peers(self) -> bool:
        """Watch for the end of the sessions that hold what this one waits for. False if one of
        them has ended since the last look."""
        assert self.ledger is not None
        all_live = True
        for peer in self.ledger.peers():
            if peer in self._peers or len(self._peers) >= _WATCHED:
                continue
            if (descriptor := self.ledger.watch(peer)) is None:
                all_live = False
                continue
            try:
                self._engine.loop.watch(descriptor, functools.partial(self._on_peer_end, peer))
            except OSError:
                os.close(descriptor)
                self._retry_later()  # calls `look`, which tries this again
                break
            self._peers[peer] = descriptor
            # Only the end matters: the bytes in the FIFO are for its session.
            self._engine.loop.pause(descriptor, True)
        return all_live

    def _on_peer_end(self, peer: bytes) -> None:
        self._unwatch_peer(peer)
        self.look()

    def _unwatch_peer(self, peer: bytes) -> None:
        descriptor = self._peers.pop(peer, None)
        if descriptor is not None:
            self._engine.loop.unwatch(descriptor)
            os.close(descriptor)


def _event(view: LedgerView, used: frozenset[str]) -> ev.PeersChanged:
    shares = [ev.PeerShare(key, *held) for key, held in view.outside.items()]
    return ev.PeersChanged(tuple(shares), view.wanted, used, view.circle)
