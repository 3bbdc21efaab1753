"""Tells watchers that the status of a session has changed, at most as often as they want."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

from gpunb.engine.faults import Faults
from gpunb.system.loop import Loop

INTERVAL = 0.25
"""Least number of seconds between two snapshots for one watcher."""

PULSE = 1.0
"""The status is compared at least every so many seconds, because the use of devices changes
without an event."""

SHARE = 0.05
"""The most of the loop's time that snapshots for one watcher take. With 100,000 waiting tasks, one
takes some 100 ms."""

Watcher: TypeAlias = Callable[[dict[str, Any] | None], bool]
"""Called with a snapshot, or with None at the end of the session. Returns whether it took it; after
False it is called again later."""


class StatusWatch:
    """One watcher, until `stop`."""

    def __init__(self, watcher: Watcher, interval: float) -> None:
        self.watcher = watcher
        self.interval = max(INTERVAL, interval)
        self.due: float | None = None
        self.sent = 0.0
        self.rests = 0.0
        """Until when no snapshot is taken for it, because of what the last one has cost."""
        self.seen: Any = None
        self.stopped = False

    def stop(self) -> None:
        """Send no more snapshots; from any thread."""
        self.stopped = True


class StatusPublisher:
    """Takes snapshots while there are watchers; on the loop's thread. Costs nothing otherwise."""

    def __init__(self, loop: Loop, faults: Faults, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._loop = loop
        self._faults = faults
        self._snapshot = snapshot
        self._watches: list[StatusWatch] = []

    @property
    def watched(self) -> bool:
        """Whether there are watchers."""
        return bool(self._watches)

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> StatusWatch:
        """Send this watcher a snapshot now, and one after each change."""
        watch = StatusWatch(watcher, interval)
        self.begin(watch)
        return watch

    def begin(self, watch: StatusWatch) -> None:
        """Do the same as `watch`, for a watch that exists already."""
        self._watches.append(watch)
        self._schedule(watch, time.monotonic())

    def changed(self) -> None:
        """Note that the status may have changed."""
        if self._watches:
            now = time.monotonic()
            for watch in self._watches:
                self._schedule(watch, max(now, watch.sent + watch.interval, watch.rests))

    def close(self) -> None:
        """Tell all watchers that the session ends."""
        watches, self._watches = self._watches, []
        for watch in watches:
            if not watch.stopped:
                self._send(watch, None)

    def _send(self, watch: StatusWatch, snapshot: dict[str, Any] | None) -> bool:
        """Return whether the watcher took the snapshot. A watcher that fails is dropped."""
        try:
            return watch.watcher(snapshot)
        except Exception as error:
            watch.stop()
            self._faults.note(f"a live view is not drawn any more: {error!r}", error)
            return False

    def _schedule(self, watch: StatusWatch, when: float) -> None:
        if watch.due is None or when < watch.due:
            watch.due = when
            self._loop.at(when, lambda: self._reached(watch, when))

    def _reached(self, watch: StatusWatch, when: float) -> None:
        if watch.due != when or watch not in self._watches:
            return
        watch.due = None
        if watch.stopped:
            self._watches.remove(watch)
            return
        begun = time.thread_time()
        snapshot = self._snapshot()
        seen = timeless(snapshot)
        now = time.monotonic()
        if seen != watch.seen:
            watch.sent = now
            if self._send(watch, snapshot):
                watch.seen = seen
        watch.rests = now + (time.thread_time() - begun) / SHARE
        self._schedule(watch, max(now + PULSE, now + watch.interval, watch.rests))


def timeless(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot without the values that change only because time passes."""
    news = {**snapshot, "time": None, "totals": None}
    for name in ("running", "waiting", "actors"):
        news[name] = [{**each, "seconds": None} for each in snapshot[name]]
    news["devices"] = [{**each, "history": None} for each in snapshot["devices"]]
    return news
