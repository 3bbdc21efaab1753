"""A plain IPython shell for tests, in this process and without a kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config


@contextlib.contextmanager
def gpunb_shell() -> Iterator[Any]:
    """A shell in which gpunb is loaded."""
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    shell.colors = "nocolor"
    shell.run_line_magic("load_ext", "gpunb")
    yield shell
    shell.run_line_magic("unload_ext", "gpunb")
    InteractiveShell.clear_instance()


def run(shell: Any, code: str) -> tuple[Any, str]:
    """The result of a cell, and what it wrote to standard output."""
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    return result, captured.stdout
