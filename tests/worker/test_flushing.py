"""While a cell runs, text that does not end its line is shown, too."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from gpunb.worker.cell import run
from tests.waiting import PATIENCE, eventually


class Stream(io.StringIO):
    """Counts how often it is flushed, and can hold up a flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = 0
        self.may_end = threading.Event()
        self.may_end.set()

    def flush(self) -> None:
        self.flushed += 1
        self.may_end.wait()


def test_text_is_flushed_again_and_again_and_the_cell_sees_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, before = Stream(), threading.enumerate()
    monkeypatch.setattr(sys, "stdout", stream)
    with run._flushing():
        eventually(lambda: stream.flushed >= 2)
        assert threading.enumerate() == before


def test_a_cell_is_not_over_before_a_flush_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    stream.may_end.clear()
    over = threading.Event()

    def cell() -> None:
        with run._flushing():
            eventually(lambda: stream.flushed)
        over.set()

    running = threading.Thread(target=cell)
    running.start()
    eventually(lambda: stream.flushed)
    assert not over.wait(3 * run.FLUSH)
    stream.may_end.set()
    assert over.wait(PATIENCE)
    running.join()
