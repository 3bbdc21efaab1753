"""`%gpu on` and `%gpu off`: every cell as if it began with %%gpu."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class Switch:
    """Puts a %%gpu line before the cells of a shell while it is on."""

    def __init__(self, shell: Any, busy: Callable[[], bool]) -> None:
        """`busy` says whether a cell is running."""
        self._shell = shell
        self._busy = busy
        self._line: str | None = None
        self._added: str | None = None

    def on(self, line: str) -> None:
        """From the next cell on, with this after %%gpu."""
        self.off()
        self._line = line.strip()
        self._transform = _Transform(self._add)
        self._shell.input_transformers_cleanup.append(self._transform)

    def off(self) -> None:
        """No longer."""
        if self._line is not None:
            self._line = None
            self._shell.input_transformers_cleanup.remove(self._transform)

    def wrote(self, line: str, cell: str) -> bool:
        """Whether the user did not write the %%gpu line of this cell."""
        return (line.strip(), cell) == (self._line, self._added)

    def _add(self, lines: list[str]) -> list[str]:
        """A cell's lines with %%gpu before them, unless it starts with a magic of its own. Cells
        that a running cell runs, such as the body of %%time, are parts of that."""
        self._added = None
        code = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
        if not code or _inside or self._busy():
            return lines
        asks = len(code) == 1 and (code[0][0] == "?" or code[0][-1] == "?")
        if asks or code[0][0] in "%!" or (lines[0][:2] == "%%"):
            return lines
        self._added = "".join(lines)
        return [f"%%gpu {self._line}".rstrip() + "\n", *lines]


class _Transform:
    """One that IPython does not use to see whether what was typed so far is a whole cell."""

    has_side_effects = True

    def __init__(self, change: Callable[[list[str]], list[str]]) -> None:
        self._change = change

    def __call__(self, lines: list[str]) -> list[str]:
        return self._change(lines)


_inside: list[None] = []


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Within this, cells are transformed as they are written."""
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()
