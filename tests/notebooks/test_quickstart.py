"""The quick start runs from start to end, and shows what it promises."""

import re
import shutil

import nbformat
import pytest

from tests.notebooks.conftest import SANITIZE, code_cells
from tests.notebooks.store import run


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
def test_no_cell_wrote_to_standard_error(quickstart):
    streams = [
        output
        for cell in nbformat.read(quickstart, as_version=4).cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    ]
    assert streams == []


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nbval_finds_the_same_outputs_again(quickstart, tmp_path):
    path = shutil.copy(quickstart, tmp_path)
    nbval = ["-m", "pytest", "--nbval", "--nbval-current-env", f"--nbval-sanitize-with={SANITIZE}"]
    done = run(*nbval, "-p", "no:cacheprovider", f"--rootdir={tmp_path}", path, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    (passed,) = re.findall(r"=+ (\d+) passed in", done.stdout)
    assert int(passed) == len(code_cells(quickstart))
