"""What other kernels hold of the devices, and what we wait for that they hold.

Nobody here decides for them: what they have is not free, and is free when they say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunb.core import events as ev
from gpunb.core.placement import Capacity
from gpunb.core.records import Task, Worker
from gpunb.core.resources import GPU, UNIT, Demand, Shares, amount
from gpunb.core.tasks import Crashed

if TYPE_CHECKING:
    from gpunb.core.queue import Line
    from gpunb.core.scheduler import Scheduler

_SHOWN = 2


class Outside:
    """Owns what is known of the other kernels; `held` by the position of the device.

    What they hold for as long as an actor lives is not `obtainable`. All else is, like what our
    own tasks hold: it is free when they end.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._core = scheduler
        self.known = ev.OutsideChanged()
        self.held: dict[int, ev.Outside] = {}
        self.wanted: frozenset[str] = frozenset()
        self._claimed: ev.Claim | None = None

    # ------------------------------------------------------------------------------------- events

    def changed(self, event: ev.OutsideChanged, now: float) -> None:
        workforce, position = self._core.workforce, self._core.capacity.position
        self.known = event
        self._shift(+1)
        self.held = {position[each.device]: each for each in event.outside if each.units}
        self._shift(-1)
        workforce.capacity.shun({position[key] for key in event.used & position.keys()})
        self.wanted = event.wanted
        for worker in [each for each in workforce.idle if self.wants(each)]:
            workforce.let_go(worker, now)
        self._core.queue.freed()

    def _shift(self, sign: int) -> None:
        workforce = self._core.workforce
        for at, each in self.held.items():
            workforce.capacity.shift(at, sign * each.units)
            workforce.obtainable.shift(at, sign * each.lasting)
        if sign < 0 and self._core.queue.reservation:
            self._core.queue.drop_reservation()

    def refused(self, event: ev.LeaseRefused) -> None:
        """The worker was never started, and its task waits again as if it had not been run."""
        core = self._core
        worker = core.workforce.workers.get(event.worker)
        if worker is None:
            return
        (task,) = (core.tasks[ident] for ident in worker.tasks)
        core.workforce.relieve(task, worker)
        core.deadlocks.unblocked(task)
        core.workforce.gone(worker)
        core.deadlines.forget(task)
        task.attempt -= 1
        if task.actor is not None:
            core.actors.refused(task)
        elif task.stop is not None or not core.feasible(task.spec.demand):
            core.settle(task, task.outcome(worker.doom or Crashed("it was not started")))
        else:
            self.again(task)

    def again(self, task: Task) -> None:
        """Let a task wait where it waited before it was to start."""
        task.worker, task.since = None, task.waited
        self._core.queue.put_back(task)

    def wants(self, worker: Worker) -> bool:
        """Whether others wait for a device that the worker holds a share of."""
        return bool(self.wanted) and any(key in self.wanted for key, _ in worker.allocation.shares)

    # ------------------------------------------------------------------------------------ waiting

    def watch(self) -> None:
        """After each event: say what we wait for that others have, if it is something else now."""
        if not self.held and self._claimed is None:
            return
        claim = self._claim() if self.held else None
        if claim != self._claimed:
            self._claimed = claim
            self._core.decide(claim or ev.Claim(None))

    def _claim(self) -> ev.Claim | None:
        """What the first in line should have in total of devices that others hold a part of."""
        core = self._core
        lines = [line for line in core.queue.lines.values() if core.capacity.fit(line.demand).parts]
        if not lines:
            return None
        lines.sort(key=lambda line: line.tasks[0].order)
        own = self._without_idle()
        passing, whole = own.copy(), own.copy()
        for at, each in self.held.items():
            passing.shift(at, each.units - each.lasting)
            whole.shift(at, each.units)
        lacks: Shares | None = None
        for line in lines:
            wanted = self._reserved(line)
            if not wanted:
                if own.place(line.demand) is not None:
                    continue  # it waits for our own
                place = passing.place(line.demand)
                if place is None:
                    if lacks is None and (place := whole.place(line.demand)):
                        lacks = self._lacking(place.shares, whole)
                    continue
                wanted = self._totals(place.shares, passing)
            if wanted:
                return ev.Claim(wanted, (), self._stuck())
        return None if lacks is None else ev.Claim((), lacks, self._stuck())

    def _lacking(self, shares: Shares, hope: Capacity) -> Shares:
        """These shares, where others have a part of the device, with all that we hold there."""
        wanted = [(key, units, hope.position[key]) for key, units in shares]
        return tuple(
            (key, min(UNIT, UNIT - hope.shares[at] + units))
            for key, units, at in wanted
            if at in self.held
        )

    def _stuck(self) -> Shares:
        """What our own actors hold, and tasks that wait for others."""
        obtainable = self._core.workforce.obtainable.shares
        found = []
        for at, device in enumerate(self._core.machine.devices):
            outside = self.held[at].lasting if at in self.held else 0
            if (units := UNIT - obtainable[at] - outside) > 0:
                found.append((device.key, units))
        return tuple(found)

    def _without_idle(self) -> Capacity:
        """What is free once those have left who are in nobody's way."""
        hope = self._core.capacity.copy()
        for worker in self._core.workforce.workers.values():
            if worker.state != "busy":
                hope.give(worker.allocation)
        return hope

    def _totals(self, shares: Shares, hope: Capacity) -> Shares:
        """These shares, where others have a part of the device, with what we hold there."""
        wanted = []
        for key, units in shares:
            at = hope.position[key]
            if at in self.held:
                ours = UNIT - hope.shares[at] - self.held[at].lasting
                wanted.append((key, min(UNIT, ours + units)))
        return tuple(wanted)

    def _reserved(self, line: Line) -> Shares | None:
        """What is kept for the line although our own tasks hold a part of it still."""
        reservation = self._core.queue.reservation
        if reservation is None or reservation.line is not line:
            return None
        devices = self._core.machine.devices
        whole = line.least >= UNIT
        wanted = [
            (devices[at].key, UNIT if whole else min(UNIT, self._lasting(at) + line.least))
            for at in sorted(reservation.kept.devices)
            if at in self.held
        ]
        return tuple(wanted)

    def _lasting(self, at: int) -> int:
        """The units of the device that our own actors hold."""
        return UNIT - self._core.workforce.obtainable.shares[at] - self.held[at].lasting

    # ----------------------------------------------------------------------------------- in words

    def why(self, demand: Demand) -> str | None:
        """What of the devices that could serve a demand others have, in words."""
        devices = self._core.machine.devices
        places = {at for part in self._core.capacity.fit(demand).parts for at in part.positions}
        found = []
        for at in sorted(places & self.held.keys()):
            each, device = self.held[at], devices[at]
            kind = device.resource or GPU
            found.append(f"{amount(each.units)} of {kind} {device.id} is {each.whose}")
        if (more := len(found) - _SHOWN) > 0:
            found[_SHOWN:] = [f"so are parts of {more} more"]
        if found and self.known.circle:
            found.append(self.known.circle)
        return "; ".join(found)
