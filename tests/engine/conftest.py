"""Fixtures for tests of the engine's parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.parts import Parts


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    """The parts of an engine, with a history of earlier runs of their own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    parts = Parts()
    yield parts
    parts.close()
