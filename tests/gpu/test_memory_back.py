"""On a real NVIDIA GPU: memory is free half a second after its process has ended, in any way."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import gpunb
from tests import sessions
from tests.gpu.cards import BACK, KERNEL, MIB, seconds_until_back, used
from tests.waiting import Gate, eventually

pytestmark = pytest.mark.gpu

SIZE = 2048 * MIB

OTHER = """
    import sys, time
    import gpunb

    gpunb.init(num_gpus=1, preload=["numpy", "torch"])

    @gpunb.remote(num_gpus=1)
    def hold(size):
        import torch
        block = torch.ones(size // 4, device="cuda")
        torch.cuda.synchronize()
        time.sleep(600)

    ref = hold.remote(int(sys.stdin.readline()))
    print("holds", flush=True)
    gpunb.get(ref)
"""


@gpunb.remote(num_gpus=1)
def hold(size: int, gate: Gate) -> int:
    import torch

    block = torch.ones(size // 4, device="cuda")
    torch.cuda.synchronize()
    gate.enter()
    return int(block.numel())


@pytest.fixture
def held(session: Any, card: Any, tmp_path: Any) -> Any:
    """A task that holds memory, its gate, and the memory that was in use before it."""
    eventually(lambda: gpunb.available_resources().get("GPU") == 1.0, "the device is free")
    before, gate = used(card), Gate(tmp_path)
    ref = hold.remote(SIZE, gate)
    gate.await_()
    eventually(lambda: used(card) >= before + SIZE, "the memory is taken")
    return ref, gate, before


def test_after_a_task(held: Any, card: Any, record_property: Any) -> None:
    ref, gate, before = held
    gate.open()
    assert gpunb.get(ref) == SIZE // 4
    took = seconds_until_back(card, before)
    record_property("memory is back after a task [s]", round(took, 3))
    assert took <= BACK


def test_after_a_kill(held: Any, card: Any, record_property: Any) -> None:
    ref, _, before = held
    gpunb.cancel(ref, force=True)
    took = seconds_until_back(card, before)
    with pytest.raises(gpunb.exceptions.TaskCancelledError):
        gpunb.get(ref)
    record_property("memory is back after a kill [s]", round(took, 3))
    assert took <= BACK


def test_after_an_interrupt(held: Any, card: Any, record_property: Any) -> None:
    ref, _, before = held
    gpunb.cancel(ref)
    with pytest.raises(gpunb.exceptions.TaskCancelledError):
        gpunb.get(ref)
    took = seconds_until_back(card, before)
    record_property("memory is back after an interrupt [s]", round(took, 3))
    assert took <= BACK


def test_after_a_kill_of_the_kernel(card: Any, record_property: Any) -> None:
    before = used(card)
    with sessions.running(OTHER, env=KERNEL) as kernel:
        kernel.stdin.write(f"{SIZE}\n")
        kernel.stdin.flush()
        assert kernel.stdout.readline() == "holds\n", kernel.stderr.read()
        eventually(lambda: used(card) >= before + SIZE, "the memory is taken")
        os.kill(kernel.pid, signal.SIGKILL)
        took = seconds_until_back(card, before)
    record_property("memory is back after a kill of the kernel [s]", round(took, 3))
    assert took <= BACK
