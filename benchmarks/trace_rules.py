"""Jobs drawn from a published trace, and the rules of queues that run them in simulated time.

The jobs, their durations and the gaps between their arrivals are drawn from the trace. The machine
has cards of 40 GiB. For `ours` the scheduler itself decides.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.trace_data import Lived, Trace
from gpunb.scheduler import events as ev
from gpunb.scheduler.auto_share import Choice, Run, choose
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.resources import UNIT, Demand, Device, Machine
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import Succeeded, TaskSpec

MEMORY = 40 * 2**30
LOAD = 0.6
"""GPU-seconds that the jobs need, as a part of what the machine has."""

LONGEST = 86_400
"""Seconds. The trace has services, too, that hold their GPUs for months."""

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


# ----------------------------------------------------------------------------------------- rules


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
