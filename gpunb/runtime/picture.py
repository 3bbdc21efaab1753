"""The picture of a session, for those who watch it: told when it has changed, and not too often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver

INTERVAL = 0.25
"""Seconds that lie at least between two snapshots for one watcher."""

PULSE = 1.0
"""Seconds after which it is looked at least whether something has changed: the use of devices
changes without any event."""

Watcher: TypeAlias = Callable[[dict[str, Any] | None], bool]
"""Is given a snapshot, or None at the end of the session; answers whether it took it, or wants to
be asked again later."""


class Watch:
    """Somebody who watches, until `stop`."""

    def __init__(self, watcher: Watcher, interval: float) -> None:
        self.watcher = watcher
        self.interval = max(INTERVAL, interval)
        self.due: float | None = None
        self.sent = 0.0
        self.seen: Any = None
        self.stopped = False

    def stop(self) -> None:
        """Be told nothing more; from any thread."""
        self.stopped = True


class Picture:
    """Takes snapshots while somebody watches; on the loop's thread. Costs nothing otherwise."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._watches: list[Watch] = []

    @property
    def watched(self) -> bool:
        """Whether anybody watches."""
        return bool(self._watches)

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> Watch:
        """Give this watcher a snapshot now, and one whenever something has changed."""
        watch = Watch(watcher, interval)
        self.begin(watch)
        return watch

    def begin(self, watch: Watch) -> None:
        """As `watch`, for one that is made already."""
        self._watches.append(watch)
        self._schedule(watch, time.monotonic())

    def changed(self) -> None:
        """Something has happened."""
        if self._watches:
            now = time.monotonic()
            for watch in self._watches:
                self._schedule(watch, max(now, watch.sent + watch.interval))

    def close(self) -> None:
        """The session ends."""
        for watch in self._watches:
            if not watch.stopped:
                watch.watcher(None)
        self._watches.clear()

    def _schedule(self, watch: Watch, when: float) -> None:
        if watch.due is None or when < watch.due:
            watch.due = when
            self._driver.loop.at(when, lambda: self._reached(watch, when))

    def _reached(self, watch: Watch, when: float) -> None:
        if watch.due != when or watch not in self._watches:
            return
        watch.due = None
        if watch.stopped:
            self._watches.remove(watch)
            return
        snapshot = self._driver.facts.tell("status")
        seen = timeless(snapshot)
        now = time.monotonic()
        if seen != watch.seen:
            watch.sent = now
            if watch.watcher(snapshot):
                watch.seen = seen
        self._schedule(watch, now + max(PULSE, watch.interval))


def timeless(snapshot: dict[str, Any]) -> dict[str, Any]:
    """What of a snapshot is news: not that time has passed."""
    news = {**snapshot, "time": None, "totals": None}
    for name in ("running", "waiting", "actors"):
        news[name] = [{**each, "seconds": None} for each in snapshot[name]]
    news["devices"] = [{**each, "history": None} for each in snapshot["devices"]]
    return news
