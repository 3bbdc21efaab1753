"""Starts a gpunb session for a probe, and waits until it is as ready as it gets."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import gpunb
from benchmarks.probe import by_value

REAL = "GPUNB_BENCH_REAL"
"""Environment variable: if set, the machine's own devices are used as far as they exist."""

_PATIENCE = 60.0


def start(devices: int, preload: Sequence[str] | None = None, *, cpus: int | None = None) -> None:
    """A session with so many devices, its preload done and its first workers behind it. Without a
    preload, all settings are the default ones."""
    init(devices, preload, cpus=cpus)
    settle()


def settle() -> None:
    """Wait until the preload is done."""
    deadline = time.monotonic() + _PATIENCE
    while gpunb.status()["preload"] is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the preload was not done after {_PATIENCE:g} s")
        time.sleep(0.02)
    problems = {name: why for name, why in gpunb.status()["preload"].items() if why}
    notes = gpunb.status()["notes"]
    if problems or notes:
        raise RuntimeError(f"preload: {problems} {notes}")
    time.sleep(0.2)  # the standbys without preload are being replaced


def init(devices: int, preload: Sequence[str] | None = None, *, cpus: int | None = None) -> None:
    """A session as it is when `init` returns."""
    modules = None if preload is None else list(preload)
    if os.environ.get(REAL):
        gpunb.init(num_gpus=devices, num_cpus=cpus, preload=modules)
    else:
        gpunb.init(simulate=f"{devices}xA100:40GiB", num_cpus=cpus, preload=modules)


def empty(**options: Any) -> Any:
    """A remote function that does nothing, defined as a notebook would."""

    @by_value
    def nothing() -> None:
        pass

    return gpunb.remote(**options)(nothing) if options else gpunb.remote(nothing)


def uses(module: str, **options: Any) -> Any:
    """A remote function that uses the module a little, and says whether it was there already."""

    @gpunb.remote(**options)
    @by_value
    def little(name: str = module) -> bool:
        import importlib
        import sys

        there = name in sys.modules
        used = importlib.import_module(name)
        if hasattr(used, "zeros"):
            used.zeros(1)
        return there

    return little
