"""What comes late in a notebook that runs without a user, where nobody would see it in a cell that
is over."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

Send = Callable[[str, dict[str, Any], Any], object]
"""Sends a message of a kind and its content as output of the cell of a request."""


class Late:
    """Gives what comes late to the cell that runs by then, or to the next one; and to the
    process's standard error what comes after the last."""

    def __init__(self, running: Any, send: Send) -> None:
        """`running` is the request of the cell that runs now, if one does."""
        self._running = running if running and running.get("header") else None
        self._send = send
        self._kept: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def begins(self, request: Any) -> None:
        """The cell of this request begins."""
        with self._lock:
            self._running = request
            kept, self._kept = self._kept, []
            for kind, content in kept:
                self._send(kind, content, request)

    def ends(self, code: str | None) -> None:
        """A cell with this text is over; cells within it do not count."""
        with self._lock:
            running = self._running
            if running is not None and code in (None, running["content"].get("code")):
                self._running = None

    def send(self, kind: str, content: dict[str, Any], request: Any) -> None:
        """Send something that belongs to the cell of a request; on any thread."""
        with self._lock:
            if self._running is request:
                self._send(kind, content, request)
            elif kind == "clear_output":
                pass  # that cell's output is what it is
            elif self._running is not None:
                self._send(kind, content, self._running)
            else:
                self._kept.append((kind, content))

    def rest(self) -> None:
        """At the process's end."""
        with self._lock:
            kept, self._kept = self._kept, []
        text = "".join(content["text"] for kind, content in kept if kind == "stream")
        try:
            os.write(sys.stderr.fileno(), text.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError, AttributeError):
            pass  # nobody is there either


_late: dict[int, Late] = {}


def of(shell: Any, request: Callable[[], Any], send: Send) -> Late:
    """That of a shell's notebook; `request` gives the message that has the running cell in it."""
    found = _late.get(id(shell))
    if found is not None:
        return found

    def begins(_: Any = None) -> None:
        made.begins(request())

    def ends(result: Any = None) -> None:
        made.ends(getattr(getattr(result, "info", None), "raw_cell", None))

    made = _late[id(shell)] = Late(request(), send)
    shell.events.register("pre_run_cell", begins)
    shell.events.register("post_run_cell", ends)
    atexit.register(made.rest)
    return made
