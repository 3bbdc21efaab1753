"""`%debug` after the error of a GPU cell."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.error import UsageError

from gpunb.notebook import cells


def install(shell: Any) -> None:
    """Say of an error that came home that there is nothing to be looked at here."""
    if "debugger" in vars(shell):
        return
    plain = shell.debugger

    def debugger(force: bool = False) -> None:
        render = getattr(getattr(sys, "last_value", None), "_render_traceback_", None)
        if force and getattr(render, "__module__", None) == cells.__name__:
            raise UsageError(
                "%debug: the error was raised in a worker, not here. Put breakpoint() into the "
                "cell; or run it with --session NAME, and then %debug in a cell of that session"
            )
        plain(force)

    shell.debugger = debugger


def uninstall(shell: Any) -> None:
    """Take it out again."""
    vars(shell).pop("debugger", None)
