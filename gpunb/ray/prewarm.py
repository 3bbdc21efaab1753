"""Processes that have loaded what work on a GPU needs, before there is such work.

Ray ends a process that has worked on a GPU, and starts one for the next; in that, loading IPython
and gpunb takes as long as starting Ray does. So once nothing of this kernel wants a GPU, a process
is started on each node where that was so, by a task that loads all this. It asks for the smallest
part of a GPU that Ray knows, because Ray gives work on GPUs only to processes that are new or had
some themselves, and only if that part is free at once. Ray then takes this process for what comes
next: work in it finds a process in which nothing of a user's has run, as in any other. What comes
while that goes on waits for it: starting a process of its own would take as long, and it would be
placed otherwise because of so small a part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpunb.ray import entry_points
from gpunb.ray.jobs import RayJob, RayJobs
from gpunb.ray.resources import SLIVER, Cluster

IDLE_FOR = 0.2
"""Seconds without work on GPUs after which a process is made ready for more."""

NODES = 4
"""Nodes on which that is done before anything has run there."""

PATIENCE = 2.0
"""Seconds for which work waits for a process that is being made ready."""


class Prewarmer:
    """Keeps one process ready on each node where this kernel uses GPUs.

    Attributes:
        ready: the process, by node; 0 where there could be none, None where there is to be one.
    """

    def __init__(self, cluster: Cluster, jobs: RayJobs, later: Callable[..., object]) -> None:
        """`later` calls a function after so many seconds."""
        self._cluster = cluster
        self._jobs = jobs
        self._later = later
        self.ready: dict[str, int | None] = {}
        self._making: dict[str, Any] = {}
        self._due = False
        self._aside = 0
        self._lock = threading.RLock()
        self._warm = ray.remote(max_calls=0, max_retries=0)(entry_points.load)

    def begin(self, node: str) -> None:
        """Beginning with this node, make some ready where there are GPUs."""
        nodes = [each.id for each in self._cluster.nodes() if each.total.get("GPU", 0) > 0]
        nodes.sort(key=lambda each: each != node)
        with self._lock:
            self.ready.update(dict.fromkeys(nodes[:NODES]))
        self.over()

    def began(self, job: RayJob) -> None:
        """A job has begun. One on a GPU takes the process that is ready; if it has another, there
        was none."""
        if job.gpus:
            with self._lock:
                self.ready[job.node_id] = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While work on a GPU is handed in."""
        with self._lock:
            self._aside += 1
            making = list(self._making.values())
        try:
            if making:
                ray.wait(making, num_returns=len(making), timeout=PATIENCE)
            yield
        except BaseException:
            self.over()
            raise
        finally:
            with self._lock:
                self._aside -= 1

    def over(self) -> None:
        """Something has ended."""
        with self._lock:
            if self._due or None not in self.ready.values():
                return
            self._due = True
        self._later(IDLE_FOR, self._look)

    def _look(self) -> None:
        with self._lock:
            self._due = False
            if self._aside or any(map(_hurries, list(self._jobs.open.values()))):
                return  # its end will be told
            for node, pid in self.ready.items():
                if pid is None and node not in self._making:
                    self._make(node)

    def _make(self, node: str) -> None:
        there = NodeAffinitySchedulingStrategy(node, soft=False, _fail_on_unavailable=True)
        own = {each.own: SLIVER for each in self._cluster.nodes() if each.id == node and each.own}
        ref = self._warm.options(
            name="gpunb: make ready",
            num_cpus=0,
            num_gpus=SLIVER,
            resources=own,
            scheduling_strategy=there,
        ).remote()
        self._making[node] = ref

        def made(future: Any) -> None:
            with self._lock:
                del self._making[node]
                # Without one the next work only takes longer; the node may be busy, or gone.
                self.ready[node] = future.result() if future.exception() is None else 0

        ref.future().add_done_callback(made)


def _hurries(job: RayJob) -> bool:
    """Whether something wants a GPU, or works on one. An actor that is there may keep one long."""
    if job.kind == "create" and job.began is not None:
        return False
    return job.demand.wants_device or bool(job.gpus)
