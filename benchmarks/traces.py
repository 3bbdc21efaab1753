"""Tables of waiting on one machine with the jobs of a published trace, and of GPUs allocated on a
cluster.

    python -m benchmarks.traces FOLDER              # all tables, as Markdown; an hour
    python -m benchmarks.traces FOLDER waiting --jobs 100000 --gpus 16 --rules ours --seeds 1
    python -m benchmarks.traces FOLDER picture docs/images/waiting.png

`trace_data.py` says where the files of the folder come from, and `trace_rules.py` has the rules.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.lines import quantile
from benchmarks.trace_data import WORKLOADS, Trace
from benchmarks.trace_rules import EXPECTED, RULES, Job, draw

LOADS = (0.5, 0.7, 0.9)
SIZES = (1, 2, 4, 8, 16)
JOBS = 3000
SEEDS = range(3)


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
