"""On a real NVIDIA GPU: each library that is installed keeps to a task's share."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import gpunb
from gpunb.scheduler.resources import UNIT
from gpunb.scheduler.shares import pool

pytestmark = pytest.mark.gpu

SHARE = 0.25
STEPS = 64


def with_torch(step: int) -> int:
    """Take blocks until no more is given; return the bytes that the pool has."""
    import torch

    blocks = []
    try:
        while len(blocks) < 4 * STEPS:
            blocks.append(torch.empty(step // 4, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    return int(torch.cuda.max_memory_reserved())


def with_cupy(step: int) -> int:
    """As `with_torch`."""
    import cupy

    blocks = []
    try:
        while len(blocks) < 4 * STEPS:
            blocks.append(cupy.empty(step // 4, dtype=cupy.float32))
    except cupy.cuda.memory.OutOfMemoryError:
        pass
    return int(cupy.get_default_memory_pool().total_bytes())


def with_jax(step: int) -> int | None:
    """Return the bytes that the pool may have, which JAX takes at once; None if it computes on the
    host."""
    import jax

    jax.numpy.ones(1).block_until_ready()
    stats = jax.local_devices()[0].memory_stats()
    return int(stats["bytes_limit"]) if stats else None


@pytest.mark.parametrize("take", [with_torch, with_cupy, with_jax])
def test_the_pool_is_within_five_percent_of_its_limit(
    begin: Any, card: Any, record_property: Any, take: Any
) -> None:
    name = take.__name__.removeprefix("with_")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    begin(preload=["numpy"])
    _, limit = pool(int(SHARE * UNIT), card.memory)
    assert limit is not None
    taken = gpunb.get(gpunb.remote(num_gpus=SHARE, max_retries=0)(take).remote(limit // STEPS))
    if taken is None:
        pytest.skip(f"{name} is installed without support for this device")
    record_property(f"pool of {name} in a quarter, of its limit [%]", round(100 * taken / limit, 1))
    assert 0.95 * limit <= taken <= 1.05 * limit
