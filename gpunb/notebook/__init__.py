"""Shows gpunb in a notebook: the magics, where output goes, what names a cell needs."""

from __future__ import annotations

import importlib
from typing import Any


def load(shell: Any) -> None:
    """Register the magics with an IPython shell. Loading twice changes nothing."""
    importlib.import_module("gpunb.notebook.magics").register(shell)


def attach(shell: Any = None) -> None:
    """Have functions print into their cells, and old outputs keep no actors, in this shell; by
    default the one that runs here, if there is one."""
    if shell is None:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is None:
            return
    importlib.import_module("gpunb.notebook.handles").install(shell)
    importlib.import_module("gpunb.notebook.sources").install(shell)
    if hasattr(shell, "kernel"):
        importlib.import_module("gpunb.notebook.output").install(shell)


def unload(shell: Any) -> None:
    """Take them out again."""
    importlib.import_module("gpunb.notebook.magics").unregister(shell)
