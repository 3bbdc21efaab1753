"""Messages between the workers and the kernel while calls run, through one small Ray actor.

Ray itself brings results. Output, questions, and the notices that a call has begun go through this
actor. A worker sends its first message at once, and then those of some time together, so that many
short tasks and much output make few calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import ray

from gpunb.ray import messages  # noqa: F401 - the process of the mailbox unpickles them

GATHER = 0.01, 0.04
"""Seconds for which a worker gathers messages before it sends them: after the first, and at most.
While messages come, this doubles."""

_PATIENCE = 60.0

SOON = 0.05
"""A worker reads messages only for calls that have run for so many seconds: most end before."""

_SHORT = 0.5
"""Seconds for which a worker asks for messages. Ray lets no worker go that waits for anything."""


_SENDERS = 4096
"""Senders of whom it is known how far they are."""

TURN = 2.0
"""Seconds for which messages wait for those that were sent before them."""


class Mailbox:
    """Stores messages until their receiver takes them: a list for the kernel, and one for each
    worker."""

    def __init__(self) -> None:
        self._piles: dict[str, list[Any]] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._next: OrderedDict[str, int] = OrderedDict()
        self._turns: dict[tuple[str, int], asyncio.Event] = {}

    async def put(self, to: str, items: list[Any], sender: str, number: int) -> None:
        """Leave messages, the sender's so many-eth: Ray brings them in any order."""
        if number > self._next.get(sender, 0):
            turn = self._turns[sender, number] = asyncio.Event()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(turn.wait(), TURN)
            del self._turns[sender, number]
        self._next[sender] = max(number + 1, self._next.pop(sender, 0))
        if len(self._next) > _SENDERS:
            self._next.popitem(last=False)
        if items:
            self._piles.setdefault(to, []).extend(items)
        if to in self._news:
            self._news[to].set()
        if (sender, number + 1) in self._turns:
            self._turns[sender, number + 1].set()

    async def take(self, to: str, patience: float) -> list[Any]:
        """All messages that are there; waits for the first so many seconds."""
        if not self._piles.get(to):
            news = self._news[to] = asyncio.Event()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), patience)
            if self._news.get(to) is news:
                del self._news[to]
        return self._piles.pop(to, [])


KERNEL = "kernel"


def new_mailbox(node: str | None) -> Any:
    """A new mailbox, on this node."""
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 10_000, "max_restarts": 0}
    if node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
    return ray.remote(Mailbox).options(name=None, **options).remote()


class Sender:
    """Sends messages to mailboxes, which have them in this order."""

    def __init__(self) -> None:
        self._name = f"{os.getpid()}-{os.urandom(6).hex()}"
        self._numbers: dict[Any, Iterator[int]] = {}
        self._lock = threading.Lock()

    def send(self, mailbox: Any, to: str, items: list[Any], **options: Any) -> Any:
        """Ray's reference to its arrival; with ``num_returns=0`` there is none."""
        with self._lock:
            numbers = self._numbers.setdefault(mailbox._actor_id, itertools.count())
            put = mailbox.put.options(**options) if options else mailbox.put
            return put.remote(to, items, self._name, next(numbers))


class KernelReader:
    """Takes the messages for the kernel, and hands them on from a thread of its own."""

    def __init__(self, mailbox: Any, to: str, on_message: Callable[[Any], object]) -> None:
        self._mailbox = mailbox
        self._to = to
        self._on_message = on_message
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gpunb-mail", daemon=True)
        self._thread.start()

    def is_current_thread(self) -> bool:
        """Whether the caller runs on the thread that hands messages on."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        self._closed = True

    def join(self, seconds: float) -> None:
        """Wait for the thread, once the mailbox is gone."""
        if not self.is_current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closed:
            try:
                items = ray.get(self._mailbox.take.remote(self._to, _PATIENCE))
            except Exception:  # the mailbox is gone, or all of Ray
                return
            for each in items:
                try:
                    self._on_message(each)
                except Exception:
                    if not self._closed:
                        traceback.print_exc()


class WorkerReader:
    """Reads the messages for a worker while a call runs there, or `always`."""

    def __init__(
        self, mailbox: Any, to: str, on_message: Callable[[Any], object], always: bool
    ) -> None:
        self._mailbox = mailbox
        self._to = to
        self._on_message = on_message
        self._always = always
        self._running = 0
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="gpunb-read", daemon=True).start()

    def __enter__(self) -> None:
        with self._news:
            self._running += 1
            self._news.notify()

    def __exit__(self, *_: object) -> None:
        with self._news:
            self._running -= 1

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._running or self._always)
            if not self._always:
                time.sleep(SOON)
                if not self._running:
                    continue
            try:
                items = ray.get(self._mailbox.take.remote(self._to, _SHORT))
            except Exception:  # the kernel is gone
                return
            for each in items:
                try:
                    self._on_message(each)
                except Exception:
                    traceback.print_exc()


class BackgroundSender:
    """Sends messages to the kernel, in order, without making the sender wait."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._sender = Sender()
        self._thread = threading.Thread(target=self._run, name="gpunb-post", daemon=True)
        self._thread.start()

    def send(self, mailbox: Any, item: Any, to: str = KERNEL) -> None:
        self._queue.put((mailbox, to, item))

    def flush(self, mailbox: Any, timeout: float = 5.0) -> None:
        """Return when all that was sent before has arrived."""
        done = threading.Event()
        self._queue.put((mailbox, done, None))
        self._urgent.set()
        done.wait(timeout)

    def _run(self) -> None:
        while True:
            batch, (pause, longest) = [self._queue.get()], GATHER
            while batch:
                for each in _split(batch):
                    if isinstance(each[0][1], threading.Event):
                        self._arrived(*each[0][:2])
                    else:
                        self._send(each)
                self._urgent.wait(pause)
                self._urgent.clear()  # before the look: a message may be urgent from now on
                batch, pause = self._waiting(), min(2 * pause, longest)

    def _waiting(self) -> list[Any]:
        """Return the messages that are there."""
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        return found

    def _send(self, batch: list[Any]) -> None:
        mailbox, to, _ = batch[0]
        try:  # without a result: Ray lets no worker go that holds one
            self._sender.send(mailbox, to, [item for _, _, item in batch], num_returns=0)
        except Exception:
            pass  # the kernel is gone, so no process reads the message

    def _arrived(self, mailbox: Any, done: threading.Event) -> None:
        try:
            ray.get(self._sender.send(mailbox, KERNEL, []), timeout=5)
        except Exception:
            pass
        done.set()


def _split(batch: list[Any]) -> list[list[Any]]:
    """The messages together for each place that they go to, and the events between them."""
    parts: list[list[Any]] = []
    for each in batch:
        if parts and parts[-1][0][:2] == each[:2]:
            parts[-1].append(each)
        else:
            parts.append([each])
    return parts
