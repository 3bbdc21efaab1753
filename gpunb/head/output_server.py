"""Sinks in a head process for the jobs of an attached kernel: they send the output to that kernel.

Output of a background cell is also kept, because the kernel may leave before it has shown it.

The other side is `output_client`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.engine.job_log import Log
from gpunb.head.attached import AttachedKernel
from gpunb.protocol import messages as msg
from gpunb.protocol.sink import Answering, Console, Sink
from gpunb.protocol.verbs import SinkInfo

_SILENT = 256
_SILENT_FOR = 1.0
_MOST_WORKERS = 1000

Answer: TypeAlias = Callable[[str | None, Exception | Payload | None], None]
"""Takes the user's answer, or an error in place of it, which may be pickled."""


class RelayedSinks:
    """The sinks in a head process that stand for the sinks of a client, by their numbers."""

    def __init__(self, client: AttachedKernel) -> None:
        self.client = client
        self.workers: dict[int, Answering] = {}
        self._numbers = itertools.count(-1, -1)
        self._questions: dict[int, Answer] = {}
        self._silent: list[int] = []

    def sink(self, info: SinkInfo) -> RelayedSink:
        """The sink for one that the client has, under the client's number."""
        kind = InteractiveSink if info.asks else RelayedSink
        made = kind(self, info.number, info.place, info.background)
        made.sweep = info.sweep
        return made

    def number(self) -> int:
        """A number for a sink that the client shall make."""
        return next(self._numbers)

    def send(
        self, number: int, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload] = ()
    ) -> None:
        """Send the client an action for one of its sinks."""
        wires, segments = serialize.to_wires(payloads)
        self.client.send(msg.Output(number, kind, content, wires), segments)

    def ended(self, number: int) -> None:
        """Report the end of a sink without output, together with others, a moment later."""
        self._silent.append(number)
        if len(self._silent) >= _SILENT:
            self._report_silent()
        elif len(self._silent) == 1:
            self.client.engine.loop.after(_SILENT_FOR, self._report_silent)

    def _report_silent(self) -> None:
        if self._silent:
            silent, self._silent = tuple(self._silent), []
            self.send(0, "ended", {"sinks": silent})

    def knows(self, worker: Answering) -> int:
        """The number by which the client may send messages to a worker."""
        token: int = getattr(worker, "token", 0)
        if token not in self.workers:
            if len(self.workers) > _MOST_WORKERS:
                self.workers = {key: e for key, e in self.workers.items() if not e.gone}
            self.workers[token] = worker
        return token

    def asked(self, number: int, prompt: str | None, password: bool, answer: Answer) -> None:
        """Ask the user of the client."""
        question = self.number()
        self._questions[question] = answer
        self.send(number, "ask", {"prompt": prompt, "password": password, "question": question})

    def answered(self, question: int, text: str | None, payloads: Sequence[Payload]) -> None:
        """Handle the answer of the client's user, or the reason why there is none."""
        answer = self._questions.pop(question, None)
        if answer is not None:
            answer(text, payloads[0] if payloads else None)


class RelayedSink(Sink):
    """A sink that sends all output to the client, which has the real sink. It has the attributes of
    the real sink."""

    def __init__(
        self,
        sinks: RelayedSinks,
        number: int,
        place: tuple[int, str | None] | None,
        background: bool,
    ) -> None:
        self.place = place
        self.background = background
        self._within: _Within | None = None
        self._sinks = sinks
        self._number = number
        self._pid: int | None = None
        self._actor = ""
        self._worker: int | None = None
        self._used = self._over = False
        self._left_out = 0

    @property
    def _cell_log(self) -> Log | None:
        """The log of its cell."""
        own: Log | None = self.log
        return self._within.log if self._within is not None else own

    def on(self, pid: int | None, actor: str = "") -> None:
        self._pid, self._actor = pid, actor

    def by(self, worker: Answering) -> None:
        self._worker = self._sinks.knows(worker)

    def named(self, name: str) -> RelayedSink:
        number = self._sinks.number()
        self._send("named", {"number": number, "name": name})
        made = RelayedSink(self._sinks, number, self.place, self.background)
        if (log := self._cell_log) is not None:
            made._within = _Within(name, log)
        return made

    def text(self, stream: str, text: str) -> None:
        if self.log is not None:
            self.log.add(("text", stream, {"text": text}))
        elif self._within is not None:
            self._within.on(self._pid, self._actor)
            self._within.text(stream, text)
        if self._sinks.client.behind:
            self._left_out += len(text)
            return
        if self._left_out:
            text = f"\n[gpunb: {self._left_out} characters that nobody read]\n{text}"
            self._left_out = 0
        content = {"stream": stream, "text": text, "pid": self._pid, "actor": self._actor}
        self._send("text", content)

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind == "failed":
            self.failed = True
        if (log := self._cell_log) is not None and not kind.startswith("comm_"):
            log.add(("show", kind, content))
        display = {"kind": kind, "content": content, "worker": self._worker}
        self._send("show", display, payloads)

    def stop_sweep(self) -> None:
        self._send("stop_sweep", {})

    def end(self) -> None:
        if self._over:
            return
        self._over = True
        if self._used:
            self._send("end", {})
        else:
            self._sinks.ended(self._number)

    def _send(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload] = ()
    ) -> None:
        self._used = True
        self._sinks.send(self._number, kind, content, payloads)


class _Within(Console):
    """A sink for a task that a cell submitted; writes into the log of the cell."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__(name)
        self.log = log

    def write(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))


class InteractiveSink(RelayedSink):
    """A relayed sink whose user may be asked."""

    asks = True

    def ask(self, prompt: str | None, password: bool, answer: Answer) -> None:
        self._sinks.asked(self._number, prompt, password, answer)
