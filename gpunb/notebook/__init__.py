"""The notebook's side of gpunb: magics, the output of jobs, and the names that cells need."""

from __future__ import annotations

import importlib
from collections.abc import Callable
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


def register_settings(
    module: str,
    read: Callable[[Any], dict[str, Any]],
    write: Callable[[Any, str, Any], object],
    default: Callable[[Any], dict[str, Any]] | None = None,
) -> None:
    """Let the settings of a library travel with cells, as those of NumPy and pandas do.

    ``%%gpu`` cells find what the notebook has set, and what a cell in the foreground sets comes
    home. Nothing is imported for it: as long as the library is not loaded, its settings wait. The
    functions travel with each cell.

    Args:
        module: full name of the module; a later call with the same name replaces the functions.
        read: gets the module and returns its settings by name. Values that cannot be pickled are
            left out.
        write: gets the module, the name of a setting and its new value.
        default: gets the module and returns the settings that it has when it is loaded, so that
            these are not sent. Without it, all are sent with each cell.

    Raises:
        TypeError: an argument has the wrong type, or a function cannot be pickled.
    """
    importlib.import_module("gpunb.notebook.own_settings").register(module, read, write, default)
