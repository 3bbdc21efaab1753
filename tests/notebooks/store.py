"""Executes notebooks and stores their outputs: ``python -m tests.notebooks.store PATHS``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

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


def executed(notebook: Path, folder: Path) -> Path:
    """A copy of the notebook in another folder, run there from start to end."""
    path = Path(shutil.copy(notebook, folder))
    done = run("-m", "jupyter", "execute", "--inplace", path)
    assert done.returncode == 0, done.stderr
    return path


def store(notebook: Path) -> None:
    """Put the outputs of a new run into the notebook, without what differs each time."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = nbformat.read(executed(notebook, Path(folder)), as_version=4)
    for cell in fresh.cells:
        cell.metadata.pop("execution", None)  # times
        cell.get("outputs", [])[:] = joined(cell.get("outputs", []))
        for output in cell.get("outputs", []):  # a widget's kernel is gone; its HTML stays
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    fresh.metadata.pop("widgets", None)
    fresh.metadata["language_info"] = {"name": "python"}
    nbformat.write(fresh, notebook)


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Text that was sent in pieces, as one."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = found[-1] if found else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text
        else:
            found.append(output)
    return found


if __name__ == "__main__":
    for each in sys.argv[1:]:
        store(Path(each))
