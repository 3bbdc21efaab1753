"""What stands in a head process for the sinks of a client: they send on what comes, and keep it
for a cell in the background, whose client may be gone before anybody has seen it.

The other side of `shown`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gpunb import serialize
from gpunb.exceptions import GpunbError
from gpunb.runtime.log import Log
from gpunb.runtime.output import Answering, Console
from gpunb.serialize import Payload
from gpunb.workers import messages as msg

if TYPE_CHECKING:
    from gpunb.runtime.clients import Client

_SILENT = 256
_SILENT_FOR = 1.0
_TOLD = 1000

Answer: TypeAlias = Callable[[str | None, Exception | None], None]


class Sinks:
    """What stands in a head process for the sinks that a client has, each under its number."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.workers: dict[int, Answering] = {}
        self._numbers = itertools.count(-1, -1)
        self._questions: dict[int, Answer] = {}
        self._silent: list[int] = []

    def sink(
        self, number: int, place: tuple[int, str | None] | None, background: bool, asks: bool
    ) -> Relayed:
        """What the client has under a number of its own."""
        return (Asking if asks else Relayed)(self, number, place, background)

    def number(self) -> int:
        """For a sink that the client is to make."""
        return next(self._numbers)

    def say(
        self, number: int, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload] = ()
    ) -> None:
        """Have the client do something with one of its sinks."""
        wires, segments = serialize.to_wires(payloads)
        self.client.send(msg.Output(number, kind, content, wires), segments)

    def ended(self, number: int) -> None:
        """One that has shown nothing is over: there is time to say so."""
        self._silent.append(number)
        if len(self._silent) >= _SILENT:
            self._tell_silent()
        elif len(self._silent) == 1:
            self.client.driver.loop.after(_SILENT_FOR, self._tell_silent)

    def _tell_silent(self) -> None:
        if self._silent:
            silent, self._silent = tuple(self._silent), []
            self.say(0, "ended", {"sinks": silent})

    def knows(self, worker: Answering) -> int:
        """The number under which the client may tell a worker something."""
        token: int = getattr(worker, "token", 0)
        if token not in self.workers:
            if len(self.workers) > _TOLD:
                self.workers = {key: e for key, e in self.workers.items() if not e.gone}
            self.workers[token] = worker
        return token

    def asked(self, number: int, prompt: str | None, password: bool, answer: Answer) -> None:
        """Have the client's user asked."""
        question = self.number()
        self._questions[question] = answer
        self.say(number, "ask", {"prompt": prompt, "password": password, "question": question})

    def answered(self, question: int, text: str | None, payloads: Sequence[Payload]) -> None:
        """The client says what its user answered, or why he did not."""
        answer = self._questions.pop(question, None)
        if answer is not None:
            error: Exception | None = None
            if payloads:
                said = serialize.loads(payloads[0])
                error = said if isinstance(said, Exception) else GpunbError(str(said))
            answer(text, error)


class Relayed:
    """A sink that sends everything to the client that has the real one.

    Attributes:
        place: as the real one has it.
        background: as the real one has it.
        failed: whether the cell has said that it failed.
        log: what it keeps, if anything.
    """

    def __init__(
        self, sinks: Sinks, number: int, place: tuple[int, str | None] | None, background: bool
    ) -> None:
        self.place = place
        self.background = background
        self.failed = False
        self.log: Log | None = None
        self._within: _Within | None = None
        self._sinks = sinks
        self._number = number
        self._pid: int | None = None
        self._worker: int | None = None
        self._used = self._over = False
        self._left_out = 0

    @property
    def _kept(self) -> Log | None:
        """The log of its cell."""
        return self._within.log if self._within is not None else self.log

    def on(self, pid: int | None) -> None:
        self._pid = pid

    def by(self, worker: Answering) -> None:
        self._worker = self._sinks.knows(worker)

    def named(self, name: str) -> Relayed:
        number = self._sinks.number()
        self._say("named", {"number": number, "name": name})
        made = Relayed(self._sinks, number, self.place, self.background)
        if (log := self._kept) is not None:
            made._within = _Within(name, log)
        return made

    def text(self, stream: str, text: str) -> None:
        if self.log is not None:
            self.log.add(("text", stream, {"text": text}))
        elif self._within is not None:
            self._within.on(self._pid)
            self._within.text(stream, text)
        if self._sinks.client.behind:
            self._left_out += len(text)
            return
        if self._left_out:
            text = f"\n[gpunb: {self._left_out} characters that nobody read]\n{text}"
            self._left_out = 0
        self._say("text", {"stream": stream, "text": text, "pid": self._pid})

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind == "failed":
            self.failed = True
        if (log := self._kept) is not None and not kind.startswith("comm_"):
            log.add(("show", kind, content))
        said = {"kind": kind, "content": content, "worker": self._worker}
        self._say("show", said, payloads)

    def end(self) -> None:
        if self._over:
            return
        self._over = True
        if self._used:
            self._say("end", {})
        else:
            self._sinks.ended(self._number)

    def _say(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload] = ()) -> None:
        self._used = True
        self._sinks.say(self._number, kind, content, payloads)


class _Within(Console):
    """Writes into the log of the cell that has submitted a task."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__(name)
        self.log = log

    def write(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))


class Asking(Relayed):
    """One whose user may be asked."""

    def ask(self, prompt: str | None, password: bool, answer: Answer) -> None:
        self._sinks.asked(self._number, prompt, password, answer)
