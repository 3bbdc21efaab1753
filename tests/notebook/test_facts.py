"""What a snapshot says of the cells that ran."""

from __future__ import annotations

import json

import pytest

from tests.notebook.kernels import Kernel

pytestmark = pytest.mark.kernel

ASK = """
import json
print(json.dumps([[j["state"], j["background"], j["kind"]] for j in gpunb.status()["finished"]]))
"""


def last(cell: Kernel) -> list[object]:
    """State, whether in the background, and kind of what ended last."""
    printed: list[object] = json.loads(cell(ASK).stdout)[0]
    return printed


def test_a_cell_that_raised_has_failed(cell: Kernel) -> None:
    cell("%%gpu 0.5\n1 / 0")
    assert last(cell) == ["failed", False, "cell"]
    cell("%%gpu 0.5\n1")
    assert last(cell) == ["done", False, "cell"]


def test_the_status_tells_background_cells_from_others(
    cell: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "stdin", True)
    cell("%%gpu 0.5 --bg\n1")
    cell("%gpu wait")
    assert last(cell) == ["done", True, "cell"]
    cell("%%gpu 0.5 --bg\n1 / 0")
    cell("%gpu wait")
    assert last(cell) == ["failed", True, "cell"]
