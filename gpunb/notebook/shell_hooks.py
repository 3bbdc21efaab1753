"""Changes of a session to the notebook's shell: output of functions, cell names, old outputs."""

from __future__ import annotations

import importlib
from typing import Any

from gpunb.data.serialize.sources import CELLS
from gpunb.notebook.shell import current, of
from gpunb.notebook.stale_handles import OldOutputs


def install(ip: Any = None) -> None:
    """Show output of functions under their cells, and let old outputs keep no actors.

    Args:
        ip: an IPython shell; None for the shell of this process, if there is one.
    """
    shell = current() if ip is None else of(ip)
    if not shell.shows:
        return
    shell.part(OldOutputs)
    if shell.cell_of not in CELLS:
        CELLS.append(shell.cell_of)
    if shell.kernel is not None:
        importlib.import_module("gpunb.notebook.output").install(shell)
