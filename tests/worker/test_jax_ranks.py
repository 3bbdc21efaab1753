"""What JAX hears about the ranks of a call."""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

import pytest

from gpunb.worker import jax_ranks


class ClusterEnv:
    """As in JAX."""

    _cluster_types: ClassVar[list[Any]] = []

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._cluster_types.append(cls)


class Slurm(ClusterEnv):
    """A kind of cluster that JAX knows."""


def test_jax_finds_the_ranks_before_other_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("jax._src.clusters.cluster")
    module.ClusterEnv = ClusterEnv
    monkeypatch.setitem(sys.modules, module.__name__, module)
    jax_ranks.announce()
    found, slurm = ClusterEnv._cluster_types
    assert slurm is Slurm
    assert not found.is_env_present()
    variables = {"COORDINATOR_ADDRESS": "127.0.0.1:5", "NUM_PROCESSES": "4", "PROCESS_ID": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    assert found.is_env_present()
    assert found.get_coordinator_address(timeout_secs=1) == "127.0.0.1:5"
    assert (found.get_process_count(), found.get_process_id()) == (4, 2)
    assert found.get_local_process_id() is None
