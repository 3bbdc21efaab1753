"""From what a task asks for to Ray's options, and whether the cluster can ever give it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from gpunb.exceptions import InfeasibleRequestError
from gpunb.ray.scaling import scaling
from gpunb.scheduler.resources import UNIT, Demand, Gang
from gpunb.scheduler.tasks import TaskSpec

TYPE = "accelerator_type:"
_SEEN = 2.0
"""Seconds for which what the nodes have is not asked for again."""

SLIVER = 0.0001
"""The smallest part of a GPU that Ray knows. A process that is made ready holds it for a moment,
and with it as much of its node's own resource, by which `available` knows."""

_NODE = "node:"
_INNER = (_NODE, "memory", "object_store_memory")
_OF_GROUP = re.compile(r"_group_(\d+_)?[0-9a-f]{36}$")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, and all that it has."""

    id: str
    address: str
    name: str
    total: Mapping[str, float]

    @property
    def own(self) -> str:
        """The name of the resource that only this node has; empty if it has none."""
        name = _NODE + self.address
        return name if name in self.total else ""

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(sorted(n.removeprefix(TYPE) for n in self.total if n.startswith(TYPE)))

    def words(self) -> str:
        """The resources of the node, in words."""
        parts = [f"{value:g} {name}" for name, value in sorted(shown(self.total).items())]
        return f"node {self.address}: {', '.join(parts) or 'nothing'}"


def shown(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources without what Ray keeps for itself."""
    own = (name for name in resources if not name.startswith(_INNER) and not _OF_GROUP.search(name))
    return {name: resources[name] for name in own}


def available() -> dict[str, float]:
    """What Ray has free now. Parts of GPUs by which processes are made ready count as free.

    Those who place their tasks by a node's own resource take a thousandth of it, or more.
    """
    free: dict[str, float] = ray.available_resources()
    slivers = sum(-round(x / SLIVER) % 10 for name, x in free.items() if name.startswith(_NODE))
    if slivers:
        free["GPU"] = free.get("GPU", 0.0) + slivers * SLIVER
    return shown(free)


