"""Chooses the share of a task from the device memory that earlier runs of the same code took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gpunb.scheduler.explain import time_text
from gpunb.scheduler.feasibility import candidates
from gpunb.scheduler.resources import UNIT, Demand, Machine, amount, size_text
from gpunb.scheduler.shares import MIB
from gpunb.scheduler.tasks import TaskSpec

RUNS = 5
"""Number of last runs that count."""

MARGIN = 0.15
LEAST_MARGIN = 512 * MIB
"""Bytes that a share has at least beyond the largest peak: contexts differ in size."""

STEP = UNIT // 20

SIMILAR = 2.0
"""Largest ratio of the sizes of two inputs that count as equal."""

SMALL = MIB
"""Sizes of inputs up to this number of bytes count as equal."""


class Run(NamedTuple):
    """An earlier run of some code.

    Attributes:
        size: bytes of its inputs.
        memory: bytes on its device.
        peak: the most bytes of the device that it had.
        seconds: how long it ran; None if that was not noted.
    """

    size: int
    memory: int
    peak: int
    seconds: float | None = None


class Choice(NamedTuple):
    """A demand that was chosen for a task with inputs of `size` bytes, and the reason in words;
    `first` if no earlier run counts. The task is expected to run for so many seconds."""

    demand: Demand
    size: int
    why: str
    first: bool
    seconds: float | None = None

    def applied(self, spec: TaskSpec) -> TaskSpec:
        """The description of the task with this choice."""
        return replace(spec, demand=self.demand, expected=self.seconds)


def similar(one: int, other: int) -> bool:
    """Whether two sizes of inputs count as equal."""
    small, large = sorted((max(one, SMALL), max(other, SMALL)))
    return large <= SIMILAR * small


def units_for(peak: int, memory: int) -> int:
    """The share of a device for a task with this peak: with a margin, in steps of 0.05."""
    need = peak + max(math.ceil(peak * MARGIN), LEAST_MARGIN)
    return min(UNIT, -(-need * UNIT // (memory * STEP)) * STEP)


def choose(
    demand: Demand, machine: Machine, runs: Sequence[Run], size: int, *, by_memory: bool = False
) -> Choice:
    """Choose a share for a task.

    Args:
        demand: the demand with one whole device.
        runs: the earlier runs of the code, the last one first.
        size: bytes of the inputs.
        by_memory: whether the share is a number of bytes, the same on each device.
    """
    devices = [machine.devices[at] for group in candidates(demand, machine) for at, _ in group]
    memories = {each.memory for each in devices}
    there = [run for run in runs if run.memory in memories]
    same = [run for run in there if similar(run.size, size)][:RUNS]
    if any(each.whole for each in devices) or not same:
        return Choice(demand, size, _why_whole(memories, runs, there, size), True)
    largest = max(same, key=lambda run: run.peak)
    peak, memory = largest.peak, largest.memory
    units = units_for(peak, memory)
    chosen = replace(demand, gpus=units)
    if units < UNIT and (by_memory or len(memories) > 1):
        chosen = replace(demand, gpus=0, gpu_memory=memory * units // UNIT)
    runs_text = "its last run" if len(same) == 1 else f"its last {len(same)} runs"
    why = (
        f"{amount(units)} of a GPU, because it had at most {size_text(peak)} in {runs_text} with "
        f"inputs of about {size_text(max(size, SMALL))} on a GPU with {size_text(memory)}; the "
        f"rest is a margin"
    )
    times = sorted(run.seconds for run in same if run.seconds is not None)
    if not times:
        return Choice(chosen, size, why, False)
    seconds = times[len(times) // 2]
    runs_for = f"about {time_text(seconds)}" if seconds >= 1 else "less than 1 s"
    return Choice(chosen, size, f"{why}; it runs for {runs_for}", False, seconds)


def _why_whole(
    memories: set[int | None], runs: Sequence[Run], there: Sequence[Run], size: int
) -> str:
    if not any(memories):
        return "one whole GPU, because the memory of the GPUs is not known"
    text = "one whole GPU, because no run of this code was measured"
    if there:
        return f"{text} with inputs of about {size_text(max(size, SMALL))}"
    if runs:
        sizes = " or ".join(size_text(each) for each in sorted(filter(None, memories)))
        return f"{text} on a GPU with {sizes}"
    return text


def grown(demand: Demand, units: int, memory: int | None) -> Demand | None:
    """The demand with twice its share, after it had so many units of one device with this memory;
    None if it had the whole device."""
    if not 0 < units < UNIT:
        return None
    if not demand.gpu_memory:
        return replace(demand, gpus=min(2 * units, UNIT))
    if memory is not None and 2 * demand.gpu_memory > memory:
        least = max(demand.min_memory, memory)
        return replace(demand, gpus=UNIT, gpu_memory=0, min_memory=least)
    return replace(demand, gpu_memory=2 * demand.gpu_memory)
