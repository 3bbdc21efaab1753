"""The notebooks are kept with their outputs, and give the same ones each time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

from tests.notebooks.conftest import NOTEBOOKS, SANITIZE, Differences, code_cells
from tests.notebooks.store import TIMEOUT, executed

QUICKSTART, CELLS, *OTHERS = sorted(NOTEBOOKS.glob("*.ipynb"))
"""The first is run by `make demo`; the second has tests of its own."""

FOREIGN = re.compile(r"/(?:home|root|tmp|work|Users|usr)/|site-packages")
"""What belongs to the machine on which the outputs were made."""


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Path]]]:
    """The others, executed as `jupyter execute` does it, two at a time."""
    folder = tmp_path_factory.mktemp("again")
    with ThreadPoolExecutor(2) as pool:
        yield {path.stem: pool.submit(executed, path, folder) for path in OTHERS}


def test_the_quick_start_is_kept_without_outputs() -> None:
    """It runs on the GPUs of whoever opens it, so they differ."""
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(QUICKSTART))


@pytest.mark.parametrize("notebook", [CELLS, *OTHERS], ids=lambda path: path.stem)
def test_it_is_kept_with_its_outputs(notebook: Path) -> None:
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any("execution" in cell.metadata for cell in cells), "times differ with each run"
    for cell in cells:
        shown = {
            kind: value
            for output in cell.outputs
            for kind, value in {**output, **output.get("data", {})}.items()
            if kind != "image/png"
        }
        assert not FOREIGN.search(str(shown)), cell.id


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("notebook", OTHERS, ids=[path.stem for path in OTHERS])
def test_it_gives_the_same_outputs_again(
    notebook: Path, again: dict[str, Future[Path]], differences: Differences
) -> None:
    assert not differences(notebook, again[notebook.stem].result())


def test_nbval_reads_all_of_its_rules() -> None:
    """It drops one whose replacement is empty, without a word."""
    text = SANITIZE.read_text()
    names = re.findall(r"^\[\w+\]$", text, re.MULTILINE)
    assert len(get_sanitize_patterns(text)) == len(names)


def test_another_output_would_be_found(differences: Differences, tmp_path: Path) -> None:
    path = Path(shutil.copy(CELLS, tmp_path))
    assert differences(CELLS, path) == []
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [each for each in notebook.cells if each.id == "data"]
    cell.outputs[0].text = cell.outputs[0].text.replace("450", "449")
    (lost,) = [each for each in notebook.cells if each.id == "home"]
    lost.outputs = []
    nbformat.write(notebook, path)
    assert [each.partition(":")[0] for each in differences(CELLS, path)] == ["data", "home"]
