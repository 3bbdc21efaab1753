"""On a real NVIDIA GPU: two kernels share one device, and neither takes what the other holds."""

import contextlib
import os
import signal

import pytest

import gpunb
from tests import sessions
from tests.gpu.cards import KERNEL, MIB, settled, used
from tests.leases.test_ledger_sessions import Kernel
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


@pytest.fixture
def other(card):
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(sessions.running(OTHER, env=KERNEL))
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        yield Kernel(process)


@gpunb.remote(num_gpus=0.6)
def sums():
    import torch

    return float(torch.arange(1000, device="cuda").sum())


def test_what_one_kernel_holds_the_other_waits_for(begin, other):
    other.do("holder = Holder.options(num_gpus=0.6).remote()")
    pid = other.do(f"gpunb.get(holder.fill.remote({512 * MIB}))")
    session = begin()
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


def test_the_devices_of_a_killed_kernel_are_free_with_their_memory(begin, other):
    other.do("holder = Holder.options(num_gpus=1).remote()")
    pid = other.do(f"gpunb.get(holder.fill.remote({512 * MIB}))")
    begin()
    waiting = sums.remote()
    eventually(lambda: gpunb.status()["waiting"], "it waits")
    os.kill(other.pid, signal.SIGKILL)
    assert gpunb.get(waiting, timeout=PATIENCE) == 499500.0
    assert not sessions.alive(pid)


def test_two_kernels_compute_on_one_device_at_the_same_time(begin, other):
    other.do("holder = Holder.options(num_gpus=0.4).remote()")
    other.do(f"gpunb.get(holder.fill.remote({64 * MIB}))")
    begin()
    assert gpunb.get(sums.remote(), timeout=PATIENCE) == 499500.0


def test_a_warm_standby_ends_when_another_kernel_wants_its_device(begin, card, other):
    before = used(card)
    begin(warm=True)
    settled(card, before + 50 * MIB)
    other.do("holder = Holder.options(num_gpus=1).remote()")
    assert other.do(f"gpunb.get(holder.fill.remote({64 * MIB}))")
    (device,) = gpunb.status()["devices"]
    assert "standby" not in [each["kind"] for each in device["others"]]
    other.do("gpunb.kill(holder)")
    assert gpunb.get(sums.remote(), timeout=PATIENCE) == 499500.0
    settled(card, before + 50 * MIB)  # the next one
