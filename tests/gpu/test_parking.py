"""On a real NVIDIA GPU with driver 570 or newer: the memory of an idle actor leaves the device."""

from __future__ import annotations

import time
from typing import Any

import pytest

import gpunb
from tests.gpu.cards import BACK, MIB, seconds_until_back, used

pytestmark = pytest.mark.gpu

TEN_GIB = 10 * 1024 * MIB


@gpunb.remote(num_gpus=0.5)
class Holder:
    def __init__(self, size: int) -> None:
        import torch

        self.block = torch.ones(size // 4, device="cuda")
        self.rows = torch.arange(1000.0, device="cuda")
        torch.cuda.synchronize()

    def sums(self) -> tuple[float, float]:
        return float(self.rows.sum()), float(self.block[-1000:].sum())


def test_a_parked_actor_has_no_memory_on_the_device_and_the_same_state_afterwards(
    begin: Any, card: Any, record_property: Any
) -> None:
    before, size = used(card), min(TEN_GIB, card.memory // 8)
    session = begin()
    holder = Holder.remote(size)
    sums = gpunb.get(holder.sums.remote())
    assert used(card) >= before + size
    start = time.monotonic()
    try:
        session.park(holder)
    except gpunb.exceptions.GpunbError as error:
        if "driver 570" in str(error):
            pytest.skip(str(error))
        raise
    parked = time.monotonic()
    assert gpunb.available_resources()["GPU"] == 1
    assert seconds_until_back(card, before) <= BACK
    restoring = time.monotonic()
    assert gpunb.get(holder.sums.remote()) == sums
    factor = TEN_GIB / size
    record_property("parking, for each 10 GiB [s]", round((parked - start) * factor, 2))
    back = time.monotonic() - restoring
    record_property("restoring, for each 10 GiB [s]", round(back * factor, 2))
    gpunb.kill(holder)
