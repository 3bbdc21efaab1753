"""Shows gpunb in a notebook: the magics, where output goes, what names a cell needs."""

from __future__ import annotations

import importlib
from typing import Any


def load(shell: Any) -> None:
    """Register the magics with an IPython shell. Loading twice changes nothing."""
    importlib.import_module("gpunb.notebook.magics").register(shell)


def unload(shell: Any) -> None:
    """Take them out again."""
    importlib.import_module("gpunb.notebook.magics").unregister(shell)
