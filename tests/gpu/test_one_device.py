"""On a real NVIDIA GPU: pinning, sharing, and memory that is given back. One device is enough."""

import os

import pytest

import gpunb
from tests.gpu.cards import MIB, SLACK, used, without_context
from tests.waiting import eventually

pytestmark = pytest.mark.gpu


def wait_until_free() -> None:
    eventually(lambda: gpunb.available_resources().get("GPU") == 1.0, "the device is free")


@gpunb.remote(num_gpus=1)
def allocate(size: int):
    import torch

    block = torch.ones(size // 4, device="cuda")
    torch.cuda.synchronize()
    return float(block.sum()), torch.cuda.device_count(), gpunb.get_gpu_ids(), os.getpid()


@gpunb.remote(num_gpus=0.25)
def quarter():
    import torch

    value = float(torch.arange(1000, device="cuda").sum())
    return value, torch.cuda.device_count(), gpunb.get_gpu_ids()


@gpunb.remote(num_gpus=1, max_calls=0)
def reused():
    import torch

    return float(torch.ones(10, device="cuda").sum()), os.getpid()


@gpunb.remote
def without():
    import torch

    return torch.cuda.is_available(), torch.cuda.device_count()


def test_a_device_has_what_nvml_says_of_it(session):
    device = session.devices[0]
    assert device.key.startswith("GPU-")
    assert device.memory is not None
    assert device.memory > 2**30
    assert device.type
    assert not device.logical


def test_workers_are_forked_with_pytorch(session):
    problems = eventually(lambda: gpunb.status()["preload"], "the preload is done")
    assert problems == {"numpy": None, "torch": None}
    assert gpunb.status()["notes"] == []


def test_a_task_sees_its_device_and_no_other(session):
    total, count, ids, _ = gpunb.get(allocate.remote(64 * MIB))
    assert total == 16 * MIB
    assert count == 1
    assert ids == [session.devices[0].id]


def test_a_task_without_a_share_sees_none(session):
    assert gpunb.get(without.remote()) == (False, 0)


def test_four_quarters_share_one_device(session):
    results = gpunb.get([quarter.remote() for _ in range(4)])
    assert results == [(499500.0, 1, [session.devices[0].id])] * 4


def test_memory_is_back_when_the_share_is_free(session):
    wait_until_free()
    before = used(session.devices[0])
    pids = set()
    for _ in range(5):
        *_, pid = gpunb.get(allocate.remote(1024 * MIB))
        pids.add(pid)
    wait_until_free()
    assert len(pids) == 5
    assert used(session.devices[0]) <= before + SLACK


def test_a_reused_worker_keeps_its_context(session):
    (_, first), (_, second) = gpunb.get(reused.remote()), gpunb.get(reused.remote())
    assert first == second


def test_a_tensor_on_the_host_comes_home(session, torch):
    @gpunb.remote(num_gpus=1)
    def compute():
        import torch

        return torch.arange(5, device="cuda").cpu()

    assert gpunb.get(compute.remote()).tolist() == [0, 1, 2, 3, 4]


def test_the_kernel_never_touches_the_device(session, torch):
    gpunb.get(allocate.remote(MIB))
    assert not torch.cuda.is_initialized()
    assert without_context(session.devices[0])
