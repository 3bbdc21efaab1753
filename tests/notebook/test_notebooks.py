"""Notebooks of several cells: they do the same with %%gpu on some of their cells as without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.notebook.kernels import Kernel

pytestmark = pytest.mark.kernel

FORGET = """
def _forget(kept=None):
    space = get_ipython().user_ns
    if kept is None:
        return set(space)
    for name in set(space) - kept - {"_kept"}:
        if not name.startswith("_i"):
            del space[name]
_kept = _forget()
"""


@dataclass(frozen=True)
class Notebook:
    """A notebook: its cells, each with whether it runs under %%gpu, and an expression."""

    name: str
    cells: tuple[tuple[bool, str], ...]
    after: str


def notebooks() -> Iterator[Notebook]:
    text = (Path(__file__).parent / "notebooks.txt").read_text()
    text = re.sub("^###.*\n", "", text, flags=re.MULTILINE)
    for block in re.split("^=== ", text, flags=re.MULTILINE)[1:]:
        name, _, code = block.partition("\n")
        body, _, after = code.rstrip("\n").partition("\n??? ")
        parts = re.split(r"^---( G)?\n", body, flags=re.MULTILINE)[1:]
        cells = zip(parts[::2], parts[1::2], strict=True)
        yield Notebook(name, tuple((bool(mark), cell) for mark, cell in cells), after)


def run(kernel: Kernel, notebook: Notebook, *, gpu: bool) -> list[Any]:
    """What can be seen of a notebook."""
    kernel.ok("_forget(_kept)")
    seen: list[Any] = []
    for marked, code in notebook.cells:
        result = kernel(f"%%gpu 0.5\n{code}" if gpu and marked else code)
        errors = re.sub(r"<ipython-input-[-\w]+>|/tmp/\S+\.py", "file", result.stderr)
        seen.append((result.status, result.ename, result.stdout, errors, result.value))
    return [*seen, kernel.value(f"repr(({notebook.after}))")]


@pytest.fixture(scope="module")
def prepared(cell: Kernel) -> Kernel:
    cell.ok(FORGET)
    return cell


@pytest.mark.parametrize("notebook", [pytest.param(each, id=each.name) for each in notebooks()])
def test_a_notebook_does_the_same_with_gpu_cells(prepared: Kernel, notebook: Notebook) -> None:
    if any("torch" in code for _, code in notebook.cells):
        needs.pytorch()
    plain = run(prepared, notebook, gpu=False)
    assert run(prepared, notebook, gpu=True) == plain
