"""The live picture of a session in the notebook: `gpunb.monitor()`, ``%gpu top``."""

from __future__ import annotations

import importlib
from typing import Any

from gpunb import api
from gpunb.notebook.view import StatusView


def monitor() -> Any:
    """The live picture: a widget in a notebook, else the status as text."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return StatusView(api.status())
    return importlib.import_module("gpunb.notebook.monitor.widget").Monitor(shell)
