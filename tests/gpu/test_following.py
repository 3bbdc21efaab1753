"""On a real NVIDIA GPU: later tasks find the libraries that earlier ones have imported."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest

import gpunb
from gpunb import accelerators
from gpunb.processes import followed
from tests.gpu.cards import seconds_until_back, used
from tests.waiting import eventually

pytestmark = pytest.mark.gpu

PAUSE = 60.0
"""Seconds in which a library is imported once more, in the background."""


def with_torch() -> None:
    """Train one step."""
    import torch

    weights = torch.nn.Parameter(torch.zeros(1024, device="cuda"))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    (weights * 2).sum().backward()
    optimizer.step()
    assert weights.sum().item() == -2048.0


def with_cupy() -> None:
    import cupy

    assert float(cupy.arange(1024).sum()) == 523776.0


def with_jax() -> None:
    import jax

    assert float(jax.numpy.arange(1024).sum()) == 523776.0


def timed(compute: Any) -> tuple[bool, float]:
    """Return whether the library was there before, and the seconds that the work took."""
    import sys
    import time

    there = compute.__name__.removeprefix("with_") in sys.modules
    start = time.monotonic()
    compute()
    return there, time.monotonic() - start


@pytest.mark.parametrize("compute", [with_torch, with_cupy, with_jax])
def test_a_library_is_preloaded_or_a_note_says_why_not(
    begin: Any, card: Any, record_property: Any, monkeypatch: Any, compute: Any
) -> None:
    name = compute.__name__.removeprefix("with_")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setattr(followed, "FIRST_PAUSE", 0.01)
    gpunb.shutdown()
    before = used(card)
    begin(preload=None)
    eventually(lambda: gpunb.status()["preload"] is not None, "numpy and IPython are preloaded")
    task = gpunb.remote(num_gpus=1, max_retries=0)(timed)
    there, first = gpunb.get(task.remote(compute))
    assert not there

    def decided() -> tuple[bool, list[str]] | None:
        status = gpunb.status()
        notes = [each for each in status["notes"] if each.startswith("preload: ")]
        preloaded = name in status["preload"]
        left_out = any(f" {name} by itself" in each or "no longer" in each for each in notes)
        return (preloaded, notes) if preloaded or left_out else None

    submitted = time.monotonic()
    preloaded, notes = eventually(decided, f"{name} is preloaded or left out", PAUSE)
    record_property(f"{name} is decided on after [s]", round(time.monotonic() - submitted, 2))
    record_property(f"{name} is preloaded", "; ".join(notes) or "yes")
    seconds_until_back(card, before)
    assert not accelerators.measure([card])[card.key].processes
    there, second = gpunb.get(task.remote(compute))
    record_property(f"first task with {name} [s]", round(first, 3))
    record_property(f"later task with {name} [s]", round(second, 3))
    assert there == preloaded
    if name == "torch":
        assert preloaded, notes
    assert seconds_until_back(card, before) <= PAUSE
