"""The notebook on cells runs from start to end, and shows what it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks.conftest import NOTEBOOKS, Differences

FAILS = "raises-exception"

pytestmark = [pytest.mark.kernel, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cells(cells_notebook: Path) -> dict[str, Any]:
    """The executed cells by their ids."""
    notebook = nbformat.read(cells_notebook, as_version=4)
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def text(cell: Any, stream: str = "stdout") -> str:
    return "".join(
        each.text for each in cell.outputs if each.output_type == "stream" and each.name == stream
    )


def value(cell: Any) -> str:
    """What the cell showed as its value."""
    (found,) = [each for each in cell.outputs if each.output_type == "execute_result"]
    return str(found.data["text/plain"])


def percent(found: str) -> float:
    """The accuracy in a text."""
    (number,) = re.findall(r"accuracy (\d\.\d\d)", found)
    return float(number)


def error(cell: Any) -> Any:
    (found,) = cell.outputs
    assert found.output_type == "error"
    return found


def test_only_the_cells_that_are_to_fail_do(cells: dict[str, Any]) -> None:
    failed = {
        name
        for name, cell in cells.items()
        if any(each.output_type == "error" for each in cell.outputs)
    }
    tagged = {name for name, cell in cells.items() if FAILS in cell.metadata.get("tags", [])}
    assert failed == tagged == {"error", "infeasible"}
    assert not any(text(cell, "stderr") for cell in cells.values())


def test_the_outputs_are_those_that_are_kept(
    cells_notebook: Path, differences: Differences
) -> None:
    assert not differences(NOTEBOOKS / cells_notebook.name, cells_notebook)


def test_names_go_in_and_come_home(cells: dict[str, Any]) -> None:
    assert text(cells["fit"]) == "on GPU 0\n"
    assert percent(value(cells["fit"])) > 0.9
    fitted, *digits = text(cells["home"]).splitlines()
    assert fitted == "MLPClassifier fitted in another process: True"
    read, labels = [line.split(":")[1].split() for line in digits]
    assert len(read) == len(labels) == 8
    assert sum(map(str.__eq__, read, labels)) >= 7


def test_a_figure_and_a_bar(cells: dict[str, Any]) -> None:
    (figure,) = [each for each in cells["bar"].outputs if each.output_type == "display_data"]
    assert figure.data["image/png"].startswith("iVBOR")
    assert "training: 100%|██████████| 20/20" in text(cells["bar"])
    first, fitted, last = map(float, re.findall(r"\d+\.\d+", text(cells["changed"])))
    assert first > fitted > last > 0


def test_background_cells_lose_nothing(cells: dict[str, Any]) -> None:
    note, *rates = text(cells["sweep"]).splitlines()
    assert "runs to its end first" in note
    assert [line.partition(":")[0] for line in rates] == [
        "rate 0.0003",
        "rate 0.001",
        "rate 0.003",
        "rate 0.01",
    ]
    best = value(cells["sweep"])
    assert re.fullmatch(r"<Job #\d+ sweep done on GPU 0, \d+\.\d s>", value(cells["handle"]))
    assert text(cells["both"]).splitlines()[-1] == "on GPUs 0,1"
    status = value(cells["status"])
    for part in ("A100", "40 GiB", "sweep", "both", "In[3]"):
        assert part in status
    assert re.fullmatch(r"#\d+ both: done\n", text(cells["why"]))
    assert text(cells["wait"]) == "2 done\n"
    assert text(cells["gathered"]).splitlines()[0] == f"best rate: {best}"
    found = re.findall(r"([\d.]+): ([\d.]+)", text(cells["gathered"]))
    assert [f"rate {rate}: accuracy {float(each):.2f}" for rate, each in found] == rates
    assert text(cells["logs"]).splitlines() == rates
    assert [
        each.data["text/plain"]
        for each in cells["logs"].outputs
        if each.output_type == "display_data"
    ] == [best]


def test_a_session_goes_on_where_it_stopped(cells: dict[str, Any]) -> None:
    first, second = text(cells["train"]), text(cells["again"])
    assert first.endswith("after 10 rounds\n")
    assert second.endswith("after 20 rounds\n")
    assert 0.9 < percent(first) <= percent(second) + 0.02
    left = text(cells["left"])
    assert percent(left) == percent(second)
    assert left.endswith("the network did: False\n")


def test_an_expression_has_a_value(cells: dict[str, Any]) -> None:
    assert text(cells["expression"]) == "10 probabilities for each of 450 digits\n"


def test_an_error_names_the_real_lines(cells: dict[str, Any]) -> None:
    failed = error(cells["error"])
    assert failed.ename == "ValueError"
    lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(failed.traceback))
    here, there = cells["error"].execution_count, cells["function"].execution_count
    assert f"Cell In[{here}], line 3" in lines
    assert "----> 3 X_even = normalised(X_test)" in lines
    assert f"Cell In[{there}], line 2, in normalised(rows)" in lines
    assert "site-packages" not in lines
    assert re.search(r"ink 0\.\d\d$", text(cells["after-error"]))


def test_too_much_is_refused(cells: dict[str, Any]) -> None:
    refused = error(cells["infeasible"])
    assert refused.ename == "InfeasibleRequestError"
    assert "80 GiB" in refused.evalue
    assert "2 x A100 (40 GiB)" in refused.evalue


def test_an_actor_answers_the_notebook_and_a_cell(cells: dict[str, Any]) -> None:
    read = re.fullmatch(r"450 digits read, (\d+)% right\n", text(cells["actor"]))
    assert read
    assert int(read[1]) > 90
    at_home = text(cells["home"]).splitlines()[1].split(":")[1]
    assert text(cells["from-a-cell"]).startswith("it reads, for a cell:")
    assert len(text(cells["from-a-cell"]).split(":")[1].split()) == len(at_home.split())
