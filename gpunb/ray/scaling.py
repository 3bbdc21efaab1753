"""Whether an autoscaler brings nodes to the cluster, and what it is about to do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import ray
from ray.experimental import internal_kv


class Scaling(NamedTuple):
    """The state of an autoscaler.

    Attributes:
        types: the types of the nodes that exist or are being started.
        coming: the number of nodes that are being started.
        failed: the number of nodes that could not be started.
    """

    types: frozenset[str]
    coming: int
    failed: int

    @property
    def brings_nodes(self) -> bool:
        """Without an autoscaler Ray reports the same, with a type for each node."""
        return any(not each.startswith("node_") for each in self.types)

    def __str__(self) -> str:
        plural = "s" * (self.coming != 1)
        text = f"the autoscaler is bringing {self.coming} more node{plural}"
        return f"{text}, and {self.failed} could not be started" if self.failed else text


def scaling() -> Scaling | None:
    """The report of the autoscaler; None if none can add nodes."""
    try:
        scaler = _second() or _first()
    except Exception:  # it is not there yet, or of another version of Ray
        return None
    return scaler if scaler is not None and scaler.brings_nodes else None


def _first() -> Scaling | None:
    data = internal_kv._internal_kv_get(b"__autoscaling_status")
    report = (json.loads(data).get("autoscaler_report") if data else None) or {}
    launches, pending = report.get("pending_launches") or {}, report.get("pending_nodes") or ()
    types = {*(report.get("active_nodes") or {}), *(report.get("idle_nodes") or {}), *launches}
    types.update((report.get("node_type_mapping") or {}).values())
    failed = report.get("failed_nodes") or ()
    return Scaling(frozenset(types), sum(launches.values()) + len(pending), len(failed))


def _second() -> Scaling | None:
    """Of Ray's second autoscaler, where that is used."""
    from ray.autoscaler.v2 import sdk, utils

    if not utils.is_autoscaler_v2():
        return None
    status = sdk.get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    coming = [*status.pending_nodes, *status.pending_launches]
    failed = [*status.failed_nodes, *status.failed_launches]
    types = frozenset(each.ray_node_type_name for each in (*nodes, *coming, *failed))
    return Scaling(types, _count(coming), _count(failed))


def _count(nodes: Iterable[object]) -> int:
    """Of nodes, and of requests for several."""
    return sum(getattr(each, "count", 1) for each in nodes)
