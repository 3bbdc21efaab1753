"""The widget: keeps a snapshot up to date while the front end shows it.

Messages of the front end come on any thread, and are only posted to the engine. The engine's thread
sends the messages to the front end.
"""

from __future__ import annotations

import importlib.resources
import itertools
import os
import threading
import time
from typing import Any

import anywidget
import traitlets

from gpunb.api import session
from gpunb.exceptions import GpunbError
from gpunb.live.compact import compact
from gpunb.live.scripts import joined
from gpunb.live.status_view import StatusView
from gpunb.notebook import widgets
from gpunb.notebook.shell import NotebookShell
from gpunb.protocol import backend

ALIVE = 60.0
"""Seconds without a message after which a view is taken to be gone."""

CALM = 2.0
"""Seconds between two updates of the output that is saved with the notebook."""

_NUMBERS = itertools.count(1)
_FILES = importlib.resources.files("gpunb.live")


class Monitor(anywidget.AnyWidget):
    """The live picture of this process's session."""

    _esm = joined("monitor.js")
    _css = (_FILES / "view.css").read_text("utf-8")

    snapshot = traitlets.Dict().tag(sync=True)

    def __init__(self, shell: NotebookShell) -> None:
        session.current()
        self._backend: Any = backend.current()
        self._facts: dict[str, Any] = self._backend.ask("status")
        self._watch: Any = None
        self._views: dict[str, float] = {}
        self._shell = shell
        self._ident = f"gpunb-monitor-{os.getpid()}-{next(_NUMBERS)}"
        self._parent: Any = None
        self._saved = ""
        self._held: set[str] = set()
        self._met = False
        self._due: float | None = None
        self._guard = threading.Lock()
        super().__init__(snapshot=compact(self._facts))
        self.on_msg(self._on_message)
        # Else a click would wait for the end of a cell that keeps the main thread.
        if self.comm is not None:
            self.comm._reply_subshell_for = self._route  # noqa: SLF001 - ipykernel asks for it

    def _route(self, data: Any, default: str | None) -> str | None:
        return default or widgets.aside(self._shell)

    # ------------------------------------------------------------------------- from the front end

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        """Take a message of the front end; on any thread."""
        if not isinstance(content, dict):
            return
        if content.get("do") == "visible":
            self._look(str(content.get("from")), content)
            return
        to = {"to": content.get("from"), "id": content.get("id")}
        try:
            self._attached().request(content, lambda reply: self.send({**reply, **to}))
        except GpunbError as error:
            self.send({"ok": False, "error": str(error), **to})

    def _look(self, view: str, content: Any) -> None:
        """Note whether a view is visible, and whether the user works in it."""
        now = time.monotonic()
        with self._guard:
            self._met = True
            if content.get("visible"):
                self._views[view] = now
            else:
                self._views.pop(view, None)
            (self._held.add if content.get("focus") else self._held.discard)(view)
            if not self._views:
                self._stop()
                self._save_soon()
                return
            try:
                current = self._attached()
            except GpunbError:
                return
            if self._watch is None or self._watch.stopped:
                self._watch = current.watch(self._show)

    def _attached(self) -> Any:
        """The present session, which may be another than the first one."""
        current = backend.existing()
        if current is None or not hasattr(current, "watch"):
            raise GpunbError("this session was shut down")
        if current is not self._backend:
            self._backend = current
            self._stop()
        return current

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    # --------------------------------------------------------------------------- to the front end

    def _show(self, snapshot: dict[str, Any] | None) -> bool:
        """Send a new snapshot; on the engine's thread."""
        if snapshot is None:
            self._watch = None
            self.snapshot = {**self.snapshot, "ended": True}
            return True
        with self._guard:
            oldest = time.monotonic() - ALIVE
            if not any(seen > oldest for seen in self._views.values()):
                self._stop()
                return True
        self._facts = snapshot
        self.snapshot = compact(snapshot)
        if not snapshot["running"] and not snapshot["queued"]:
            self._save_soon()
        return True

    def __repr__(self) -> str:
        return repr(StatusView(self._facts))

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """The widget, with the last state as text and HTML for front ends without widgets; and
        metadata, by which Colab finds the code that draws widgets."""
        view = StatusView(self._facts)
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        return {**data, "text/plain": repr(view), "text/html": view._repr_html_()}, metadata

    def _ipython_display_(self, **_: Any) -> None:
        """Show the widget as an output that can be updated."""
        self._parent = self._shell.request()
        data, metadata = self._repr_mimebundle_()
        self._saved = data["text/plain"]
        shown = {"data": data, "metadata": metadata}
        self._shell.ip.display_pub.publish(**shown, transient={"display_id": self._ident})
        self._shell.ip.events.register("post_run_cell", self._after_cell)

    # ------------------------------------------------------------------------- what stays of it

    def _after_cell(self, _: Any = None) -> None:
        """Show the state after each cell if there never was a view, as a program runs the
        notebook."""
        if self._met:
            return
        try:
            self._facts = self._attached().ask("status")
        except GpunbError:
            return
        data, metadata = self._repr_mimebundle_()
        if data["text/plain"] != self._saved:
            self.snapshot = compact(self._facts)
            self._saved = data["text/plain"]
            shown = {"data": data, "metadata": metadata, "update": True}
            self._shell.ip.display_pub.publish(**shown, transient={"display_id": self._ident})

    def _save_soon(self) -> None:
        """Update the output in the notebook soon. That draws the widget anew, so it waits until
        nothing happens or nobody sees the widget."""
        first, self._due = self._due is None, time.monotonic() + CALM
        if first and self._parent is not None:
            self._backend.later(CALM, self._save)

    def _save(self) -> None:
        """Update the output in the notebook; on the engine's thread."""
        if self._due is None:
            return
        if (left := self._due - time.monotonic()) > 0 or self._held:
            self._backend.later(max(left, CALM), self._save)
            return
        self._due = None
        facts = self._facts
        if self._views and (facts["running"] or facts["queued"]):
            return
        data, metadata = self._repr_mimebundle_()
        if data["text/plain"] == self._saved:
            return
        self._saved = data["text/plain"]
        content = {"data": data, "metadata": metadata, "transient": {"display_id": self._ident}}
        self._shell.send("update_display_data", content, self._parent)
