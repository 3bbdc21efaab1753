"""Whether shares are kept: what the sampler sees and what workers say, as warnings and as ends."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpunb.accelerators import Lost
from gpunb.core import events as ev
from gpunb.core.resources import GPU, Device
from gpunb.core.resources import Shares as Held
from gpunb.core.sightings import Exceeded, Finding, Holder, Reading, Remark
from gpunb.core.tasks import TaskId, WorkerId
from gpunb.core.usage import Book
from gpunb.runtime import sampler
from gpunb.runtime.sampler import Health, Readings, Sampler, facts
from gpunb.workers import messages as msg
from gpunb.workers.pool import Process

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver
    from gpunb.runtime.jobs import Job

PERIOD = 1.0
"""Seconds between two looks while tasks with devices run."""

REST = 10.0
"""The same while devices are held and nothing runs on them."""

BEFORE = 0.2
"""Seconds that a task has to run before it is looked at: a short one costs nothing."""

LINGER = 5.0
"""Seconds for which it is looked after somebody has asked."""

STALE = 30.0
"""Seconds after which what was seen means nothing any more."""

MOST = 50
"""Warnings that are kept."""


def hidden(devices: Iterable[Device]) -> bool:
    """Whether there are devices whose processes cannot be told from here."""
    return any(not each.logical for each in devices) and sampler.hidden()


def told(devices: Iterable[Device], policy: str) -> bool:
    """Whether workers have to tell what they have while they run: where nothing else does, and a
    task on a simulated device is to be stopped."""
    devices = list(devices)
    stops = policy == "kill" and any(each.logical and each.memory for each in devices)
    return stops or hidden(devices)


class Shares:
    """Knows what workers have of their devices; on the loop's thread, but for what says
    otherwise. Costs nothing while no task has a device."""

    def __init__(self, driver: Driver, *, policy: str = "warn") -> None:
        self._driver = driver
        self._policy = policy
        self._devices = {each.key: each for each in driver.scheduler.machine.devices}
        self._book = Book(self._devices.values())
        devices = list(self._devices.values())
        self._sampler = Sampler(devices, self._deliver, strange=hidden(devices))
        self._warnings: deque[str] = deque(maxlen=MOST)
        self._health: dict[str, str] = {}
        self._seen_at: float | None = None
        self._asked_at = 0.0
        self._begins = False

    # ---------------------------------------------------------------------------- who has a share

    def begins(self, job: Job, worker: WorkerId, process: Process, shares: Held) -> None:
        """A task or a call runs on a worker that has shares."""
        actor = self._driver.actors.on(worker)
        ident = actor.id if actor is not None else job.id
        name = actor.class_name if actor is not None else job.call.spec.name
        known = self._book.holders.get(worker)
        if known is not None and known.job == ident and known.lasting:
            self._book.calls(known)
        else:
            label = f"#{ident} {name}"
            holder = Holder(worker, ident, label, shares, process.pid, lasting=actor is not None)
            self._book.begins(holder)
        if not self._begins and not self._sampler.blind:
            self._begins = True
            self._driver.loop.after(BEFORE, self._begin)

    def ends(self, job: Job) -> None:
        """A task or a call is over."""
        worker = job.worker or 0
        self._book.ends(worker, job.id, last=not self._driver.by_worker.get(worker))

    def gone(self, worker: WorkerId) -> None:
        """A worker's process is gone."""
        if worker in self._book.holders:
            self._book.gone(worker, time.monotonic(), watched=self._sampler.running)

    def used(self, process: Process, message: msg.Used) -> None:
        """A worker says what its frameworks have."""
        holder = self._book.holders.get(process.worker or 0)
        if holder is None:
            return
        self._says(holder, message.memory)

    def _says(self, holder: Holder, memory: Iterable[tuple[int, int, int]]) -> None:
        keys = [key for key, _ in holder.shares if self._devices[key].resource == GPU]
        for position, now, peak in memory:
            if position < len(keys):
                self._take(self._book.says(holder.worker, keys[position], now, peak))

    # ------------------------------------------------------------------------------------- looking

    def _begin(self) -> None:
        self._begins = False
        if self._book.holders:
            self._sampler.want(3 * PERIOD, PERIOD)

    def glance(self, seconds: float) -> None:
        """Look once before devices are given out for the first time, if that is quick."""
        if self._seen_at is None and (seen := self._sampler.first(seconds)):
            self._read(seen[0], time.monotonic())

    def _deliver(self, readings: Readings, health: Health) -> None:
        """On the sampler's thread."""
        self._driver.loop.post((self._looked, readings, health))

    def _looked(self, readings: Readings, health: Health) -> None:
        now = time.monotonic()
        self._seen_at = now
        self._read(readings, now)
        for key, problem in health.items():
            before = self._health.get(key)
            if not problem or key not in self._devices or isinstance(before, Lost):
                continue
            if problem != before:
                self._health[key] = problem
                device = self._devices[key]
                says = "is out of service" if isinstance(problem, Lost) else "needs attention"
                self.warn(f"{device.resource} {device.id} {says}: {problem}")
            if isinstance(problem, Lost):
                self._driver.feed(ev.DeviceLost(key, problem))
        busy = any(each.busy for each in self._book.holders.values())
        if busy or self._book.waits or now - self._asked_at < LINGER:
            self._sampler.want(3 * PERIOD, PERIOD)
        elif self._book.holders:
            self._sampler.want(3 * REST, REST)
        self._driver.picture.changed()

    def _read(self, readings: Readings, now: float) -> None:
        for worker, holder in self._book.holders.items():
            process = self._driver.pool.process(worker)
            holder.pid = process.pid if process is not None else holder.pid
        self._take(self._book.look(readings, os.getpid(), now, self._without()))
        self._driver.leases.seen(self._book.others)

    def _without(self) -> dict[int, tuple[TaskId, str]]:
        """The tasks that run and have no device, by process id."""
        found = {}
        for worker, tasks in self._driver.by_worker.items():
            job = self._driver.jobs.get(tasks[-1]) if tasks else None
            if worker not in self._book.holders and job is not None and job.pid is not None:
                found[job.pid] = job.id, f"#{job.id} {job.call.spec.name}"
        return found

    def _take(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            match finding:
                case Remark():
                    self.warn(finding.text, finding.job)
                case Exceeded() if self._policy == "kill":
                    self._driver.feed(ev.ShareExceeded(finding.worker, finding.text))
                case Exceeded() if self._policy == "warn":
                    self.warn(finding.text, finding.job)
                case _:
                    pass

    def warn(self, text: str, job: TaskId | None = None) -> None:
        """Say something once, where the task shows what it prints, or else on standard error."""
        self._warnings.append(text)
        actor = self._driver.actors.get(job) if job is not None else None
        known = self._driver.jobs.get(job) if job is not None else None
        sink = known.sink if known is not None else actor.sink if actor is not None else None
        try:
            if sink is None:
                sys.stderr.write(f"gpunb: {text}\n")
                return
            if known is not None and (on := getattr(sink, "on", None)) is not None:
                on(known.pid)
            sink.text("stderr", f"gpunb: {text}\n")
        except (OSError, ValueError):
            pass  # a closed terminal is no reason to stop

    # ------------------------------------------------------------------------------- for who asks

    def fresh(self) -> None:
        """Look now, if it was long ago, and wait for it a moment; not on the loop's thread."""
        self._sampler.fresh(2 * PERIOD, PERIOD)

    def usage(self, key: str) -> dict[str, Any]:
        """The figures of a device; None for what is not known."""
        self._ask()
        reading = self._reading(key)
        device = self._devices.get(key)
        figures = facts(reading)
        if figures["memory_total"] is None and device is not None:
            figures["memory_total"] = device.memory
        if reading is None:
            said = [each.said[key] for each in self._book.holders.values() if key in each.said]
            figures["memory_used"] = sum(said) if said else None
        return figures

    def others(self, key: str) -> list[dict[str, Any]]:
        """The processes on a device that no task of this session has started."""
        if self._reading(key) is None:
            return []
        return [
            {
                "pid": each.pid,
                "user": each.user,
                "notebook": None,
                "job": None,
                "share": None,
                "memory": each.memory,
                "since": each.since,
                "kind": "outsider",
            }
            for each in self._book.others.get(key, ())
        ]

    def health(self, key: str) -> str | None:
        """Why a device is out of service; None if it is not."""
        return self._health.get(key)

    def memory(self, job: TaskId) -> dict[str, int | None]:
        """What a task has of its devices, had at most, and may have: bytes by ``"now"``,
        ``"peak"`` and ``"share"``."""
        return self._book.memory(job)

    def hint(self, job: TaskId) -> str | None:
        """What would have been a better share for a task, in words."""
        return self._book.hint(job)

    def table(self, worker: WorkerId | None, memory: Iterable[tuple[int, Any]] = ()) -> str:
        """Who has how much of the devices that a worker has a share of, in words. `memory` is
        what it says of itself at this moment."""
        holder = self._book.holders.get(worker or 0)
        if holder is None:
            return self._book.table()
        self._says(holder, [(at, *each) for at, each in memory])
        return self._book.table(*(key for key, _ in holder.shares))

    def warnings(self) -> list[str]:
        """What there was to say."""
        silent = self._sampler.silent_for()
        if not silent:
            return list(self._warnings)
        text = f"the driver of the devices has not answered for {silent:.0f} s: see nvidia-smi"
        return [*self._warnings, text]

    def close(self) -> None:
        """Look no more."""
        self._sampler.stop()

    def _ask(self) -> None:
        """Somebody looks: what is seen should not be old."""
        if self._sampler.blind:
            return
        now = time.monotonic()
        if now - self._asked_at >= PERIOD:
            self._asked_at = now
            self._sampler.want(LINGER, PERIOD)

    def _reading(self, key: str) -> Reading | None:
        if self._seen_at is None or time.monotonic() - self._seen_at > STALE:
            return None
        return self._book.readings.get(key)
