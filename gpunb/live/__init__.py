"""Live pictures in the notebook: of a session (`gpunb.monitor()`, ``%gpu top``) and of a sweep."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from gpunb.api import public
from gpunb.live.status_view import StatusView
from gpunb.notebook.shell import current

if TYPE_CHECKING:
    from gpunb.sweeps.sweep import Sweep


def monitor() -> Any:
    """The live view of the session: devices, their holders, and waiting tasks with the reason.
    A widget in a notebook, elsewhere the status as text."""
    shell = current()
    if shell.kernel is None:
        return StatusView(public.status())
    return importlib.import_module("gpunb.live.widget").Monitor(shell)


def show_sweep(sweep: Sweep) -> None:
    """Show a sweep under the running cell; where nobody would see later changes, at its end."""
    shell = current()
    if shell.kernel is None:
        sys.stdout.write(f"{sweep!r}\n")
        return
    if shell.headless():
        sweep.wait()
    importlib.import_module("gpunb.live.sweep_widget").SweepWidget(sweep, shell).show()
