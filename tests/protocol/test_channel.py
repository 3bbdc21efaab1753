"""Messages between two processes, whatever their size, with descriptors beside them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from gpunb.data.segments import Segment
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import PACKET, Channel, ChannelClosed, encode
from tests.waiting import eventually


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(each) for each in Channel.pair())
    yield one, other
    one.close()
    other.close()


def reply(size: int) -> msg.Reply:
    return msg.Reply(1, b"x" * size)


OVERHEAD = len(encode(reply(1000))) - 1000


@pytest.mark.parametrize(
    "size", [0, 1, 1000, *(PACKET - OVERHEAD + i for i in range(-12, 13, 3)), 5_000_000]
)
def test_any_size(ends, size):
    one, other = ends
    one.send(reply(size))
    message, descriptors = other.receive()
    assert message == reply(size)
    assert descriptors == []


@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("count", [1, 100, 250])
def test_descriptors(ends, size, count):
    one, other = ends
    segments = [Segment.write([b"%d" % i])[0] for i in range(count)]
    one.send(reply(size), segments)
    message, descriptors = other.receive()
    assert message == reply(size)
    back = [Segment.adopt(each) for each in descriptors]
    assert [bytes(each.map()) for each in back] == [b"%d" % i for i in range(count)]
    assert not any(os.get_inheritable(each.fileno()) for each in back)


def test_a_short_message_that_looks_spilled(ends):
    one, other = ends
    one.send(msg.Retired())
    assert other.receive()[0] == msg.Retired()


def test_a_closed_peer(ends):
    one, other = ends
    one.send(reply(10))
    one.close()
    assert other.receive()[0] == reply(10)
    with pytest.raises(ChannelClosed):
        other.receive()
    with pytest.raises(ChannelClosed):
        other.send(reply(10))
    with pytest.raises(ChannelClosed):
        other.send(reply(1_000_000))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("peek", [True, False])
def test_what_a_peer_sent_before_it_went_arrives_whatever_it_had_not_read(ends, wait, peek):
    one, other = ends
    one.send(reply(1))
    other.send(reply(2))
    other.send(reply(3))
    other.close()  # with what came to it unread, of which the system says that it was reset
    if peek:
        one.await_message()
    assert [one.receive(wait=wait)[0] for _ in range(2)] == [reply(2), reply(3)]
    with pytest.raises(ChannelClosed):
        one.receive(wait=wait)


def test_a_full_or_empty_channel_does_not_block(ends):
    import socket

    one, other = ends
    with pytest.raises(BlockingIOError):
        other.receive(wait=False)
    data, sent = encode(reply(50_000)), 0
    try:
        while True:
            one.send_encoded(data, (), socket.MSG_DONTWAIT)
            sent += 1
    except BlockingIOError:
        assert sent
    for _ in range(sent):
        other.receive(wait=False)
    with pytest.raises(BlockingIOError):
        other.receive(wait=False)


@pytest.mark.parametrize(
    "message",
    [
        msg.Ready(7),
        msg.Retired(),
        msg.Held((1, 2), -1),
        msg.Done(1, 2, "ok", (((b"", (), (), ()), False),)),
        msg.Request(1, 2, 3, "fetch", ((), None)),
        msg.Shown(1, "display_data", {"data": {}}),
    ],
)
def test_messages_are_the_same_again(ends, message):
    one, other = ends
    one.send(message)
    assert other.receive()[0] == message


def test_a_receiver_that_stays_awake_misses_nothing(ends):
    one, other = ends

    def answer():
        for _ in range(300):
            other.send(other.receive()[0])
        other.close()

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(300):
        if number % 100 == 99:
            eventually(lambda: not other._spins, "it does not stay awake any longer")
        one.send(reply(number))
        assert one.receive()[0] == reply(number)
    with pytest.raises(ChannelClosed):
        one.receive()
    thread.join()


@pytest.mark.parametrize("may", [True, False])
def test_a_receiver_spins_only_where_there_is_a_cpu_for_it(ends, monkeypatch, may):
    one, other = ends
    one.may_spin, yields = may, []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    for _ in range(20):  # a busy machine may let a receiver wait for what has come
        other.send(reply(0))
        one.receive()  # that was fast: the next one may be, too
        late = threading.Timer(0.01, other.send, [reply(1)])
        late.start()
        one.receive()
        late.join()
        if yields:
            break
    assert bool(yields) == may


@pytest.mark.parametrize("wait", ["receive", "await_message"])
def test_an_interrupt_of_a_receiver_that_spins_has_no_error_behind_it(ends, monkeypatch, wait):
    def interrupted():
        raise KeyboardInterrupt

    one, _ = ends
    one._spins = True
    monkeypatch.setattr(os, "sched_yield", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        getattr(one, wait)()
    assert raised.value.__context__ is None
