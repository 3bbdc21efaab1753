"""From what a task asks for to Ray's options, and whether the cluster can ever give it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from gpunb.core.resources import UNIT, Demand
from gpunb.core.tasks import TaskSpec
from gpunb.exceptions import InfeasibleRequestError
from gpunb.runtime.ray.scaling import scaling

TYPE = "accelerator_type:"
_SEEN = 2.0
"""Seconds for which what the nodes have is not asked for again."""

_INNER = ("node:", "memory", "object_store_memory")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, and all that it has."""

    id: str
    address: str
    name: str
    total: Mapping[str, float]

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(sorted(n.removeprefix(TYPE) for n in self.total if n.startswith(TYPE)))

    def words(self) -> str:
        """What it has, in words."""
        parts = [f"{value:g} {name}" for name, value in sorted(shown(self.total).items())]
        return f"node {self.address}: {', '.join(parts) or 'nothing'}"


def shown(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources without what Ray keeps for itself."""
    return {name: x for name, x in resources.items() if not name.startswith(_INNER)}


class Cluster:
    """What there is in the cluster, as it was a moment ago."""

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
        if demand.gpu_memory or demand.min_memory:
            what = "gpu_memory" if demand.gpu_memory else "min_memory"
            raise ValueError(
                f"{what}= cannot be asked for on Ray, which does not know how large the memory of "
                "its devices is: ask for a share, such as num_gpus=0.5, and for a type of device "
                "with accelerator_type="
            )
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
        if self.feasible(demand) or scaling() is not None:
            return None
        return self.never(demand)

    def feasible(self, demand: Demand) -> bool:
        """Whether some node can ever give it."""
        wanted = needs(demand)
        types: Sequence[str | None] = demand.types or (None,)
        return any(gives(node, wanted, kind) for node in self.nodes() for kind in types)


def needs(demand: Demand) -> dict[str, float]:
    """What a demand takes of a node, by Ray's names."""
    wanted = {"CPU": demand.cpus, "GPU": demand.gpus, **dict(demand.resources)}
    return {name: units / UNIT for name, units in wanted.items() if units}


def gives(node: Node, wanted: Mapping[str, float], kind: str | None) -> bool:
    """Whether a node that has nothing else to do gives this."""
    if kind is not None and node.total.get(TYPE + kind, 0) <= 0:
        return False
    return all(node.total.get(name, 0) + 1e-9 >= amount for name, amount in wanted.items())
