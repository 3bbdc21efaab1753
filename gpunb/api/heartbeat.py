"""Waits in coroutines that an interrupt can end.

An event loop that sleeps does not see an interrupt of its thread. So a loop in which coroutines
wait for objects wakes up every `HEARTBEAT` seconds.
"""

from __future__ import annotations

import asyncio
import weakref

from gpunb.system.signals import HEARTBEAT


class _Heart:
    """Wakes a loop up while coroutines wait in it, with one timer for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.proxy(loop)
        self._waiting = 0
        self._beats = False

    async def until(self, ready: asyncio.Event) -> None:
        self._waiting += 1
        if not self._beats:
            self._beat()
        try:
            await ready.wait()
        finally:
            self._waiting -= 1

    def _beat(self) -> None:
        self._beats = self._waiting > 0
        if self._beats:
            self._loop.call_later(HEARTBEAT, self._beat)


_hearts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Heart] = weakref.WeakKeyDictionary()


async def until(ready: asyncio.Event) -> None:
    """Wait for an event, in a loop that sees interrupts meanwhile."""
    loop = asyncio.get_running_loop()
    await _hearts.setdefault(loop, _Heart(loop)).until(ready)
