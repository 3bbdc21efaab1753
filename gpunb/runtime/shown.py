"""The sinks of a kernel that is attached to a head process, each under a number.

What the head process says of a number is done with the sink: the other side of `clients.Sinks`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from gpunb import serialize
from gpunb.runtime.output import Sink
from gpunb.serialize import Payload
from gpunb.workers import messages as msg

MOST = 5000
"""Sinks that are kept for what widgets show between cells."""

About: TypeAlias = tuple[int, tuple[int, str | None] | None, bool, bool]
"""A sink's number, its place, whether it is in the background, and whether it has a user."""


class Ask(Protocol):
    """Asks the head process for something to which there is no answer; from any thread."""

    def __call__(
        self, verb: str, arguments: tuple[Any, ...], payloads: Sequence[Payload] = ()
    ) -> None: ...


class Sinks:
    """Gives what comes to the sinks, on the loop's thread."""

    ask: Ask

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}
        self._numbers = itertools.count(1)
        self._lasting: OrderedDict[int, int] = OrderedDict()
        self.closed = False

    def add(self, sink: Sink) -> About:
        """Have a number for a sink, until `forget` or its job's end; from any thread."""
        number = next(self._numbers)
        self._sinks[number] = sink
        return self._about(number, sink)

    def forget(self, number: int) -> None:
        self._sinks.pop(number, None)

    def lasting(self, sink: Sink) -> About:
        """The number of a sink that is no job's; from any thread."""
        number = self._lasting.get(id(sink))
        if number is None:
            number = self._lasting[id(sink)] = self.add(sink)[0]
            if len(self._lasting) > MOST:
                self.forget(self._lasting.popitem(last=False)[1])
        return self._about(number, sink)

    @staticmethod
    def _about(number: int, sink: Sink) -> About:
        asks = getattr(sink, "ask", None) is not None
        background = bool(getattr(sink, "background", False))
        return number, getattr(sink, "place", None), background, asks

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        for sink in list(self._sinks.values()):
            _end(sink)
        self._sinks.clear()

    def output(self, message: msg.Output, payloads: Sequence[Payload]) -> None:
        """Do what the head process says."""
        content = message.content
        if message.kind == "ended":
            for number in content["sinks"]:
                if (sink := self._sinks.pop(number, None)) is not None:
                    _end(sink)
            return
        sink = self._sinks.get(message.sink)
        if sink is None:
            return
        match message.kind:
            case "text":
                if (on := getattr(sink, "on", None)) is not None:
                    on(content["pid"])
                sink.text(content["stream"], content["text"])
            case "show":
                if content["worker"] is not None and (by := getattr(sink, "by", None)) is not None:
                    by(Worker(self, content["worker"]))
                sink.show(content["kind"], content["content"], payloads)
            case "named":
                named: Callable[[str], Sink] | None = getattr(sink, "named", None)
                child = named(content["name"]) if named is not None else _Shared(sink)
                self._sinks[content["number"]] = child
            case "ask":
                self._question(sink, content)
            case "end":
                del self._sinks[message.sink]
                _end(sink)
            case _:
                pass

    def _question(self, sink: Any, content: Mapping[str, Any]) -> None:
        question: int = content["question"]

        def answer(text: str | None, error: Exception | None) -> None:
            payloads = [] if error is None else [_dumped(error)]
            self.ask("answer", (question, text), payloads)

        sink.ask(content["prompt"], content["password"], answer)


class Worker:
    """A worker of the head process that has shown something, for the front end's answers."""

    def __init__(self, sinks: Sinks, token: int) -> None:
        self._sinks = sinks
        self._token = token

    @property
    def gone(self) -> bool:
        """Whether all of them are; what is said to one that is gone is heard by nobody."""
        return self._sinks.closed

    def tell(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Sink
    ) -> None:
        about = self._sinks.lasting(sink)
        self._sinks.ask("tell", (self._token, kind, content, about), payloads)


class _Shared:
    """A sink in which another job shows as well, whose end is not its own."""

    def __init__(self, sink: Sink) -> None:
        self.text = sink.text
        self.show = sink.show
        if (by := getattr(sink, "by", None)) is not None:
            self.by = by
        if (on := getattr(sink, "on", None)) is not None:
            self.on = on


def _end(sink: Sink) -> None:
    if (end := getattr(sink, "end", None)) is not None:
        end()


def _dumped(error: Exception) -> Payload:
    try:
        return serialize.dumps(error)
    except TypeError:
        return serialize.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
