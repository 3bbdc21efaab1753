"""Notebooks of several cells: they do the same with %%gpu on some of their cells as without."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.notebook.kernels import Kernel

pytestmark = pytest.mark.kernel

FILES = ("notebooks.txt", "library_notebooks.txt")

PASSING = re.compile(r"(?<= at )0x[0-9a-f]+|(?<=-id-)\d+|(?<='model_id': ')\w+")
"""What differs each time: addresses, numbers of diagrams and of widgets."""

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
    here = Path(__file__).parent
    text = "".join((here / name).read_text() for name in FILES)
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
        shown = PASSING.sub("", repr((result.result, result.displayed)))
        seen.append((result.status, result.ename, result.stdout, errors, shown))
    return [*seen, kernel.value(f"repr(({notebook.after}))")]


def needed(notebook: Notebook) -> Iterator[str]:
    """The packages that the cells of a notebook import."""
    for _, code in notebook.cells:
        python = re.sub("^%.*$", "pass", code, flags=re.MULTILINE)
        for node in ast.walk(ast.parse(python)):
            if isinstance(node, ast.Import):
                yield from (each.name.partition(".")[0] for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.partition(".")[0]


@pytest.fixture(scope="module")
def prepared(cell: Kernel) -> Kernel:
    cell.ok(FORGET)
    return cell


@pytest.mark.parametrize("notebook", [pytest.param(each, id=each.name) for each in notebooks()])
def test_a_notebook_does_the_same_with_gpu_cells(prepared: Kernel, notebook: Notebook) -> None:
    needs.packages(needed(notebook))
    plain = run(prepared, notebook, gpu=False)
    assert run(prepared, notebook, gpu=True) == plain
