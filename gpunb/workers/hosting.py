"""Actors that do several things at once: in threads, or in coroutines on one event loop.

Other actors are no different from any worker: their calls come one after the other, and run on
the main thread.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpunb import backend
from gpunb.awaiting import ROOT
from gpunb.objects import Segment
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.channel import Channel, ChannelClosed
from gpunb.workers.interrupts import Attempt
from gpunb.workers.remote import TIDY_AFTER
from gpunb.workers.running import Runner


class Threads:
    """Runs each call in a thread; the main thread reads what comes, and nothing else.

    A call cannot be interrupted: it can ask whether it was cancelled.
    """

    def __init__(self, runner: Runner, concurrency: int) -> None:
        self._runner = runner
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="gpunb-call")
        self._running: dict[Attempt, threading.Event] = {}
        runner.interrupts.elsewhere = self._stop
        _tag_output(runner)

    def start(self, work: msg.Execute, segments: list[Segment]) -> None:
        attempt = (work.task, work.attempt)
        stopped = self._running[attempt] = threading.Event()
        if self._runner.interrupts.was_early(attempt):
            stopped.set()
        self._pool.submit(self._run, work, segments, stopped)

    def _run(self, work: msg.Execute, segments: list[Segment], stopped: threading.Event) -> None:
        runner = self._runner
        results: list[Payload] = []
        with runner.remote.within(runner.context(work, stopped.is_set)):
            try:
                report, results = "ok", runner.results(work, runner.call(work, segments))
            except BaseException as error:
                report, results = runner.failure(work, error)
            del self._running[work.task, work.attempt]
            try:
                runner.finish(work, report, results)
            except ChannelClosed:
                pass  # the main thread finds out by itself

    def _stop(self, attempt: Attempt) -> bool:
        stopped = self._running.get(attempt)
        if stopped is not None:
            stopped.set()
        return stopped is not None


class EventLoop:
    """Runs each call as a coroutine; those that are none run in between. Cancelling one raises
    `asyncio.CancelledError` in it."""

    def __init__(self, runner: Runner, channel: Channel) -> None:
        self._runner = runner
        self._channel = channel
        self._running: dict[Attempt, asyncio.Task[None]] = {}
        self._stopped: set[Attempt] = set()
        self._tidying = False
        runner.interrupts.elsewhere = self._stop

    def serve(self, work: msg.Execute, segments: list[Segment]) -> None:
        """Make the actor and serve its calls until it is to end."""
        asyncio.run(self._serve(work, segments))

    async def _serve(self, work: msg.Execute, segments: list[Segment]) -> None:
        runner, loop = self._runner, asyncio.get_running_loop()
        self._loop = loop
        self._over = asyncio.Event()
        _tag_output(runner)
        if not runner.execute(work, segments) or runner.actor is None:
            return
        runner.remote.beside = self._tell
        loop.add_reader(self._channel.fileno(), self._look)
        self._look()
        await self._over.wait()

    def _tell(self) -> None:
        """From any thread: there is something to look at."""
        self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._runner.end_forked()
        try:
            for message, descriptors in self._runner.remote.messages_now():
                match message:
                    case msg.Execute():
                        self._start(message, [Segment.adopt(each) for each in descriptors])
                    case msg.Retired():
                        self._over.set()
                    case _:
                        pass
        except ChannelClosed:
            self._over.set()

    def _start(self, work: msg.Execute, segments: list[Segment]) -> None:
        attempt = (work.task, work.attempt)
        task = self._loop.create_task(self._run(work, segments), name=work.name)
        self._running[attempt] = task
        task.add_done_callback(lambda _: self._running.pop(attempt, None))
        if self._runner.interrupts.was_early(attempt):
            self._stop(attempt)

    async def _run(self, work: msg.Execute, segments: list[Segment]) -> None:
        runner, attempt = self._runner, (work.task, work.attempt)
        results: list[Payload] = []
        ROOT.set(asyncio.current_task())
        with runner.remote.within(runner.context(work, lambda: attempt in self._stopped)):
            try:
                report, results = "ok", await self._call(work, segments)
            except BaseException as error:
                if self._over.is_set() and isinstance(error, asyncio.CancelledError):
                    return  # it ends with its actor, which the kernel will hear of
                if attempt in self._stopped and isinstance(error, asyncio.CancelledError):
                    report = "interrupted"
                else:
                    report, results = runner.failure(work, error)
            self._stopped.discard(attempt)
            try:
                runner.finish(work, report, results)
            except ChannelClosed:
                self._over.set()
        if report == "exit":
            self._over.set()
        elif not self._tidying:
            self._tidying = True
            self._loop.call_later(TIDY_AFTER, self._tidy)

    async def _call(self, work: msg.Execute, segments: list[Segment]) -> list[Payload]:
        runner = self._runner
        value: Any = runner.call(work, segments)
        if inspect.iscoroutine(value):
            value = await value
        if inspect.isasyncgen(value):
            if work.returns == backend.STREAMING:
                index = 0
                async for each in value:
                    runner.yielded(work, index, each)
                    index += 1
                return []
            values = [each async for each in value]
            value = iter(values) if work.returns == backend.DYNAMIC else values
        elif work.returns == backend.STREAMING and inspect.isgenerator(value):
            for index, each in enumerate(value):
                runner.yielded(work, index, each)
                await asyncio.sleep(0)
            return []
        return runner.results(work, value)

    def _tidy(self) -> None:
        self._tidying = False
        if not self._running:
            self._runner.remote.tidy()

    def _stop(self, attempt: Attempt) -> bool:
        task = self._running.get(attempt)
        if task is not None:
            self._stopped.add(attempt)
            self._loop.call_soon_threadsafe(task.cancel)
        return task is not None


def _tag_output(runner: Runner) -> None:
    """What several calls print at once goes each its own way."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, _Tagged(runner, name, getattr(sys, name)))


class _Tagged(io.TextIOBase):
    """A standard stream that sends each line for the call that wrote it."""

    def __init__(self, runner: Runner, name: str, plain: Any) -> None:
        super().__init__()
        self._runner = runner
        self._name = name
        self._plain = plain
        self._parts: dict[int, list[str]] = {}
        self._pid = os.getpid()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        descriptor: int = self._plain.fileno()
        return descriptor

    @property
    def buffer(self) -> Any:
        """For bytes, which go where all goes that no call is known for."""
        return self._plain.buffer

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        task = self._runner.remote.context().task
        if task is None or os.getpid() != self._pid:
            self._plain.write(text)
            return len(text)
        self._parts.setdefault(task, []).append(text)
        if "\n" in text:
            self._send(task)
        return len(text)

    def flush(self) -> None:
        task = self._runner.remote.context().task
        if task is not None and os.getpid() == self._pid:
            self._send(task)
        self._plain.flush()

    def _send(self, task: int) -> None:
        parts = self._parts.pop(task, None)
        if parts:
            self._runner.remote.send(msg.Printed(task, self._name, "".join(parts)))
