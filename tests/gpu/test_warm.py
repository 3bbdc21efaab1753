"""On a real NVIDIA GPU: warm standbys, which have made a context before there is a task."""

from __future__ import annotations

import time
from typing import Any

import pytest

import gpunb
from tests.gpu.cards import BACK, MIB, seconds_until_back, settled, used
from tests.waiting import eventually

pytestmark = pytest.mark.gpu


def standby() -> dict[str, Any] | None:
    """The facts about the standby, once it is there."""
    (device,) = gpunb.status()["devices"]
    return next((each for each in device["others"] if each["kind"] == "standby"), None)


@gpunb.remote(num_gpus=1)
def first_kernel() -> tuple[float, float, int]:
    import os

    import torch

    start = time.monotonic()
    torch.ones(1024, device="cuda").sum().item()
    return start, time.monotonic(), os.getpid()


def test_a_task_in_a_standby_finds_a_context_and_its_memory_is_back_after_the_session(
    begin: Any, card: Any, record_property: Any
) -> None:
    before = used(card)
    begin(warm=True)
    eventually(lambda: gpunb.status()["preload"], "the preload is done")
    gpunb.get(first_kernel.remote())  # standbys from before that end are gone now
    eventually(standby, "there is another one")
    held = settled(card, before + 50 * MIB) - before
    record_property("memory of a warm standby [MiB]", held // MIB)
    pid = eventually(standby, "it is shown")["pid"]
    assert not gpunb.status()["warnings"]
    submitted = time.monotonic()
    start, end, worker = gpunb.get(first_kernel.remote())
    gpunb.shutdown()
    assert seconds_until_back(card, before) <= 5 * BACK
    assert worker == pid
    record_property("first kernel in a warm standby, in the task [s]", round(end - start, 4))
    record_property("first kernel in a warm standby, from .remote() [s]", round(end - submitted, 4))
