"""The shares of ranks, and the limits that go with them, on simulated devices."""

from __future__ import annotations

import os

import gpunb
from tests.sessions import assert_idle, session
from tests.waiting import PATIENCE


def share():
    """The devices of a rank, its other resources, and its limit of device memory."""
    limit = float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
    found = gpunb.get_runtime_context().get_assigned_resources()
    return gpunb.get_gpu_ids(), found, os.environ["CUDA_VISIBLE_DEVICES"], limit


def test_each_rank_has_the_share_and_the_memory_limit_of_one_process(by_value: None) -> None:
    options = {"gpu_memory": "10GiB", "accelerator_type": "A100", "num_cpus": 0.5}
    with session(simulate="1xV100:32GiB,1xA100:40GiB", num_cpus=2):
        remote = gpunb.remote(**options)(share)
        alone = gpunb.get(remote.remote(), timeout=PATIENCE)
        ids, resources, visible, limit = alone
        assert (ids, visible) == ([1], "1")
        assert (resources["CPU"], resources["GPU"]) == (0.5, 0.25)
        assert 0 < limit <= 0.25
        assert gpunb.get(remote.options(ranks=4).remote(), timeout=PATIENCE) == [alone] * 4
        assert_idle()
