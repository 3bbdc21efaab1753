"""Waiting on one machine with the jobs of a published trace, and GPUs allocated on a cluster.

    python -m benchmarks.traces FOLDER              # all tables, as Markdown; an hour
    python -m benchmarks.traces FOLDER waiting --jobs 100000 --gpus 16 --rules ours --seeds 1
    python -m benchmarks.traces FOLDER picture docs/images/waiting.png

`trace_data.py` says where the files of the folder come from. The jobs, their durations and the gaps
between their arrivals are drawn from the trace. The machine has cards of 40 GiB. For `ours` the
scheduler itself decides, in simulated time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.lines import quantile
from benchmarks.trace_data import WORKLOADS, Lived, Trace
from gpunb.scheduler import events as ev
from gpunb.scheduler.auto_share import Choice, Run, choose
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.resources import UNIT, Demand, Device, Machine
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import Succeeded, TaskSpec

MEMORY = 40 * 2**30
LOAD = 0.6
LOADS = (0.5, 0.7, 0.9)
"""GPU-seconds that the jobs need, as a part of what the machine has."""

LONGEST = 86_400
"""Seconds. The trace has services, too, that hold their GPUs for months."""

SIZES = (1, 2, 4, 8, 16)
JOBS = 3000
SEEDS = range(3)
WHOLE = Demand(gpus=UNIT)


class Job(NamedTuple):
    """A job of the trace; `units` of GPU that it needs, in all."""

    arrival: float
    seconds: float
    units: int
    kind: Hashable


@dataclass(slots=True)
class Outcome:
    """The waiting time of each job in seconds, the end of the last one, and the GPU-seconds that
    were given out."""

    waited: list[float]
    makespan: float = 0.0
    held: float = 0.0

    def run(self, job: Job, now: float, units: int) -> float:
        """Note that a job starts. Returns the time of its end."""
        self.waited.append(now - job.arrival)
        self.held += job.seconds * units / UNIT
        self.makespan = max(self.makespan, now + job.seconds)
        return now + job.seconds


def draw(trace: Trace, gpus: int, count: int, seed: int, load: float = LOAD) -> list[Job]:
    """Jobs of the trace that fit on so many GPUs."""
    chance = random.Random(seed)
    known = [each for each in trace.lived if each.gpus <= gpus and each.seconds <= LONGEST]
    chosen = chance.choices(known, k=count)
    pauses = chance.choices(trace.gaps, k=count)
    need = sum(each.seconds * _units(each) for each in chosen) / UNIT
    pace = need / (load * gpus) / sum(pauses)
    arrivals = itertools.accumulate(pause * pace for pause in pauses)
    return [
        Job(at, each.seconds, _units(each), each.kind)
        for at, each in zip(arrivals, chosen, strict=True)
    ]


def _units(job: Lived) -> int:
    return job.gpus * job.share * UNIT // 1000


# ------------------------------------------------------------------------------------- the rules


def machine(gpus: int) -> Machine:
    cards = [Device(f"GPU-{at}", at, "A100", "A100", MEMORY) for at in range(gpus)]
    return Machine(tuple(cards))


class Ours:
    """gpunb's scheduler, with the shares of the trace or with those that `auto` chooses.

    Args:
        expect: what it knows of the time that a job will run; `EXPECTED` has the words.
    """

    def __init__(
        self, *, age: float = Policy().age, auto: bool = False, expect: str = "nothing known"
    ) -> None:
        self._policy = Policy(age=age, max_workers=1_000_000)
        self._auto = auto
        self._expect = expect

    def __call__(self, jobs: Sequence[Job], gpus: int) -> Outcome:
        self._scheduler = Scheduler(machine(gpus), self._policy)
        self._jobs, self._outcome = jobs, Outcome([])
        self._due: list[tuple[float, int, ev.Event]] = []
        self._order = itertools.count()
        self._history: dict[Hashable, deque[Run]] = {}
        self._unknown: dict[Hashable, list[int]] = {}
        chance = random.Random(0)
        for ident, job in enumerate(jobs):
            while self._due and self._due[0][0] <= job.arrival:
                self._next()
            if self._auto and job.units <= UNIT and job.kind not in self._history:
                self._unknown.setdefault(job.kind, []).append(ident)
            spec = TaskSpec("job", self._demand(job), "f", max_calls=1)
            spec = replace(spec, expected=self._expected(job, chance))
            self._feed(ev.Submitted(ident, spec), job.arrival)
        while self._due:
            self._next()
        return self._outcome

    def _expected(self, job: Job, chance: random.Random) -> float | None:
        match self._expect:
            case "exact":
                return job.seconds
            case "twice or half":
                return job.seconds * chance.choice((0.5, 2))
            case "any other's":
                return chance.choice(self._jobs).seconds
            case "earlier ones of its kind" if job.kind in self._history:
                return self._choice(job).seconds
        return None

    def _next(self) -> None:
        now, _, event = heapq.heappop(self._due)
        self._feed(event, now)
        if isinstance(event, ev.Finished):
            self._feed(ev.WorkerExited(event.worker, "exit code 0"), now)
            job = self._jobs[event.task]
            runs = self._history.setdefault(job.kind, deque(maxlen=50))
            runs.appendleft(Run(0, MEMORY, job.units * MEMORY // UNIT, job.seconds))
            for ident in self._unknown.pop(job.kind, ()):
                self._feed(ev.Chosen(ident, self._choice(job)), now)

    def _feed(self, event: ev.Event, now: float) -> None:
        for decision in self._scheduler.handle(event, now):
            match decision:
                case ev.Run():
                    units = sum(each for _, each in decision.allocation.shares)
                    end = self._outcome.run(self._jobs[decision.task], now, units)
                    done = ev.Finished(
                        decision.task, decision.attempt, decision.worker, Succeeded()
                    )
                    heapq.heappush(self._due, (end, next(self._order), done))
                case ev.WakeAt():
                    wake = decision.time, next(self._order), ev.TimeReached()
                    heapq.heappush(self._due, wake)
                case _:
                    pass

    def _demand(self, job: Job) -> Demand:
        if not self._auto or job.units > UNIT:
            return Demand(gpus=job.units)
        return self._choice(job).demand

    def _choice(self, job: Job) -> Choice:
        runs = list(self._history.get(job.kind, ()))
        return choose(WHOLE, self._scheduler.machine, runs, 0)


class Baseline:
    """A queue that starts jobs in the order of their arrival on the first GPUs with room.

    Args:
        whole: whether each job gets whole GPUs.
        overtake: whether jobs that fit start before earlier ones that do not.
    """

    def __init__(self, *, whole: bool, overtake: bool) -> None:
        self._whole = whole
        self._overtake = overtake

    def __call__(self, jobs: Sequence[Job], gpus: int) -> Outcome:
        free, outcome = [UNIT] * gpus, Outcome([])
        waiting: dict[int, deque[Job]] = {}
        ends: list[tuple[float, int, list[int], int]] = []
        order = itertools.count()

        def start(now: float) -> None:
            lines = sorted(waiting, key=lambda units: waiting[units][0].arrival)
            for units in lines:
                line = waiting[units]
                while line and (devices := _first_fit(free, units)):
                    part = units // len(devices)
                    for at in devices:
                        free[at] -= part
                    end = outcome.run(line.popleft(), now, units)
                    heapq.heappush(ends, (end, next(order), devices, part))
                if not line:
                    del waiting[units]

        def until(moment: float) -> None:
            while ends and ends[0][0] <= moment:
                now, _, devices, part = heapq.heappop(ends)
                for at in devices:
                    free[at] += part
                start(now)

        if not self._overtake:
            return _in_order(jobs, free, outcome, self._asked)
        for job in jobs:
            until(job.arrival)
            waiting.setdefault(self._asked(job), deque()).append(job)
            start(job.arrival)
        until(math.inf)
        return outcome

    def _asked(self, job: Job) -> int:
        return -(-job.units // UNIT) * UNIT if self._whole else job.units


def _in_order(
    jobs: Sequence[Job], free: list[int], outcome: Outcome, asked: Callable[[Job], int]
) -> Outcome:
    """First come, first served: a job that does not fit holds up all later ones."""
    ends: list[tuple[float, int, list[int], int]] = []
    now = 0.0
    for number, job in enumerate(jobs):
        now, units = max(now, job.arrival), asked(job)
        while (ends and ends[0][0] <= now) or not (devices := _first_fit(free, units)):
            end, _, held, part = heapq.heappop(ends)
            now = max(now, end)
            for at in held:
                free[at] += part
        part = units // len(devices)
        for at in devices:
            free[at] -= part
        heapq.heappush(ends, (outcome.run(job, now, units), number, devices, part))
    return outcome


def _first_fit(free: Sequence[int], units: int) -> list[int]:
    """The first GPU with room for a part, or the first free ones; empty if there are none."""
    if units < UNIT:
        return next(([at] for at, room in enumerate(free) if room >= units), [])
    whole = [at for at, room in enumerate(free) if room == UNIT][: units // UNIT]
    return whole if len(whole) * UNIT == units else []


RULES: dict[str, Callable[[Sequence[Job], int], Outcome]] = {
    "whole GPUs, first come first served": Baseline(whole=True, overtake=False),
    "Ray's rule": Baseline(whole=False, overtake=True),
    "ours without ageing": Ours(age=math.inf),
    "ours": Ours(),
    "ours with auto": Ours(auto=True, expect="earlier ones of its kind"),
    "ours, times known to a factor of 2": Ours(expect="twice or half"),
}

EXPECTED = {
    words: Ours(expect=words)
    for words in (
        "nothing known",
        "exact",
        "twice or half",
        "earlier ones of its kind",
        "any other's",
    )
}
"""Our rule by what it knows of the time that a job will run."""


# ------------------------------------------------------------------------------------ the tables


class Row(NamedTuple):
    """Means over the seeds, in seconds; `held` in GPU-seconds."""

    gpus: int
    rule: str
    mean: float
    p95: float
    largest: float
    makespan: float
    held: float


def waiting(
    trace: Trace,
    sizes: Sequence[int] = SIZES,
    count: int = JOBS,
    rules: Sequence[str] = tuple(RULES),
    seeds: Sequence[int] = SEEDS,
) -> list[Row]:
    """A row for each number of GPUs and each rule."""
    rows = []
    for gpus in sizes:
        for rule in rules:
            found = [RULES[rule](draw(trace, gpus, count, seed), gpus) for seed in seeds]
            waited = [each.waited for each in found]
            rows.append(
                Row(
                    gpus,
                    rule,
                    statistics.mean(map(statistics.mean, waited)),
                    statistics.mean(quantile(each, 0.95) for each in waited),
                    statistics.mean(map(max, waited)),
                    statistics.mean(each.makespan for each in found),
                    statistics.mean(each.held for each in found),
                )
            )
    return rows


def waiting_table(rows: Sequence[Row]) -> str:
    lines = [
        "| GPUs | rule | waited, mean | 95 % below | longest | makespan | GPU-hours given |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        hours = [f"{each / 3600:,.1f} h" for each in row[2:6]]
        cells = [str(row.gpus), row.rule, *hours, f"{row.held / 3600:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cluster_table(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    lines = [f"| | {' | '.join(WORKLOADS)} |", "|---" + "|--:" * len(WORKLOADS) + "|"]
    lines += [f"| {name} | {' | '.join(f'{x:.1f}' for x in values)} |" for name, values in rows]
    return "\n".join(lines)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw the mean and the longest waiting time of each rule, for each number of GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    sizes, rules = sorted({row.gpus for row in rows}), list(dict.fromkeys(row.rule for row in rows))
    width = 0.8 / len(rules)
    panels = figure.subplots(1, 2)
    for axes, field, title in zip(panels, ("mean", "largest"), ("mean", "longest"), strict=True):
        for number, rule in enumerate(rules):
            heights = [getattr(row, field) / 3600 for row in rows if row.rule == rule]
            places = [at + (number - (len(rules) - 1) / 2) * width for at in range(len(sizes))]
            axes.bar(places, heights, width, label=rule)
        axes.set_yscale("log")
        axes.set_xticks(range(len(sizes)), [str(gpus) for gpus in sizes])
        axes.set_xlabel("GPUs")
        axes.set_title(f"{title} waiting time, hours", fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Software": None})


class Compared(NamedTuple):
    """A run of ours and one of Ray's rule with the same jobs."""

    mean: float  # ratio
    makespan: float  # ratio
    longest: float  # to the mean
    longest_of_ray: float


