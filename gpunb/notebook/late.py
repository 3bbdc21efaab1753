"""The output of a background cell: to its cell in a Jupyter kernel, and kept in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpunb.notebook.capping import Cap
from gpunb.notebook.output import Place, Sent, relay
from gpunb.runtime.log import Item, Log
from gpunb.serialize import Payload


class InCell(Sent):
    """A sink that shows all in the cell that is running now, whenever it comes.

    Attributes:
        failed: whether the cell has said that it failed.
        cleared: is called when the output of the cell was cleared, and what stands there for good
            has to be shown again.
    """

    background = True
    failed = False
    cleared: Callable[[], object] = staticmethod(bool)

    def __init__(self, shell: Any) -> None:
        super().__init__(shell, None, number=shell.displayhook.prompt_count)
        self._clear_next = False
        self._error_shown = False

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        self.end()  # what was held back comes before it
        if kind == "failed":
            self.failed = True
            if content["ename"] != "KeyboardInterrupt":  # the reason of that is known here
                self.error(dict(content))
            return
        super().show(kind, content, payloads)

    def send(self, kind: str, content: dict[str, Any]) -> None:
        again = self._clear_next or (kind == "clear_output" and not content["wait"])
        self._clear_next = kind == "clear_output" and content["wait"]
        if kind != "clear_output" and again:
            self.cleared()
        self.send_now(kind, content)
        if kind == "clear_output" and again:
            self.cleared()

    def send_now(self, kind: str, content: dict[str, Any]) -> None:
        """Send a message that has nothing to do with what was sent before."""
        super().send(kind, content)

    def error(self, content: dict[str, Any]) -> None:
        """Show an error, unless the cell has shown it."""
        if not self._error_shown:
            self.failed = self._error_shown = True
            self.log.add(("show", "failed", content))
            self.send("error", content)


class Kept:
    """A sink that keeps all and shows nothing, for want of a place: in a terminal."""

    background = True
    failed = False
    place: Place | None = None

    def __init__(self) -> None:
        self.log = Log()

    def text(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind == "failed":
            self.failed = True
        else:
            self.log.add(("show", kind, content))

    def error(self, content: dict[str, Any]) -> None:
        """Keep an error."""
        self.failed = True
        self.log.add(("show", "failed", content))


def replay(shell: Any, log: Iterable[Item]) -> None:
    """Show again what a job has shown, in the running cell; if that is very much, not all text."""
    caps = {"stdout": Cap(), "stderr": Cap()}
    for kind, what, content in log:
        if kind == "text":
            _write(what, caps[what].feed(content["text"]))
            continue
        for stream, cap in caps.items():
            _write(stream, cap.rest())
        if what == "failed":
            sys.stderr.write("\n".join(content["traceback"]) + "\n")
        elif what == "execute_result":
            relay(shell, kind, "display_data", {**content, "transient": {}})
        elif what in ("display_data", "update_display_data", "clear_output"):
            relay(shell, kind, what, content)
    for stream, cap in caps.items():
        _write(stream, cap.rest())


def _write(stream: str, text: str) -> None:
    if text:
        target = getattr(sys, stream)
        target.write(text)
        target.flush()
