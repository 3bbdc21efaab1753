"""From a job to the cell that it belongs to.

A job in the foreground hands its output to the main thread, which writes it as the cell itself
would: `%%capture`, Output widgets and a plain terminal see nothing unusual. Any other job's output
is sent to the front end by the runtime's thread, with the request that submitted the job as its
parent, whichever cell runs by then.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpunb.notebook.capping import Cap
from gpunb.runtime import output
from gpunb.serialize import Payload

Item = tuple[str, str, Mapping[str, Any]]

DONE: Item = ("done", "", {})


class Foreground:
    """A sink that keeps everything, in order, for whoever waits for the job."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._caps: dict[str, Cap] = {}

    def text(self, stream: str, text: str) -> None:
        shown = self._caps.setdefault(stream, Cap()).feed(text)
        if shown:
            self.queue.put(("text", stream, {"text": shown}))

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        self._rest()
        self.queue.put(("show", kind, content))

    def done(self) -> None:
        """Nothing more will come."""
        self._rest()
        self.queue.put(DONE)

    def _rest(self) -> None:
        for stream, cap in self._caps.items():
            if rest := cap.rest():
                self.queue.put(("text", stream, {"text": rest}))


def relay(shell: Any, kind: str, what: str, content: Mapping[str, Any]) -> None:
    """Write one thing that a job in the foreground showed, as the running cell would."""
    if kind == "text":
        stream = getattr(sys, what)
        stream.write(content["text"])
        stream.flush()
    elif what in ("display_data", "update_display_data"):
        sys.stdout.flush()
        shell.display_pub.publish(
            data=content["data"],
            metadata=content["metadata"],
            transient=content["transient"],
            update=what.startswith("update"),
        )
    elif what == "clear_output":
        shell.display_pub.clear_output(wait=content["wait"])
    elif what == "error":
        error = type(content["ename"], (Exception,), {})(content["evalue"])
        shell._showtraceback(type(error), error, content["traceback"])  # noqa: SLF001
    elif what == "execute_result":
        hook = shell.displayhook
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(content["data"], content["metadata"])
        hook.log_output(content["data"])
        hook.finish_displayhook()


class Sent:
    """A sink that sends to the cell from which it was made, in a Jupyter kernel."""

    def __init__(self, shell: Any, name: str, parent: Any = None) -> None:
        self._shell = shell
        self._kernel = shell.kernel
        self._parent = parent or _request(shell)
        self._console = _Prefixed(name, self._stream)
        self._caps: dict[str, Cap] = {}

    def on(self, pid: int | None) -> None:
        """The worker's process, for the prefix of its lines."""
        self._console.on(pid)

    def named(self, name: str) -> Sent:
        """For a task of another name that shows in the same cell."""
        return Sent(self._shell, name, self._parent)

    def text(self, stream: str, text: str) -> None:
        shown = self._caps.setdefault(stream, Cap()).feed(text)
        if shown:
            self._console.text(stream, shown)

    def end(self) -> None:
        """The job is over."""
        for stream, cap in self._caps.items():
            if rest := cap.rest():
                self._console.text(stream, rest)

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        self._send(kind, dict(content))

    def _stream(self, stream: str, text: str) -> None:
        self._send("stream", {"name": stream, "text": text})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        self._kernel.session.send(self._kernel.iopub_socket, kind, content, parent=self._parent)


class _Prefixed(output.Console):
    """Lines with the task they come from, written by a function."""

    def __init__(self, name: str, write: Any) -> None:
        super().__init__(name)
        self._write_to = write

    def write(self, stream: str, text: str) -> None:
        self._write_to(stream, text)


def install(shell: Any) -> None:
    """In a Jupyter kernel, send what functions print to the cells that submitted them."""
    output.install(lambda name: Sent(shell, name), lambda: _cell(shell))


def _request(shell: Any) -> Any:
    """The message that has the running cell in it."""
    get_parent = getattr(shell, "get_parent", None) or shell.kernel.get_parent
    return get_parent()


def _cell(shell: Any) -> str | None:
    """The running cell, the same whenever it is run: the front end's name for it, or its text."""
    request = _request(shell)
    named = (request.get("metadata") or {}).get("cellId")
    return named or (request.get("content") or {}).get("code")
