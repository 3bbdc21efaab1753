"""Where the output of a task goes.

A sink belongs to the job that writes into it. Without a notebook it is the process's own standard
streams; a notebook installs a factory whose sinks know the cell that submitted the job.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpunb.serialize import Payload

TAIL = 4096
"""Bytes of a job's standard error that are kept for the message should its worker crash."""


class Sink(Protocol):
    """Receives what one job shows. Called on the runtime's thread; must not block.

    One that has a method `by(worker)` is told before `show` to whom answers may be given, one that
    has a method `ask(prompt, password, answer)` has the job's user asked, and `answer(text, error)`
    called on any thread; without a prompt it only says whether it would.

    One that has a method `on(pid)` is told of the worker's process before each text, one that
    has a method `end()` of the end of the job. One that has a method `named(name)` gives another
    for a task that the job submits; without it they share one.
    """

    def text(self, stream: str, text: str) -> None:
        """Text written to ``"stdout"`` or ``"stderr"``."""

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        """Something else, as in Jupyter's messages."""


class Answering(Protocol):
    """A worker that has shown something. From any thread."""

    @property
    def gone(self) -> bool:
        """Whether it can be told nothing any more."""

    def tell(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Sink
    ) -> None:
        """Tell it something, as in Jupyter's messages. What it shows because of that, with no job
        running there, goes to this sink."""


class Console:
    """Writes to this process's standard streams, each line with the task it comes from."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid: int | None = None
        self._at_start = {"stdout": True, "stderr": True}

    def on(self, pid: int | None) -> None:
        self._pid = pid

    def named(self, name: str) -> Console:
        """For a task of another name that shows in the same place."""
        return Console(name)

    def text(self, stream: str, text: str) -> None:
        prefix = f"({self._name} pid={self._pid}) "
        lines = text.splitlines(keepends=True)
        start = self._at_start[stream]
        pieces = []
        for line in lines:
            pieces.append(prefix + line if start else line)
            start = line.endswith(("\n", "\r"))
        self._at_start[stream] = start
        self.write(stream, "".join(pieces))

    def write(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.write(text)
            target.flush()
        except (OSError, ValueError):
            pass  # a closed terminal is no reason to stop

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        text = content.get("data", {}).get("text/plain")
        if text:
            self.text("stdout", f"{text}\n")


Factory = Callable[[str], Sink]
_factory: Factory = Console


def _no_cell() -> str | None:
    return None


_origin: Callable[[], str | None] = _no_cell


def install(factory: Factory | None, origin: Callable[[], str | None] = _no_cell) -> None:
    """Use this for jobs submitted from now on; None for the standard streams. `origin` says
    which cell of a notebook is running, in a way that stays the same when it is run again."""
    global _factory, _origin
    _factory = factory or Console
    _origin = origin


def sink(name: str) -> Sink:
    """A sink for a job of this name, submitted here and now."""
    return _factory(name)


def origin() -> str | None:
    """The notebook's cell that submits a job here and now."""
    return _origin()


class Pipe:
    """Decodes what one process writes to one stream, and keeps the end of it."""

    __slots__ = ("_decoder", "tail")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.tail = b""

    def feed(self, data: bytes | str) -> str:
        """The text of what was written, as far as it is whole."""
        written = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        self.tail = written[-TAIL:] if len(written) >= TAIL else (self.tail + written)[-TAIL:]
        return data if isinstance(data, str) else self._decoder.decode(data)

    def last_lines(self, count: int = 10) -> str:
        text = self.tail.decode("utf-8", "backslashreplace")
        return "\n".join(text.splitlines()[-count:])
