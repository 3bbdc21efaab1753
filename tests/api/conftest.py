"""What the tests of the API share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Closed; opened at the end, whatever happens."""
    gate = Gate(tmp_path)
    yield gate
    gate.open()
