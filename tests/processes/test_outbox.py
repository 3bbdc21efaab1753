"""Messages that wait for room in a socket."""

from __future__ import annotations

import contextlib
import errno

import pytest

from gpunb.processes.outbox import Outbox
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, decode_trusted, encode_trusted
from gpunb.system.loop import Loop


def test_an_outbox_may_close_its_channel_when_a_waiting_message_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = (Channel(each, decode_trusted) for each in Channel.pair())
    loop = Loop()
    loop.watch(ours.fileno(), lambda: None)

    def end() -> None:
        loop.unwatch(ours.fileno())
        ours.close()

    outbox = Outbox(loop, ours, encode_trusted, end)
    with contextlib.closing(theirs):
        while not outbox.waiting:
            outbox.send(msg.Ready(1))

        def fails(*_: object) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr(Channel, "send_encoded", fails)
        outbox.send_waiting()
    assert not outbox.waiting
    assert ours.fileno() == -1
    loop.close()
