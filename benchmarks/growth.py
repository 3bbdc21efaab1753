"""How costs grow: with devices, with what waits, with workers, kernels and the size of data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, median, scaled, skipped

TOLERANCE = 0.2
"""How much steeper than its work a measure may be: what a logarithm and the noise make."""

QUICK = 3
"""The number of sizes that `--quick` measures, from the smallest on."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows.

    Attributes:
        name: what there is more and more of.
        probe: takes one of `sizes` as `n`, and returns lists of samples by measure.
        work: by measure, the power of the size that its work grows with; 0 where one piece of it
            is measured.
    """

    name: str
    probe: str
    sizes: Sequence[int]
    work: Mapping[str, int]


AXES = (
    Axis(
        "devices",
        "devices",
        (1, 4, 16),
        {
            "init until all is ready": 0,
            "fresh GPU task": 0,
            "a task on each device at once, for each": 0,
            "idle: memory (PSS)": 1,
            "idle: processor time, of a core": 0,
            "status()": 1,
            "an event of the scheduler": 0,
            "find a place": 1,
        },
    ),
    Axis(
        "waiting tasks",
        "waiting",
        (10, 100, 1000, 10_000, 100_000),
        {
            "submit, for each": 0,
            "until the scheduler has it, for each": 0,
            "memory for each": 0,
            "status()": 1,
            "warm CPU task beside them": 0,
            "fresh GPU task from the queue": 0,
            "cancel, for each": 0,
            "shutdown, for each": 0,
            "an event of the scheduler": 0,
        },
    ),
    Axis(
        "workers",
        "workers",
        (1, 4, 16, 64),
        {
            "make an actor": 0,
            "a call of one": 0,
            "a call of each at once, for each": 0,
            "memory (PSS) of each": 0,
            "idle: processor time, of a core": 1,
            "status()": 1,
            "kill an actor, until a call of it fails": 0,
        },
    ),
    Axis(
        "kernels on one ledger",
        "kernels",
        (1, 2, 8, 32),
        {
            "take a share and give it back": 1,
            "fresh GPU task beside idle kernels": 0,
            "idle: processor time of each, of a core": 0,
            "a task of all on one device": 0,
        },
    ),
    Axis(
        "data",
        "data",
        (1_000_000, 16_000_000, 256_000_000, 1_000_000_000, 4_000_000_000),
        {"argument": 1, "put, used by 8 tasks": 1, "returned": 1},
    ),
)


def measure(bench: Any) -> Iterator[Line]:
    for axis in AXES:
        sizes = axis.sizes[:QUICK] if bench.quick else axis.sizes
        found: dict[int, Result] = {}
        for size in sizes:
            found[size] = bench.run(probe.call(f"growth_probes.{axis.probe}", n=size, timeout=300))
        yield from lines(axis, found)


def lines(axis: Axis, found: Mapping[int, Result]) -> Iterator[Line]:
    """One line for each measure: its last slope, and its figures in the note."""
    for size, result in found.items():
        if "skipped" in result:
            yield skipped(f"growth with {axis.name}, {size:,}", "", result)
    for name, work in axis.work.items():
        points = {size: median(x[name]) for size, x in found.items() if x.get(name)}
        if len(points) < 2:
            continue
        unit = "B" if "memory" in name else "" if "of a core" in name else "s"
        figures = ", ".join(f"{_size(axis, n)}: {scaled(v, unit)}" for n, v in points.items())
        yield Line(
            f"growth with {axis.name}: {name}",
            slopes(points)[-1],
            "",
            goal=work + TOLERANCE,
            note=figures,
            detail={"points": points, "slopes": slopes(points), "work": work},
        )


def slopes(points: Mapping[int, float]) -> list[float]:
    """The power of the size with which the value grows, from each size to the next."""
    return [
        math.log(max(after, 1e-12) / max(before, 1e-12)) / math.log(more / less)
        for (less, before), (more, after) in itertools.pairwise(points.items())
    ]


def _size(axis: Axis, size: int) -> str:
    return scaled(size, "B") if axis.name == "data" else f"{size:,}"
