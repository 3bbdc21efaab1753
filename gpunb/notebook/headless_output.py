"""Shows late output in a notebook without a user: in the cell that runs by then, because nobody
would see it in a cell that is over."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from gpunb.notebook.shell import NotebookShell


class Late:
    """Sends late output to the cell that runs by then, or to the next one. Text that comes after
    the last cell goes to the process's standard error."""

    def __init__(self, shell: NotebookShell) -> None:
        running = shell.request()
        self._shell = shell
        self._running: Any = running if running.get("header") else None
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()
        shell.ip.events.register("pre_run_cell", self.begins)
        shell.ip.events.register("post_run_cell", self.ends)
        atexit.register(self.rest)

    def begins(self, _: Any = None) -> None:
        """Send the kept output to the cell that begins."""
        request = self._shell.request()
        with self._lock:
            self._running = request
            waiting, self._waiting = self._waiting, []
            for kind, content in waiting:
                self._shell.send(kind, content, request)

    def ends(self, result: Any = None) -> None:
        """Note the end of the running cell; the end of a cell within it does not count."""
        code = getattr(getattr(result, "info", None), "raw_cell", None)
        with self._lock:
            running = self._running
            if running is not None and code in (None, running["content"].get("code")):
                self._running = None

    def send(self, kind: str, content: dict[str, Any], request: Any) -> None:
        """Send output of the cell of a request; on any thread."""
        with self._lock:
            if self._running is request:
                self._shell.send(kind, content, request)
            elif kind == "clear_output":
                pass  # the output of a cell that is over stays
            elif self._running is not None:
                self._shell.send(kind, content, self._running)
            else:
                self._waiting.append((kind, content))

    def rest(self) -> None:
        """Write the kept text to standard error, at the end of the process."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        text = "".join(content["text"] for kind, content in waiting if kind == "stream")
        try:
            os.write(sys.stderr.fileno(), text.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError, AttributeError):
            pass  # the reader of the stream is gone
