"""The published trace of a GPU cluster, reduced to the tables in `data/openb`.

python -m benchmarks.trace_data FOLDER      # writes them again from the CSV files of the trace
"""

from __future__ import annotations

import csv
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "data" / "openb"
WORKLOADS = ("default", "gpushare100", "gpuspec33", "multigpu50", "cpu250")

Rows = Iterable[Iterable[object]]


class Node(NamedTuple):
    """Machines of one kind; `cpu` in thousandths, `memory` in MiB."""

    cpu: int
    memory: int
    gpus: int
    model: str
    count: int


class Task(NamedTuple):
    """A request: `share` of each GPU in thousandths, and the accepted models, all if empty."""

    cpu: int
    memory: int
    gpus: int
    share: int
    models: str

    @property
    def asked(self) -> int:
        """Thousandths of a GPU in all."""
        return self.gpus * self.share


class Lived(NamedTuple):
    """A GPU task of the trace, and the seconds that it ran; `kind` numbers its request."""

    kind: int
    gpus: int
    share: int
    seconds: int


@functools.cache
def nodes() -> tuple[Node, ...]:
    """The machines with GPUs."""
    return tuple(
        Node(*map(int, row[:3]), row[3], int(row[4]))  # type: ignore[call-arg]
        for row in _read("nodes.csv")
    )


@functools.cache
def tasks(workload: str) -> tuple[Task, ...]:
    """The requests of a workload, each as often as it was made."""
    column = 5 + WORKLOADS.index(workload)
    found: list[Task] = []
    for row in _read("tasks.csv"):
        found += [Task(*map(int, row[:4]), row[4])] * int(row[column])  # type: ignore[call-arg]
    return tuple(found)


@functools.cache
def lived() -> tuple[Lived, ...]:
    """The GPU tasks of the default workload with their durations, each as often as there was."""
    found: list[Lived] = []
    for row in _read("lives.csv"):
        found += [Lived(*map(int, row[:4]))] * int(row[4])
    return tuple(found)


@functools.cache
def gaps() -> tuple[int, ...]:
    """Seconds between two arrivals of GPU tasks, each as often as there were."""
    found: list[int] = []
    for seconds, count in _read("gaps.csv"):
        found += [int(seconds)] * int(count)
    return tuple(found)


def _read(name: str) -> list[list[str]]:
    with open(FOLDER / name, newline="") as file:
        return list(csv.reader(file))[1:]


# ----------------------------------------------------------------------------------- reducing


def reduce(folder: Path) -> None:
    """Write the tables from the files `openb_*.csv` of the trace."""
    machines = Counter(
        (each["cpu_milli"], each["memory_mib"], each["gpu"], each["model"])
        for each in _rows(folder / "openb_node_list_gpu_node.csv")
    )
    _write("nodes.csv", "cpu,memory,gpus,model,count", [(*k, n) for k, n in machines.items()])
    counts = {
        name: Counter(map(_task, _rows(folder / f"openb_pod_list_{name}.csv")))
        for name in WORKLOADS
    }
    every = sorted({task for each in counts.values() for task in each})
    columns = ",".join(("cpu,memory,gpus,share,models", *WORKLOADS))
    _write("tasks.csv", columns, [(*task, *(counts[w][task] for w in WORKLOADS)) for task in every])
    pods = [
        each
        for each in _rows(folder / "openb_pod_list_default.csv")
        if each["num_gpu"] != "0" and each["deletion_time"]
    ]
    kinds = {task: at for at, task in enumerate(sorted(set(map(_task, pods))))}
    lives: Counter[Lived] = Counter()
    for pod in pods:
        task = _task(pod)
        began = float(pod["scheduled_time"] or pod["creation_time"])
        seconds = _rounded(float(pod["deletion_time"]) - began)
        if seconds > 0:
            lives[Lived(kinds[task], task.gpus, task.share, seconds)] += 1
    _write("lives.csv", "kind,gpus,share,seconds,count", [(*k, lives[k]) for k in sorted(lives)])
    times = sorted(float(pod["creation_time"]) for pod in pods)
    between = Counter(_rounded(after - before) for before, after in pairwise(times))
    _write("gaps.csv", "seconds,count", sorted(between.items()))


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _task(pod: dict[str, str]) -> Task:
    gpus = int(pod["num_gpu"])
    share = int(pod["gpu_milli"]) if gpus else 0
    cpu, memory = int(pod["cpu_milli"]), int(pod["memory_mib"])
    return Task(cpu, memory, gpus, share, pod.get("gpu_spec") or "")


def _rounded(seconds: float) -> int:
    """Seconds with two digits."""
    if seconds < 100:
        return round(seconds)
    return round(seconds, 1 - math.floor(math.log10(seconds))).__int__()


def _write(name: str, head: str, rows: Rows) -> None:
    with open(FOLDER / name, "w", newline="") as file:
        file.write(f"{head}\n")
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    reduce(Path(sys.argv[1]))
