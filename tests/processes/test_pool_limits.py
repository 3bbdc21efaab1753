"""The pool while the system refuses resources for a new process."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from gpunb.processes import pool as pools
from gpunb.processes.pool import WorkerPool
from gpunb.system.loop import Loop
from gpunb.worker.zygote import Zygote
from tests.sessions import descriptors


class Refused:
    """Fails with one call, given by its number, of those that a new process needs."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Source:
    notes: tuple[str, ...] = ()

    def __init__(self, refused: Refused) -> None:
        self.refused = refused

    def start(self, process: Any, ends: Any, *, bare: bool = False, wait: bool = False) -> None:
        self.refused()

    def signal(self, process: Any, number: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("number", range(1, 8))
def test_failed_start_of_a_process_leaves_no_descriptors(number, monkeypatch):
    loop, refused = Loop(), Refused(number)
    watch, pipe, pair = loop.watch, os.pipe2, pools.Channel.pair
    monkeypatch.setattr(loop, "watch", lambda *each: (refused(), watch(*each)))
    monkeypatch.setattr(pools.os, "pipe2", lambda *each: (refused(), pipe(*each))[1])
    monkeypatch.setattr(pools.Channel, "pair", lambda: (refused(), pair())[1])
    before = descriptors()
    pool = WorkerPool(loop, None, standbys=0)  # type: ignore[arg-type]
    pool.open(Source(refused))
    with pytest.raises(OSError, match="No space"):
        pool.start(1)
    assert descriptors() == before
    assert not pool.processes()
    assert not loop._watched
    loop.close()


def test_failed_watch_leaves_the_descriptor_unwatched(monkeypatch):
    loop = Loop()
    with pytest.raises(ValueError, match="negative"):
        loop.watch(-1, lambda: None)
    loop.unwatch(-1)
    loop.close()


def test_an_interrupt_is_sent_again_when_its_pipe_is_full():
    loop, signals = Loop(), []
    pool = WorkerPool(loop, None, standbys=0)  # type: ignore[arg-type]
    source: Any = Source(Refused(0))
    source.signal = lambda process, number: signals.append(number)
    pool.open(source)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with open(reader, "rb", buffering=0) as read, open(writer, "wb", buffering=0) as written:
        with contextlib.suppress(BlockingIOError):
            while written.write(b"x" * 65536):
                pass
        pool._workers[1] = SimpleNamespace(interrupts=writer, gone=True)  # type: ignore[assignment]
        pool.interrupt(1, 7, 1)
        assert not signals
        assert len(loop._timers) == 1
        while read.read(65536):
            pass
        loop._timers[0][2]()
        assert signals == [signal.SIGINT]
    loop.close()


def test_zygote_repeats_a_report_that_lacked_memory():
    sent = []

    def send(data: bytes) -> None:
        sent.append(data)
        if len(sent) < 3:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    reported = Zygote.__new__(Zygote)
    reported._sock = SimpleNamespace(send=send)  # type: ignore[assignment]
    reported._reply("exited", 7, 0)
    assert len(sent) == 3
