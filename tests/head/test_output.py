"""The output of tasks of a head process, on its way to the sinks of a kernel."""

from __future__ import annotations

from typing import Any

from gpunb.engine.faults import Faults
from gpunb.head import output_client, output_server
from gpunb.protocol import messages as msg
from gpunb.protocol.sink import Sink


class Slow:
    """A client that reads or does not."""

    def __init__(self) -> None:
        self.behind = False
        self.sent: list[msg.Output] = []

    def send(self, message: msg.Output, segments: Any = ()) -> None:
        self.sent.append(message)


def test_text_that_nobody_reads_is_left_out_and_counted():
    client: Any = Slow()
    sink = output_server.RelayedSink(output_server.RelayedSinks(client), 7, None, False)
    sink.on(42)
    sink.text("stdout", "a")
    client.behind = True
    sink.text("stdout", "bcd")
    sink.show("display_data", {"data": {}}, [])
    client.behind = False
    sink.text("stdout", "e")
    sink.end()
    sink.end()
    assert [(each.sink, each.kind) for each in client.sent] == [
        (7, "text"),
        (7, "show"),
        (7, "text"),
        (7, "end"),
    ]
    texts = [each.content["text"] for each in client.sent if each.kind == "text"]
    assert texts == ["a", "\n[gpunb: 3 characters that nobody read]\ne"]


class Plain(Sink):
    """A sink that has only the usual methods."""

    def __init__(self) -> None:
        self.shown_output: list[Any] = []

    def text(self, stream: str, text: str) -> None:
        self.shown_output.append((stream, text))

    def show(self, kind: str, content: Any, payloads: Any) -> None:
        self.shown_output.append((kind, content))


def test_a_sink_needs_no_more_than_two_methods():
    sinks, plain = output_client.KernelSinks(Faults()), Plain()
    number, place, background, asks, sweep = sinks.add(plain)
    assert (place, background, asks, sweep) == (None, False, False, None)
    text = {"stream": "stdout", "text": "x", "pid": 1}
    sinks.output(msg.Output(number, "text", text), [])
    sinks.output(msg.Output(number, "named", {"number": -1, "name": "inner"}), [])
    sinks.output(msg.Output(-1, "text", text), [])
    sinks.output(msg.Output(-1, "end", {}), [])
    shown_output = {"kind": "display_data", "content": {}, "worker": 5}
    sinks.output(msg.Output(number, "show", shown_output), [])
    sinks.output(msg.Output(0, "ended", {"sinks": (number, 99)}), [])
    sinks.output(msg.Output(number, "text", text), [])
    assert plain.shown_output == [("stdout", "x"), ("stdout", "x"), ("display_data", {})]
