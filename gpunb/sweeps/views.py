"""The views of a sweep, which are updated now and then while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

PERIOD = 0.5
"""Seconds between two updates, at least."""


class Views:
    """Calls views on the thread of the sweep, and leaves out those that raise.

    Attributes:
        due: time of the next update, on the clock of `time.monotonic`; None without views.
    """

    def __init__(self) -> None:
        self._views: list[Callable[[], object]] = []
        self._next = 0.0

    @property
    def due(self) -> float | None:
        return self._next if self._views else None

    def add(self, view: Callable[[], object]) -> None:
        self._views.append(view)

    def update(self) -> list[str]:
        """Call all views; the next time later if that takes long, for 2 % of a core at most.

        Returns:
            The failures of views, in words.
        """
        before, failures = time.thread_time(), []
        for view in list(self._views):
            try:
                view()
            except Exception as error:
                self._views.remove(view)
                failures.append(f"a view of the sweep has failed: {error!r}")
        self._next = time.monotonic() + max(PERIOD, 50 * (time.thread_time() - before))
        return failures

    def clear(self) -> None:
        self._views.clear()
