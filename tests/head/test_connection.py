"""The connection of an attached kernel: requests, their replies, and its end.

The test is the head process: it reads and answers at the other end of the socket.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.engine.faults import Faults
from gpunb.exceptions import GpunbError
from gpunb.head.connection import Connection
from gpunb.protocol import messages as msg
from gpunb.protocol import verbs
from gpunb.protocol.channel import Channel, ChannelClosed
from tests.waiting import PATIENCE

GONE = "the head process 'lab' is gone"
ASK = verbs.Ask("total", ())
LARGE = bytes(100_000)


class Head:
    """The head process at the other end, and the kernel's connection to it.

    Attributes:
        heard: the messages that the listener of the connection got, and None for its end.
    """

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        theirs.settimeout(PATIENCE)
        self.channel = Channel(theirs)
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.listener: Callable[[Any, list[Payload]], object] = self._note
        self.connection = Connection(ours, GONE, self._listen, Faults())
        self._threads = ThreadPoolExecutor(4)

    def _listen(self, message: msg.Output | None, payloads: list[Payload]) -> None:
        self.listener(message, payloads)

    def _note(self, message: msg.Output | None, payloads: list[Payload]) -> None:
        self.heard.put((message, [serialize.loads(each) for each in payloads]))

    def next(self) -> Any:
        """Return the next message of the kernel."""
        message, descriptors = self.channel.receive()
        self.segments = [Segment.adopt(each) for each in descriptors]
        return message

    def reply(self, request: Any, value: object, *payloads: Payload, failed: bool = False) -> None:
        wires, segments = serialize.to_wires(payloads)
        self.channel.send(msg.Reply(request.request, value, wires, failed), segments)

    def output(self, number: int, *payloads: Payload) -> None:
        wires, segments = serialize.to_wires(payloads)
        self.channel.send(msg.Output(1, "text", {"number": number}, wires), segments)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function on a thread of its own."""
        return self._threads.submit(function, *arguments)

    def ask(self, verb: Any = ASK, payloads: Sequence[Payload] = ()) -> Future[Any]:
        """Send a request from a thread of its own, which waits for the reply."""
        return self.start(self.connection.request, verb, payloads)

    def close(self) -> None:
        self.connection.hang_up()
        self.channel.close()
        self.connection.join()
        self._threads.shutdown()


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    yield head
    head.close()


def error_of(asked: Future[Any]) -> str:
    """Return the text of the GpunbError of a request."""
    with pytest.raises(GpunbError) as raised:
        asked.result(PATIENCE)
    return str(raised.value)


# ----------------------------------------------------------------------------- requests and replies


@pytest.mark.parametrize("main", [True, False], ids=["the main thread", "another thread"])
def test_request_has_the_value_and_the_payloads_of_its_reply(head: Head, main: bool) -> None:
    def answer() -> msg.Request:
        request = head.next()
        head.reply(request, [1, "two"], serialize.dumps("small"), serialize.dumps(LARGE))
        return request

    if main:
        answered = head.start(answer)
        value, payloads = head.connection.request(ASK)
        request = answered.result(PATIENCE)
    else:
        asked = head.ask()
        request = answer()
        value, payloads = asked.result(PATIENCE)
    assert (request.verb, request.arguments) == ("Ask", ("total", ()))
    assert (value, [serialize.loads(each) for each in payloads]) == ([1, "two"], ["small", LARGE])


def test_payloads_of_a_request_arrive(head: Head) -> None:
    asked = head.ask(verbs.Put(True), [serialize.dumps(LARGE)])
    request = head.next()
    (payload,) = serialize.from_wires(request.payloads, head.segments)
    assert serialize.loads(payload) == LARGE
    head.reply(request, (0, 7))
    assert asked.result(PATIENCE)[0] == (0, 7)


