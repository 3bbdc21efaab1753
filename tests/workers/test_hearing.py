"""What the kernel hears of a process: who it is, before what it prints."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from gpunb.workers import messages as msg
from gpunb.workers.channel import Channel
from gpunb.workers.loop import Loop
from gpunb.workers.pool import Pool, Process


class Source:
    """Starts nothing; has the process's ends."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ends: list[int] = []

    def start(self, process: Process, descriptors: Sequence[int]) -> None:
        self.ends = [os.dup(each) for each in descriptors]

    def signal(self, process: Process, number: int) -> None:
        pass

    def close(self) -> None:
        pass


class Listener:
    def __init__(self) -> None:
        self.texts: list[tuple[int | None, bytes]] = []

    def said(self, process: Process, message: msg.Message, segments: list[Any]) -> None:
        pass

    def printed(self, process: Process, name: str, data: bytes) -> None:
        self.texts.append((process.pid, data))

    def exited(self, process: Process, reason: str) -> None:
        pass


@pytest.mark.parametrize("first", ["output", "channel"])
def test_what_is_printed_at_once_is_known_to_be_the_processs(first: str) -> None:
    """A kernel that stood still finds both at the same time, in any order."""
    loop, listener, source = Loop(), Listener(), Source()
    pool = Pool(loop, listener, 0)
    pool.open(source)
    process = pool.start(1)
    channel, out, *others = source.ends
    try:
        with socket.socket(fileno=channel) as theirs:
            Channel(theirs).send(msg.Ready(4711))
            os.write(out, b"text")
            if first == "channel":
                loop.ready.add(process.out)
                pool._heard(process)
            pool._output(process, process.out)
        assert listener.texts == [(4711, b"text")]
        assert process.ready
    finally:
        for each in (out, *others, process.out, process.err, process.interrupts):
            os.close(each)
        process.channel.close()
        loop.close()
