"""What a run of the tests says that has left some out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sessions import ROOT

NEEDS = "tests/worker/test_memory_limits.py::test_pytorch_itself"


def ran(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A run of tests where PyTorch is not installed."""
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, NEEDS]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "GPUNB_REQUIRE_PYTORCH": "0", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("processes", ["0", "1"])
def test_the_last_line_says_what_was_left_out(tmp_path: Path, processes: str) -> None:
    done = ran(tmp_path, "--numprocesses", processes)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("LEFT OUT: 1 test without PyTorch: it is not installed")


def test_what_is_required_is_not_left_out(tmp_path: Path) -> None:
    done = ran(tmp_path, GPUNB_REQUIRE_PYTORCH="1")
    assert done.returncode == 1
    assert "GPUNB_REQUIRE_PYTORCH is set, and it is not installed" in done.stdout
    assert "LEFT OUT" not in done.stdout
