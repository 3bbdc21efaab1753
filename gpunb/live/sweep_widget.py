"""The widget of a sweep: sends the rows that have changed, on the sweep's thread."""

from __future__ import annotations

import importlib.resources
import itertools
import os
from typing import Any

import anywidget
import traitlets

from gpunb.live.sweep_view import html_of, output_of, row_of, signature, state_of
from gpunb.notebook import widgets
from gpunb.notebook.shell import NotebookShell
from gpunb.sweeps.sweep import Sweep
from gpunb.sweeps.trials import Trial

_NUMBERS = itertools.count(1)
_FILES = importlib.resources.files("gpunb.live")


class SweepWidget(anywidget.AnyWidget):
    """The live table of a sweep.

    A front end gets all rows when it opens the widget (`table`), and then messages with the rows
    that have changed.
    """

    _esm = (_FILES / "sweep.js").read_text("utf-8")
    _css = (_FILES / "view.css").read_text("utf-8") + (_FILES / "sweep.css").read_text("utf-8")

    table = traitlets.Int(0).tag(sync=True, to_json=lambda _, widget: widget.everything())

    def __init__(self, sweep: Sweep, shell: NotebookShell) -> None:
        self._sweep, self._shell = sweep, shell
        # Before the widget opens with all rows: what changes meanwhile is sent again.
        self._sent: dict[Trial, tuple[Any, ...]] = {each: signature(each) for each in sweep.trials}
        self._ident = f"gpunb-sweep-{os.getpid()}-{next(_NUMBERS)}"
        self._parent: Any = None
        super().__init__()
        self.on_msg(self._on_message)
        # Else a click would wait for the end of a cell that keeps the main thread.
        if self.comm is not None:
            self.comm._reply_subshell_for = self._route  # noqa: SLF001 - ipykernel asks for it

    def _route(self, data: Any, default: str | None) -> str | None:
        return default or widgets.aside(self._shell)

    def everything(self) -> dict[str, Any]:
        """The state of the sweep with all rows."""
        return {**state_of(self._sweep), "rows": [row_of(each) for each in self._sweep.trials]}

    def update(self) -> None:
        """Send the rows that have changed; at the end, change what stays in the notebook."""
        changed = []
        for trial in self._sweep.trials:
            if self._sent.get(trial) != (now := signature(trial)):
                self._sent[trial] = now
                changed.append(row_of(trial))
        if changed or self._sweep.done:
            self.send({**state_of(self._sweep), "rows": changed})
        if self._sweep.done and self._parent is not None:
            transient = {"display_id": self._ident}
            content = {**self._output(), "transient": transient}
            self._shell.send("update_display_data", content, self._parent)

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        """Answer a click on a trial; on any thread."""
        number = content.get("trial") if isinstance(content, dict) else None
        if isinstance(number, int) and 0 <= number < len(self._sweep.trials):
            trial = self._sweep.trials[number]
            self.send({"trial": number, "about": repr(trial), "output": output_of(trial)})

    def _output(self) -> dict[str, Any]:
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        texts = {"text/plain": repr(self._sweep), "text/html": html_of(self._sweep)}
        return {"data": {**data, **texts}, "metadata": metadata}

    def show(self) -> None:
        """Show the widget under the running cell, and keep it up to date."""
        self._parent = self._shell.request()
        over, transient = self._sweep.done, {"display_id": self._ident}
        self._shell.ip.display_pub.publish(**self._output(), transient=transient)
        if not over:
            self._sweep.watch(self.update)
