"""The values and settings that travel with a cell."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from gpunb.data import serialize
from gpunb.notebook.capture import CellRequest, meaning, pack_cell
from gpunb.notebook.shell import NotebookShell
from gpunb.scheduler.options import Options
from gpunb.worker.cell.cell_types import Cell


@pytest.fixture(scope="module")
def shell() -> Iterator[NotebookShell]:
    config = Config()
    config.HistoryManager.enabled = False
    yield NotebookShell(InteractiveShell(config=config))
    InteractiveShell.clear_instance()


def request(source: str, **more: Any) -> CellRequest:
    return CellRequest(source, "%%gpu", Options(), **more)


def packed(shell: NotebookShell, source: str, **more: Any) -> tuple[Cell, dict[str, Any]]:
    """The cell and its values, as the worker gets them."""
    payload, _ = pack_cell(shell, request(source, **more), 1)
    cell, values = serialize.loads(payload)
    return cell, values


@pytest.mark.parametrize("source", [r'a = "\d"', 'get_ipython\na = "\\d"'])
def test_a_warning_of_the_compiler_is_shown_once_here(shell: NotebookShell, source: str) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        packed(shell, source)
    assert len([each for each in shown if "invalid escape" in str(each.message)]) == 1


def test_only_names_that_the_cell_reads_travel(shell: NotebookShell) -> None:
    shell.user_ns.update(a=1, b=2)
    cell, values = packed(shell, "c = a + 1")
    assert values == {"a": 1}
    assert cell.binds is not None
    assert "c" in cell.binds


def test_names_that_functions_look_up_go_along(shell: NotebookShell) -> None:
    exec("scale = 3\ndef scaled(x): return x * scale", shell.user_ns)
    _, values = packed(shell, "scaled(2)")
    assert sorted(values) == ["scale", "scaled"]


def test_modules_travel_by_name(shell: NotebookShell) -> None:
    exec("import math as m", shell.user_ns)
    cell, values = packed(shell, "m.sqrt(4)")
    assert cell.modules == {"m": "math"}
    assert values == {}


def test_listed_names_travel_and_no_others(shell: NotebookShell) -> None:
    shell.user_ns.update(a=1, b=2)
    assert packed(shell, "c = a", inputs=("b",))[1] == {"b": 2}
    with pytest.raises(UsageError, match="not bound in the notebook: nowhere"):
        packed(shell, "c = a", inputs=("nowhere",))


def test_a_value_that_cannot_be_pickled_is_named(shell: NotebookShell) -> None:
    shell.user_ns["stream"] = (each for each in ())
    with pytest.raises(UsageError, match="stream"):
        packed(shell, "next(stream)")


def test_lines_keep_their_numbers_in_the_notebook(shell: NotebookShell) -> None:
    assert packed(shell, "x = 1\n")[0].source == "#%%gpu\nx = 1\n"
    with pytest.raises(SyntaxError) as caught:
        packed(shell, "x = 1\nx = = 2")
    assert caught.value.lineno == 3


def test_the_meaning_of_a_cell_is_its_code_and_its_values(shell: NotebookShell) -> None:
    shell.user_ns.update(a=1)
    before = meaning(shell, request("c = a"))
    assert meaning(shell, request("c = a  # a comment")) == before
    assert meaning(shell, request("c = a + 1")) != before
    shell.user_ns.update(a=2)
    assert meaning(shell, request("c = a")) != before
    given = meaning(shell, request("c = a", given={"a": 7}))
    assert meaning(shell, request("c = a", given={"a": 8})) == given
