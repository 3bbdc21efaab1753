"""The channel of a worker, which all its threads share: the test is the kernel."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.protocol import messages as msg
from gpunb.protocol import verbs
from gpunb.protocol.channel import Channel, ChannelClosed, decode_trusted, encode_trusted
from gpunb.worker.transport import Transport, arrived
from tests.waiting import PATIENCE

LARGE = bytes(100_000)


def execute(task: int, *, spin: bool = True) -> msg.Execute:
    wire = ((b"", (), (), ()), 0)
    return msg.Execute(
        task, 1, "f", "call", None, "", None, wire, (), (), 1, False, False, None, "", spin
    )


class Kernel:
    """The kernel's end of a worker's channel.

    Attributes:
        transport: the worker's end.
    """

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        theirs.settimeout(PATIENCE)
        self.channel = Channel(theirs)
        self.transport = Transport(Channel(ours, decode_trusted))

    def send(self, message: msg.Message, *payloads: Payload) -> None:
        """Send a message, with payloads if it is a reply or a message of the front end."""
        if payloads:
            wires, segments = serialize.to_wires(payloads)
            made: Any = message
            message = made._replace(payloads=wires)
            descriptors = [each.fileno() for each in segments]
            self.channel.send_encoded(encode_trusted(message), descriptors)
        else:
            self.channel.send_encoded(encode_trusted(message))

    def next(self) -> msg.Message:
        return self.channel.receive()[0]

    def close(self) -> None:
        self.transport.listen_to(None)
        self.channel.close()
        self.transport.channel.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


# ----------------------------------------------------------------------------------------- sending


@pytest.mark.parametrize(
    "message",
    [
        msg.Held((7, 0), -1),
        msg.Printed(5, "stdout", "text"),
        msg.Request(1, 5, 1, *verbs.encode(verbs.Take((7, 0)))),
    ],
    ids=["plain", "text of a user", "request"],
)
def test_messages_arrive_as_they_are(kernel: Kernel, message: msg.Message) -> None:
    kernel.transport.send(message)
    assert kernel.next() == message


def test_values_of_a_kind_of_the_user_are_made_plain(kernel: Kernel) -> None:
    """The kernel takes plain values only, such as the name of an actor."""

    class Name(str):
        __slots__ = ()

    kernel.transport.send(msg.Printed(5, "stdout", Name("text")))
    verb = verbs.FindActor(Name("tally"), "")
    kernel.transport.send(msg.Request(1, 5, 1, *verbs.encode(verb)))
    printed, request = kernel.next(), kernel.next()
    assert isinstance(printed, msg.Printed)
    assert isinstance(request, msg.Request)
    assert [type(each) for each in (printed.text, request.arguments[0])] == [str, str]


# ------------------------------------------------------------------------------------- the work


def test_work_comes_in_its_order(kernel: Kernel) -> None:
    for task in (1, 2, 3):
        kernel.send(execute(task))
    found = [kernel.transport.next_work(None) for _ in range(3)]
    assert [each[0].task for each in found if each] == [1, 2, 3]  # type: ignore[union-attr]


def test_wait_for_work_may_end_without_any(kernel: Kernel) -> None:
    assert kernel.transport.next_work(0) is None
    kernel.send(msg.Retired())
    work = kernel.transport.next_work(0)
    assert work is not None
    assert work[0] == msg.Retired()


def test_work_that_is_there_is_taken_without_waiting(kernel: Kernel) -> None:
    assert list(kernel.transport.work_now()) == []
    for task in (1, 2):
        kernel.send(execute(task))
    found: list[Any] = [message for message, _ in kernel.transport.work_now()]
    assert [each.task for each in found] == [1, 2]


@pytest.mark.parametrize("spin", [True, False])
def test_task_says_whether_its_worker_may_spin(kernel: Kernel, spin: bool) -> None:
    kernel.transport.channel.may_spin = not spin
    kernel.send(execute(1, spin=spin))
    kernel.transport.next_work(None)
    assert kernel.transport.channel.may_spin is spin


def test_end_of_the_kernel_ends_each_wait(kernel: Kernel) -> None:
    waiter = kernel.transport.pending.expect()
    kernel.channel.close()
    for wait in (
        lambda: kernel.transport.next_work(None),
        lambda: list(kernel.transport.work_now()),
        lambda: kernel.transport.wait_for(waiter),
    ):
        with pytest.raises(ChannelClosed):
            wait()


# ----------------------------------------------------------------------------------------- replies


def test_reply_comes_with_its_memory(kernel: Kernel) -> None:
    waiter = kernel.transport.pending.expect()
    assert kernel.transport.busy
    kernel.send(msg.Reply(waiter.number, "value"), serialize.dumps(LARGE))
    reply, segments = kernel.transport.wait_for(waiter)
    (payload,) = serialize.from_wires(reply.payloads, segments)
    assert (reply.value, serialize.loads(payload)) == ("value", LARGE)
    kernel.transport.pending.forget(waiter.number)
    assert not kernel.transport.busy


def test_work_that_comes_before_a_reply_is_kept(kernel: Kernel) -> None:
    told: list[str] = []
    kernel.transport.beside = lambda: told.append("work")
    waiter = kernel.transport.pending.expect()
    kernel.send(execute(1))
    kernel.send(msg.Reply(waiter.number, "value"))
    assert kernel.transport.wait_for(waiter)[0].value == "value"
    assert told == ["work"]
    work: Any = kernel.transport.next_work(None)
    assert work[0].task == 1


def test_reply_of_another_thread_is_left_for_it(kernel: Kernel) -> None:
    first, second = (kernel.transport.pending.expect() for _ in range(2))
    kernel.send(msg.Reply(second.number, "second"))
    kernel.send(msg.Reply(first.number, "first"))
    assert kernel.transport.wait_for(first)[0].value == "first"
    assert second.reply is not None
    assert kernel.transport.wait_for(second)[0].value == "second"


def test_threads_read_for_each_other(kernel: Kernel) -> None:
    count = 8
    waiters = [kernel.transport.pending.expect() for _ in range(count)]
    found: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def wait(waiter: Any) -> None:
        reply, _ = kernel.transport.wait_for(waiter)
        kernel.transport.pending.forget(waiter.number)
        found.put((waiter.number, reply.value))

    threads = [threading.Thread(target=wait, args=(each,)) for each in waiters]
    for thread in threads:
        thread.start()
    for waiter in reversed(waiters):
        kernel.send(msg.Reply(waiter.number, -waiter.number))
    assert {found.get(timeout=PATIENCE) for _ in range(count)} == {
        (each.number, -each.number) for each in waiters
    }
    for thread in threads:
        thread.join(PATIENCE)


def test_callbacks_are_called_although_nobody_waits(kernel: Kernel) -> None:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for value in ("first", "second"):
        number = kernel.transport.pending.call_back(found.put)
        kernel.transport.read_for_callbacks()
        kernel.send(msg.Reply(number, value))
        reply, _ = found.get(timeout=PATIENCE)
        assert reply.value == value


# ------------------------------------------------------------------------------- the front end


COMM = msg.CommMessage("comm_msg", {"data": 1})


def test_message_of_the_front_end_is_work_between_tasks(kernel: Kernel) -> None:
    kernel.send(COMM)
    work = kernel.transport.next_work(None)
    assert work is not None
    assert work[0] == COMM


def test_listener_hears_the_front_end_while_a_task_runs(kernel: Kernel) -> None:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    kernel.transport.listen_to(lambda message, payloads: heard.put((message, payloads)))
    kernel.send(COMM, serialize.dumps(LARGE))
    message, payloads = heard.get(timeout=PATIENCE)
    assert (message.kind, message.content) == ("comm_msg", {"data": 1})
    assert [serialize.loads(each) for each in payloads] == [LARGE]


def test_listener_hears_what_a_waiting_thread_has_read(kernel: Kernel) -> None:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    kernel.transport.listen_to(lambda message, _: heard.put(message))
    waiter = kernel.transport.pending.expect()
    kernel.send(COMM)
    kernel.send(msg.Reply(waiter.number, "value"))
    assert kernel.transport.wait_for(waiter)[0].value == "value"
    assert heard.get(timeout=PATIENCE) == COMM


def test_payloads_of_a_message_are_made_of_its_descriptors(kernel: Kernel) -> None:
    kernel.send(COMM, serialize.dumps(LARGE), serialize.dumps("small"))
    work: Any = kernel.transport.next_work(None)
    message, descriptors = work
    found = [serialize.loads(each) for each in arrived(message.payloads, descriptors)]
    assert found == [LARGE, "small"]
