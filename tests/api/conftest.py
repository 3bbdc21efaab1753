"""What the tests of the API share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from gpunb.protocol import sink
from gpunb.protocol.permits import Permits
from tests.waiting import Gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Closed; opened at the end, whatever happens."""
    gate = Gate(tmp_path)
    yield gate
    gate.open()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the permits to begin tasks that were sent ahead."""
    granted: list[int] = []
    grant = Permits.grant

    def noting(self: Permits, count: int) -> int:
        first = grant(self, count)
        granted.extend(range(first, first + count))
        return first

    monkeypatch.setattr(Permits, "grant", noting)
    return granted


class Noted(sink.Sink):
    """Notes the text of one task."""

    made: ClassVar[list[Noted]] = []

    def __init__(self, name: str) -> None:
        self.said = ""
        Noted.made.append(self)

    def text(self, stream: str, text: str) -> None:
        self.said += text


@pytest.fixture
def noted() -> Iterator[list[Noted]]:
    """The text of each task, in the order in which they were handed in."""
    Noted.made.clear()
    sink.install(Noted)
    yield Noted.made
    sink.install(None)
    Noted.made.clear()
