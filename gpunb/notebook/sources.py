"""The cells of a notebook by the names that IPython gives to the files of their code."""

from __future__ import annotations

import weakref
from typing import Any

from gpunb.serialize.sources import CELLS

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def install(shell: Any) -> None:
    """Let tracebacks of functions name the cells of this shell."""
    if shell not in _known:
        _known.add(shell)
        CELLS.append(lambda file: cell_of(shell, file))


def cell_of(shell: Any, file: str) -> str | None:
    """Such as ``"Cell In[3]"``; None if the file is no cell's."""
    named = getattr(shell.compile, "format_code_name", None)
    found = named(file) if named is not None else None
    return None if found is None else " ".join(found)
