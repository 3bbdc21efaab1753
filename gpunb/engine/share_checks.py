"""Compares the use of devices with the shares, and warns or ends tasks."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpunb.accelerators import Lost
from gpunb.engine import sampler
from gpunb.engine.sampler import Health, Readings, Sampler, facts
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import GPU, UNIT, Device, Shares, amount
from gpunb.scheduler.tasks import TaskId, WorkerId
from gpunb.scheduler.usage import Book
from gpunb.scheduler.usage_types import Exceeded, Finding, Holder, Reading, Remark, Seen

if TYPE_CHECKING:
    from gpunb.engine.jobs import Job
    from gpunb.engine.state import EngineState

PERIOD = 1.0
"""Seconds between two looks while tasks with devices run."""

REST = 10.0
"""The same while devices are held and nothing runs on them."""

BEFORE = 0.2
"""Seconds that a task runs before it is measured, so that short tasks cost nothing."""

LINGER = 5.0
"""Seconds for which devices are measured after a request for figures."""

STALE = 30.0
"""Seconds after which a measurement is too old to use."""

MOST = 50
"""The number of warnings that are kept."""

STANDBY = "gpunb's warm standby"
"""A prepared worker, in texts for users."""


def hidden(devices: Iterable[Device]) -> bool:
    """Return whether there are devices whose processes this process cannot see."""
    return any(not each.logical for each in devices) and sampler.hidden()


def workers_report(devices: Iterable[Device], policy: str) -> bool:
    """Return whether workers must report the memory that they use: where the device cannot tell,
    and where a task on a simulated device may be ended."""
    devices = list(devices)
    stops = policy == "kill" and any(each.logical and each.memory for each in devices)
    return stops or hidden(devices)


def _ignore(processes: Mapping[str, Sequence[Seen]]) -> None:
    """Ignore the processes that were seen."""


class ShareChecks:
    """Compares the memory of workers with their shares. On the loop's thread, unless a method says
    otherwise. Costs nothing while no task has a device.

    Attributes:
        on_seen: is called with the processes of others that were seen on each device.
    """

    def __init__(self, engine: EngineState, *, policy: str = "warn") -> None:
        self._engine = engine
        self.on_seen: Callable[[Mapping[str, Sequence[Seen]]], object] = _ignore
        self._policy = policy
        self._devices = {each.key: each for each in engine.scheduler.machine.devices}
        self._book = Book(self._devices.values())
        devices = list(self._devices.values())
        self._sampler = Sampler(devices, self._deliver, strange=hidden(devices))
        self._warnings: deque[str] = deque(maxlen=MOST)
        self._health: dict[str, str] = {}
        self._seen_at: float | None = None
        self._asked_at = 0.0
        self._begins = False

    # ---------------------------------------------------------------------------- who has a share

    def begins(self, job: Job, worker: WorkerId, process: WorkerProcess, shares: Shares) -> None:
        """Note that a task or a call runs on a worker with shares."""
        actor = self._engine.actors.on(worker)
        ident = actor.id if actor is not None else job.id
        name = actor.class_name if actor is not None else job.call.spec.name
        known = self._book.holders.get(worker)
        if known is not None and known.job == ident and known.lasting:
            self._book.start_call(known)
        else:
            label = f"#{ident} {name}"
            holder = Holder(worker, ident, label, shares, process.pid, lasting=actor is not None)
            self._book.start_task(holder)
        if not self._begins and not self._sampler.blind:
            self._begins = True
            self._engine.loop.after(BEFORE, self._begin)

    def prepares(self, worker: WorkerId, process: WorkerProcess, shares: Shares) -> None:
        """Note that a prepared worker, which has no task yet, makes a context."""
        self._book.start_task(Holder(worker, -worker, STANDBY, shares, process.pid, busy=False))

    def holds(self, worker: WorkerId, shares: Shares) -> None:
        """Note that a worker has given up its devices, or has others now."""
        if (holder := self._book.holders.get(worker)) is not None:
            holder.shares, holder.now, holder.idle = shares, {}, None

    def pids(self, worker: WorkerId) -> set[int]:
        """Return the processes of a worker that were seen on devices and still run."""
        holder = self._book.holders.get(worker)
        listed = {
            process.pid
            for reading in self._book.readings.values()
            for process in reading.processes or ()
        }
        return holder.pids & listed if holder is not None else set()

    def free(self, keys: Iterable[str], since: float) -> int | None:
        """Return the least free memory of these devices, in bytes; None if they do not tell it, and
        -1 until they have been looked at after `since`, which is soon."""
        self._sampler.want(PERIOD, PERIOD / 10)
        if not self._sampler.blind and (self._seen_at or 0.0) < since:
            return -1
        found = [self._reading(key) for key in keys]
        known = [
            each.memory_total - each.memory_used
            for each in found
            if each is not None and each.memory_total and each.memory_used is not None
        ]
        return min(known) if known else None

    def ends(self, job: Job) -> None:
        """Note that a task or a call is over."""
        worker = job.worker or 0
        self._book.end_task(worker, job.id, last=not self._engine.by_worker.get(worker))

    def gone(self, worker: WorkerId) -> None:
        """Note that a worker's process is gone."""
        if worker in self._book.holders:
            self._book.remove_worker(worker, time.monotonic(), watched=self._sampler.running)

    def used(self, process: WorkerProcess, message: msg.Used) -> None:
        """Note the memory that the frameworks of a worker report."""
        holder = self._book.holders.get(process.worker or 0)
        if holder is None:
            return
        self._report_memory(holder, message.memory)

    def _report_memory(self, holder: Holder, memory: Iterable[tuple[int, int, int]]) -> None:
        keys = [key for key, _ in holder.shares if self._devices[key].resource == GPU]
        for position, now, peak in memory:
            if position < len(keys):
                self._take(self._book.report_memory(holder.worker, keys[position], now, peak))

    # ------------------------------------------------------------------------------------- looking

    def _begin(self) -> None:
        self._begins = False
        if self._book.holders:
            self._sampler.want(3 * PERIOD, PERIOD)

    def glance(self, seconds: float) -> None:
        """Look at the devices before the first one is given out, if that is quick."""
        if self._seen_at is None and (seen := self._sampler.first(seconds)):
            self._read(seen[0], time.monotonic())

    def _deliver(self, readings: Readings, health: Health) -> None:
        """Pass readings from the sampler's thread to the loop."""
        self._engine.loop.post((self._looked, readings, health))

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
                state = "is out of service" if isinstance(problem, Lost) else "needs attention"
                self.warn(f"{device.resource} {device.id} {state}: {problem}")
            if isinstance(problem, Lost):
                self._engine.feed(ev.DeviceLost(key, problem))
        busy = any(each.busy for each in self._book.holders.values())
        if busy or self._book.awaits_memory or now - self._asked_at < LINGER:
            self._sampler.want(3 * PERIOD, PERIOD)
        elif self._book.holders:
            self._sampler.want(3 * REST, REST)
        self._engine.changed()

    def _read(self, readings: Readings, now: float) -> None:
        for worker, holder in self._book.holders.items():
            process = self._engine.pool.process(worker)
            holder.pid = process.pid if process is not None else holder.pid
        self._take(self._book.update(readings, os.getpid(), now, self._without()))
        self.on_seen(self._book.others)

    def _without(self) -> dict[int, tuple[TaskId, str]]:
        """Return the running tasks that have no device, by process id."""
        found = {}
        for worker, tasks in self._engine.by_worker.items():
            job = self._engine.jobs.get(tasks[-1]) if tasks else None
            if worker not in self._book.holders and job is not None and job.pid is not None:
                found[job.pid] = job.id, f"#{job.id} {job.call.spec.name}"
        return found

    def _take(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            match finding:
                case Remark():
                    self.warn(finding.text, finding.job)
                case Exceeded() if self._policy == "kill":
                    self._engine.feed(ev.ShareExceeded(finding.worker, finding.text))
                case Exceeded() if self._policy == "warn":
                    self.warn(finding.text, finding.job)
                case _:
                    pass

    def warn(self, text: str, job: TaskId | None = None) -> None:
        """Warn once: in the output of the task, or else on standard error."""
        self._warnings.append(text)
        actor = self._engine.actors.get(job) if job is not None else None
        known = self._engine.jobs.get(job) if job is not None else None
        sink = known.sink if known is not None else actor.sink if actor is not None else None
        if sink is None:
            with contextlib.suppress(Exception):  # a closed terminal is no reason to stop
                sys.stderr.write(f"gpunb: {text}\n")
            return
        if known is not None:
            self.note(known, text)
        else:
            self._engine.outlets.call(sink.text, "stderr", f"gpunb: {text}\n")

    def note(self, job: Job, text: str) -> None:
        """Show a text in the output of a task."""
        if (sink := job.sink) is not None:
            self._engine.outlets.call(sink.on, job.pid)
            self._engine.outlets.call(sink.text, "stderr", f"gpunb: {text}\n")

    # ------------------------------------------------------------------------------- for who asks

    def fresh(self) -> None:
        """Look at the devices if the last look is old, and wait for it a moment. Not on the loop's
        thread."""
        self._sampler.fresh(2 * PERIOD, PERIOD)

    def usage(self, key: str) -> dict[str, Any]:
        """Return the figures of a device; None for a figure that is not known."""
        self._ask()
        reading = self._reading(key)
        device = self._devices.get(key)
        figures = facts(reading)
        if figures["memory_total"] is None and device is not None:
            figures["memory_total"] = device.memory
        if reading is None:
            reports = [each.reported for each in self._book.holders.values()]
            used = [report[key] for report in reports if key in report]
            figures["memory_used"] = sum(used) if used else None
        return figures

    def others(self, key: str) -> list[dict[str, Any]]:
        """Return the processes on a device that no task of this session has started."""
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
        """Return why a device is out of service; None if the device is fine."""
        return self._health.get(key)

    def memory(self, job: TaskId) -> dict[str, int | None]:
        """Return the device memory of a task in bytes: ``"now"``, ``"peak"``, and ``"share"``."""
        return self._book.memory(job)

    def peak(self, job: TaskId) -> int | None:
        """Return the most device memory that a job had, in bytes; None if nobody measures it."""
        return self.memory(job).get("peak")

    def hint(self, job: TaskId) -> str | None:
        """Return a better share for a task, in words; None if there is none."""
        return self._book.hint(job)

    def table(self, worker: WorkerId | None, memory: Iterable[tuple[int, Any]] = ()) -> str:
        """Return a text that lists the memory of all tasks on the devices of a worker. `memory` is
        what the worker itself measures now."""
        holder = self._book.holders.get(worker or 0)
        if holder is None:
            return self._book.table()
        self._report_memory(holder, [(at, *each) for at, each in memory])
        table = self._book.table(*(key for key, _ in holder.shares))
        units = dict(holder.shares).values()
        if holder.lasting and (share := min(units, default=UNIT)) < UNIT:
            return (
                f"{table}\n{holder.label} is not run again with a larger share, because its state "
                f"would be lost: start it with {amount(min(2 * share, UNIT))}"
            )
        return table

    def warnings(self) -> list[str]:
        """Return the last warnings."""
        silent = self._sampler.silent_for()
        if not silent:
            return list(self._warnings)
        text = f"the driver of the devices has not answered for {silent:.0f} s: see nvidia-smi"
        return [*self._warnings, text]

    def close(self) -> None:
        """Stop looking at the devices."""
        self._sampler.stop()

    def _ask(self) -> None:
        """Look at the devices again soon, because a caller asks for figures."""
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
