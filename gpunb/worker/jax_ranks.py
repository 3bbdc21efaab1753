"""Lets ``jax.distributed.initialize()`` find the ranks of a call without arguments.

JAX itself reads two of the variables of a rank, and asks its known kinds of clusters for the rest.
"""

from __future__ import annotations

import os
from typing import Any

from gpunb.worker.import_hooks import when_loaded


def announce() -> None:
    """Tell JAX about the ranks, now or when it is imported."""
    when_loaded("jax._src.clusters.cluster", _define)


def _define(module: Any) -> None:
    """Define a kind of cluster; JAX notes each subclass."""

    class Ranks(module.ClusterEnv):  # type: ignore[misc]
        name = "gpunb"

        @classmethod
        def is_env_present(cls) -> bool:
            return "JAX_PROCESS_ID" in os.environ

        @classmethod
        def get_coordinator_address(cls, *_: Any, **__: Any) -> str:
            return os.environ["JAX_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["JAX_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["JAX_PROCESS_ID"])

        @classmethod
        def get_local_process_id(cls) -> None:
            """The rank's devices are those that JAX_LOCAL_DEVICE_IDS names, or all that it sees."""

    known = module.ClusterEnv._cluster_types  # noqa: SLF001 - there is no public way
    known.insert(0, known.pop())  # else Slurm goes first, if the notebook runs in its allocation
