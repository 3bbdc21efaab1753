"""Adds the lines of a notebook's code to tracebacks of other processes, which lack the source."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable

CELLS: list[Callable[[str], str | None]] = []
"""Each returns the cell of a file name, such as ``"Cell In[3]"``, or None."""

_FRAME = re.compile(r'^(?P<indent> *)File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<rest>.*)$')


def with_sources(text: str) -> str:
    """Return a traceback's text with the cells and lines of code that this process knows."""
    if not CELLS:
        return text
    lines = text.split("\n")
    shown: list[str] = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        found = _FRAME.match(line)
        cell = _cell(found["file"]) if found is not None else None
        if found is None or cell is None:
            shown.append(line)
            continue
        indent, number = found["indent"], int(found["line"])
        shown.append(f"{indent}{cell}, line {number}, in {found['rest']}")
        code = linecache.getline(found["file"], number).strip()
        if code and not after.startswith(f"{indent}  "):
            shown.append(f"{indent}  {code}")
    return "\n".join(shown)


def _cell(file: str) -> str | None:
    if os.path.exists(file):
        return None
    return next((name for each in CELLS if (name := each(file)) is not None), None)
