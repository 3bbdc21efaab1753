"""Shows the output of a background cell under that cell, or keeps it in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpunb.data.serialize import Payload
from gpunb.engine.job_log import Item, Log
from gpunb.notebook.output import Sent, relay
from gpunb.notebook.output_limit import OutputCaps
from gpunb.notebook.rank_output import Folds, folded, none
from gpunb.notebook.shell import NotebookShell
from gpunb.protocol.sink import Sink


class InCell(Sent):
    """A sink that shows all output in the cell in which the sink was made.

    Attributes:
        cleared: called when the output of the cell was cleared, so that its card is shown again.
    """

    background = True
    cleared: Callable[[], object] = staticmethod(bool)

    def __init__(self, shell: NotebookShell, folds: Folds | None = None) -> None:
        super().__init__(shell, None, number=shell.number, folds=folds)
        self._clear_next = False
        self._error_shown = False

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        self.rest()  # text that was held back comes first
        if kind == "failed":
            self.failed = True
            if content["ename"] != "KeyboardInterrupt":  # the end of the cell tells its reason
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
        """Send a message without regard to a clear before it."""
        super().send(kind, content)

    def error(self, content: dict[str, Any]) -> None:
        """Show an error, unless the cell has shown it."""
        if not self._error_shown:
            self.failed = self._error_shown = True
            self.log.add(("show", "failed", content))
            self.send("error", content)


class BufferedOutput(Sink):
    """A sink that keeps all output and shows nothing, in a terminal."""

    background = True

    def __init__(self, folds: Folds | None = None) -> None:
        self.log = Log()
        self.folds = folds

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


def replay(shell: NotebookShell, log: Iterable[Item], folds: Folds | None = None) -> None:
    """Show the output of a job again, in the running cell; of very much text not all."""
    caps = OutputCaps()
    folds = folds or Folds(none, live=shell.kernel is not None)
    for kind, what, content in folded(log, folds):
        if kind == "text":
            _write([(what, caps.feed(what, content["text"]))])
            continue
        _write(caps.rest())
        if what == "failed":
            sys.stderr.write("\n".join(content["traceback"]) + "\n")
        elif what == "execute_result":
            relay(shell, kind, "display_data", {**content, "transient": {}})
        elif what in ("display_data", "update_display_data", "clear_output"):
            relay(shell, kind, what, content)
    _write(caps.rest())


def _write(texts: Iterable[tuple[str, str]]) -> None:
    for stream, text in texts:
        if text:
            target = getattr(sys, stream)
            target.write(text)
            target.flush()
