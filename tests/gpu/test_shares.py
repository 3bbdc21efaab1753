"""On a real NVIDIA GPU: shares that are kept, and figures that are right. One device is enough."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import pytest

import gpunb
from gpunb import accelerators
from gpunb.accelerators import mps
from gpunb.scheduler.shares import CONTEXT
from tests.gpu.cards import MIB
from tests.waiting import Gate, eventually

pytestmark = pytest.mark.gpu


@gpunb.remote(num_gpus=0.1)
def fill(size: int, seconds: float = 0.0) -> tuple[int, int]:
    """Take so many bytes for a while; what PyTorch has then, and what NVML should say."""
    import torch

    block = torch.ones(size // 4, device="cuda")
    torch.cuda.synchronize()
    time.sleep(seconds)
    return torch.cuda.max_memory_reserved(), int(block.numel())


def free(card: Any) -> int:
    reading = accelerators.measure([card])[card.key]
    return reading.memory_total - reading.memory_used


def facts(ref: gpunb.ObjectRef) -> dict[str, Any]:
    found = gpunb.status()
    jobs = {each["id"]: each for each in (*found["running"], *found["finished"])}
    return jobs[ref.id[0]]


def test_four_quarters_at_once_each_within_its_own(begin, card, tmp_path):
    begin()
    gate = Gate(tmp_path)

    @gpunb.remote(num_gpus=0.25)
    def most(number: int) -> int:
        import torch

        block = torch.empty(int(card.memory * 0.15), dtype=torch.uint8, device="cuda")
        block.fill_(1)
        torch.cuda.synchronize()
        gate.enter(number)
        return int(block.numel())  # the stand-in has no values for so large a block

    refs = [most.remote(number) for number in range(4)]
    eventually(lambda: gate.count() == 4, "all four have their memory at once")
    gate.open()
    assert gpunb.get(refs) == [int(card.memory * 0.15)] * 4


def test_one_that_asks_for_more_than_its_share_fails_alone(begin, card):
    begin()
    greedy = fill.options(max_retries=0).remote(card.memory // 5)
    modest = fill.remote(64 * MIB, 2.0)
    with pytest.raises(Exception, match="out of memory") as caught:
        gpunb.get(greedy)
    assert "The memory of the devices when this was raised:" in str(caught.value)
    assert gpunb.get(modest)[1] == 16 * MIB


def test_out_of_memory_of_one_task_leaves_three_others_unharmed(begin, card, tmp_path):
    begin()
    gate = Gate(tmp_path)

    @gpunb.remote(num_gpus=0.25)
    def steady(number: int) -> float:
        import torch

        total, rows = 0.0, torch.ones(1024, 1024, device="cuda")
        gate.note(number)
        while not gate.is_open():
            total = float((rows * number).sum())
        return total

    others = [steady.remote(number) for number in range(3)]
    for number in range(3):
        gate.await_(number)
    greedy = fill.options(num_gpus=0.25, max_retries=0).remote(card.memory // 3)
    with pytest.raises(Exception, match="out of memory"):
        gpunb.get(greedy)
    gate.open()
    assert gpunb.get(others) == [number * 2.0**20 for number in range(3)]


def test_the_cap_makes_no_context(begin):
    begin()

    @gpunb.remote(num_gpus=0.1)
    def imports() -> bool:
        import torch

        return torch.cuda.is_initialized()

    assert gpunb.get(imports.remote()) is False


def test_the_samplers_figures_are_those_of_the_framework(begin):
    begin()
    ref = fill.remote(1024 * MIB, 4.0)
    seen = eventually(lambda: facts(ref)["memory"]["now"], "it is seen")
    reserved, _ = gpunb.get(ref)
    peak = facts(ref)["memory"]["peak"]
    assert reserved <= peak <= reserved + 3 * CONTEXT
    assert seen <= peak


def test_memory_is_back_after_fresh_tasks(begin, card):
    begin()
    before = free(card)
    for _ in range(3):
        gpunb.get(fill.remote(512 * MIB, 1.5))
    eventually(lambda: free(card) >= before - 64 * MIB, "the memory is back")
    assert not [each for each in gpunb.status()["warnings"] if "is not back" in each]


def test_without_caps_it_may(begin, card):
    if free(card) < card.memory // 4:
        pytest.skip("others use this device")
    begin(share="off")
    assert gpunb.get(fill.options(caps=False).remote(card.memory // 5))


def test_without_caps_the_sampler_ends_it(begin, card):
    if free(card) < card.memory // 4:
        pytest.skip("others use this device")
    begin(share="kill")
    with pytest.raises(gpunb.exceptions.OutOfMemoryError, match="was stopped"):
        gpunb.get(fill.options(caps=False).remote(card.memory // 5, 30.0))


def test_the_notebooks_own_context_is_seen(hardware, begin, torch):
    if os.environ.get("GPUNB_TEST_OWN_CONTEXT") != "1":
        pytest.skip("it makes a context in this process for good: GPUNB_TEST_OWN_CONTEXT=1")
    begin()
    torch.ones(1, device="cuda")
    text = "this notebook's own process uses"
    eventually(lambda: any(text in each for each in gpunb.status()["warnings"]), "a warning")


def test_mps_keeps_shares(begin, card):
    if shutil.which(mps.PROGRAM) is None:
        pytest.skip(f"{mps.PROGRAM} is not installed")
    try:
        begin(mps=True, caps=False)
    except gpunb.exceptions.GpunbError as error:
        pytest.skip(str(error))

    @gpunb.remote(num_gpus=0.25)
    def limited() -> tuple[str | None, int]:
        import torch

        return os.environ.get("CUDA_MPS_PIPE_DIRECTORY"), torch.cuda.mem_get_info()[1]

    folder, _ = gpunb.get(limited.remote())
    assert folder
    with pytest.raises(Exception, match="out of memory"):
        gpunb.get(fill.options(max_retries=0).remote(card.memory // 5))
    gpunb.shutdown()
    assert not os.path.exists(folder)
