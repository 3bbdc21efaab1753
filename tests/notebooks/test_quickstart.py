"""The quick start runs from start to end, and shows what it promises."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="module")
def demo():
    command = [sys.executable, str(NOTEBOOKS / "run_demo.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def executed(demo):
    assert demo.returncode == 0, demo.stderr
    return nbformat.read(NOTEBOOKS / "executed" / "01-quickstart.ipynb", as_version=4)


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_summary_says_what_happened(demo):
    assert demo.returncode == 0, demo.stderr
    for part in (
        "gpunb.get_gpu_ids(): [0]",
        "CUDA_VISIBLE_DEVICES: 0",
        "12 trials with",
        "on quarters of 2 devices",
        "[a figure]",
        "came home: confusion, ndarray of shape (10, 10)",
        "15 GPU tasks ran in 15 processes, none of them the kernel's",
        "01-quickstart.ipynb",
    ):
        assert part in demo.stdout


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_cell_wrote_to_standard_error(executed):
    streams = [
        output
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    ]
    assert streams == []


def test_it_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOKS / "01-quickstart.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
