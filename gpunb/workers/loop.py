"""An event loop for one thread: descriptors, a timer, and an inbox that any thread may post to."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_LONGEST = 3600.0
"""Seconds of one sleep; the system's limit is some days."""

LINGER = 0.005
"""Seconds after which the loop looks around once more when it has done something."""


class Loop:
    """Calls back, one after the other, on the thread that runs it.

    While that thread sleeps, another one can have its `turn`, and do by itself what it would have
    posted: waking a thread, and waiting for the interpreter's lock, takes longer than most of what
    is to be done.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        self._inbox: deque[Any] = deque()
        self._news: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._asleep = False
        self._lingers = False
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._turns = 0
        self._until = math.inf
        self._receive: Callable[[Any], None] | None = None
        self._failure: BaseException | None = None
        self.assisted = False
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._stopped = False
        self.ready: set[int] = set()

    # --------------------------------------------------------------------------- from any thread

    def post(self, item: Any) -> None:
        """Leave something for the loop. Takes no lock, so that even a destructor may."""
        self._inbox.append(item)
        if self._asleep and not self.assisted:
            self._asleep = False
            os.eventfd_write(self._wake, 1)

    def post_lazily(self, item: Any) -> None:
        """As `post`, for what can wait until the loop looks around."""
        self._inbox.append(item)
        if self._asleep and not self._lingers and not self.assisted:
            self._asleep = False
            os.eventfd_write(self._wake, 1)

    def do(self, item: Any, then: Callable[[], object] | None = None) -> None:
        """As `post`; at once and on this thread if the loop sleeps, and after it what is `then` to
        be done while this thread has the turn. No interrupt may come."""
        if not self._asleep or not self._turn.acquire(blocking=False):
            self.post(item)
            return
        inbox, receive = self._inbox, self._receive
        assert receive is not None
        try:
            self._owner = threading.get_ident()
            self._turns += 1
            self.assisted = True
            inbox.append(item)
            for _ in range(len(inbox)):
                receive(inbox.popleft())
            if then is not None:
                then()
        except BaseException as error:
            self._failure = error  # it is the loop's, as if it had been there
        finally:
            self._owner = None
            self.assisted = False
            self._turn.release()
            # Looked at after `assisted`: who posts now wakes the loop by itself.
            sooner = bool(self._later) and self._later[0][0] < self._until
            waiting = inbox or self._news or sooner
            if waiting or self._stopped or self._failure is not None:
                os.eventfd_write(self._wake, 1)

    def mine(self) -> bool:
        """Whether this thread has the loop's turn: what it waits for would never come."""
        return self._owner == threading.get_ident()

    # ------------------------------------------------------------ from the thread that has the turn

    def tell(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Have somebody else told, on the loop's own thread and in the order of these calls. His
        errors end nothing: they are printed."""
        self._news.append((callback, arguments))
        if not self.assisted:
            self._tell()

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
        self._receive = receive
        inbox = self._inbox
        while not self._stopped:
            self._until = math.inf
            self._asleep = True
            turns = self._turns
            timeout = 0.0 if inbox else self._timeout()
            if timeout == 0.0:
                self._asleep = False
            events = self._epoll.poll(timeout)
            self._asleep = False
            with self._turn:
                if self._failure is not None:
                    raise self._failure
                if events and turns != self._turns:
                    events = self._epoll.poll(0)  # these may be over
                self._owner = threading.get_ident()
                self._lingers = bool(events or inbox)
                self._round(events, receive)
                self._owner = None

    def _round(self, events: Sequence[tuple[int, int]], receive: Callable[[Any], None]) -> None:
        inbox, watched = self._inbox, self._watched
        if self._news:
            self._tell()
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
        self._tell()
        self._epoll.close()
        self._watched.clear()
        self._later.clear()

    def __del__(self) -> None:
        # Not earlier: a thread that posts at this moment might wake what has its number by then.
        os.close(self._wake)

    def _tell(self) -> None:
        news = self._news
        while news:
            callback, arguments = news.popleft()
            try:
                callback(*arguments)
            except Exception:
                traceback.print_exc()

    def _timeout(self) -> float:
        longest = LINGER if self._lingers else _LONGEST
        if not self._later:
            return longest
        now = time.monotonic()
        self._until = min(self._later[0][0], now + longest)
        return max(0.0, self._until - now)

    def _run_later(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
