"""Compares the memory that tasks use with their shares.

`Book` gets the readings of the devices and the holders of shares, and returns findings: reasons
for a warning, or for the end of a task. It returns each finding only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gpunb.scheduler.resources import UNIT, Device, Shares, amount, size_text
from gpunb.scheduler.shares import CONTEXT, allowed, hint
from gpunb.scheduler.tasks import TaskId, WorkerId
from gpunb.scheduler.usage_types import Exceeded, Finding, Holder, Reading, Remark, Seen

IDLE_AFTER = 600.0
"""Seconds after which an unused device of an actor is worth a warning."""

BACK_AFTER = 2.0
"""Seconds in which the memory of an ended process should be free again."""

REMEMBERED = 1000
"""Number of ended tasks for which the peak is kept."""

_SERVERS = ("nvidia-cuda-mps",)
_NOBODY: Mapping[int, tuple[TaskId, str]] = MappingProxyType({})


class _Leftover(NamedTuple):
    """Memory of an ended worker on one device that should be free soon."""

    key: str
    label: str
    pids: frozenset[int]
    peak: int
    before: int | None
    since: float


class Book:
    """The use of each device by each worker."""

    def __init__(self, devices: Iterable[Device]) -> None:
        self.devices = {each.key: each for each in devices}
        self.holders: dict[WorkerId, Holder] = {}
        self.readings: dict[str, Reading] = {}
        self.others: dict[str, list[Seen]] = {}
        self.past: dict[TaskId, tuple[dict[str, int], Shares]] = {}
        self._reported: set[tuple[object, ...]] = set()
        self._leftovers: list[_Leftover] = []
        self._ended: dict[int, float] = {}
        self._before: dict[tuple[WorkerId, str], int | None] = {}

    @property
    def awaits_memory(self) -> bool:
        """Whether memory of ended workers may still be in use."""
        return bool(self._leftovers)

    # ------------------------------------------------------------------------------------ holders

    def start_task(self, holder: Holder) -> None:
        """Note that a task or actor starts on a worker with shares."""
        known = self.holders.get(holder.worker)
        if known is not None:
            holder.pids, holder.now, holder.reported = known.pids, known.now, known.reported
        else:
            for key, _ in holder.shares:
                self._before[holder.worker, key] = self._unlisted(key)
        self.holders[holder.worker] = holder

    def start_call(self, holder: Holder) -> None:
        """Note that a call of an actor starts."""
        if not holder.busy:
            holder.busy, holder.recent = True, dict(holder.now)

    def end_task(self, worker: WorkerId, job: TaskId, *, last: bool) -> None:
        """Note that a task or a call is over; after the `last` one the worker is not busy."""
        holder = self.holders.get(worker)
        if holder is not None:
            holder.busy = holder.busy and not last
            self._remember(job, holder.peak if job == holder.job else holder.recent, holder.shares)

    def remove_worker(self, worker: WorkerId, now: float, *, watched: bool) -> None:
        """Note that a worker's process is gone; if `watched`, readings show when memory is free."""
        holder = self.holders.pop(worker, None)
        if holder is None:
            return
        if self._use_of(holder.job)[0] is None:
            self._remember(holder.job, holder.peak, holder.shares)
        self._ended.update(dict.fromkeys(holder.pids, now))
        if holder.pid is not None:
            self._ended[holder.pid] = now
        for key, _ in holder.shares:
            before = self._before.pop((worker, key), None)
            peak = holder.peak.get(key, 0)
            if watched and key in self.readings and (holder.pids or peak):
                pids = frozenset(holder.pids)
                self._leftovers.append(_Leftover(key, holder.label, pids, peak, before, now))

    def report_memory(self, worker: WorkerId, key: str, now: int, peak: int) -> Sequence[Finding]:
        """Take over the bytes that a worker's frameworks report to use of a device."""
        holder = self.holders.get(worker)
        if holder is None:
            return ()
        holder.reported[key] = now
        seen = holder.now.get(key, 0) if key in self.readings else 0
        self._set_used(holder, key, max(now, seen))
        holder.peak[key] = max(peak, holder.peak[key])
        return list(self._exceeded(holder, key, self._total(key)))

    @staticmethod
    def _set_used(holder: Holder, key: str, used: int) -> None:
        holder.now[key] = used
        holder.peak[key] = max(used, holder.peak.get(key, 0))
        holder.recent[key] = max(used, holder.recent.get(key, 0))

    def _remember(self, job: TaskId, peak: Mapping[str, int], shares: Shares) -> None:
        self.past.pop(job, None)
        self.past[job] = dict(peak), shares
        if len(self.past) > REMEMBERED:
            del self.past[next(iter(self.past))]

    # ----------------------------------------------------------------------------------- readings

    def update(
        self,
        readings: Mapping[str, Reading],
        kernel: int,
        now: float,
        without: Mapping[int, tuple[TaskId, str]] = _NOBODY,
    ) -> list[Finding]:
        """Take over new readings. `kernel` is the process id of the session; `without` has the
        tasks without a device, with their labels, by process id."""
        found: list[Finding] = []
        self.readings.update(readings)
        self._ended = {pid: at for pid, at in self._ended.items() if now - at < BACK_AFTER}
        for key, reading in readings.items():
            if key in self.devices:
                found += self._device(key, reading, kernel, without)
        for (worker, key), before in self._before.items():
            if before is None:
                self._before[worker, key] = self._unlisted(key)
        for holder in self.holders.values():
            for key, _ in holder.shares:
                if key in readings:
                    found += self._exceeded(holder, key, self._total(key))
            found += self._unused(holder, now)
        found += self._not_returned(now)
        return found

    def _device(
        self,
        key: str,
        reading: Reading,
        kernel: int,
        without: Mapping[int, tuple[TaskId, str]],
    ) -> Iterable[Finding]:
        sums: dict[WorkerId, int] = {}
        outside: list[Seen] = []
        for process in reading.processes or ():
            owner = self._owner(process)
            if owner is not None:
                owner.pids.add(process.pid)
                sums[owner.worker] = sums.get(owner.worker, 0) + (process.memory or 0)
                if key not in dict(owner.shares):
                    yield from self._foreign(key, owner.job, owner.label)
            elif process.pid == kernel:
                yield from self._used_by_kernel(key, process)
            elif not self._ended.keys().isdisjoint((process.pid, *process.line)):
                pass  # its memory is checked as a leftover
            elif not (process.name or "").startswith(_SERVERS):
                outside.append(process)
                for pid in process.line:
                    if pid in without:
                        yield from self._foreign(key, *without[pid])
        self.others[key] = outside
        for holder in self.holders.values():
            if key not in dict(holder.shares):
                continue
            seen = sums.get(holder.worker) if reading.processes is not None else None
            known = [each for each in (seen, holder.reported.get(key)) if each is not None]
            if known:
                self._set_used(holder, key, max(known))

    def _foreign(self, key: str, job: TaskId, label: str) -> Iterable[Finding]:
        if self._once("foreign", job, key):
            yield Remark(
                f"{label} uses {self._name(key)}, which it was not given: it may have changed the "
                "environment variable that shows it its devices",
                job,
            )

    def _used_by_kernel(self, key: str, process: Seen) -> Iterable[Finding]:
        if self._once("kernel", key):
            has = f" and has {size_text(process.memory)} there" if process.memory else ""
            yield Remark(
                f"this notebook's own process uses {self._name(key)}{has}, which no task can have "
                "until it is restarted: a library was used outside of gpunb"
            )

    def _owner(self, process: Seen) -> Holder | None:
        line = process.line or (process.pid,)
        for holder in self.holders.values():
            if holder.pid is not None and holder.pid in line:
                return holder
        return None

    def _exceeded(self, holder: Holder, key: str, total: int | None) -> Iterable[Finding]:
        units = dict(holder.shares).get(key, UNIT)
        used = holder.now.get(key, 0)
        if not total or units >= UNIT or used <= allowed(units, total):
            return
        if self._once("exceeded", holder.worker, holder.job, key):
            share = size_text(total * units // UNIT)
            yield Exceeded(
                holder.worker,
                holder.job,
                f"{holder.label} has {size_text(used)} of {self._name(key)}, and its share of "
                f"{amount(units)} is {share}. {self.table(key)}",
            )

    def _unused(self, holder: Holder, now: float) -> Iterable[Finding]:
        """A remark on an actor or a session with unused devices."""
        rates = [self.readings[key].utilization for key, _ in holder.shares if key in self.readings]
        works = any(rates) if any(each is not None for each in rates) else holder.busy
        if not holder.lasting or works:
            holder.idle = None
            return
        holder.idle = now if holder.idle is None else holder.idle
        if now - holder.idle >= IDLE_AFTER and self._once("idle", holder.worker):
            names = " and ".join(self._name(key) for key, _ in holder.shares)
            minutes = int((now - holder.idle) // 60)
            yield Remark(
                f"{holder.label} has kept {names} for {minutes} minutes without using it", None
            )

    def _not_returned(self, now: float) -> Iterable[Finding]:
        """Remarks on memory of ended workers that is not free in time."""
        kept: list[_Leftover] = []
        for left in self._leftovers:
            listed = self.readings[left.key].processes or ()
            still = [each for each in listed if left.pids.intersection((each.pid, *each.line))]
            excess = self._excess(left)
            if not still and not excess:
                continue
            if now - left.since < BACK_AFTER:
                kept.append(left)
                continue
            what = f"the memory that {left.label} had on {self._name(left.key)} is not back"
            if still:
                names = ", ".join(map(str, still))
                yield Remark(f"{what}: {names} still {'have' if len(still) > 1 else 'has'} it")
            else:
                size = size_text(excess)
                yield Remark(f"{what}: {size} are in use that no process is listed for")
        self._leftovers = kept

    def _excess(self, left: _Leftover) -> int:
        """Bytes in use without a listed process, beyond those before the worker started."""
        after = self._unlisted(left.key)
        if after is None or left.before is None or not left.peak:
            return 0
        more = after - left.before
        return more if more > max(CONTEXT // 2, left.peak // 2) else 0

    def _unlisted(self, key: str) -> int | None:
        """Bytes in use without a listed process; None if not known."""
        reading = self.readings.get(key)
        if reading is None or reading.memory_used is None or reading.processes is None:
            return None
        if any(each.memory is None for each in reading.processes):
            return None
        return reading.memory_used - sum(each.memory or 0 for each in reading.processes)

    def _once(self, *finding: object) -> bool:
        """Whether this finding was not reported before."""
        new = finding not in self._reported
        self._reported.add(finding)
        return new

    # ----------------------------------------------------------------------------------- in words

    def memory(self, job: TaskId) -> dict[str, int | None]:
        """The use of memory by a task, its peak and the sum of its shares, in bytes."""
        holder, peak, shares = self._use_of(job)
        totals = [self._total(key) for key, _ in shares]
        share = None
        if shares and None not in totals:
            share = sum(
                (total or 0) * units // UNIT
                for total, (_, units) in zip(totals, shares, strict=True)
            )
        return {
            "now": sum(holder.now.values()) if peak and holder is not None else None,
            "peak": sum(peak.values()) if peak else None,
            "share": share,
        }

    def _use_of(self, job: TaskId) -> tuple[Holder | None, dict[str, int], Shares]:
        # The process of an earlier attempt may end later than the next attempt begins.
        for holder in reversed(self.holders.values()):
            if holder.job == job:
                return holder, holder.peak, holder.shares
        return None, *self.past.get(job, ({}, ()))

    def hint(self, job: TaskId) -> str | None:
        """A better share for a task, in words; None if its share was about right."""
        _, peak, shares = self._use_of(job)
        if len(shares) != 1:
            return None
        ((key, units),) = shares
        total = self._total(key)
        return hint(peak[key], units, total) if total and key in peak else None

    def table(self, *keys: str) -> str:
        """The users of these devices, or of all held ones, in words: one line for each device."""
        held = [key for each in self.holders.values() for key, _ in each.shares]
        lines = [self._line(key) for key in self.devices if key in (keys or held)]
        return "\n".join(line for line in lines if line)

    def _line(self, key: str) -> str:
        parts = []
        for holder in self.holders.values():
            units = dict(holder.shares).get(key)
            if units is not None:
                used = holder.now.get(key)
                has = size_text(used) if used is not None else "an unknown part"
                parts.append(f"{holder.label} has {has} (share {amount(units)})")
        for each in self.others.get(key, ()):
            has = size_text(each.memory) if each.memory is not None else "an unknown part"
            parts.append(f"{each} has {has}")
        reading, total = self.readings.get(key), self._total(key)
        if reading is not None and reading.memory_used is not None and total:
            parts.append(f"{size_text(max(0, total - reading.memory_used))} are free")
        of = f" of {size_text(total)}" if total else ""
        return f"{self._name(key)}{of}: {', '.join(parts)}" if parts else ""

    def _name(self, key: str) -> str:
        device = self.devices[key]
        return f"{device.resource} {device.id}"

    def _total(self, key: str) -> int | None:
        reading = self.readings.get(key)
        return (reading.memory_total if reading else None) or self.devices[key].memory
