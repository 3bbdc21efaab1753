"""Actors that run several calls at once, in threads or as coroutines of one event loop.

Other actors are no different from any worker: their calls come one after the other, and run on
the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import queue
import sys
import threading
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.protocol import backend
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, ChannelClosed
from gpunb.worker.interrupts import Attempt
from gpunb.worker.kernel_client import TIDY_AFTER, KernelClient
from gpunb.worker.task_runner import TaskRunner
from gpunb.worker.termination import Termination

_LOOP_ENDS_WITHIN = 1.0
"""Seconds. A call may block the loop of its group, and must not keep the actor's process."""


class Threads:
    """Runs each call in a thread of its concurrency group; the main thread reads what comes, and
    nothing else.

    A call cannot be interrupted: it can ask whether it was cancelled.
    """

    def __init__(self, runner: TaskRunner, remote: KernelClient, limits: Mapping[str, int]) -> None:
        """`limits`: the number of threads of each group; the default group has an empty name."""
        self._runner, self._remote = runner, remote
        self._pools = {
            group: ThreadPoolExecutor(limit, thread_name_prefix="gpunb-call")
            for group, limit in limits.items()
        }
        self._running: dict[Attempt, threading.Event] = {}
        self._calls: set[Future[None]] = set()
        self._termination = Termination(lambda: not self._calls)
        runner.interrupts.elsewhere = self._stop
        _tag_output(runner)

    def start(self, work: msg.Execute, segments: list[Segment]) -> None:
        if self._termination.asked:
            return  # the kernel will hear of the end of this process
        attempt = (work.task, work.attempt)
        stopped = self._running[attempt] = threading.Event()
        if self._runner.interrupts.was_early(attempt):
            stopped.set()
        pool = self._pools.get(work.group) or self._pools[""]
        call = pool.submit(self._run, work, segments, stopped)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _run(self, work: msg.Execute, segments: list[Segment], stopped: threading.Event) -> None:
        runner = self._runner
        results: list[Payload] = []
        with self._remote.within(runner.context(work, stopped.is_set)):
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
    `asyncio.CancelledError` in it.

    Each concurrency group has an event loop of its own, in a thread, so that a call which blocks
    its loop holds up only its group.
    """

    def __init__(
        self, runner: TaskRunner, remote: KernelClient, channel: Channel, groups: Iterable[str]
    ) -> None:
        self._runner, self._remote = runner, remote
        self._channel = channel
        self._groups = tuple(groups)
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}
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
        self._termination = Termination(lambda: not self._running)
        _tag_output(runner)
        if not runner.execute(work, segments) or runner.actor is None:
            return
        if self._groups:
            with _loops(self._groups) as self._loops:
                self._remote.transport.beside = _nothing  # the reader finds it
                threading.Thread(target=self._read, name="gpunb-reader", daemon=True).start()
                await self._over.wait()
            return
        self._remote.transport.beside = self._look_soon
        loop.add_reader(self._channel.fileno(), self._look)
        self._look()
        await self._over.wait()

    def _look_soon(self) -> None:
        """From any thread: there is something to look at."""
        self._loop.call_soon_threadsafe(self._look)

    def _read(self) -> None:
        """Start the calls of all groups, in a thread, because a call may block any of the loops."""
        try:
            while (work := self._remote.transport.next_work(None)) is not None:
                self._act(*work)
        except (ChannelClosed, OSError):
            self._end()

    def _look(self) -> None:
        self._runner.end_forked()
        try:
            for message, descriptors in self._remote.transport.work_now():
                self._act(message, descriptors)
        except ChannelClosed:
            self._end()

    def _act(self, message: msg.Message, descriptors: list[int]) -> None:
        match message:
            case msg.Execute():
                self._place(message, [Segment.adopt(each) for each in descriptors])
            case msg.Retired():
                self._end()
            case _:
                pass

    def _end(self) -> None:
        """From any thread: let the actor end."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._over.set)

    def _place(self, work: msg.Execute, segments: list[Segment]) -> None:
        """Start a call on the loop of its group."""
        if self._groups:
            loop = self._loops.get(work.group, self._loop)
            loop.call_soon_threadsafe(self._start, work, segments)
        else:
            self._start(work, segments)

    def _start(self, work: msg.Execute, segments: list[Segment]) -> None:
        if self._termination.asked:
            return  # the kernel will hear of the end of this process
        attempt = (work.task, work.attempt)
        coroutine = self._run(work, segments)
        task = asyncio.get_running_loop().create_task(coroutine, name=work.name)
        self._running[attempt] = task
        task.add_done_callback(lambda _: self._running.pop(attempt, None))
        if self._runner.interrupts.was_early(attempt):
            self._stop(attempt)

    async def _run(self, work: msg.Execute, segments: list[Segment]) -> None:
        runner, attempt = self._runner, (work.task, work.attempt)
        results: list[Payload] = []
        with self._remote.within(runner.context(work, lambda: attempt in self._stopped)):
            try:
                # Called here: a StopIteration does not come out of a coroutine as itself.
                value = runner.call(work, segments)
                report, results = "ok", await self._results(work, value)
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
                self._end()
        if report == "exit":
            self._end()
        elif not self._tidying:
            self._tidying = True
            asyncio.get_running_loop().call_later(TIDY_AFTER, self._tidy)

    async def _results(self, work: msg.Execute, value: Any) -> list[Payload]:
        runner = self._runner
        if inspect.iscoroutine(value):
            value = await value
        if inspect.isasyncgen(value):
            if work.returns == backend.STREAMING:
                index = 0
                async for each in value:
                    runner.yielded(work, index, each)
                    index += 1
                return []
            value = await collected(value, work.returns)
        elif work.returns == backend.STREAMING and inspect.isgenerator(value):
            for index, each in enumerate(value):
                runner.yielded(work, index, each)
                await asyncio.sleep(0)
            return []
        return runner.results(work, value)

    def _tidy(self) -> None:
        self._tidying = False
        if not self._running:
            self._remote.tidy()

    def _stop(self, attempt: Attempt) -> bool:
        task = self._running.get(attempt)
        if task is not None:
            self._stopped.add(attempt)
            task.get_loop().call_soon_threadsafe(task.cancel)
        return task is not None