def compare(jobs: Sequence[Job], gpus: int, rule: str) -> Compared:
    ours, ray = EXPECTED[rule](jobs, gpus), RULES["Ray's rule"](jobs, gpus)
    mean, other = statistics.fmean(ours.waited), statistics.fmean(ray.waited)
    makespan = ours.makespan / ray.makespan
    return Compared(mean / other, makespan, max(ours.waited) / mean, max(ray.waited) / other)


def loads(
    trace: Trace,
    rule: str,
    sizes: Sequence[int] = SIZES,
    count: int = JOBS,
    seeds: Sequence[int] = SEEDS,
) -> str:
    """A table of the mean wait as a ratio to Ray's rule, and in brackets the longest over the mean,
    with our rule and with Ray's."""
    keys = [(load, gpus, seed) for load in LOADS for gpus in sizes for seed in seeds]
    with ProcessPoolExecutor() as pool:
        runs = [
            pool.submit(compare, draw(trace, gpus, count, seed, load), gpus, rule)
            for load, gpus, seed in keys
        ]
    found = dict(zip(keys, (run.result() for run in runs), strict=True))
    lines = [f"| load | {' | '.join(f'{gpus} GPU' for gpus in sizes)} |"]
    lines.append("|--:" * (len(sizes) + 1) + "|")
    for load in LOADS:
        cells = []
        for gpus in sizes:
            means, _, longest, of_ray = zip(
                *(found[load, gpus, each] for each in seeds), strict=True
            )
            cells.append(
                f"{statistics.geometric_mean(means):.2f}, {max(means):.2f} "
                f"({max(longest):.0f}, {max(of_ray):.0f})"
            )
        lines.append(f"| {load} | {' | '.join(cells)} |")
    mean = statistics.geometric_mean(each.mean for each in found.values())
    makespan = max(each.makespan for each in found.values())
    lines.append(f"\n{rule}: geometric mean {mean:.3f}, largest ratio of makespans {makespan:.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces")
    parser.add_argument("folder", type=Path, help="of the files of the trace")
    parser.add_argument("what", nargs="?", choices=["cluster", "waiting", "loads", "picture"])
    parser.add_argument("path", nargs="?", type=Path, help="of the picture")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--gpus", type=int, nargs="*", default=SIZES)
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--expected", nargs="*", default=list(EXPECTED), choices=list(EXPECTED))
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    options = parser.parse_args()
    trace, seeds = Trace(options.folder), range(options.seeds)
    if options.what in (None, "cluster"):
        from benchmarks import packing

        print(cluster_table(packing.table(trace)), end="\n\n")
    if options.what in (None, "waiting", "picture"):
        began = time.process_time()
        rows = waiting(trace, options.gpus, options.jobs, options.rules, seeds)
        print(waiting_table(rows))
        print(f"\n{time.process_time() - began:.1f} s of processor time", end="\n\n")
        if options.what == "picture":
            picture(rows, options.path)
    if options.what in (None, "loads"):
        for rule in options.expected:
            print(loads(trace, rule, options.gpus, options.jobs, seeds), end="\n\n")


if __name__ == "__main__":
    main()
