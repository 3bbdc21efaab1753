"""Looks at all sessions while somebody wants to know, and tells them what has changed.

Everything here runs on the server's event loop. Without listeners there is no task, no connection
and no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpunb.exceptions import GpunbError
from gpunb.runtime import kernels
from gpunb.server import machine
from gpunb.server.view import News, View, silent

INTERVAL = 0.25
"""Seconds between two looks for new sessions, and at least between two messages to a listener."""

AGAIN = 5.0
"""Seconds until the devices of a machine without sessions are measured again."""

RETRY = 0.5
"""Seconds until a session that went away, and left its socket, is tried again."""

LONGEST = 1 << 26
"""Bytes of the longest snapshot."""

_log = logging.getLogger("gpunb.server")


class Listener:
    """Somebody who is told news: at most one message an interval, and none before the last one has
    left, however much happens meanwhile."""

    def __init__(self, send: Callable[[str], Awaitable[None]], interval: float = INTERVAL) -> None:
        self._send = send
        self._interval = max(INTERVAL, interval)
        self._news = News()
        self._task: asyncio.Task[None] | None = None
        self._last = float("-inf")

    def tell(self, news: News) -> None:
        """Have it sent as soon as may be."""
        self._news.add(news)
        if self._task is None and self._news:
            self._task = asyncio.get_running_loop().create_task(self._deliver())

    def stop(self) -> None:
        """Send nothing more."""
        if self._task is not None:
            self._task.cancel()

    async def _deliver(self) -> None:
        try:
            while self._news:
                await asyncio.sleep(self._last + self._interval - time.monotonic())
                news, self._news = self._news, News()
                self._last = time.monotonic()
                await self._send(json.dumps(news.as_dict(), default=str))
        finally:
            self._task = None


class Watching:
    """The sessions of this user, for listeners."""

    def __init__(self) -> None:
        self._view = View()
        self._listeners: set[Listener] = set()
        self._scan: asyncio.Task[None] | None = None
        self._followed: dict[int, asyncio.Task[None]] = {}
        self._unheard: dict[int, asyncio.Event] = {}
        self._avoid: dict[int, float] = {}
        self._measure_at = 0.0
        self._ready = False

    @property
    def idle(self) -> bool:
        """Whether nothing is done, because nobody listens."""
        return self._scan is None and not self._followed

    def join(self, listener: Listener) -> None:
        """Tell somebody everything, and what changes from now on."""
        self._listeners.add(listener)
        if self._ready:
            listener.tell(self._view.whole(time.time()))
        if self._scan is None:
            self._scan = asyncio.get_running_loop().create_task(self._look())

    def leave(self, listener: Listener) -> None:
        """Somebody wants to know no more; without listeners nothing is done."""
        self._listeners.discard(listener)
        listener.stop()
        if not self._listeners:
            self._stop()

    def _stop(self) -> None:
        for task in (self._scan, *self._followed.values()):
            if task is not None:
                task.cancel()
        self._view, self._scan, self._ready, self._measure_at = View(), None, False, 0.0
        self._followed, self._unheard, self._avoid = {}, {}, {}

    def _spread(self, news: News) -> None:
        if news and self._ready:
            for listener in self._listeners:
                listener.tell(news)

    async def _look(self) -> None:
        """Follow each session that is there, and measure the devices where there is none."""
        while True:
            problem = None
            try:
                here = machine.sockets()
            except (GpunbError, OSError) as error:
                here, problem = {}, str(error)
            now = time.monotonic()
            for pid, path in here.items():
                if pid not in self._followed and self._avoid.get(pid, now) <= now:
                    self._unheard[pid] = asyncio.Event()
                    follow = self._follow(pid, path)
                    self._followed[pid] = asyncio.get_running_loop().create_task(follow)
            if not self._followed and now >= self._measure_at:
                self._spread(self._view.measured(await machine.facts(problem)))
                self._measure_at = time.monotonic() + AGAIN
            if not self._ready:
                await self._heard()
                self._ready = True
                self._spread(self._view.whole(time.time()))
            await asyncio.sleep(INTERVAL)

    async def _heard(self) -> None:
        """Each session has said what it does, or takes its time: nobody is to see an empty machine
        for an instant."""
        words = [asyncio.ensure_future(each.wait()) for each in self._unheard.values()]
        if words:
            _, late = await asyncio.wait(words, timeout=2 * INTERVAL)
            for each in late:
                each.cancel()

    async def _follow(self, pid: int, path: Path) -> None:
        """Pass on what a session says, until it ends."""
        try:
            await self._listen(pid, path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.debug("the session of process %d cannot be followed: %r", pid, error)
        finally:
            if self._followed.get(pid) is asyncio.current_task():
                del self._followed[pid]
                self._unheard.pop(pid).set()
                self._avoid[pid] = time.monotonic() + RETRY
                self._spread(self._view.left(pid))
                self._measure_at = 0.0

    async def _listen(self, pid: int, path: Path) -> None:
        try:
            with kernels.address(path) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=LONGEST)
        except ConnectionRefusedError:
            await asyncio.to_thread(kernels.sessions)  # removes what a dead process has left
            return
        try:
            writer.write(json.dumps({"do": "watch", "interval": INTERVAL}).encode() + b"\n")
            wait: float | None = kernels.TIMEOUT
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), wait)
                except TimeoutError:
                    self._spread(self._view.told(pid, silent(pid)))
                    wait = None
                    continue
                if not line:
                    return
                wait = None
                self._spread(self._view.told(pid, json.loads(line)["snapshot"]))
                self._unheard[pid].set()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
