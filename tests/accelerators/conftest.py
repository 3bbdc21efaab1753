"""A registry of the test's own, installed packages made up, and recorded machines."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from gpunb.accelerators import registry
from gpunb.accelerators.nvidia import Nvidia
from tests.accelerators.machines import Machine


class Installed:
    """The entry points that the test's machine has."""

    def __init__(self) -> None:
        self.points: list[EntryPoint] = []
        self.real = registry._entry_points

    def add(self, name: str, value: str) -> None:
        self.points.append(EntryPoint(name, value, registry.GROUP))


@pytest.fixture
def plugins(monkeypatch) -> Iterator[Installed]:
    """Only NVIDIA's plug-in and what the test registers are known; no package is installed."""
    installed = Installed()
    monkeypatch.setattr(registry, "_known", {"nvidia": Nvidia})
    monkeypatch.setattr(registry, "_built_in", {})
    monkeypatch.setattr(registry, "_entry_points", lambda: installed.points)
    yield installed
    registry._revision += 1


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    """A recorded machine in place of this one: nothing is there until something is played."""
    return Machine(tmp_path, monkeypatch)
