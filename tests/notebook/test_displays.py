"""Displays arrive as plain values; one that cannot be made plain is an error of its cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.kernels import Kernel
from tests.waiting import Gate

pytestmark = pytest.mark.kernel

BACKGROUND = """
%%gpu 0.5 --bg
from pathlib import Path
from tests.waiting import Gate
Gate(Path({folder!r})).enter()
survivor = 'here'
"""

GPU = "%%gpu 0.5\n"

SHOWN = {
    "text that shows itself": """
class Html(str):
    _repr_html_ = lambda self: self
Html("<b>x</b>")
""",
    "metadata of a kind of its own": """
class Facts(dict):
    pass
display({"text/plain": "x", "text/html": "<b>x</b>"}, metadata=Facts(a=Facts(b=1)), raw=True)
""",
    "a number of NumPy's": """
import numpy
display({"text/html": "<b>x</b>", "application/json": {"a": numpy.float32(1)}}, raw=True)
""",
}

REFUSED = {
    "an object of a module that only the worker has": """
import sys, types
module = types.ModuleType("only_here")
exec("class Thing: pass", module.__dict__)
sys.modules["only_here"] = module
display({"text/plain": "x"}, metadata={"a": module.Thing()}, raw=True)
""",
    "what would end the process that opens it": """
import os
class Ends:
    def __reduce__(self):
        return os._exit, (9,)
display({"text/plain": Ends()}, raw=True)
""",
    "what contains itself": """
endless = {}
endless["self"] = endless
display({"application/json": endless}, raw=True)
""",
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_display_of_plain_kinds_is_shown(cell: Kernel, case: str) -> None:
    result = cell.ok(GPU + SHOWN[case])
    (data,) = (each for each in [*result.displayed, result.result] if each)
    assert data["text/html"] == "<b>x</b>"


@pytest.mark.parametrize("case", REFUSED)
def test_a_display_that_cannot_be_sent_is_an_error_of_its_cell(
    cell: Kernel, case: str, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    cell.ok("%config GpuMagics.headless = False")
    cell.ok(BACKGROUND.strip().format(folder=str(tmp_path)))
    gate.await_()
    result = cell(GPU + REFUSED[case])
    assert result.ename == "TypeError"
    assert "cannot be displayed" in result.evalue
    gate.open()
    cell.ok("%gpu wait")
    assert cell.value("survivor") == "here"
    cell.ok("del survivor")
    assert "1" in (cell.ok(GPU + "1").value or "")
