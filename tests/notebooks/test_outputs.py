"""The notebooks are kept without outputs, and give the same ones each time."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.conftest import NOTEBOOKS, TIMEOUT, run

ALL = sorted(NOTEBOOKS.glob("*.ipynb"))
SANITIZE = Path(__file__).parent / "nbval.cfg"


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [each for each in nbformat.read(path, as_version=4).cells if each.cell_type == "code"]


@pytest.mark.parametrize("notebook", ALL, ids=[path.stem for path in ALL])
def test_it_is_kept_without_outputs(notebook: Path) -> None:
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(notebook))


def run_again(executed: Path, folder: Path) -> None:
    """With nbval, which compares what is not known to differ from run to run."""
    folder.mkdir()
    path = Path(shutil.copy(executed, folder))
    nbval = ["-m", "pytest", "--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}"]
    done = run(*nbval, "-p", "no:cacheprovider", f"--rootdir={folder}", path, folder=folder)
    assert done.returncode == 0, done.stdout
    (passed,) = re.findall(r"=+ (\d+) passed in", done.stdout)
    assert int(passed) == len(code_cells(path))


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_they_give_the_same_outputs_again(
    quickstart: Path, cells_notebook: Path, tmp_path: Path
) -> None:
    executed = [quickstart, cells_notebook]
    assert [path.name for path in executed] == [path.name for path in ALL]
    with ThreadPoolExecutor(len(executed)) as pool:
        list(pool.map(run_again, executed, [tmp_path / path.stem for path in executed]))
