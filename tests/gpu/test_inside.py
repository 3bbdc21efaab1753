"""On a real NVIDIA GPU: processes that a task starts."""

from __future__ import annotations

from typing import Any

import pytest

import gpunb
from tests import sessions
from tests.gpu.cards import BACK, seconds_until_back, used
from tests.waiting import eventually

pytestmark = pytest.mark.gpu


@gpunb.remote(num_gpus=0.5)
def load() -> float:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    total = torch.zeros(1, device="cuda")
    for (rows,) in DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2):
        total += rows.to("cuda").sum()
    return float(total)


@gpunb.remote(num_gpus=0.5)
def share() -> list[float]:
    import torch

    from tests.gpu.cards import add_one

    context = torch.multiprocessing.get_context("spawn")
    tensor = torch.zeros(3, device="cuda")
    child = context.Process(target=add_one, args=(tensor,))
    child.start()
    child.join(60)
    torch.cuda.synchronize()
    assert child.exitcode == 0, child.exitcode
    return tensor.tolist()


@gpunb.remote(num_gpus=0.5)
def leak() -> int:
    import multiprocessing

    from tests.gpu.cards import hold_context

    context = multiprocessing.get_context("spawn")
    pids = context.SimpleQueue()
    context.Process(target=hold_context, args=(pids.put, 600.0)).start()
    return int(pids.get())


def test_a_loader_of_data_has_processes_in_a_task(session: Any) -> None:
    assert gpunb.get(load.remote()) == sum(range(64))


def test_a_task_shares_a_tensor_with_its_child(session: Any, hardware: None) -> None:
    assert gpunb.get(share.remote()) == [1.0, 1.0, 1.0]


def test_a_child_that_a_task_leaves_ends_with_its_context(
    session: Any, card: Any, record_property: Any
) -> None:
    eventually(lambda: gpunb.available_resources().get("GPU") == 1.0, "the device is free")
    before = used(card)
    pid = gpunb.get(leak.remote())
    took = seconds_until_back(card, before)
    record_property("memory of a left child is back [s]", round(took, 3))
    assert not sessions.alive(pid)
    assert took <= 5 * BACK
