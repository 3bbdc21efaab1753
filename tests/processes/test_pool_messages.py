"""The order of messages and output of a worker process."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from gpunb.processes.pool import WorkerPool
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel
from gpunb.system.loop import Loop


class Source:
    """Starts nothing, and has the process's ends of the pipes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ends: list[int] = []

    def start(
        self,
        process: WorkerProcess,
        descriptors: Sequence[int],
        *,
        bare: bool = False,
        wait: bool = False,
    ) -> None:
        self.ends = list(descriptors)

    def signal(self, process: WorkerProcess, number: int) -> None:
        pass

    def close(self) -> None:
        pass


class Listener:
    def __init__(self) -> None:
        self.texts: list[tuple[int | None, bytes]] = []

    def on_message(self, process: WorkerProcess, message: msg.Message, segments: list[Any]) -> None:
        pass

    def on_output(self, process: WorkerProcess, name: str, data: bytes) -> None:
        self.texts.append((process.pid, data))

    def on_renewed(self) -> None:
        pass

    def on_exit(self, process: WorkerProcess, reason: str) -> None:
        pass


@pytest.mark.parametrize("first", ["output", "channel"])
def test_output_before_the_ready_message_has_the_pid_of_its_process(first: str) -> None:
    """A kernel that was stopped finds both at the same time, in any order."""
    loop, listener, source = Loop(), Listener(), Source()
    pool = WorkerPool(loop, listener, 0)
    pool.open(source)
    process = pool.start(1)
    channel, out, *others = source.ends
    try:
        with socket.socket(fileno=channel) as theirs:
            Channel(theirs).send(msg.Ready(4711))
            os.write(out, b"text")
            if first == "channel":
                loop.ready.add(process.out)
                pool.receiver.on_channel(process)
            pool.receiver.on_output(process, process.out)
        assert listener.texts == [(4711, b"text")]
        assert process.ready
    finally:
        for each in (out, *others, process.out, process.err, process.interrupts):
            os.close(each)
        process.channel.close()
        loop.close()


def test_a_process_whose_output_cannot_be_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever as soon as the pipe is full."""
    loop, source = Loop(), Source()
    killed: list[int] = []
    monkeypatch.setattr(source, "signal", lambda _, number: killed.append(number))
    pool = WorkerPool(loop, Listener(), 0)
    pool.open(source)
    process = pool.start(1)

    def refuse(descriptor: int, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    process.ready = True
    with monkeypatch.context() as patch:
        patch.setattr("gpunb.processes.receiver.os.read", refuse)
        pool.receiver.on_output(process, process.out)
    assert killed == [signal.SIGKILL]
    assert process.fault == "what it printed could not be read: Input/output error"
    process.close()
    for each in source.ends:
        os.close(each)
    loop.close()
