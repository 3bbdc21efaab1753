"""Ray workers that have loaded IPython and gpunb before there is work for them.

Ray ends a worker after its work on a GPU, and starts a new one for the next work. Half of that
start is the loading of IPython and gpunb. So when no work of this kernel wants a GPU any more, a
small task on each node that had such work loads them. Ray gives its worker to the next work; no
code of a user has run in it.

The small task asks for the smallest share of a GPU that Ray knows, because Ray gives work on GPUs
only to workers that are new or had a GPU. It runs only if that share is free at once. Work that
comes while it runs waits for its end: a start of its own would take as long, and the small share
could make Ray place that work elsewhere.
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
"""At most so many nodes get a worker before any work has run there."""

PATIENCE = 2.0
"""Work waits at most so many seconds for a worker that is being made ready."""


class Prewarmer:
    """Keeps one process ready on each node where this kernel uses GPUs.

    Attributes:
        ready: process id of the worker, by node; 0 where none could be made, None where one is to
            be made.
    """

    def __init__(self, cluster: Cluster, jobs: RayJobs, later: Callable[..., object]) -> None:
        """`later(seconds, function)` calls the function after so many seconds."""
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
        """Make a worker ready on this node and on some other nodes with GPUs."""
        nodes = [each.id for each in self._cluster.nodes() if each.total.get("GPU", 0) > 0]
        nodes.sort(key=lambda each: each != node)
        with self._lock:
            self.ready.update(dict.fromkeys(nodes[:NODES]))
        self.over()

    def began(self, job: RayJob) -> None:
        """A job has begun. If it has a GPU, it uses up the worker that was ready on its node."""
        if job.gpus:
            with self._lock:
                self.ready[job.node_id] = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Make no worker ready while work on a GPU is submitted, and wait first for those in the
        making."""
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
        """A job has ended: there may be nodes that need a new worker."""
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
