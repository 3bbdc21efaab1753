"""An event loop for one thread: descriptors, timers, and an inbox for other threads."""

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

from gpunb.system.signals import interrupt_later

_LONGEST = 3600.0
"""Seconds of the longest sleep; the system's own limit is some days."""

LINGER = 0.005
"""Seconds of the sleep after a round that had work; `post_lazily` does not cut it short."""


class Loop:
    """Runs callbacks one after the other, on the thread that calls `run`.

    An `Exception` of a callback is reported to `failed`, and the loop goes on; any other exception
    ends the loop. After an error the callback's descriptor is not watched any more, because the
    callback would fail again at once.

    While the loop's thread sleeps, another thread can take the *turn* and handle its item itself
    (`do`): to wake a thread and to wait for the interpreter's lock takes longer than most items.

    1. `run` sets `_asleep` before it looks at the inbox; `post` appends its item before it looks at
       `_asleep`. So the loop sees the item, or the poster wakes the loop.
    2. The turn is a lock. If the loop wakes up during another thread's turn, it waits for the end
       of that turn. If there are other descriptors to watch after it, the loop polls again: it may
       have closed one that was ready, and another file may have the number by now.
    3. During another thread's turn (`assisted`) a post wakes nobody. At its end that thread wakes
       the loop if there are new items or notices, or a timer before the end of the loop's sleep.
    """

    _wake = -1

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        self._inbox: deque[Any] = deque()
        self._notices: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._asleep = False
        self._lingers = False
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._changes = 0
        """Of the descriptors to watch."""
        self._sleeps_until = math.inf
        self._receive: Callable[[Any], None] | None = None
        self._failure: BaseException | None = None
        self.failed: Callable[[Exception, Callable[..., object]], object] = _print
        self.assisted = False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._stopped = False
        self.ready: set[int] = set()

    # --------------------------------------------------------------------------- from any thread

    def post(self, item: Any) -> None:
        """Put an item into the inbox. Takes no lock, so that destructors may call it."""
        self._inbox.append(item)
        if self._asleep and not self.assisted:
            self._asleep = False
            os.eventfd_write(self._wake, 1)

    def post_lazily(self, item: Any) -> None:
        """Put an item that can wait for `LINGER` seconds into the inbox. An interrupt is raised a
        moment later instead of here, so that the caller does not post the item twice."""
        try:
            self._inbox.append(item)
            if self._asleep and not self._lingers and not self.assisted:
                self._asleep = False
                os.eventfd_write(self._wake, 1)
        except KeyboardInterrupt:
            interrupt_later()
            os.eventfd_write(self._wake, 1)

    def do(self, item: Any, then: Callable[[], object] | None = None) -> None:
        """Handle an item on this thread if the loop sleeps, and then call `then` in the same turn;
        otherwise post the item and ignore `then`. The caller keeps interrupts out."""
        if not self._asleep or not self._turn.acquire(blocking=False):
            self.post(item)
            return
        inbox, receive = self._inbox, self._receive
        assert receive is not None
        try:
            self._owner = threading.get_ident()
            self.assisted = True
            inbox.append(item)
            for _ in range(len(inbox)):
                self._call_guarded(inbox.popleft(), receive)
            if then is not None:
                self._call_guarded(then, _call)
        except BaseException as error:
            self._failure = error  # `run` raises it on the loop's thread
        finally:
            self._owner = None
            self.assisted = False
            self._turn.release()
            # After `assisted` was cleared: from then on a post wakes the loop by itself.
            sooner = bool(self._timers) and self._timers[0][0] < self._sleeps_until
            waiting = inbox or self._notices or sooner
            if waiting or self._stopped or self._failure is not None:
                os.eventfd_write(self._wake, 1)

    def mine(self) -> bool:
        """Whether this thread has the loop's turn: it must not wait for the loop, then."""
        return self._owner == threading.get_ident()

    # ------------------------------------------------------------ from the thread that has the turn

    def call_user(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call a user's callback on the loop's own thread, in the order of these calls. Its errors
        are printed."""
        self._notices.append((callback, arguments))
        if not self.assisted:
            self._call_notices()

    # ---------------------------------------------------------------------------- from its thread

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back whenever the descriptor can be read or its other end is closed."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._watched[descriptor] = callback
        self._changes += 1

    def watch_writing(self, descriptor: int, wanted: bool) -> None:
        """Call back for a watched descriptor also when it can be written, or no longer."""
        mask = select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN
        self._epoll.modify(descriptor, mask)

    def unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            self.ready.discard(descriptor)
            self._changes += 1

    def pause(self, descriptor: int, wanted: bool) -> None:
        """Stop calling back for a watched descriptor, or start again if `wanted` is False."""
        if descriptor in self._watched:
            self._epoll.modify(descriptor, 0 if wanted else select.EPOLLIN)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at a time of `time.monotonic`."""
        heapq.heappush(self._timers, (when, next(self._count), callback))

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.at(time.monotonic() + seconds, callback)

    def stop(self) -> None:
        self._stopped = True

    def run(self, receive: Callable[[Any], None]) -> None:
        """Run callbacks until `stop`; `receive` is called with each posted item."""
        self._receive = receive
        inbox = self._inbox
        while not self._stopped:
            self._sleeps_until = math.inf
            self._asleep = True
            changes = self._changes
            timeout = 0.0 if inbox else self._timeout()
            if timeout == 0.0:
                self._asleep = False
            events = self._epoll.poll(timeout)
            self._asleep = False
            with self._turn:
                if self._failure is not None:
                    raise self._failure
                if events and changes != self._changes:
                    events = self._epoll.poll(0)
                self._owner = threading.get_ident()
                self._lingers = bool(events or inbox)
                self._handle(events, receive)
                self._owner = None

    def _handle(self, events: Sequence[tuple[int, int]], receive: Callable[[Any], None]) -> None:
        inbox, watched = self._inbox, self._watched
        if self._notices:
            self._call_notices()
        self.ready = {descriptor for descriptor, _ in events}
        for descriptor, _ in events:
            callback = watched.get(descriptor)
            if callback is not None:
                if descriptor in self.ready:
                    try:
                        callback()
                    except Exception as error:
                        self._drop(descriptor, callback, error)
            elif descriptor == self._wake:
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    pass
        # Only the items of this moment: a flood of posts must not hold up the descriptors.
        for _ in range(len(inbox)):
            self._call_guarded(inbox.popleft(), receive)
        if self._timers:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._call_guarded(heapq.heappop(self._timers)[2], _call)

    def _call_guarded(self, item: Any, receive: Callable[[Any], object]) -> None:
        try:
            receive(item)
        except Exception as error:
            self._report(error, item[0] if isinstance(item, tuple) else item)

    def _drop(self, descriptor: int, callback: Callable[[], None], error: Exception) -> None:
        self._report(error, callback)
        if self._watched.get(descriptor) is callback:
            del self._watched[descriptor]
            try:
                self._epoll.unregister(descriptor)
            except (OSError, ValueError):
                pass  # it was closed

    def _report(self, error: Exception, callback: Callable[..., object]) -> None:
        try:
            self.failed(error, callback)
        except Exception:
            pass  # no handler is left

    def close(self) -> None:
        """Close the loop after `run` has returned. Items that are posted from now on are lost."""
        self._call_notices()
        self._epoll.close()
        self._watched.clear()
        self._timers.clear()

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        self._asleep = False  # so that a post does not wake the loop
        self._epoll.close()
        self._close_wake()

    def __del__(self) -> None:
        # Not in `close`: a post of another thread could write to a new descriptor of that number.
        self._close_wake()

    def _close_wake(self) -> None:
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _call_notices(self) -> None:
        news = self._notices
        while news:
            callback, arguments = news.popleft()
            try:
                callback(*arguments)
            except Exception as error:
                try:
                    _print(error, callback)
                except Exception:
                    pass  # standard error does not work either

    def _timeout(self) -> float:
        longest = LINGER if self._lingers else _LONGEST
        if not self._timers:
            return longest
        now = time.monotonic()
        self._sleeps_until = min(self._timers[0][0], now + longest)
        return max(0.0, self._sleeps_until - now)


def _call(callback: Callable[[], object]) -> None:
    callback()


def _print(error: Exception, _: Callable[..., object]) -> None:
    traceback.print_exception(error)