def test_failed_reply_raises_its_error(head: Head) -> None:
    asked = head.ask()
    head.reply(head.next(), None, serialize.dumps(LookupError("no such job")), failed=True)
    with pytest.raises(LookupError, match="no such job"):
        asked.result(PATIENCE)


def test_replies_may_come_in_another_order(head: Head) -> None:
    asked = {}
    requests = []
    for name in ("first", "second", "third"):
        asked[name] = head.ask(verbs.Ask(name, ()))
        requests.append(head.next())
    for request in reversed(requests):
        head.reply(request, request.arguments[0])
    for name, each in asked.items():
        assert each.result(PATIENCE)[0] == name


def test_callback_gets_the_reply(head: Head) -> None:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    head.connection.request_soon(found.put, verbs.Watch((7, 0)))
    request = head.next()
    assert (request.verb, request.arguments) == ("Watch", ((7, 0),))
    head.reply(request, None)
    reply, segments = found.get(timeout=PATIENCE)
    assert (reply.request, reply.failed, segments) == (request.request, False, [])


def test_callback_that_fails_ends_nothing(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    head.connection.request_soon(lambda _: 1 // 0, verbs.Watch((7, 0)))
    head.reply(head.next(), None)
    asked = head.ask()
    head.reply(head.next(), "still here")
    assert asked.result(PATIENCE)[0] == "still here"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_request_without_a_reply_has_no_number(head: Head) -> None:
    head.connection.request_later(verbs.Unwatch(3))
    request = head.next()
    assert (request.request, request.verb, request.arguments) == (0, "Unwatch", (3,))


@pytest.mark.parametrize("lazily", [False, True])
def test_message_that_is_no_request_is_sent(head: Head, lazily: bool) -> None:
    head.connection.send(msg.Held((7, 0), -1), lazily=lazily)
    assert head.next() == msg.Held((7, 0), -1)


def test_reply_that_nobody_waits_for_is_dropped(head: Head) -> None:
    asked = head.ask()
    request = head.next()
    head.reply(request._replace(request=999), "lost")
    head.reply(request, "found")
    assert asked.result(PATIENCE)[0] == "found"


def test_messages_wait_in_their_order_while_the_head_process_is_slow(head: Head) -> None:
    """Nobody waits for the head process meanwhile, although the socket is full."""
    count = 50
    for number in range(count):
        head.connection.request_later(verbs.Unwatch(number), [serialize.dumps(bytes(40_000))])
    assert [head.next().arguments for _ in range(count)] == [(number,) for number in range(count)]


def test_no_message_overtakes_those_that_wait(head: Head) -> None:
    """The socket has room again, and the loop has not sent what waits: it runs a callback."""
    full, room = threading.Event(), threading.Event()

    def fills(_: Any) -> None:
        for number in range(20):
            head.connection.request_later(verbs.Unwatch(number), [serialize.dumps(bytes(40_000))])
        full.set()
        room.wait(PATIENCE)
        head.connection.request_later(verbs.Unwatch(20))

    head.connection.request_soon(fills, verbs.Watch((7, 0)))
    head.reply(head.next(), None)
    assert full.wait(PATIENCE)
    first = head.next()
    room.set()
    found = [first, *(head.next() for _ in range(20))]
    assert [each.arguments for each in found] == [(number,) for number in range(21)]


# -------------------------------------------------------------------------------------- the output


def test_listener_gets_the_output_in_its_order(head: Head) -> None:
    for number in range(3):
        head.output(number, serialize.dumps(LARGE))
    for number in range(3):
        message, values = head.heard.get(timeout=PATIENCE)
        assert (message.content, values) == ({"number": number}, [LARGE])


def test_request_in_a_callback_is_answered_before_other_messages(head: Head) -> None:
    """The callback has the thread that reads: it reads its own reply itself."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def asks(_: Any) -> None:
        value, _ = head.connection.request(ASK)
        found.put((value, head.heard.qsize()))

    head.connection.request_soon(asks, verbs.Watch((7, 0)))
    head.reply(head.next(), None)
    request = head.next()
    head.output(1)
    head.reply(request, "answer")
    assert found.get(timeout=PATIENCE) == ("answer", 0)
    message, _ = head.heard.get(timeout=PATIENCE)
    assert message.content == {"number": 1}


# ----------------------------------------------------------------------------------------- the end


def test_end_of_the_head_process_is_told_to_all_who_wait(head: Head) -> None:
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked = [head.ask(), head.ask()]
    head.connection.request_soon(called.put, verbs.Watch((7, 0)))
    for _ in range(3):
        head.next()
    assert head.connection.alive
    head.channel.close()
    for each in asked:
        assert error_of(each).startswith(f"{GONE}: call gpunb.shutdown()")
    assert called.get(timeout=PATIENCE) is None
    assert head.heard.get(timeout=PATIENCE) == (None, [])
    assert (head.connection.alive, head.connection.lost) == (False, True)


def test_nothing_is_asked_after_the_end(head: Head) -> None:
    called: list[Any] = []
    head.channel.close()
    assert head.heard.get(timeout=PATIENCE)[0] is None
    for ask in (
        lambda: head.connection.request(ASK),
        lambda: head.connection.request_soon(called.append, ASK),
        head.connection.check_alive,
    ):
        with pytest.raises(GpunbError, match=GONE):
            ask()
    head.connection.request_later(ASK)
    head.connection.send(msg.Held((7, 0), -1))
    assert called == []


def test_last_messages_are_heard_before_the_end(head: Head) -> None:
    count = 100
    for number in range(count):
        head.output(number)
    head.channel.close()
    heard = [head.heard.get(timeout=PATIENCE)[0] for _ in range(count + 1)]
    assert [each.content["number"] for each in heard[:-1]] == list(range(count))
    assert heard[-1] is None


@pytest.mark.parametrize("bad", ["garbage", "message", "listener"])
def test_head_process_that_cannot_be_understood_is_left(head: Head, bad: str) -> None:
    def fails(message: msg.Output | None, payloads: list[Payload]) -> None:
        head.heard.put((message, payloads))
        if message is not None:
            raise KeyError("no such sink")

    asked = head.ask()
    head.next()
    head.listener = fails
    match bad:
        case "garbage":
            head.channel.send_encoded(b"garbage")
        case "message":
            head.channel.send(msg.Ready(1))
        case _:
            head.output(1)
    text = error_of(asked)
    assert text.startswith("what the head process said cannot be understood: ")
    assert {"garbage": "", "message": "Ready", "listener": "no such sink"}[bad] in text
    with pytest.raises(ChannelClosed):
        head.next()


def test_kernel_may_hang_up_while_threads_wait(head: Head) -> None:
    called: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked = head.ask()
    head.connection.request_soon(called.put, verbs.Watch((7, 0)))
    for _ in range(2):
        head.next()
    assert head.connection.hang_up()
    assert not head.connection.hang_up()
    assert "shut down" in error_of(asked)
    assert called.get(timeout=PATIENCE) is None
    head.connection.join()
    with pytest.raises(ChannelClosed):
        head.next()
    with pytest.raises(GpunbError, match="this session was shut down"):
        head.connection.request(ASK)
    assert (head.connection.alive, head.connection.lost) == (False, False)


def test_reason_of_an_end_is_the_first_one(head: Head) -> None:
    """`end` is for the loop's thread, so a callback calls it."""
    asked = head.ask()
    watched: threading.Event = threading.Event()

    def end(_: Any) -> None:
        head.connection.end("dismissed: too slow")
        head.connection.end("another reason")
        watched.set()

    head.next()
    head.connection.request_soon(end, verbs.Watch((7, 0)))
    head.reply(head.next(), None)
    assert watched.wait(PATIENCE)
    assert error_of(asked).startswith("dismissed: too slow: call gpunb.shutdown()")
