"""A Ray cluster of several nodes on this machine, for `make test-ray`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually

HERE = Path(__file__).parent
ASKED = os.environ.get("GPUNB_TEST_RAY") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ray is heavy, and these run only where they are asked for."""
    missing = importlib.util.find_spec("ray") is None
    reason = "Ray is not installed" if missing else "GPUNB_TEST_RAY is not 1"
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("needs_ray") is not None:
            if missing or not ASKED:
                item.add_marker(pytest.mark.skip(reason=f"{reason}: make test-ray"))
            else:  # Ray leaves processes and sockets to the garbage collector
                item.add_marker(pytest.mark.filterwarnings("ignore"))
                item.add_marker(pytest.mark.timeout(400))
    if ASKED and not missing:
        config.addinivalue_line("filterwarnings", "ignore")


def patient(start: Callable[..., Any], **settings: Any) -> Any:
    """What Ray starts; it gives up after half a minute, which a busy machine may need."""
    for _ in range(4):
        try:
            return start(**settings)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start(**settings)


class Nodes:
    """The cluster: a head without GPUs, and nodes that come and go."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    def add(self, gpus: int, kind: str | None = None, cpus: int = 2, **resources: float) -> Any:
        """One more node, whose GPUs are of a type."""
        types = {f"accelerator_type:{kind}": 1} if kind else {}
        node = patient(
            self.cluster.add_node,
            num_cpus=cpus,
            num_gpus=gpus,
            resources={**types, **resources},
            object_store_memory=10**8,
        )
        self.cluster.wait_for_nodes()
        return node

    def lose(self, node: Any) -> None:
        """A node that is gone without a word."""
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A session on a cluster with two A100 on one node and a V100 on another."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # all of it is on this machine
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_health_check_failure_threshold", "3")
    import ray
    from ray.cluster_utils import Cluster

    import gpunb

    head = {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
    cluster = patient(Cluster, initialize_head=True, head_node_args=head)
    try:
        made = Nodes(cluster)
        made.add(2, "A100", first=1)
        made.add(1, "V100", second=1)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            with gpunb.init("ray"):
                yield made
        finally:
            ray.shutdown()
    finally:
        cluster.shutdown()


@pytest.fixture
def nothing_left(nodes: Nodes) -> Iterator[None]:
    """All devices of the cluster are free after each test, and no placement group is left."""
    import ray

    import gpunb

    yield
    eventually(lambda: gpunb.available_resources() == gpunb.cluster_resources(), within=120)
    states = {each["state"] for each in ray.util.placement_group_table().values()}
    assert states <= {"REMOVED"}


@pytest.fixture(scope="module")
def shell(nodes: Nodes) -> Iterator[Any]:
    """A plain IPython in which gpunb is loaded."""
    from tests.shells import gpunb_shell

    with gpunb_shell() as made:
        yield made
