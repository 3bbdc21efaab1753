"""A registry of the test's own, and installed packages made up."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from gpunb.accelerators import registry


class Installed:
    """The entry points that the test's machine has."""

    def __init__(self) -> None:
        self.points: list[EntryPoint] = []
        self.real = registry._entry_points

    def add(self, name: str, value: str) -> None:
        self.points.append(EntryPoint(name, value, registry.GROUP))


@pytest.fixture
def plugins(monkeypatch) -> Iterator[Installed]:
    """What is registered in the test is forgotten after it; no other package is installed."""
    installed = Installed()
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    monkeypatch.setattr(registry, "_entry_points", lambda: installed.points)
    yield installed
    registry._revision += 1
