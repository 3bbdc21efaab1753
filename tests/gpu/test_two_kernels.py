"""On a real NVIDIA GPU: two kernels share one device, and neither takes what the other holds."""

import contextlib
import os
import signal

import pytest

import gpunb
from gpunb import accelerators
from gpunb.runtime import folder
from tests import sessions
from tests.runtime.test_ledger_sessions import Kernel
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.gpu

OTHER = """
    import json, os, sys
    import gpunb

    gpunb.init(num_gpus=1, preload=["numpy", "torch"])

    @gpunb.remote
    class Holder:
        def fill(self, size):
            import torch
            self.block = torch.ones(size // 4, device="cuda")
            torch.cuda.synchronize()
            return os.getpid()

    names = globals()
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            value = eval(line, names)
        except SyntaxError:
            exec(line, names)
            value = None
        print(json.dumps(value, default=repr), flush=True)
"""

MIB = 2**20


@pytest.fixture
def other(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="these tests compute with PyTorch")
    devices = [each for each in accelerators.detect().devices if each.vendor == "nvidia"]
    if not devices:
        pytest.skip("no NVIDIA GPU: " + "; ".join(accelerators.detect().notes))
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "run"))
    monkeypatch.delenv("GPUNB_LEDGER_DIR", raising=False)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(sessions.running(OTHER))
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        yield Kernel(process)


@gpunb.remote(num_gpus=0.6)
def sums():
    import torch

    return float(torch.arange(1000, device="cuda").sum())


def used(device):
    figures = accelerators.measure([device])[device.key]
    return figures.memory_used


def test_what_one_kernel_holds_the_other_waits_for(other, start):
    other.do("holder = Holder.options(num_gpus=0.6).remote()")
    pid = other.do(f"gpunb.get(holder.fill.remote({512 * MIB}))")
    session = start(num_gpus=1, preload=["numpy", "torch"])
    waiting = sums.remote()
    eventually(lambda: gpunb.status()["waiting"], "it waits")
    (reason,) = [each["waits_for"] for each in gpunb.status()["waiting"]]
    assert (
        f"0.6 of GPU {session.devices[0].id} is held by another kernel (pid {other.pid}" in reason
    )
    (device,) = gpunb.status()["devices"]
    assert other.pid in [each["pid"] for each in device["others"]]
    before = used(session.devices[0])
    other.do("gpunb.kill(holder)")
    assert gpunb.get(waiting, timeout=PATIENCE) == 499500.0
    assert not sessions.alive(pid)
    eventually(lambda: used(session.devices[0]) < before - 256 * MIB, "its memory is free")


def test_the_devices_of_a_killed_kernel_are_free_with_their_memory(other, start):
    other.do("holder = Holder.options(num_gpus=1).remote()")
    pid = other.do(f"gpunb.get(holder.fill.remote({512 * MIB}))")
    start(num_gpus=1, preload=["numpy", "torch"])
    waiting = sums.remote()
    eventually(lambda: gpunb.status()["waiting"], "it waits")
    os.kill(other.pid, signal.SIGKILL)
    assert gpunb.get(waiting, timeout=PATIENCE) == 499500.0
    assert not sessions.alive(pid)


def test_two_kernels_compute_on_one_device_at_the_same_time(other, start):
    other.do("holder = Holder.options(num_gpus=0.4).remote()")
    other.do(f"gpunb.get(holder.fill.remote({64 * MIB}))")
    start(num_gpus=1, preload=["numpy", "torch"])
    assert gpunb.get(sums.remote(), timeout=PATIENCE) == 499500.0
