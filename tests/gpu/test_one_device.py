"""On a real NVIDIA GPU: pinning, sharing, and memory that is given back. One device is enough."""

import os
import time

import pytest

import gpunb
from gpunb import accelerators

pytestmark = pytest.mark.gpu

MIB = 2**20
SLACK = 64 * MIB


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="these tests compute with PyTorch")


@pytest.fixture(scope="module")
def session(torch, by_value):
    devices = [each for each in accelerators.detect().devices if each.vendor == "nvidia"]
    if not devices:
        pytest.skip("no NVIDIA GPU: " + "; ".join(accelerators.detect().notes))
    with gpunb.init(num_gpus=1, preload=["numpy", "torch"]) as session:
        yield session


def used(session) -> int:
    """Bytes in use on the device, by anybody."""
    device = session.devices[0]
    memory = accelerators.measure([device])[device.key].memory_used
    assert memory is not None
    return memory


def wait_until_free() -> None:
    deadline = time.monotonic() + 30
    while gpunb.available_resources().get("GPU") != 1.0:
        assert time.monotonic() < deadline, gpunb.status()
        time.sleep(0.01)


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
    before = used(session)
    pids = set()
    for _ in range(5):
        *_, pid = gpunb.get(allocate.remote(1024 * MIB))
        pids.add(pid)
    wait_until_free()
    assert len(pids) == 5
    assert used(session) <= before + SLACK


def test_memory_is_back_after_a_kill(session):
    wait_until_free()
    before = used(session)

    @gpunb.remote(num_gpus=1)
    def hold():
        import torch

        block = torch.ones(256 * MIB, device="cuda")
        torch.cuda.synchronize()
        time.sleep(600)
        return block

    ref = hold.remote()
    deadline = time.monotonic() + 60
    while used(session) < before + 512 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    gpunb.cancel(ref, force=True)
    with pytest.raises(gpunb.exceptions.TaskCancelledError):
        gpunb.get(ref)
    wait_until_free()
    assert used(session) <= before + SLACK


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
    device = session.devices[0]
    processes = accelerators.measure([device])[device.key].processes or ()
    assert os.getpid() not in [each.pid for each in processes]
