"""Reads an example as the cells of a notebook."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

_MARK = re.compile(r"# ?%%|#{20,}\s*$")
"""Starts a cell in the scripts of galleries."""


def cells_of(path: Path) -> list[str]:
    """The sources of the cells of a script or a notebook, without cells that run nothing.

    A script without marks is cut where a blank line is before a statement.
    """
    if path.suffix == ".ipynb":
        sources = ["".join(each["source"]) for each in _notebook_cells(path)]
    else:
        text = path.read_text()
        lines = _without_docstring(text)
        starts = [n for n, line in enumerate(lines) if _MARK.match(line)] or _blocks(text, lines)
        ends = [0, *starts, len(lines)]
        sources = ["\n".join(lines[one:end]) for one, end in pairwise(ends)]
    return [each.strip("\n") for each in sources if _runs(each)]


def imports_of(path: Path) -> list[str]:
    """The modules that the cells of an example import by their full names."""
    found = set()
    for source in cells_of(path):
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except SyntaxError:  # a cell with a magic
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
    return sorted(found - {"__future__"})


def _notebook_cells(path: Path) -> Iterator[dict[str, list[str]]]:
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            yield cell


def _without_docstring(text: str) -> list[str]:
    """The lines of a script; those of its docstring are empty."""
    lines, first = text.splitlines(), ast.parse(text).body[:1]
    if first and isinstance(first[0], ast.Expr) and isinstance(first[0].value, ast.Constant):
        end = first[0].end_lineno or 0
        lines[first[0].lineno - 1 : end] = [""] * (end - first[0].lineno + 1)
    return lines


def _blocks(text: str, lines: list[str]) -> list[int]:
    """Indices of the lines at which statements start that have a blank line before them."""
    starts = []
    for node in ast.parse(text).body:
        first = min(each.lineno for each in [node, *getattr(node, "decorator_list", [])]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        if first and not lines[first - 1].strip():
            starts.append(first)
    return starts


def _runs(source: str) -> bool:
    """Whether a cell has more than comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in source.splitlines())
