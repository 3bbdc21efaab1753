"""`%gpu on` and `%gpu off`: run every cell as if it began with %%gpu."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpunb.notebook.shell import NotebookShell


class Switch:
    """Puts a %%gpu line before the cells of a shell while it is on."""

    def __init__(self, shell: NotebookShell, busy: Callable[[], bool]) -> None:
        """`busy` tells whether a cell is running."""
        self._shell = shell
        self._busy = busy
        self._line: str | None = None
        self._added: str | None = None

    def on(self, line: str) -> None:
        """Put a %%gpu line with this text before each cell from the next one on."""
        self.off()
        self._line = line.strip()
        transform: Any = partial(self._add)
        # IPython then does not run it to check whether the user has typed a whole cell.
        transform.has_side_effects = True
        self._transform = transform
        self._shell.ip.input_transformers_cleanup.append(self._transform)

    def off(self) -> None:
        """Leave cells as they are."""
        if self._line is not None:
            self._line = None
            self._shell.ip.input_transformers_cleanup.remove(self._transform)

    def wrote(self, line: str, cell: str) -> bool:
        """Whether the user did not write the %%gpu line of this cell."""
        return (line.strip(), cell) == (self._line, self._added)

    def _add(self, lines: list[str]) -> list[str]:
        """The lines of a cell with %%gpu before them, unless the cell starts with a magic. A cell
        within a running cell, such as the body of %%time, stays as it is."""
        self._added = None
        code = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
        if not code or _inside or self._busy():
            return lines
        asks = len(code) == 1 and (code[0][0] == "?" or code[0][-1] == "?")
        if asks or code[0][0] in "%!" or (lines[0][:2] == "%%"):
            return lines
        self._added = "".join(lines)
        return [f"%%gpu {self._line}".rstrip() + "\n", *lines]


_inside: list[None] = []


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Transform cells without a %%gpu line that the user did not write."""
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()
