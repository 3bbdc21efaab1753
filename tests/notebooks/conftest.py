"""The notebooks, executed once for all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
TIMEOUT = 300


def run(*command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment's Python."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Both notebooks, side by side: one as `make demo` does it, one without a script around it."""
    path = tmp_path_factory.mktemp("executed") / "02-cells.ipynb"
    shutil.copyfile(NOTEBOOKS / path.name, path)
    with ThreadPoolExecutor(2) as pool:
        yield {
            "demo": pool.submit(run, NOTEBOOKS / "run_demo.py"),
            "cells": pool.submit(run, "-m", "jupyter", "execute", "--inplace", path),
            "path": pool.submit(lambda: path),
        }


@pytest.fixture(scope="session")
def demo(runs: dict[str, Future]) -> subprocess.CompletedProcess[str]:
    """What `make demo` does."""
    return runs["demo"].result()


@pytest.fixture(scope="session")
def quickstart(demo: subprocess.CompletedProcess[str]) -> Path:
    """The quick start notebook, executed."""
    assert demo.returncode == 0, demo.stderr
    return NOTEBOOKS / "executed" / "01-quickstart.ipynb"


@pytest.fixture(scope="session")
def cells_notebook(runs: dict[str, Future]) -> Path:
    """The notebook on cells, executed."""
    done = runs["cells"].result()
    assert done.returncode == 0, done.stderr
    return runs["path"].result()
