"""Fills a cluster with the tasks of a trace, and says how much of its GPUs a rule of placing used.

The experiment is that of "Beware of Fragmentation" (Weng et al., USENIX ATC 2023): the tasks arrive
in random order and stay; one that fits nowhere is refused. The measure is the allocated part of all
GPUs when the tasks that have arrived asked for as much as the cluster has.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.trace_data import WORKLOADS, Node, Task, Trace

WHOLE = 1000
SEEDS = range(42, 52)

PUBLISHED = {
    "Random": (86.3, 78.9, 83.9, 81.3, 80.0),
    "DotProd": (90.6, 82.0, 79.8, 94.7, 83.6),
    "Clustering": (91.7, 82.2, 81.1, 95.7, 87.8),
    "Packing": (91.8, 82.1, 82.2, 96.1, 88.1),
    "BestFit": (92.9, 84.6, 80.4, 95.6, 91.2),
    "FGD": (95.2, 86.6, 87.8, 97.1, 93.2),
}
"""Percent for each of WORKLOADS, the mean of the ten published runs of each rule (column 100 of
`experiments/analysis/expected_results/analysis_allo_discrete.csv` in the paper's repository)."""

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_NOWHERE = 1 << 40


class Cluster:
    """The free room of all machines; `gpus` has a row for each machine, with -1 for no GPU."""

    def __init__(self, nodes: Sequence[Node], seed: int) -> None:
        """The machines are in a random order: kinds of machines are not to be filled in turn."""
        mixed = random.Random(seed).sample(nodes, len(nodes))
        self.models = np.array([each.model for each in mixed])
        self.cpu: Ints = np.array([each.cpu for each in mixed])
        self.memory: Ints = np.array([each.memory for each in mixed])
        has = np.array([each.gpus for each in mixed])
        self.gpus: Ints = np.where(np.arange(has.max()) < has[:, None], WHOLE, -1)
        self.total = int(has.sum()) * WHOLE
        self._accepts: dict[str, Mask] = {"": np.ones(len(mixed), bool)}

    def suitable(self, task: Task) -> Mask:
        """The machines with CPUs, memory and a model of GPU for the task."""
        if task.models not in self._accepts:
            self._accepts[task.models] = np.isin(self.models, task.models.split("|"))
        fits: Mask = (self.cpu >= task.cpu) & (self.memory >= task.memory)
        return fits & self._accepts[task.models]

    def free(self) -> Ints:
        """The free thousandths of GPUs of each machine."""
        free: Ints = np.where(self.gpus > 0, self.gpus, 0).sum(1)
        return free


class Rule(Protocol):
    """Chooses a machine and the devices on it, of those where the task fits."""

    def machine(self, cluster: Cluster, task: Task, fits: Mask) -> int:
        """The machine for a task without a GPU, or with whole ones."""

    def device(self, cluster: Cluster, task: Task, left: Ints) -> tuple[int, int]:
        """The machine and the device for a part. `left` is the room after it, and very large where
        it does not fit."""


class Ours:
    """gpunb's rule for the device. A machine is one in gpunb; of several, it would be the one where
    the task leaves the fewest free GPUs without CPUs. The lowest index on ties."""

    CPUS = 8_000
    """Thousandths of CPUs without which a free GPU counts as of no use."""

    def machine(self, cluster: Cluster, task: Task, fits: Mask) -> int:
        if not task.gpus:  # to the machine with the most CPUs for each free GPU
            return int(np.argmax(np.where(fits, cluster.cpu / (cluster.free() + 1), -1)))
        return int(np.argmin(np.where(fits, self._stranded(cluster, task), np.inf)))

    def device(self, cluster: Cluster, task: Task, left: Ints) -> tuple[int, int]:
        equal = left == left.min()
        at = self.machine(cluster, task, equal.any(1))
        return at, int(np.argmax(equal[at]))

    def _stranded(self, cluster: Cluster, task: Task) -> npt.NDArray[np.float64]:
        """The GPUs that would be left without CPUs, beyond those that are."""

        def lacking(free: Ints, cpu: Ints) -> npt.NDArray[np.float64]:
            return np.maximum(free / WHOLE - cpu / self.CPUS, 0)

        free = cluster.free()
        after = lacking(free - task.asked, cluster.cpu - task.cpu)
        return np.round(after - lacking(free, cluster.cpu), 9)


class LowestIndex(Ours):
    """gpunb's rule for the device, and the first machine that has room."""

    def machine(self, cluster: Cluster, task: Task, fits: Mask) -> int:
        return int(np.argmax(fits))


class BestFit(Ours):
    """The paper's rule of this name: the machine with the least room left, half of it CPUs."""

    def machine(self, cluster: Cluster, task: Task, fits: Mask) -> int:
        room = cluster.cpu / 128_000 + cluster.free() / (8 * WHOLE)
        return int(np.argmin(np.where(fits, room, np.inf)))

    def device(self, cluster: Cluster, task: Task, left: Ints) -> tuple[int, int]:
        at = self.machine(cluster, task, (left < _NOWHERE).any(1))
        return at, int(np.argmin(left[at]))


RULES: dict[str, Rule] = {
    "ours": Ours(),
    "ours, first machine": LowestIndex(),
    "BestFit, here": BestFit(),
}


def arrivals(known: Sequence[Task], seed: int, total: int) -> Iterator[Task]:
    """The tasks of a workload in random order, and then more of them drawn at random, until they
    have asked for all GPUs."""
    chance = random.Random(seed)
    first = chance.sample(known, len(known))
    asked, at = 0, 0
    while asked < total:
        task = first[at] if at < len(first) else chance.choice(known)
        asked, at = asked + task.asked, at + 1
        yield task


def allocated(nodes: Sequence[Node], tasks: Sequence[Task], seed: int, rule: Rule) -> float:
    """Percent of the cluster's GPUs that are given out in the end."""
    cluster, given = Cluster(nodes, seed), 0
    for task in arrivals(tasks, seed, cluster.total):
        given += task.asked * place(cluster, task, rule)
    return 100 * given / cluster.total


def place(cluster: Cluster, task: Task, rule: Rule) -> bool:
    """Give a task its room. False if it fits nowhere."""
    fits = cluster.suitable(task)
    if 0 < task.share < WHOLE:
        room = (cluster.gpus >= task.share) & fits[:, None]
        if not room.any():
            return False
        left = np.where(room, cluster.gpus - task.share, _NOWHERE)
        at, device = rule.device(cluster, task, left)
        cluster.gpus[at, device] -= task.share
    else:
        if task.gpus:
            fits &= (cluster.gpus == WHOLE).sum(1) >= task.gpus
        if not fits.any():
            return False
        at = rule.machine(cluster, task, fits)
        whole = np.flatnonzero(cluster.gpus[at] == WHOLE)[: task.gpus]
        cluster.gpus[at, whole] = 0
    cluster.cpu[at] -= task.cpu
    cluster.memory[at] -= task.memory
    return True


def table(trace: Trace) -> list[tuple[str, list[float]]]:
    """A row for each rule: percent for each of WORKLOADS, the mean of ten runs."""
    rows = [(name, list(values)) for name, values in PUBLISHED.items()]
    workloads = [trace.tasks(name) for name in WORKLOADS]
    for name, rule in RULES.items():
        means = [
            statistics.mean(allocated(trace.nodes, tasks, seed, rule) for seed in SEEDS)
            for tasks in workloads
        ]
        rows.append((name, means))
    return rows
