"""`%debug` after the error of a GPU cell."""

from __future__ import annotations

import sys

from IPython.core.error import UsageError

from gpunb.notebook import cell
from gpunb.notebook.shell import NotebookShell


def install(shell: NotebookShell) -> None:
    """Refuse to debug an error that was raised in a worker, as its frames are not here."""
    ip = shell.ip
    if "debugger" in vars(ip):
        return
    plain = ip.debugger

    def debugger(force: bool = False) -> None:
        render = getattr(getattr(sys, "last_value", None), "_render_traceback_", None)
        if force and getattr(render, "__module__", None) == cell.__name__:
            raise UsageError(
                "%debug: the error was raised in a worker, not here. Put breakpoint() into the "
                "cell; or run it with --session NAME, and then %debug in a cell of that session"
            )
        plain(force)

    ip.debugger = debugger


def uninstall(shell: NotebookShell) -> None:
    """Let `%debug` work as IPython has it."""
    vars(shell.ip).pop("debugger", None)
