"""On a real NVIDIA GPU: figures and names of devices are those of nvidia-smi and of CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest

import gpunb
from gpunb.engine.sampler import hidden
from gpunb.scheduler.shares import CONTEXT
from tests.gpu.cards import MIB
from tests.waiting import Gate, eventually

pytestmark = pytest.mark.gpu

CLOSE = 64 * MIB


def smi(query: str, card: Any) -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not on PATH")
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--id={card.key}"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [[part.strip() for part in line.split(",")] for line in text.splitlines() if line]


@gpunb.remote(num_gpus=0.5)
def hold(size: int, gate: Gate) -> int:
    import torch

    block = torch.ones(size // 4, device="cuda")
    torch.cuda.synchronize()
    gate.enter()
    return os.getpid() if len(block) else 0


def test_the_sampler_says_what_nvidia_smi_says(
    begin: Any, card: Any, tmp_path: Any, record_property: Any
) -> None:
    begin()
    gate = Gate(tmp_path)
    ref = hold.remote(1024 * MIB, gate)
    gate.await_()

    def figures() -> tuple[int, int] | None:
        (device,) = gpunb.status()["devices"]
        ours = device["usage"]["memory_used"]
        theirs = int(smi("--query-gpu=memory.used", card)[0][0]) * MIB
        near = ours and ours > 1024 * MIB and abs(ours - theirs) <= CLOSE
        return (ours, theirs) if near else None

    ours, theirs = eventually(figures, "both say the same of the device")
    record_property("memory in use: gpunb, nvidia-smi [MiB]", [ours // MIB, theirs // MIB])
    (job,) = gpunb.status()["running"]
    listed = {int(pid): memory for pid, memory in smi("--query-compute-apps=pid,used_memory", card)}
    if job["pid"] in listed and listed[job["pid"]].isdigit():
        both = [job["memory"]["now"] // MIB, int(listed[job["pid"]])]
        record_property("memory of the task: gpunb, nvidia-smi [MiB]", both)
        # In a container the worker itself reports its pool, which is without the context.
        assert abs(both[0] - both[1]) * MIB <= (3 * CONTEXT if hidden() else CLOSE)
    else:
        record_property("processes that nvidia-smi lists", len(listed))
    gate.open()
    assert gpunb.get(ref) == job["pid"]


def test_a_device_can_be_named_by_its_uuid(card: Any, by_value: None, monkeypatch: Any) -> None:
    gpunb.shutdown()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", card.key)

    @gpunb.remote(num_gpus=1)
    def look() -> tuple[Any, ...]:
        import torch

        torch.ones(1, device="cuda")
        found = torch.cuda.get_device_properties(0)
        return gpunb.get_gpu_ids(), torch.cuda.device_count(), str(getattr(found, "uuid", ""))

    with gpunb.init(preload=["numpy", "torch"]) as session:
        assert [each.id for each in session.devices] == [card.key]
        ids, count, uuid = gpunb.get(look.remote())
    assert (ids, count) == ([card.key], 1)
    assert uuid in card.key  # an older PyTorch does not tell it
