"""An event loop for one thread: descriptors, a timer, and an inbox that any thread may post to."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_LONGEST = 3600.0
"""Seconds of one sleep; the system's limit is some days."""


class Loop:
    """Calls back, one after the other, on the thread that runs it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        self._inbox: deque[Any] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._asleep = False
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._stopped = False
        self.ready: set[int] = set()

    # --------------------------------------------------------------------------- from any thread

    def post(self, item: Any) -> None:
        """Leave something for the loop. Takes no lock, so that even a destructor may."""
        self._inbox.append(item)
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake, 1)

    # ---------------------------------------------------------------------------- from its thread

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back whenever the descriptor can be read (or its other side is gone)."""
        self._watched[descriptor] = callback
        self._epoll.register(descriptor, select.EPOLLIN)

    def watch_writing(self, descriptor: int, wanted: bool) -> None:
        """For a watched descriptor: also call back when it can be written."""
        mask = select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN
        self._epoll.modify(descriptor, mask)

    def unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            self.ready.discard(descriptor)

    def pause(self, descriptor: int, wanted: bool) -> None:
        """Keep or stop hearing of a watched descriptor."""
        if descriptor in self._watched:
            self._epoll.modify(descriptor, 0 if wanted else select.EPOLLIN)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at a time of `time.monotonic`."""
        heapq.heappush(self._later, (when, next(self._count), callback))

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.at(time.monotonic() + seconds, callback)

    def stop(self) -> None:
        self._stopped = True

    def run(self, receive: Callable[[Any], None]) -> None:
        """Until `stop`; `receive` is called with each thing that was posted."""
        inbox, watched = self._inbox, self._watched
        while not self._stopped:
            self._asleep = True
            timeout = 0.0 if inbox else self._timeout()
            if timeout == 0.0:
                self._asleep = False
            events = self._epoll.poll(timeout)
            self._asleep = False
            self.ready = {descriptor for descriptor, _ in events}
            for descriptor, _ in events:
                callback = watched.get(descriptor)
                if callback is not None:
                    if descriptor in self.ready:
                        callback()
                elif descriptor == self._wake:
                    os.eventfd_read(self._wake)
            # Only what is there now: a flood of posts must not keep descriptors waiting.
            for _ in range(len(inbox)):
                receive(inbox.popleft())
            if self._later:
                self._run_later()

    def close(self) -> None:
        """End for good, after `run`. What is posted from now on is never looked at."""
        self._epoll.close()
        self._watched.clear()
        self._later.clear()

    def __del__(self) -> None:
        # Not earlier: a thread that posts at this moment might wake what has its number by then.
        os.close(self._wake)

    def _timeout(self) -> float | None:
        if not self._later:
            return None
        return min(max(0.0, self._later[0][0] - time.monotonic()), _LONGEST)

    def _run_later(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
