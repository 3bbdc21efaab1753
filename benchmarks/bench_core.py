"""What a decision costs: the scheduler's own time for each event, without processes.

``python -m benchmarks.bench_core`` prints the table; `run` returns its numbers.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator

from gpunb.core import events as ev
from gpunb.core.placement import Capacity
from gpunb.core.resources import UNIT, Demand, Device, Machine
from gpunb.core.scheduler import Scheduler
from gpunb.core.tasks import Succeeded, TaskSpec

WAITING = 100_000
ENDED = 20_000
GiB = 1024**3

Times = dict[str, list[int]]
"""Nanoseconds of each event, by what it was."""


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
        before = len(self.running)
        self._send("exit", ev.WorkerExited(run.worker, "exit code 0"))
        if len(self.running) > before:
            self.times.setdefault("exit and start", []).append(self.times["exit"][-1])

    def _send(self, kind: str, event: ev.Event) -> None:
        self._now += 0.002
        start = time.thread_time_ns()
        decisions = self.scheduler.handle(event, self._now)
        self.times.setdefault(kind, []).append(time.thread_time_ns() - start)
        self.running.extend(each for each in decisions if isinstance(each, ev.Run))


def measure(gpus: int, waiting: int = WAITING, ended: int = ENDED) -> Times:
    session = Session(gpus)
    # A collection over 100,000 waiting tasks is no part of a decision, and would hide it.
    gc.collect()
    gc.disable()
    try:
        for _ in range(waiting):
            session.submit()
        for _ in range(ended):
            session.end_one()
    finally:
        gc.enable()
    return session.times


def placement(gpus: int, rounds: int = 20_000) -> list[int]:
    """Nanoseconds to find the place for one demand, on a machine in use."""
    capacity = Capacity(machine(gpus))
    for demand in demands()[:9]:
        place = capacity.place(demand)
        if place is not None:
            capacity.take(place)
    times = []
    for demand in itertools.islice(itertools.cycle(demands()), rounds):
        start = time.thread_time_ns()
        capacity.place(demand)
        times.append(time.thread_time_ns() - start)
    return times


def run() -> dict[str, float]:
    """Microseconds, by name."""
    results: dict[str, float] = {}
    for gpus in (4, 16):
        for kind, times in measure(gpus).items():
            _note(results, f"{gpus} devices, 100,000 waiting: {kind}", times)
    for kind, times in measure(16, waiting=10_000, ended=5_000).items():
        if kind == "exit and start":
            _note(results, f"16 devices, 10,000 waiting: {kind}", times)
    _note(results, "16 devices: find a place", placement(16))
    return results


def _note(results: dict[str, float], name: str, times: list[int]) -> None:
    results[f"{name}, median us"] = statistics.median(times) / 1000
    results[f"{name}, mean us"] = statistics.mean(times) / 1000


def main() -> None:
    for name, value in run().items():
        print(f"{name:60} {value:8.1f}")


if __name__ == "__main__":
    main()
