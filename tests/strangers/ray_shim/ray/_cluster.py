"""`ray.cluster_utils` for clusters of one node: that node is the session."""

from __future__ import annotations

import itertools
from typing import Any

from ray._lookup import NotThere

PREFIX = "one-node-cluster-"
NODES: dict[str, dict[str, Any]] = {}
"""The settings of a session, by the address of its cluster."""

cluster_not_supported = False
_numbers = itertools.count()


class Cluster:
    """A cluster of one node."""

    def __init__(
        self,
        initialize_head: bool = False,
        connect: bool = False,
        head_node_args: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        self.address = f"{PREFIX}{next(_numbers)}"
        if initialize_head:
            self.add_node(**(head_node_args or {}))
        if connect:
            self.connect()

    def add_node(self, **settings: Any) -> Node:
        if self.address in NODES:
            raise NotThere("a second node of a cluster")
        if settings.pop("enable_object_reconstruction", False):
            raise NotThere("objects that are made again when a node is lost")
        NODES[self.address] = {"num_cpus": 1, **settings}
        return Node()

    def connect(self, namespace: str | None = None) -> None:
        import ray

        ray.init(self.address, namespace=namespace)

    def wait_for_nodes(self, timeout: float = 30) -> None:
        """The node is there."""

    def shutdown(self) -> None:
        NODES.pop(self.address, None)

    def __getattr__(self, name: str) -> Any:
        raise NotThere(f"ray.cluster_utils.Cluster.{name}")


class Node:
    """The node of a cluster."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotThere(f"a node's {name}")


class AutoscalingCluster:
    """Not there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotThere("ray.cluster_utils.AutoscalingCluster")
