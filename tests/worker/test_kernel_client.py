"""The kernel as a worker sees it: questions and their answers."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.protocol import channel as channel_module
from gpunb.protocol import messages as msg
from gpunb.protocol import rpc
from gpunb.protocol.channel import Channel
from gpunb.worker import kernel_client, references, transport
from gpunb.worker.kernel_client import KernelClient
from tests.stepping import every_step
from tests.waiting import PATIENCE

STEPPED = kernel_client, transport, references, rpc, channel_module


@pytest.fixture
def remote() -> Iterator[KernelClient]:
    """Of a kernel that answers each question with its number."""
    ours, theirs = (Channel(each) for each in Channel.pair())

    def answer() -> None:
        while True:
            message, _ = theirs.receive()
            if not isinstance(message, msg.Request):
                return
            theirs.send(msg.Reply(message.request, message.request))

    kernel = threading.Thread(target=answer)
    kernel.start()
    yield KernelClient(ours)
    ours.send(msg.Ready(0))
    kernel.join(PATIENCE)
    ours.close()
    theirs.close()


class Interrupted:
    """A lock at which an interrupt comes just when it was acquired, or is to be released."""

    def __init__(self, lock: Any, when: str) -> None:
        self._lock = lock
        self._when = when

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        got: bool = self._lock.acquire(*args, **kwargs)
        self._interrupt("acquired")
        return got

    def release(self) -> None:
        self._interrupt("released")
        self._lock.release()

    def _interrupt(self, when: str) -> None:
        if self._when == when:
            self._when = ""
            signal.raise_signal(signal.SIGINT)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("when", ["acquired", "released"])
def test_an_interrupt_at_a_lock_keeps_nobody_from_asking_again(
    remote: KernelClient, when: str
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    remote.transport._reading = Interrupted(remote.transport._reading, when)  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            remote.question("first? ")
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(remote.question("second? "), int)


@pytest.mark.timeout(2 * PATIENCE)
def test_an_interrupt_between_any_two_steps_loses_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that waits for an answer also reads what it is to do next."""
    # Others of this process have nothing to do with it, so that it can recover as in a worker.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    ours, theirs = (Channel(each) for each in Channel.pair())
    remote = KernelClient(ours)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    count = 0

    def comes() -> None:
        signal.raise_signal(signal.SIGINT)

    try:
        for steps in every_step(comes, *STEPPED):
            count += 1
            number = next(remote.transport.pending._numbers) + 1
            theirs.send(msg.CommMessage(str(count), {}))
            theirs.send(msg.Reply(number, number))
            with contextlib.suppress(KeyboardInterrupt), steps.counted():
                remote.question(f"{count}? ")
            with contextlib.suppress(BlockingIOError):
                theirs.receive(wait=False)  # the question, if it got there
            remote.recover()  # as after every attempt that was interrupted
            reported = [
                each.kind
                for each, _ in remote.transport.work_now()
                if isinstance(each, msg.CommMessage)
            ]
            assert reported == [str(count)]
    finally:
        signal.signal(signal.SIGINT, before)
        ours.close()
        theirs.close()
