"""Leases while the event loop cannot watch another descriptor."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from gpunb import accelerators
from gpunb.leases import ledger_file, liveness
from gpunb.leases.leases import Leases
from gpunb.leases.ledger import Ledger
from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import UNIT, Machine
from gpunb.system.loop import Loop
from tests.waiting import eventually

MACHINE = Machine(accelerators.parse_simulate("1xA100:40GiB"), UNIT)
(KEY,) = [each.key for each in MACHINE.devices]
RUN: Any = SimpleNamespace(worker=1, allocation=SimpleNamespace(shares=((KEY, UNIT),)))


class Full(Loop):
    """Cannot watch the next `full` descriptors."""

    full = 0

    def watch(self, *each: Any) -> None:
        self.full -= 1
        if self.full >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().watch(*each)


@pytest.fixture
def leases(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(ledger_file.VARIABLE, str(tmp_path))
    engine: Any = SimpleNamespace(
        loop=Full(),
        feed=lambda event: None,
        scheduler=SimpleNamespace(machine=MACHINE, peers=SimpleNamespace(report=None)),
    )
    sampler: Any = SimpleNamespace(usage=lambda key: None, glance=lambda seconds: None)
    found: Any = Leases(engine, sampler)
    found.enter(MACHINE)
    found.loop = engine.loop
    thread = threading.Thread(target=engine.loop.run, args=(lambda item: item(),))
    thread.start()
    yield found
    engine.loop.post(engine.loop.stop)
    thread.join(5)
    found.close()
    engine.loop.close()


def on_loop(leases: Any, function: Callable[[], Any]) -> Any:
    """Call a function on the loop's thread."""
    done: Future[Any] = Future()
    leases.loop.post(lambda: done.set_result(function()))
    return done.result(5)


def test_lease_is_taken_while_the_fifo_cannot_be_watched(leases):
    leases.loop.full = 1
    assert on_loop(leases, lambda: leases.take(RUN, "train", lasting=False))
    on_loop(leases, lambda: leases.gone(1))
    assert not leases._held
    eventually(lambda: leases.ledger.fifo in leases.loop._watched, "the FIFO is watched")


def test_end_of_another_session_is_watched_after_a_failed_try(leases, tmp_path):
    other = Ledger(tmp_path, [KEY], {})
    other.take({KEY: UNIT}, lasting=False, job="train")
    on_loop(leases, leases.open)
    leases._claim = object()  # as if it waited
    leases.loop.full = 1
    on_loop(leases, leases.look)
    eventually(lambda: leases._peers, "the other one is watched")
    (descriptor,) = leases._peers.values()
    assert descriptor in leases.loop._watched
    leases._claim = None
    other.close()


def test_lease_refused_without_a_known_reason_is_tried_again_only_after_a_pause(leases):
    looks: list[Any] = []
    look = leases.ledger.look
    claim = ev.Claim(shares=((KEY, UNIT),))

    def feed(event: Any) -> None:  # as the scheduler does, which waits and says so
        if isinstance(event, ev.PeersChanged) and event.shares and len(looks) < 100:
            leases.claim(claim)

    def refused() -> None:
        leases._engine.feed = feed
        leases._engine.scheduler.peers.report = leases._reported
        leases.ledger.look = lambda: looks.append(1) or look()
        leases.ledger.take = lambda *_, **__: False
        leases.take(RUN, "train", lasting=False)
        found.append(len(looks))

    found: list[int] = []
    on_loop(leases, refused)
    assert found == [1]
    eventually(lambda: len(looks) > 1, "it looks again after a pause")


def test_a_session_that_is_woken_in_vain_again_and_again_looks_seldom(leases, tmp_path):
    other = Ledger(tmp_path, [KEY], {})
    other.take({KEY: UNIT}, lasting=False, job="train")
    on_loop(leases, leases.open)
    on_loop(leases, lambda: leases.claim(ev.Claim(((KEY, UNIT),))))
    looks: list[Any] = []
    look = leases.look
    leases.look = lambda: (looks.append(1), look())
    ended = time.monotonic() + 0.5
    while time.monotonic() < ended:
        liveness.notify(leases.ledger._folder, [leases.ledger.record.id])
        time.sleep(0.001)  # by the clock: the pauses between looks are
    assert len(looks) <= 15
    other.give({KEY: UNIT}, lasting=False)
    other.publish()
    eventually(lambda: not leases._reported.shares, "it has seen the end of the lease")
    assert on_loop(leases, lambda: leases.take(RUN, "train", lasting=False))
    assert not leases._woken
    on_loop(leases, lambda: leases.gone(1))
    other.close()


def test_a_session_that_does_not_wait_is_never_woken_in_vain(leases, tmp_path):
    other = Ledger(tmp_path, [KEY], {})
    other.take({KEY: UNIT}, lasting=False, job="train")
    on_loop(leases, leases.open)
    on_loop(leases, lambda: leases.claim(ev.Claim(((KEY, UNIT),))))
    on_loop(leases, leases._on_fifo)
    assert leases._woken == 1
    on_loop(leases, lambda: leases.claim(ev.Claim(None)))
    on_loop(leases, leases._on_fifo)
    assert leases._woken == 0
    other.close()
