"""Runs the quick start notebook and says in the terminal what it did."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE / "01-quickstart.ipynb"
EXECUTED = HERE / "executed" / NOTEBOOK.name
TITLE = "title:"


def main() -> int:
    """Execute the notebook in a kernel of this environment; the exit status is Jupyter's."""
    EXECUTED.parent.mkdir(exist_ok=True)
    shutil.copyfile(NOTEBOOK, EXECUTED)
    print(f"Running {NOTEBOOK.relative_to(HERE.parent)} ...", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", str(EXECUTED)]
    # A notebook's own kernel, whatever kernels the user has registered.
    environment = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if run.returncode:
        print(run.stderr, file=sys.stderr)
        print(f"The notebook failed; as far as it came: {EXECUTED}", file=sys.stderr)
        return run.returncode
    print(f"... in {time.monotonic() - began:.1f} s\n")
    summarise(nbformat.read(EXECUTED, as_version=4))
    print(f"The executed notebook, with its figure: {EXECUTED}")
    print("Try it yourself: make lab")
    return 0


def summarise(notebook: nbformat.NotebookNode) -> None:
    """Print what each titled cell showed."""
    for cell in notebook.cells:
        titles = [tag for tag in cell.metadata.get("tags", []) if tag.startswith(TITLE)]
        if not titles:
            continue
        print(titles[0].removeprefix(TITLE))
        for output in cell.get("outputs", []):
            for line in shown(output).splitlines():
                print(f"  {line}")
        print()


def shown(output: nbformat.NotebookNode) -> str:
    """An output as text."""
    if output.output_type == "stream":
        return str(output.text)
    data = output.get("data", {})
    return "[a figure]" if "image/png" in data else str(data.get("text/plain", ""))


if __name__ == "__main__":
    sys.exit(main())
