"""When standbys are forked, so that nobody waits for the fork."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpunb.processes import pool as pools
from gpunb.processes.pool import WorkerPool
from gpunb.system.loop import Loop


class Clock:
    """The time of the pool; `to` goes on to a time, and calls what is due by then."""

    def __init__(self, loop: Loop) -> None:
        self.now = 0.0
        self._timers = loop._timers

    def to(self, when: float) -> None:
        for each in sorted(self._timers):
            if each[0] <= when:
                self._timers.remove(each)
                self.now = each[0]
                each[2]()
        self.now = when


class Source:
    """Counts the processes that it should start, and starts none."""

    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.started = 0

    def start(self, process: Any, ends: Sequence[int], **options: bool) -> None:
        self.started += 1
        for each in ends:
            os.close(each)

    def close(self) -> None:
        pass


@pytest.fixture
def parts(monkeypatch) -> Iterator[tuple[WorkerPool, Source, Clock]]:
    loop, source = Loop(), Source()
    clock = Clock(loop)
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: clock.now))
    listener: Any = SimpleNamespace(on_exit=lambda *_: None)
    pool = WorkerPool(loop, listener, standbys=2)
    pool.open(source)
    assert source.started == 2
    yield pool, source, clock
    pool.close()
    loop.close()


def test_the_next_one_waits_while_there_is_another(parts):
    pool, source, clock = parts
    process = pool.start(1)
    clock.to(0.05)
    assert source.started == 2
    pool.ended(process, "ended")
    assert source.started == 2
    clock.to(0.06)
    assert source.started == 3


def test_it_is_forked_while_the_worker_runs_on(parts):
    pool, source, clock = parts
    pool.start(1)
    clock.to(0.2)
    assert source.started == 3


def test_each_start_and_end_makes_it_wait_anew(parts):
    pool, source, clock = parts
    pool.ended(pool.start(1), "ended")
    clock.to(0.05)
    assert source.started == 3
    clock.to(0.099)
    process = pool.start(2)
    clock.to(0.15)  # the pause of the first start is over
    assert source.started == 3
    pool.ended(process, "ended")
    clock.to(0.16)
    assert source.started == 4


def test_it_does_not_wait_when_there_is_no_other(parts):
    pool, source, _ = parts
    pool.start(1)
    pool.start(2)
    assert source.started == 4
