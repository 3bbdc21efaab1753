"""What the tests on a real GPU measure, and the code that their tasks' child processes run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from gpunb import accelerators
from tests.sessions import ROOT
from tests.waiting import eventually

MIB = 2**20
SLACK = 64 * MIB

KERNEL = {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))}
"""The environment of other kernels, which may have to find the stand-in."""

STAND_IN = "GPUNB_STAND_IN" in os.environ

BACK = 5.0 if STAND_IN else 0.5
"""Seconds in which memory must be free again. On the stand-in they measure how busy the machine is.
"""


def used(card: Any) -> int:
    """Bytes in use on the device, by anybody."""
    memory = accelerators.measure([card])[card.key].memory_used
    assert memory is not None
    return memory


def seconds_until_back(card: Any, before: int) -> float:
    """Wait until no more memory than before is in use; return the seconds that this took."""
    start = time.monotonic()
    within = max(10.0, 4 * BACK)
    eventually(lambda: used(card) <= before + SLACK, f"{before + SLACK} bytes in use", within)
    return time.monotonic() - start


def settled(card: Any, least: int) -> int:
    """Wait until at least so many bytes are in use, and no more are taken; return how many."""

    def same() -> int:
        now = used(card)
        if now < least:
            return 0
        time.sleep(0.2)  # by the clock: two readings of the driver must be the same
        return now if used(card) == now else 0

    found: int = eventually(same, f"{least} bytes in use")
    return found


def without_context(card: Any) -> bool:
    """Return whether this process has no context on the device."""
    processes = accelerators.measure([card])[card.key].processes or ()
    return os.getpid() not in [each.pid for each in processes]


def add_one(tensor: Any) -> None:
    """Run in a child process of a task: change a tensor that the task shares with it."""
    tensor += 1


def hold_context(report: Callable[[int], object], seconds: float) -> None:
    """Run in a child process of a task: make a context, report the process and go on."""
    import torch

    torch.ones(1024, device="cuda")
    report(os.getpid())
    time.sleep(seconds)
