"""Watchers of a session on Ray, and their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gpunb.engine.publisher import PULSE, StatusWatch, Watcher, timeless
from gpunb.exceptions import GpunbError
from gpunb.ray.status import RayStatus


class Watches:
    """Gives snapshots to watchers, each on a thread of its own."""

    def __init__(self, status: RayStatus, changed: threading.Event) -> None:
        """`changed` is set when the status of the session may have changed."""
        self._status = status
        self._changed = changed
        self._watches: list[StatusWatch] = []
        self._closed = False

    def add(self, watcher: Watcher, interval: float) -> StatusWatch:
        """Give snapshots to this watcher, until its watch is stopped."""
        watch = StatusWatch(watcher, interval)
        self._watches.append(watch)
        threading.Thread(target=self._run, args=(watch,), name="gpunb-watch", daemon=True).start()
        return watch

    def close(self) -> None:
        """Tell all watchers that the session ends."""
        self._closed = True
        for watch in self._watches:
            if not watch.stopped:
                watch.watcher(None)
        self._changed.set()

    def request(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], object]) -> None:
        """Carry out a request on a thread, and answer it."""

        def carry_out() -> None:
            try:
                answer({"ok": True, "value": self._status.carry_out(request)})
            except Exception as error:
                known = isinstance(error, GpunbError | ValueError)
                answer({"ok": False, "error": str(error) if known else repr(error)})

        threading.Thread(target=carry_out, name="gpunb-request", daemon=True).start()

    def _run(self, watch: StatusWatch) -> None:
        while not (watch.stopped or self._closed):
            try:
                snapshot = self._status.status()
                seen = timeless(snapshot)
                if seen != watch.seen and watch.watcher(snapshot):
                    watch.seen = seen
            except Exception:
                if self._closed:
                    return
            self._changed.wait(max(PULSE, watch.interval))
            time.sleep(watch.interval)
            self._changed.clear()
