"""Watches all sessions of the user while there are listeners, and sends them the changes.

All of it runs on the server's event loop. Without listeners there is no task, no connection and no
timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gpunb.control import client
from gpunb.exceptions import GpunbError
from gpunb.server import machine
from gpunb.server.view import MachineView, News, silent

INTERVAL = 0.25
"""Seconds between two searches for new sessions, and the least time between two messages."""

AGAIN = 5.0
"""Seconds between two measurements of the devices of a machine without sessions."""

RETRY = 0.5
"""Seconds until the next connection to a session that closed one, and left its socket."""

LONGEST = 1 << 26
"""The most bytes of one snapshot."""

_log = logging.getLogger("gpunb.server")


class NewsListener:
    """Sends news to one client: at most one message an interval, and none before the last one was
    sent. News in between is merged."""

    def __init__(self, send: Callable[[str], Awaitable[None]], interval: float = INTERVAL) -> None:
        self._send = send
        self._interval = max(INTERVAL, interval)
        self._news = News()
        self._task: asyncio.Task[None] | None = None
        self._last = float("-inf")

    def on_news(self, news: News) -> None:
        """Send news as soon as the interval allows."""
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
                message = {**news.as_dict(), "time": time.time()}
                await self._send(json.dumps(message, default=str))
        finally:
            self._task = None


class Watcher:
    """Follows the sessions of this user, for listeners."""

    def __init__(self) -> None:
        self._view = MachineView()
        self._listeners: set[NewsListener] = set()
        self._scan: asyncio.Task[None] | None = None
        self._followed: dict[int, asyncio.Task[None]] = {}
        self._unreplied: dict[int, asyncio.Event] = {}
        self._avoid: dict[int, float] = {}
        self._measure_at = 0.0
        self._ready = False

    @property
    def idle(self) -> bool:
        """Whether there is no task, because there is no listener."""
        return self._scan is None and not self._followed

    def join(self, listener: NewsListener) -> None:
        """Send a listener the whole state, and from now on the changes."""
        self._listeners.add(listener)
        if self._ready:
            listener.on_news(self._view.whole(time.time()))
        if self._scan is None:
            self._scan = asyncio.get_running_loop().create_task(self._scan_sessions())

    def leave(self, listener: NewsListener) -> None:
        """Remove a listener. After the last one all tasks end."""
        self._listeners.discard(listener)
        listener.stop()
        if not self._listeners:
            self._stop()

    def _stop(self) -> None:
        for task in (self._scan, *self._followed.values()):
            if task is not None:
                task.cancel()
        self._view, self._scan, self._ready, self._measure_at = MachineView(), None, False, 0.0
        self._followed, self._unreplied, self._avoid = {}, {}, {}

    def _broadcast(self, news: News) -> None:
        if news and self._ready:
            for listener in self._listeners:
                listener.on_news(news)

    async def _scan_sessions(self) -> None:
        """Follow each session that runs; measure the devices while none runs. Never returns."""
        while True:
            problem = None
            try:
                paths = machine.sockets()
            except (GpunbError, OSError) as error:
                paths, problem = {}, str(error)
            now = time.monotonic()
            for pid, path in paths.items():
                if pid not in self._followed and self._avoid.get(pid, now) <= now:
                    self._unreplied[pid] = asyncio.Event()
                    follow = self._follow(pid, path)
                    self._followed[pid] = asyncio.get_running_loop().create_task(follow)
            if not self._followed and now >= self._measure_at:
                self._broadcast(self._view.set_machine(await machine.facts(problem)))
                self._measure_at = time.monotonic() + AGAIN
            if not self._ready:
                await self._wait_for_first_snapshots()
                self._ready = True
                self._broadcast(self._view.whole(time.time()))
            await asyncio.sleep(INTERVAL)

    async def _wait_for_first_snapshots(self) -> None:
        """Wait until each session has sent a snapshot, or is late. Without this a new listener
        would see an empty machine for a moment."""
        waits = [asyncio.ensure_future(each.wait()) for each in self._unreplied.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=2 * INTERVAL)
            for each in late:
                each.cancel()

    async def _follow(self, pid: int, path: Path) -> None:
        """Broadcast the snapshots of a session until it ends."""
        try:
            await self._read_snapshots(pid, path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.debug("the session of process %d cannot be followed: %r", pid, error)
        finally:
            if self._followed.get(pid) is asyncio.current_task():
                del self._followed[pid]
                self._unreplied.pop(pid).set()
                self._avoid[pid] = time.monotonic() + RETRY
                self._broadcast(self._view.remove(pid))
                self._measure_at = 0.0

    async def _read_snapshots(self, pid: int, path: Path) -> None:
        try:
            with client.address(path) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=LONGEST)
        except ConnectionRefusedError:
            await asyncio.to_thread(client.sessions)  # removes the sockets of dead processes
            return
        try:
            writer.write(json.dumps({"do": "watch", "interval": INTERVAL}).encode() + b"\n")
            wait: float | None = client.TIMEOUT
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), wait)
                except TimeoutError:
                    self._broadcast(self._view.update(pid, silent(pid)))
                    wait = None
                    continue
                if not line:
                    return
                wait = None
                self._broadcast(self._view.update(pid, json.loads(line)["snapshot"]))
                self._unreplied[pid].set()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
