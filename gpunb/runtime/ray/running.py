"""Calls of gpunb in a Ray worker, from their beginning to their end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import ray

from gpunb import backend, exceptions, serialize
from gpunb.backend import DYNAMIC, STREAMING
from gpunb.core.tasks import TaskId
from gpunb.runtime.ray import failures
from gpunb.runtime.ray.hosts import key_of
from gpunb.runtime.ray.kits import Kit, setup_of
from gpunb.runtime.ray.onray import Head
from gpunb.runtime.ray.parcels import Parcel, pack
from gpunb.runtime.ray.worker import InWorker, exit_at_once, here
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.hosting import _tag_output

GRACE = 5.0
"""Seconds that a task has to end by itself after its time-out, before its process is ended."""

_HERE = os.path.dirname(__file__)

_this: Running | None = None
_making = threading.Lock()


def this() -> Running:
    """What this process is."""
    global _this
    with _making:
        if _this is None:
            _this = Running()
            backend.install(_this)
        return _this


class Running(InWorker):
    """Runs the calls that Ray brings here."""

    def run(self, head: Head, parcel: Parcel, inputs: Sequence[Parcel]) -> Any:
        """Run a call and return its results as parcels; raise what stands for its failure."""
        head = Head(*head)
        if self._several:
            return self._run_beside(head, parcel, inputs)
        work = self._begin(head, parcel, inputs)
        # What the results refer to is kept until they are packed.
        runner, value = self._runner, None
        results: list[Payload] = []
        with self._captured(), self._watched(head), self._listening(head):
            try:
                try:
                    self._interruptible((head.task, work.attempt))
                    value = runner.call(work, [])
                    if head.kind == "cell" and self._is_given_up():
                        raise KeyboardInterrupt  # which is in what it brings home
                    report, results = "ok", runner.results(work, value)
                finally:
                    self._interrupts.end()
            except BaseException as error:
                report, results = self._report_of(work, error)
            runner.finish(work, report, results)
        result = self._end(head, report, results)
        del value
        return result

    def run_stream(self, head: Head, parcel: Parcel, inputs: Sequence[Parcel]) -> Iterator[Any]:
        """Run a generator and yield its values as parcels."""
        head = Head(*head)
        work = self._begin(head, parcel, inputs, several=self._several)
        runner, report = self._runner, "ok"
        results: list[Payload] = []
        own = contextlib.nullcontext() if self._several else self._captured()
        with own, self._watched(head), self._listening(head), self._within(work):
            attempt = head.task, work.attempt
            try:
                if not self._several:
                    self._interruptible(attempt)
                value = runner.call(work, [])
                if not hasattr(value, "__next__"):
                    text = f"{head.name} (#{head.task}) was to yield its results, but returned"
                    raise TypeError(f"{text} {value!r:.80}")
                for index, each in enumerate(value):
                    runner.yielded(work, index, each)
                    parcel = pack(self._yielded.pop(head.task), self._found)
                    if self._several or not head.actor:
                        yield parcel
                        continue
                    # Ray's own code runs until it wants the next one. It takes an interrupt there
                    # for its own, which it never sends to an actor, and may crash.
                    self._interrupts.end()
                    yield parcel
                    self._interruptible(attempt)
                self._interrupts.end()
            except GeneratorExit:
                self._tell(("ended", head.task, "cancelled"))
                raise
            except BaseException as error:
                report, results = self._report_of(work, error)
            runner.finish(work, report, results)
        try:
            self._end(head, report, results)
        except failures.Failed:
            if report == "interrupted" and not head.actor:
                # Ray may lose an error that comes as the last value of what it cancels.
                raise KeyboardInterrupt from None
            raise

    def become(self, head: Head, parcel: Parcel, inputs: Sequence[Parcel]) -> None:
        """Make the actor that this process is from now on."""
        head = Head(*head)
        new = head.new
        assert new is not None
        self.key = key_of(head.actor)
        self._several = new.concurrent or new.rules.max_concurrency > 1
        self._concurrent = new.concurrent
        self._session = new.namespace == backend.SESSIONS
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        host = msg.Host(
            head.actor, new.name, new.type, restarted, new.rules.max_concurrency, new.concurrent
        )
        work = self._begin(head, parcel, inputs, host=tuple(host))
        me = ray.get_runtime_context().current_actor
        self.table.add((head.actor, backend.HANDLE), me)
        results: list[Payload] = []
        with self._captured():
            try:
                try:
                    self._interruptible((head.task, work.attempt))
                    self._runner.call(work, [])
                    report = "ok"
                finally:
                    self._interrupts.end()
            except BaseException as error:
                report, results = self._report_of(work, error)
            self._runner.finish(work, report, results)
        if self._several:
            _tag_output(self._runner)
        if report == "ok":
            self._tell(("made", head.task))
            return
        if report == "exit":
            self._leave(head.actor)
        failure = failures.failed(results[0])
        self._tell(("failed", head.actor, failure.data))
        self._post.flush(self._box)
        raise failure

    def _begin(
        self,
        head: Head,
        parcel: Parcel,
        inputs: Sequence[Parcel],
        *,
        host: tuple[Any, ...] | None = None,
        several: bool = False,
    ) -> msg.Execute:
        """Take in what comes with a call, and say that it begins."""
        if self._fresh:
            self._settle(head)
        kit = self._take_kit(head)
        attempt = (
            ray._private.worker.global_worker.core_worker.get_current_task_attempt_number() + 1
        )
        gpus = _gpu_ids()
        runner = self._runner
        code = None
        if head.function not in runner.functions or head.kind == "create" or not head.function:
            code = head.code if isinstance(head.code, bytes) else ray.get(head.code[0])
        arguments, *values = (self.arrived(each) for each in (parcel, *inputs))
        work = msg.Execute(
            head.task,
            attempt,
            head.name,
            head.kind,
            None
            if several or (runner.host is not None and host is None)
            else self._setup(kit, gpus, head),
            head.function,
            code if head.kind in ("call", "create") else None,
            (arguments.wire(), 0),
            tuple([(each.wire(), 0) for each in values]),
            (),
            head.returns,
            head.retry,
            False,
            host,
        )
        self._kept = arguments, values
        self._sink, self._dynamic = head.sink, head.returns == DYNAMIC
        runner.prepare(work)
        if not several:
            self.enter(runner.context(work, lambda: self._is_cancelled(head.task)))
        node = ray.get_runtime_context().get_node_id()
        news = (head.task, attempt, os.getpid(), node, gpus, self.key, self.fatal)
        self._tell(("began", *news, head.name, head.kind, head.parent, head.sink, head.actor))
        return work

    def _settle(self, head: Head) -> None:
        """Before the first call. A process that works on a GPU ends after it, and to look for
        garbage among all that has been loaded would take most of the time that the end takes."""
        self._fresh = False
        if not head.gpus or head.actor:
            return  # what is there by now may become garbage while it lives on
        if head.kind == "cell":
            from gpunb.workers import cells, shell  # noqa: F401 - loaded now

            shell.prepare()
        gc.freeze()

    def _setup(self, kit: Kit, gpus: tuple[int | str, ...], head: Head) -> tuple[Any, ...]:
        return setup_of(kit, gpus, head.share, head.kind == "cell" or self._session)

    def _report_of(self, work: msg.Execute, error: BaseException) -> tuple[str, list[Payload]]:
        """The report of an attempt that raised."""
        self._interrupts.end()
        task = work.task
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            label = f"{work.name} (#{task})"
            if task in self._late:
                return "raised", [serialize.dump_failure(self._too_late(label, task), task=label)]
            if self._interrupts.hit or self._is_cancelled(task):
                cancelled = exceptions.TaskCancelledError(f"{label} was cancelled")
                return "interrupted", [serialize.dumps(cancelled)]
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_HERE):
            frame = frame.tb_next
        report: tuple[str, list[Payload]] = self._runner.failure(work, error.with_traceback(frame))
        return report

    def _too_late(self, label: str, task: TaskId) -> TimeoutError:
        return TimeoutError(
            f"{label} ran longer than its timeout of {self._limits.get(task, 0):g} s "
            "and was stopped"
        )

    def _end(self, head: Head, report: str, results: list[Payload]) -> Any:
        """Say that a call is over, and hand its results, or its failure, to Ray."""
        states = {"ok": "done", "exit": "done", "interrupted": "cancelled"}
        again = report == "retry"
        self._tell(("ended", head.task, "again" if again else states.get(report, "failed")))
        self._stopped.discard(head.task)
        wrote = self._capture is not None and self._capture.wrote
        told = 0
        if wrote or head.gpus or head.kind == "cell" or self._several:
            self._post.flush(self._box)
            told = head.task
        self._kept = None
        if report == "exit":
            self._leave(head.actor)
        if report != "ok":
            raise failures.failed(results[0], again=again, told=told)
        parcels = [pack(each, self._found, told=told) for each in results]
        if head.returns == DYNAMIC:
            self._dynamic = False
            self.table.leave(self._pinned)
            self._pinned = []
        if head.returns == STREAMING or not parcels:
            return None
        return parcels[0] if head.returns in (1, DYNAMIC) else parcels

    def _leave(self, actor: int) -> None:
        """End this process, which is an actor."""
        self._tell(("left", actor))
        self._post.flush(self._box)
        ray.actor.exit_actor()

    # ------------------------------------------------------------------------ several calls at once

    def _run_beside(self, head: Head, parcel: Parcel, inputs: Sequence[Parcel]) -> Any:
        """Run a call in one of the actor's threads."""
        work = self._begin(head, parcel, inputs, several=True)
        runner, value = self._runner, None
        results: list[Payload] = []
        with self._within(work), self._watched(head), self._listening(head):
            try:
                if head.task in self._stopped:
                    raise KeyboardInterrupt
                value = runner.call(work, [])
                report, results = "ok", runner.results(work, value)
            except BaseException as error:
                report, results = self._report_of(work, error)
            runner.finish(work, report, results)
        result = self._end(head, report, results)
        del value
        return result

    async def run_async(self, head: Head, parcel: Parcel, inputs: Sequence[Parcel]) -> Any:
        """Run a call as a coroutine."""
        head = Head(*head)
        work = self._begin(head, parcel, inputs, several=True)
        runner, value = self._runner, None
        results: list[Payload] = []
        with self._within(work):
            try:
                value = runner.call(work, [])
                if inspect.iscoroutine(value):
                    value = await self._timed(head, value)
                if inspect.isasyncgen(value):
                    values = [each async for each in value]
                    value = iter(values) if work.returns == DYNAMIC else values
                report, results = "ok", runner.results(work, value)
            except BaseException as error:
                report, results = self._report_of(work, error)
            runner.finish(work, report, results)
            result = await self._ended(head, report, results)
        del value
        return result

    async def stream_async(
        self, head: Head, parcel: Parcel, inputs: Sequence[Parcel]
    ) -> AsyncIterator[Any]:
        """Run a generator of an actor on its event loop."""
        head = Head(*head)
        work = self._begin(head, parcel, inputs, several=True)
        runner, report, index = self._runner, "ok", 0
        results: list[Payload] = []
        with self._within(work):
            try:
                value = runner.call(work, [])
                if not inspect.isasyncgen(value):
                    value = _awaited(value)
                async for each in value:
                    runner.yielded(work, index, each)
                    index += 1
                    yield pack(self._yielded.pop(head.task), self._found)
            except GeneratorExit:
                self._tell(("ended", head.task, "cancelled"))
                raise
            except BaseException as error:
                report, results = self._report_of(work, error)
            runner.finish(work, report, results)
        await self._ended(head, report, results)

    async def _timed(self, head: Head, value: Any) -> Any:
        if head.timeout is None:
            return await value
        try:
            return await asyncio.wait_for(value, head.timeout)
        except TimeoutError:
            self._limits[head.task] = head.timeout
            raise self._too_late(f"{head.name} (#{head.task})", head.task) from None

    async def _ended(self, head: Head, report: str, results: list[Payload]) -> Any:
        """As `_end`, without holding up the event loop."""
        loop = asyncio.get_running_loop()
        if report == "exit":
            return self._end(head, report, results)
        self._kept = None
        return await loop.run_in_executor(None, self._end, head, report, results)

    @contextlib.contextmanager
    def _within(self, work: msg.Execute) -> Iterator[None]:
        """This is what runs in this thread or coroutine, among others."""
        if not self._several:
            yield
            return
        context = self._runner.context(work, lambda: self._is_cancelled(work.task))
        token = here.set(context)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # a generator that ends in another context
                here.reset(token)

    @contextlib.contextmanager
    def _watched(self, head: Head) -> Iterator[None]:
        """While a call runs that has a time limit."""
        if head.timeout is None:
            yield
            return
        self._limits[head.task] = head.timeout

        def late() -> None:
            self._late.add(head.task)
            self._interrupt(head.task)

        def too_late() -> None:
            self._tell(("late", head.task, head.timeout))
            self._post.flush(self._box)
            exit_at_once(1)

        timers = [threading.Timer(head.timeout, late)]
        if not self._several:
            timers.append(threading.Timer(head.timeout + GRACE, too_late))
        for each in timers:
            each.daemon = True
            each.start()
        try:
            yield
        finally:
            for each in timers:
                each.cancel()
            self._late.discard(head.task)
            self._limits.pop(head.task, None)

    def _take_kit(self, head: Head) -> Kit:
        key, refs = head.kit
        kit = self._kits.get(key)
        if kit is None:
            kit = self._kits[key] = ray.get(refs[0])
        self._kit, self._box = head.kit, kit.box
        return kit


async def _awaited(generator: Any) -> AsyncIterator[Any]:
    for each in generator:
        yield each
        await asyncio.sleep(0)


def _gpu_ids() -> tuple[int | str, ...]:
    """The devices that Ray has given to this process, ascending."""
    ids = [int(each) if str(each).isdigit() else str(each) for each in ray.get_gpu_ids()]
    return tuple(sorted(ids, key=lambda each: (isinstance(each, str), each)))
