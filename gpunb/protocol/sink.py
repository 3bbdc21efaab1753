"""Sinks: receivers of the output of tasks.

A sink belongs to the job that writes into it. Without a notebook it is the process's own standard
streams; a notebook installs a factory whose sinks know the cell that submitted the job.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from gpunb.data.serialize import Payload

TAIL = 1 << 14
"""Bytes of a job's standard error that are kept for the message should its worker crash."""

_FATAL = "Fatal Python error: "
_MOST_FRAMES = 30
_NATIVE = re.compile(r"\s+@\s+0x[0-9a-f]+\b")
_OURS = r'File ".*/(gpunb/worker|IPython/core)/\w+\.py", line'


REPORT = "gpunb.report"
"""The kind of an output that goes from a trial to its sweep only: values by name."""

Place: TypeAlias = tuple[int, str | None]
"""A cell: its number, and the front end's name for it."""

SweepInfo: TypeAlias = tuple[int, str, int]
"""A sweep: its number in its process, its name, and the number of its trials; 0 if it is not
known."""


class Sink:
    """Receives the output of one job. Methods are called on the engine's thread and must not block.

    A subclass overrides the methods that it needs; the others do nothing.

    Attributes:
        place: the cell that the job comes from.
        background: whether the notebook does not wait for the job.
        failed: whether the job reported a failure, as a cell that raised does.
        log: the record of the output, if the sink has one.
        asks: whether `ask` may be called.
        sweep: the sweep of which the job is a trial.
    """

    place: Place | None = None
    background: bool = False
    failed: bool = False
    log: Any = None
    asks: bool = False
    sweep: SweepInfo | None = None

    def on(self, pid: int | None, actor: str = "") -> None:
        """Note the process that writes the next text, and the title of its actor; empty for
        none."""

    def text(self, stream: str, text: str) -> None:
        """Text written to ``"stdout"`` or ``"stderr"``."""

    def by(self, worker: Answering) -> None:
        """Note the worker of the next display, for messages of the front end to this worker."""

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        """Show a display or another output, as in Jupyter's messages."""

    def named(self, name: str) -> Sink:
        """Return the sink for a task of this name that the job submits; it may be this one."""
        return self

    def ask(self, prompt: str | None, password: bool, answer: Callable[..., None]) -> None:
        """Ask the job's user, and call `answer(text, error)` on any thread. Without a prompt, only
        answer whether the user can be asked."""
        raise NotImplementedError("only a cell in the foreground can ask its user")

    def stop_sweep(self) -> None:
        """The user stops the sweep of which the job is a trial."""

    def end(self) -> None:
        """Note that the job is over."""


class SharedSink(Sink):
    """A sink that another job uses as well. The end of the other job does not end the sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.place, self.background, self.asks = sink.place, sink.background, sink.asks

    def on(self, pid: int | None, actor: str = "") -> None:
        self._sink.on(pid, actor)

    def text(self, stream: str, text: str) -> None:
        self._sink.text(stream, text)

    def by(self, worker: Answering) -> None:
        self._sink.by(worker)

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        self._sink.show(kind, content, payloads)

    def named(self, name: str) -> Sink:
        return self._sink.named(name)

    def ask(self, prompt: str | None, password: bool, answer: Callable[..., None]) -> None:
        self._sink.ask(prompt, password, answer)


class LeadSink(SharedSink):
    """A sink for the rank that leads. Its output is that of the cell."""

    def __init__(self, sink: Sink, rank: int) -> None:
        super().__init__(sink)
        if rank:  # rank 0 leads by default
            sink.show("rank", {"rank": rank, "kind": "leads"}, ())

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind == "failed":  # the coordinator shows the error of the cell
            self.failed = True
        else:
            super().show(kind, content, payloads)


class RankSink(Sink):
    """A sink for a rank that does not lead. Its output goes to the sink of the cell, marked with
    the rank."""

    def __init__(self, sink: Sink, rank: int) -> None:
        self._sink = sink
        self._rank = rank
        self.place, self.background = sink.place, sink.background

    def text(self, stream: str, text: str) -> None:
        self._mark("text", stream, {"text": text})

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind == "failed":  # the coordinator shows the error of the cell
            self.failed = True
        elif kind in ("display_data", "update_display_data", "execute_result", "error"):
            self._mark("show", kind, content)

    def ask(self, prompt: str | None, password: bool, answer: Callable[..., None]) -> None:
        answer(None, NotImplementedError(f"only the first rank can ask the user, not {self._rank}"))

    def _mark(self, kind: str, what: str, content: Mapping[str, Any]) -> None:
        item = {"rank": self._rank, "kind": kind, "what": what, "content": content}
        self._sink.show("rank", item, ())


class Answering(Protocol):
    """A worker whose output was shown. From any thread."""

    @property
    def gone(self) -> bool:
        """Whether the worker receives no more messages."""

    def send_comm(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Sink
    ) -> None:
        """Send the worker a comm message of the front end. Output that the worker produces because
        of it, while no job runs there, goes to this sink."""


class Console(Sink):
    """Writes to this process's standard streams, each line with the task it comes from."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid: int | None = None
        self._actor = ""
        self._within_line: frozenset[str] = frozenset()

    def on(self, pid: int | None, actor: str = "") -> None:
        self._pid, self._actor = pid, actor

    def named(self, name: str) -> Console:
        """A sink for a task of another name with the same streams."""
        return Console(name)

    def text(self, stream: str, text: str) -> None:
        prefix = f"({self._actor or self._name} pid={self._pid}) "
        lines = text.splitlines(keepends=True)
        start = stream not in self._within_line
        pieces = []
        for line in lines:
            pieces.append(prefix + line if start else line)
            start = line.endswith(("\n", "\r"))
        self._within_line = self._within_line - {stream} if start else self._within_line | {stream}
        self.write(stream, "".join(pieces))

    def write(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        if target is None:
            return  # a program without a terminal, such as one under pythonw
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
    """Decodes the output of a process to one stream, and keeps the end of it."""

    __slots__ = ("_decoder", "tail")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self.tail = b""

    def feed(self, data: bytes | str) -> str:
        """Return the decoded text, without an incomplete character at the end."""
        written = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        self.tail = written[-TAIL:] if len(written) >= TAIL else (self.tail + written)[-TAIL:]
        return data if isinstance(data, str) else self._decoder.decode(data)

    def last_lines(self, count: int = 10) -> str:
        """The last lines without the frames of C++ that Abseil prints, which push out the reason;
        after a fatal signal, also the user's part of Python's stack."""
        lines = self.tail.decode("utf-8", "backslashreplace").splitlines()
        lines = [each for each in lines if not _NATIVE.match(each)]
        fatal = [at for at, line in enumerate(lines) if line.startswith(_FATAL)]
        if not fatal:
            return "\n".join(lines[-count:])
        printed, stack = lines[: fatal[-1]], lines[fatal[-1] :]
        ours = (at for at, line in enumerate(stack) if re.search(_OURS, line))
        return "\n".join([*printed[-count:], *stack[: next(ours, len(stack))][:_MOST_FRAMES]])
