"""What a decision costs: the scheduler's own time for each event, without processes.

Twenty different demands wait, most of them for longer than it takes to get a reservation; that is
when an event costs most.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator

from gpunb.scheduler import events as ev
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import UNIT, Demand, Device, Machine
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import Succeeded, TaskSpec

EXIT = "exit, so that another starts"
DECISION = f"{EXIT}, 16 devices, 10,000 waiting: median us"
"""The line with a goal: what it takes to decide which task runs next, and where."""

GiB = 1024**3

Times = dict[str, list[int]]
"""Nanoseconds of CPU time for each event, by what it was: others may use the machine too."""


def machine(gpus: int) -> Machine:
    devices = tuple(
        Device(f"GPU-{at}", at, "A100", "A100" if at % 4 else "V100", 40 * GiB)
        for at in range(gpus)
    )
    return Machine(devices, 16 * UNIT)


def demands() -> list[Demand]:
    """Twenty that differ: parts, whole devices, memory, types, CPUs beside."""
    parts = [Demand(gpus=part * 1000) for part in range(1, 10)]
    whole = [Demand(gpus=count * UNIT) for count in (1, 2, 3)]
    memory = [Demand(gpu_memory=size * GiB) for size in (4, 10, 20, 30)]
    typed = [Demand(gpus=5000, types=(kind,)) for kind in ("A100", "V100")]
    beside = [Demand(gpus=2500, cpus=UNIT), Demand(gpus=UNIT, cpus=2 * UNIT)]
    return [*parts, *whole, *memory, *typed, *beside]


class Session:
    """A scheduler that is fed with events, the time of each noted by kind."""

    def __init__(self, gpus: int) -> None:
        self.scheduler = Scheduler(machine(gpus))
        self.running: deque[ev.Run] = deque()
        self.times: Times = {}
        self._now = 0.0
        self._ids: Iterator[int] = itertools.count()
        self._specs = [TaskSpec("bench", demand, "f", max_calls=1) for demand in demands()]

    def submit(self) -> None:
        task = next(self._ids)
        self._send("submit", ev.Submitted(task, self._specs[task % len(self._specs)]))

    def end_one(self) -> None:
        """A task finishes and its process is gone, so that others start."""
        run = self.running.popleft()
        self._send("finish", ev.Finished(run.task, run.attempt, run.worker, Succeeded()))
        self._send(EXIT, ev.WorkerExited(run.worker, "exit code 0"))

    def _send(self, kind: str, event: ev.Event) -> None:
        self._now += 0.002
        start = time.thread_time_ns()
        decisions = self.scheduler.handle(event, self._now)
        self.times.setdefault(kind, []).append(time.thread_time_ns() - start)
        self.running.extend(each for each in decisions if isinstance(each, ev.Run))


def times(gpus: int, waiting: int, ended: int) -> Times:
    """So many tasks wait, then so many come to their end."""
    session = Session(gpus)
    gc.collect()
    for _ in range(waiting):
        session.submit()
    for _ in range(ended):
        session.end_one()
    return session.times


def placement(gpus: int, rounds: int = 20_000) -> list[int]:
    """Nanoseconds to find the place for one demand, on a machine in use."""
    capacity = Capacity(machine(gpus))
    for demand in demands()[:9]:
        place = capacity.place(demand)
        if place is not None:
            capacity.take(place)
    found = []
    for demand in itertools.islice(itertools.cycle(demands()), rounds):
        start = time.thread_time_ns()
        capacity.place(demand)
        found.append(time.thread_time_ns() - start)
    return found


def samples(waiting: int = 100_000, ended: int = 20_000) -> Iterator[tuple[str, list[int]]]:
    """Nanoseconds of many runs of each thing that is measured."""
    for gpus in (4, 16):
        for kind, found in times(gpus, waiting, ended).items():
            yield f"{kind}, {gpus} devices, {waiting:,} waiting", found
    few = waiting // 10
    yield f"{EXIT}, 16 devices, {few:,} waiting", times(16, few, few // 2)[EXIT]
    yield "find a place on 16 devices", placement(16)


def run() -> dict[str, float]:
    """Microseconds, by name."""
    results: dict[str, float] = {}
    for name, found in samples():
        results[f"{name}: median us"] = statistics.median(found) / 1000
        results[f"{name}: mean us"] = statistics.fmean(found) / 1000
    return results


def main() -> None:
    for name, value in run().items():
        print(f"{name:70} {value:6.1f}")


if __name__ == "__main__":
    main()
