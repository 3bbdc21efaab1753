"""Runs the examples of pages as a notebook's cells: `python -m tests.docs.runner PAGE ...`.

Each page begins anew, without names. Those that start no session share one, of the devices that the
environment names. What became of an example is written as
a line of JSON, to the descriptor that is the standard output when this starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

import gpunb
from tests.docs.pages import examples
from tests.waiting import eventually

INIT = "gpunb.init("


def main(names: list[str]) -> None:
    with open(os.dup(1), "w", encoding="utf-8") as report:
        os.dup2(2, 1)  # what else is printed goes with the errors
        shell = InteractiveShell.instance(colors="NoColor", cache_size=10)
        for name in names:
            shell.reset()
            text = Path(name).read_text()
            for example in examples(text):
                settle()
                facts = {"page": name, "line": example.line, **run(shell, example)}
                report.write(json.dumps(facts) + "\n")
                report.flush()
            if INIT in text:
                gpunb.shutdown()


def settle() -> None:
    """Wait until all that is over is gone, so that the next one finds its place free."""

    def settled() -> bool:
        facts = gpunb.status()
        holders = {each["id"] for each in (*facts["running"], *facts["actors"])}
        held = {ident for device in facts["devices"] for ident, _ in device["held"]}
        return held <= holders

    if gpunb.is_initialized():
        eventually(settled, "devices are given back")


def run(shell: Any, example: Any) -> dict[str, Any]:
    """What an example prints, and the error that it ends with."""
    if INIT in example.before + example.code:
        gpunb.shutdown()
    error = ""
    if example.before:
        error = _cell(shell, example.before)[1]
    printed = ""
    if not error:
        printed, error = _cell(shell, example.code)
    return {"printed": printed, "error": error, "expected": example.prints}


def _cell(shell: Any, code: str) -> tuple[str, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        done = shell.run_cell(code, store_history=True)
    error = done.error_before_exec or done.error_in_exec
    return printed.getvalue(), f"{type(error).__name__}: {error}" if error else ""


if __name__ == "__main__":
    main(sys.argv[1:])
