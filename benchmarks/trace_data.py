"""A published trace of a GPU cluster, read from its files.

The folder has files `openb_*.csv`: those of `data/csv` in
https://github.com/hkust-adsl/kubernetes-scheduler-simulator (Apache License 2.0), the repository of

    Qizhen Weng, Lingyun Yang, Yinghao Yu, Wei Wang, Xiaochuan Tang, Guodong Yang, Liping Zhang:
    Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent.
    USENIX ATC 2023.

Alibaba published the trace as `cluster-trace-gpu-v2023` in https://github.com/alibaba/clusterdata.
"""

from __future__ import annotations

import csv
import functools
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

WORKLOADS = ("default", "gpushare100", "gpuspec33", "multigpu50", "cpu250")


class Node(NamedTuple):
    """A machine; `cpu` in thousandths, `memory` in MiB."""

    cpu: int
    memory: int
    gpus: int
    model: str


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
    """A GPU task of the trace, and the seconds that it ran; equal requests are of one `kind`."""

    kind: Task
    gpus: int
    share: int
    seconds: float


class Trace:
    """The trace in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """The machines with GPUs."""
        return [
            Node(int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
            for row in self._rows("openb_node_list_gpu_node.csv")
        ]

    def tasks(self, workload: str) -> list[Task]:
        """The requests of a workload."""
        return [_task(row) for row in self._rows(f"openb_pod_list_{workload}.csv")]

    @functools.cached_property
    def lived(self) -> list[Lived]:
        """The GPU tasks of the default workload that came to an end."""
        found = []
        for row in self._gpu_tasks():
            began = float(row["scheduled_time"] or row["creation_time"])
            seconds, task = float(row["deletion_time"]) - began, _task(row)
            if seconds > 0:
                found.append(Lived(task, task.gpus, task.share, seconds))
        return found

    @functools.cached_property
    def gaps(self) -> list[float]:
        """Seconds between two arrivals of GPU tasks."""
        times = sorted(float(row["creation_time"]) for row in self._gpu_tasks())
        return [after - before for before, after in pairwise(times)]

    def _gpu_tasks(self) -> list[dict[str, str]]:
        rows = self._rows("openb_pod_list_default.csv")
        return [row for row in rows if row["num_gpu"] != "0" and row["deletion_time"]]

    def _rows(self, name: str) -> list[dict[str, str]]:
        with open(self._folder / name, newline="") as file:
            return list(csv.DictReader(file))


def _task(row: dict[str, str]) -> Task:
    gpus = int(row["num_gpu"])
    share = int(row["gpu_milli"]) if gpus else 0
    cpu, memory = int(row["cpu_milli"]), int(row["memory_mib"])
    return Task(cpu, memory, gpus, share, row.get("gpu_spec") or "")