class Cluster:
    """The nodes and resources of the cluster, as they were a moment ago."""

    def __init__(self) -> None:
        self._seen = 0.0
        self._nodes: tuple[Node, ...] = ()

    def nodes(self, *, fresh: bool = False) -> tuple[Node, ...]:
        """The nodes that are alive."""
        now = time.monotonic()
        if fresh or now - self._seen > _SEEN:
            self._nodes = tuple(
                Node(
                    each["NodeID"],
                    each["NodeManagerAddress"],
                    each["NodeManagerHostname"],
                    each["Resources"],
                )
                for each in ray.nodes()
                if each["Alive"]
            )
            self._seen = now
        return self._nodes

    def options(self, spec: TaskSpec) -> dict[str, Any]:
        """Ray's options for a task or an actor.

        Raises:
            InfeasibleRequestError: no node can ever give it, and no autoscaler may bring one.
            ValueError: it asks for something that Ray cannot be asked for.
        """
        demand = spec.demand
        if spec.auto is not None:
            raise ValueError(
                "num_gpus='auto' cannot be asked for on Ray, which does not measure the device "
                "memory of its tasks: ask for a share, such as num_gpus=0.5"
            )
        if spec.priority:
            raise ValueError(
                f"priority={spec.priority} cannot be asked for on Ray, which starts tasks in an "
                "order of its own: submit first what is to start first"
            )
        if spec.grow:
            raise ValueError(
                "retry_oom=True (--grow) cannot be asked for on Ray, where a task keeps the share "
                "that it was submitted with: ask for a larger one, or use retry_exceptions="
            )
        _check_no_memory(demand)
        special: dict[str, Any] = dict(spec.ray or {})
        wanted = needs(demand)
        placed = special.get("scheduling_strategy") is not None or "placement_group" in special
        chosen: str | None = None
        if demand.types or not placed:
            chosen = self._chosen(spec.name, demand, wanted, placed)
        options: dict[str, Any] = {
            "num_cpus": demand.cpus / UNIT,
            "num_gpus": demand.gpus / UNIT,
            "resources": {name: units / UNIT for name, units in demand.resources},
        }
        if chosen is not None:
            options["accelerator_type"] = chosen
        environment = dict(special.pop("runtime_env", None) or {})
        if spec.environment:
            variables = {**environment.get("env_vars", {}), **dict(spec.environment)}
            environment["env_vars"] = variables
        if environment:
            options["runtime_env"] = environment
        options.update(special)
        return options

    def _chosen(
        self, name: str, demand: Demand, wanted: Mapping[str, float], placed: bool
    ) -> str | None:
        """The type to ask Ray for: the first that some node can ever give it on."""
        types: Sequence[str | None] = demand.types or (None,)
        for fresh in (False, True):
            for kind in types:
                if placed or any(gives(each, wanted, kind) for each in self.nodes(fresh=fresh)):
                    return kind
        if scaling() is not None:
            return types[0]
        raise InfeasibleRequestError(f"{name}: {self.never(demand)}")

    def never(self, demand: Demand) -> str:
        """In words: what no node can give, and what each of them has."""
        there = "; ".join(each.words() for each in self.nodes())
        scaler = scaling()
        if scaler is not None:
            return f"asks for {demand}, which no node can give now: there is {there}; {scaler}"
        return (
            f"asks for {demand}, which can never be given: there is {there}; no autoscaler is "
            "there to bring another node"
        )

    def refusal(self, demand: Demand) -> str | None:
        """Why it can never be given, or None if it can, or a node that gives it may come."""
        if isinstance(demand, Gang):
            _check_no_memory(demand.bundles[0])
        if self.feasible(demand) or scaling() is not None:
            return None
        return self.never(demand)

    def for_each(self, demand: Demand, count: int) -> Demand:
        """The demand with the first of its types of which there is room for so many at once; with
        the first of all if there is none."""
        kinds = [replace(demand, types=(kind,)) for kind in demand.types] or [demand]
        fitting = [each for each in kinds if self.feasible(Gang.of([each] * count))]
        return (fitting or kinds)[0]

    def feasible(self, demand: Demand) -> bool:
        """Whether some node can ever give it, or all nodes together the bundles of a gang, which
        are equal."""
        count = len(demand.bundles) if isinstance(demand, Gang) else 1
        demand = demand.bundles[0] if isinstance(demand, Gang) else demand
        wanted = needs(demand)
        types: Sequence[str | None] = demand.types or (None,)
        if count > 1:
            nodes = self.nodes()
            return any(sum(times(each, wanted, kind) for each in nodes) >= count for kind in types)
        return any(gives(node, wanted, kind) for node in self.nodes() for kind in types)


def _check_no_memory(demand: Demand) -> None:
    """Raise ValueError if a demand asks for device memory."""
    if demand.gpu_memory or demand.min_memory:
        what = "gpu_memory" if demand.gpu_memory else "min_memory"
        raise ValueError(
            f"{what}= cannot be asked for on Ray, which does not know how large the memory of "
            "its devices is: ask for a share, such as num_gpus=0.5, and for a type of device "
            "with accelerator_type="
        )


def needs(demand: Demand) -> dict[str, float]:
    """The resources that a demand takes of a node, by Ray's names."""
    wanted = {"CPU": demand.cpus, "GPU": demand.gpus, **dict(demand.resources)}
    return {name: units / UNIT for name, units in wanted.items() if units}


def times(node: Node, wanted: Mapping[str, float], kind: str | None) -> int:
    """How often a node that has nothing else to do gives this at once."""
    if not gives(node, wanted, kind):
        return 0
    counts = [int(node.total[name] / each + 1e-9) for name, each in wanted.items()]
    if 0 < (gpus := wanted.get("GPU", 0)) < 1:  # parts of different devices are no device
        counts.append(int(node.total["GPU"]) * int(1 / gpus + 1e-9))
    return min(counts)


def gives(node: Node, wanted: Mapping[str, float], kind: str | None) -> bool:
    """Whether a node that has nothing else to do gives this."""
    if kind is not None and node.total.get(TYPE + kind, 0) <= 0:
        return False
    return all(node.total.get(name, 0) + 1e-9 >= amount for name, amount in wanted.items())
