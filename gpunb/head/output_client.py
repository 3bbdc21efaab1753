"""The sinks of an attached kernel. The head process knows each by a number.

Each message of the head process names a sink by its number. The other side is
`output_server.RelayedSinks`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.engine.faults import Faults, Outlets
from gpunb.protocol import messages as msg
from gpunb.protocol import verbs
from gpunb.protocol.sink import SharedSink, Sink

MOST = 5000
"""Sinks that are kept for the output of widgets between cells."""


class SendVerb(Protocol):
    """Sends a request that has no reply to the head process; from any thread."""

    def __call__(self, verb: verbs.Verb[None], payloads: Sequence[Payload] = ()) -> None: ...


class KernelSinks:
    """Gives messages of the head process to the sinks, on the loop's thread."""

    ask: SendVerb

    def __init__(self, faults: Faults) -> None:
        self._outlets = Outlets(faults)
        self._sinks: dict[int, Sink] = {}
        self._numbers = itertools.count(1)
        self._lasting: OrderedDict[int, int] = OrderedDict()
        self.closed = False

    def add(self, sink: Sink) -> verbs.SinkInfo:
        """Give a sink a number, until `forget` or its job's end; from any thread."""
        number = next(self._numbers)
        self._sinks[number] = sink
        return self._info(number, sink)

    def forget(self, number: int) -> None:
        self._sinks.pop(number, None)

    def lasting(self, sink: Sink) -> verbs.SinkInfo:
        """The number of a sink that belongs to no job; from any thread."""
        number = self._lasting.get(id(sink))
        if number is None:
            number = self._lasting[id(sink)] = self.add(sink).number
            if len(self._lasting) > MOST:
                self.forget(self._lasting.popitem(last=False)[1])
        return self._info(number, sink)

    @staticmethod
    def _info(number: int, sink: Sink) -> verbs.SinkInfo:
        return verbs.SinkInfo(number, sink.place, sink.background, sink.asks, sink.sweep)

    def close(self) -> None:
        """Note that no further message follows."""
        self.closed = True
        for sink in list(self._sinks.values()):
            self._outlets.call(sink.end)
        self._sinks.clear()

    def output(self, message: msg.Output, payloads: Sequence[Payload]) -> None:
        """Carry out a message of the head process."""
        content, call = message.content, self._outlets.call
        if message.kind == "ended":
            for number in content["sinks"]:
                if (ended := self._sinks.pop(number, None)) is not None:
                    call(ended.end)
            return
        sink = self._sinks.get(message.sink)
        if sink is None:
            return
        match message.kind:
            case "text":
                call(sink.on, content["pid"], content.get("actor", ""))
                call(sink.text, content["stream"], content["text"])
            case "show":
                if content["worker"] is not None:
                    call(sink.by, RemoteWorker(self, content["worker"]))
                call(sink.show, content["kind"], content["content"], payloads)
            case "named":
                made = call(sink.named, content["name"])
                self._sinks[content["number"]] = SharedSink(sink) if made in (sink, None) else made
            case "ask":
                self._question(sink, content)
            case "stop_sweep":
                call(sink.stop_sweep)
            case "end":
                del self._sinks[message.sink]
                call(sink.end)
            case _:
                pass

    def _question(self, sink: Sink, content: Mapping[str, Any]) -> None:
        question: int = content["question"]

        def answer(text: str | None, error: Exception | None) -> None:
            payloads = [] if error is None else [_dumped(error)]
            self.ask(verbs.Answer(question, text), payloads)

        try:
            sink.ask(content["prompt"], content["password"], answer)
        except Exception as error:  # the worker waits for an answer, and an error is one, too
            answer(None, error)


class RemoteWorker:
    """A worker of the head process whose output was shown; the front end sends messages to it."""

    def __init__(self, sinks: KernelSinks, token: int) -> None:
        self._sinks = sinks
        self._token = token

    @property
    def gone(self) -> bool:
        """Whether the connection is closed. Messages to a worker that has ended are lost."""
        return self._sinks.closed

    def send_comm(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Sink
    ) -> None:
        about = self._sinks.lasting(sink)
        self._sinks.ask(verbs.SendComm(self._token, kind, content, about), payloads)


def _dumped(error: Exception) -> Payload:
    try:
        return serialize.dumps(error)
    except TypeError:
        return serialize.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
