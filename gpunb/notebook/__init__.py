"""The notebook's side of gpunb: magics, the output of jobs, and the names that cells need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpunb.notebook.background import JobHandle


def load(ip: Any) -> None:
    """Register the magics with an IPython shell. Loading twice changes nothing."""
    importlib.import_module("gpunb.notebook.magics").register(ip)


def unload(ip: Any) -> None:
    """Take the magics out again."""
    importlib.import_module("gpunb.notebook.magics").unregister(ip)


def get_job(ident: int) -> JobHandle:
    """The handle of a background cell, as its ``%%gpu --bg`` returned it.

    `wait` and `result` of the handle bind the cell's names in this notebook. The output is shown
    in the notebook of the cell; `logs()` returns it anywhere.

    Args:
        ident: number of a background cell of this notebook, or of any kernel that is attached to
            the same head process.

    Raises:
        ValueError: there is no such cell.
        ObjectLostError: the cell's result is not stored any more.
    """
    handle: JobHandle = importlib.import_module("gpunb.notebook.background").get_job(ident)
    return handle
