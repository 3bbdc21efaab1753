"""The notebooks, executed once for all tests of a file."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import IPyNbFile, coalesce_streams, get_sanitize_patterns

from tests.notebooks.store import executed, run

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SANITIZE = Path(__file__).parent / "nbval.cfg"

Differences = Callable[[Path, Path], list[str]]


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [each for each in nbformat.read(path, as_version=4).cells if each.cell_type == "code"]


@pytest.fixture(scope="session")
def demo() -> subprocess.CompletedProcess[str]:
    """What `make demo` does."""
    return run(NOTEBOOKS / "run_demo.py")


@pytest.fixture(scope="session")
def quickstart(demo: subprocess.CompletedProcess[str]) -> Path:
    """The quick start notebook, executed."""
    assert demo.returncode == 0, demo.stderr
    return NOTEBOOKS / "executed" / "01-quickstart.ipynb"


@pytest.fixture(scope="session")
def cells_notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook on cells, executed."""
    return executed(NOTEBOOKS / "02-cells.ipynb", tmp_path_factory.mktemp("executed"))


@pytest.fixture(scope="session")
def differences(request: pytest.FixtureRequest) -> Differences:
    """Says in which outputs a notebook differs from another run of it, by nbval's own rules."""

    def find(notebook: Path, again: Path) -> list[str]:
        file = IPyNbFile.from_parent(request.session, path=notebook)
        file.sanitize_patterns.update(get_sanitize_patterns(SANITIZE.read_text()))
        found = []
        for cell, fresh in zip(file.collect(), code_cells(again), strict=True):
            assert cell.cell.id == fresh.id
            stored, outputs = map(coalesce_streams, (cell.cell.outputs, fresh.outputs))
            if cell.options["check"] and not cell.compare_outputs(outputs, stored):
                found.append(f"{fresh.id}: " + "\n".join(cell.comparison_traceback))
        return found

    return find
