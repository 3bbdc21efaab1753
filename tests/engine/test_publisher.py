"""Watchers get a snapshot when the status has changed, and not too often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.engine.faults import Faults
from gpunb.engine.publisher import INTERVAL, PULSE, SHARE, StatusPublisher, timeless
from gpunb.system.loop import Loop

EMPTY: dict[str, Any] = {"running": [], "waiting": [], "actors": [], "devices": [], "queued": 0}


class Clock(Loop):
    """A loop whose timers are called by the test, whatever their time.

    Attributes:
        timers: the time of each timer that was not called yet, and the function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[tuple[float, Any]] = []

    def at(self, when: float, callback: Any) -> None:
        self.timers.append((when, callback))

    def reach(self) -> float:
        """Call the first of the timers. Return its time."""
        self.timers.sort(key=lambda each: each[0])
        when, callback = self.timers.pop(0)
        callback()
        return when


class Watcher:
    """Keeps the snapshots that it is given, and takes them as long as `takes` is set."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.takes = True

    def __call__(self, snapshot: dict[str, Any] | None) -> bool:
        self.seen.append(snapshot)
        return self.takes


class Session:
    """A publisher of a status that tests change in `status`."""

    def __init__(self) -> None:
        self.status = {**EMPTY}
        self.clock = Clock()
        self.faults = Faults()
        self.asked = 0
        self.publisher = StatusPublisher(self.clock, self.faults, self.snapshot)

    def snapshot(self) -> dict[str, Any]:
        self.asked += 1
        return {**self.status, "time": self.asked, "totals": self.asked}


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.clock.close()


def test_nothing_is_looked_at_without_watchers(session: Session) -> None:
    session.publisher.changed()
    assert not session.publisher.watched
    assert (session.clock.timers, session.asked) == ([], 0)


def test_new_watcher_gets_a_snapshot_at_once(session: Session) -> None:
    watcher = Watcher()
    watch = session.publisher.watch(watcher)
    assert session.publisher.watched
    reached = session.clock.reach()
    assert len(watcher.seen) == 1
    assert reached <= watch.sent


def test_change_is_sent_an_interval_after_the_last_snapshot(session: Session) -> None:
    watcher = Watcher()
    watch = session.publisher.watch(watcher)
    session.clock.reach()
    session.status["queued"] = 1
    session.publisher.changed()
    sent = watch.sent
    assert session.clock.reach() >= sent + INTERVAL
    assert [each["queued"] for each in watcher.seen] == [0, 1]


def test_many_changes_are_one_snapshot(session: Session) -> None:
    watcher = Watcher()
    session.publisher.watch(watcher)
    session.clock.reach()
    timers = len(session.clock.timers)
    for count in range(1, 6):
        session.status["queued"] = count
        session.publisher.changed()
    assert len(session.clock.timers) <= timers + 1
    session.clock.reach()
    assert [each["queued"] for each in watcher.seen] == [0, 5]


@pytest.mark.parametrize(("asked", "interval"), [(0.0, INTERVAL), (2.5, 2.5)])
def test_watcher_is_sent_snapshots_at_its_own_pace(
    session: Session, asked: float, interval: float
) -> None:
    watch = session.publisher.watch(Watcher(), asked)
    session.clock.reach()
    session.status["queued"] = 1
    session.publisher.changed()
    sent = watch.sent
    assert session.clock.reach() >= sent + interval


def test_snapshots_that_cost_much_come_seldom(session: Session) -> None:
    watcher = Watcher()
    watch = session.publisher.watch(watcher)
    spent = 0.1
    snapshot = session.snapshot

    def costly() -> dict[str, Any]:
        begun = time.thread_time()
        while time.thread_time() < begun + spent:
            pass
        return snapshot()

    session.publisher._snapshot = costly
    session.clock.reach()
    session.status["queued"] = 1
    session.publisher.changed()
    sent = watch.sent
    assert session.clock.reach() >= sent + spent / SHARE
    assert session.clock.timers[0][0] >= watch.sent + spent / SHARE


@pytest.mark.parametrize(("asked", "pause"), [(0.0, PULSE), (2.5, 2.5)])
def test_status_is_looked_at_now_and_then_without_a_change(
    session: Session, asked: float, pause: float
) -> None:
    """The use of devices changes without any event."""
    watcher = Watcher()
    watch = session.publisher.watch(watcher, asked)
    session.clock.reach()
    (when,) = (when for when, _ in session.clock.timers)
    assert when == watch.sent + pause
    session.status["devices"] = [{"utilization": 50}]
    session.clock.reach()
    assert len(watcher.seen) == 2


def test_snapshot_that_only_time_has_changed_is_not_sent(session: Session) -> None:
    watcher = Watcher()
    session.publisher.watch(watcher)
    session.clock.reach()
    session.publisher.changed()
    session.clock.reach()
    assert (len(watcher.seen), session.asked) == (1, 2)


def test_snapshot_that_was_not_taken_is_sent_again(session: Session) -> None:
    watcher = Watcher()
    watcher.takes = False
    session.publisher.watch(watcher)
    session.clock.reach()
    watcher.takes = True
    session.clock.reach()
    session.clock.reach()
    assert len(watcher.seen) == 2


def test_late_timer_of_an_earlier_time_does_nothing(session: Session) -> None:
    """A change moves the next snapshot forward; the timer of the pulse stays in the loop."""
    session.publisher.watch(Watcher())
    session.clock.reach()
    (pulse,) = session.clock.timers
    session.publisher.changed()
    session.clock.reach()
    asked = session.asked
    pulse[1]()
    assert session.asked == asked


def test_stopped_watcher_gets_nothing_more(session: Session) -> None:
    stopped, other = Watcher(), Watcher()
    watch = session.publisher.watch(stopped)
    session.clock.reach()
    session.publisher.watch(other)
    watch.stop()
    session.status["queued"] = 1
    session.publisher.changed()
    for _ in range(4):
        session.clock.reach()
    session.publisher.close()
    assert [each and each["queued"] for each in stopped.seen] == [0]
    assert [each and each["queued"] for each in other.seen] == [1, None]


def test_stopped_watcher_does_not_hear_of_the_end(session: Session) -> None:
    watcher = Watcher()
    session.publisher.watch(watcher).stop()
    session.publisher.close()
    assert watcher.seen == []


def test_publisher_rests_when_its_last_watcher_has_stopped(session: Session) -> None:
    watch = session.publisher.watch(Watcher())
    watch.stop()
    session.clock.reach()
    assert not session.publisher.watched
    assert (session.clock.timers, session.asked) == ([], 0)


def test_watcher_that_fails_is_named_and_dropped(session: Session) -> None:
    calls = []

    def fails(snapshot: dict[str, Any] | None) -> bool:
        calls.append(snapshot)
        raise KeyError("a picture without a frame")

    other = Watcher()
    session.publisher.watch(fails)
    session.publisher.watch(other)
    for _ in range(3):
        session.clock.reach()
    assert [text.partition(":")[0] for text in session.faults.texts] == [
        "a live view is not drawn any more"
    ]
    session.publisher.close()
    assert len(calls) == 1
    assert [each is None for each in other.seen] == [False, True]


def test_end_of_the_session_is_told_once(session: Session) -> None:
    watcher = Watcher()
    session.publisher.watch(watcher)
    session.clock.reach()
    session.publisher.close()
    session.publisher.close()
    for _, timer in session.clock.timers[:]:
        timer()
    assert session.asked == 1
    assert [each is None for each in watcher.seen] == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"time": 9},
        {"totals": {"jobs": 3}},
        {"running": [{"id": 1, "seconds": 9.0}]},
        {"waiting": [{"id": 2, "seconds": 9.0}]},
        {"actors": [{"id": 3, "seconds": 9.0}]},
        {"devices": [{"id": 0, "history": [1, 2]}]},
    ],
)
def test_values_that_change_with_time_are_no_change(change: dict[str, Any]) -> None:
    before = {
        "time": 1,
        "totals": None,
        "queued": 0,
        "running": [{"id": 1, "seconds": 1.0}],
        "waiting": [{"id": 2, "seconds": 1.0}],
        "actors": [{"id": 3, "seconds": 1.0}],
        "devices": [{"id": 0, "history": [1]}],
    }
    assert timeless({**before, **change}) == timeless(before)
    for name in ("running", "waiting", "actors", "devices"):
        other = {**before, name: [{**before[name][0], "name": "new"}]}  # type: ignore[index]
        assert timeless(other) != timeless(before)
    assert before["running"] == [{"id": 1, "seconds": 1.0}]