def _nothing() -> None:
    """Do nothing."""


@contextlib.contextmanager
def _loops(names: Iterable[str]) -> Iterator[dict[str, asyncio.AbstractEventLoop]]:
    """Event loops by name, each in a thread of its own. At the end their tasks are cancelled."""
    begun: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        over = asyncio.Event()
        begun.put((asyncio.get_running_loop(), over))
        await over.wait()

    threads, ends = [], []
    loops: dict[str, asyncio.AbstractEventLoop] = {}
    for name in names:
        run = threading.Thread(target=asyncio.run, args=(serve(),), name="gpunb-call", daemon=True)
        run.start()
        threads.append(run)
        loops[name], over = begun.get()
        ends.append((loops[name], over.set))
    try:
        yield loops
    finally:
        for loop, end in ends:
            loop.call_soon_threadsafe(end)
        for thread in threads:
            thread.join(_LOOP_ENDS_WITHIN)


async def collected(values: AsyncIterable[Any], returns: int) -> Any:
    """The values in a list; for several results a generator, which ends with the same error."""
    if returns in (0, 1):
        return [each async for each in values]
    found: list[Any] = []
    failure = None
    try:
        async for each in values:
            found.append(each)  # noqa: PERF401 - extend adds nothing if there is an error
    except Exception as error:
        failure = error
    return _replayed(found, failure)


def _replayed(values: list[Any], failure: Exception | None) -> Iterator[Any]:
    yield from values
    if failure is not None:
        raise failure


def _tag_output(runner: TaskRunner) -> None:
    """Send the printed text of each of several calls to its own sink."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, _Tagged(runner, name, getattr(sys, name)))


class _Tagged(io.TextIOBase):
    """A standard stream that sends each line for the call that wrote it."""

    def __init__(self, runner: TaskRunner, name: str, plain: Any) -> None:
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
