"""JAX in several ranks, on CPUs."""

from __future__ import annotations

import os

import gpunb
from tests import needs
from tests.sessions import assert_idle, session
from tests.waiting import PATIENCE


def gathered():
    """The numbers of all processes, as JAX knows them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize()
    own = jax.numpy.array([jax.process_index()])
    found = multihost_utils.process_allgather(own).ravel().tolist()
    jax.distributed.shutdown()
    return jax.process_index(), jax.process_count(), found


def test_jax_finds_the_other_ranks_without_arguments(by_value: None) -> None:
    needs.jax()
    with session(num_gpus=2, num_cpus=2):
        remote = gpunb.remote(num_gpus=1, ranks=2)(gathered)
        assert gpunb.get(remote.remote(), timeout=4 * PATIENCE) == [(0, 2, [0, 1]), (1, 2, [0, 1])]
        assert_idle()
