"""Calls of gpunb in a Ray worker, from their beginning to their end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from gpunb import exceptions
from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.protocol import backend, plain
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import DYNAMIC, STREAMING
from gpunb.ray import failures, time_limits
from gpunb.ray.interrupts import is_cancelled_by_ray
from gpunb.ray.job_env import JobEnv, Setups
from gpunb.ray.messages import Began, ConstructorFailed, Ended, Late, Left, Made
from gpunb.ray.time_limits import TimeLimits
from gpunb.ray.transport import (
    INTERRUPTED,
    CallHeader,
    RayPayload,
    key_of,
    light,
    opened,
    separated,
)
from gpunb.ray.worker import RayWorker, exit_at_once, here
from gpunb.scheduler.tasks import TaskId
from gpunb.worker.concurrent_actor import _tag_output, collected
from gpunb.worker.task_runner import TaskRunner

_HERE = os.path.dirname(__file__)

_this: RayTaskRunner | None = None
_making = threading.Lock()


def this() -> RayTaskRunner:
    """Return the runner of this process."""
    global _this
    with _making:
        if _this is None:
            worker = RayWorker()
            _this = RayTaskRunner(worker)
            backend.install(worker)
        return _this


@dataclass(slots=True)
class AttemptEnd:
    """How an attempt ended: its report, and its results or its failure.

    Attributes:
        cancelled: whether Ray cancelled it, and it has results all the same.
    """

    report: str = "ok"
    results: list[Payload] = field(default_factory=list)
    cancelled: bool = False


class RayTaskRunner:
    """Runs the calls that Ray brings here."""

    def __init__(self, worker: RayWorker) -> None:
        self._worker = worker
        self._link = worker.link
        self._interrupts = worker.interrupts
        self._runner = TaskRunner(worker, worker.interrupts.signals)
        self._limits = TimeLimits(worker.interrupts.interrupt, self._end_process)
        self._job_envs: dict[str, JobEnv] = {}
        self._node = ray.get_runtime_context().get_node_id()
        self._gpu_ids: tuple[int | str, ...] | None = None
        self._setups = Setups()
        self._fresh = True
        self._received: Any = None

    def run(self, sent: Any, inputs: Sequence[Any]) -> Any:
        """Run a call and return its packed results; raise an error that carries its failure."""
        header, packed = separated(sent)
        work = self._begin(header, packed, inputs, several=self._interrupts.several)
        # What the results refer to is kept until they are packed.
        value = None
        with self._around(header), self._ending(work) as ending:
            try:
                self._interrupts.begin((header.task, work.attempt))
                value = self._runner.call(work, [])
                if header.kind in INTERRUPTED and is_cancelled_by_ray():
                    # A cell's own KeyboardInterrupt is among the values that it brings home, and
                    # the kernel knows whether it only wanted to stop the cell.
                    if not isinstance(value, Payload):  # of a cell
                        raise KeyboardInterrupt
                    ending.cancelled = True
                ending.results = self._runner.results(work, value)
            finally:
                self._interrupts.end()
        result = self._end(header, ending)
        del value
        return result

    def run_stream(self, sent: Any, inputs: Sequence[Any]) -> Iterator[Any]:
        """Run a generator and yield its packed values."""
        header, packed = separated(sent)
        work = self._begin(header, packed, inputs, several=self._interrupts.several)
        attempt = header.task, work.attempt
        with self._around(header), self._ending(work) as ending:
            try:
                self._interrupts.begin(attempt)
                value = self._runner.call(work, [])
                if not hasattr(value, "__next__"):
                    text = f"{header.name} (#{header.task}) was to yield its results, but returned"
                    raise TypeError(f"{text} {value!r:.80}")
                for index, each in enumerate(value):
                    self._runner.yielded(work, index, each)
                    result = self._worker.pack_yielded(header.task)
                    if self._interrupts.several or not header.actor:
                        yield result
                        continue
                    # Ray's own code runs until it wants the next one. It takes an interrupt there
                    # for its own, which it never sends to an actor, and may crash.
                    self._interrupts.end()
                    yield result
                    self._interrupts.begin(attempt)
            finally:
                self._interrupts.end()
        try:
            self._end(header, ending)
        except failures.Failed:
            if ending.report == "interrupted" and not header.actor:
                # Ray may lose an error that comes as the last value of what it cancels.
                raise KeyboardInterrupt from None
            raise

    def become(self, sent: Any, inputs: Sequence[Any]) -> None:
        """Make the actor that this process is from now on."""
        header, packed = separated(sent)
        new = header.new
        assert new is not None
        self._link.key = key_of(header.actor)
        self._link.session = new.namespace == backend.SESSIONS
        self._interrupts.several = (
            new.concurrent or max(new.rules.limits.values()) > 1 or bool(new.rules.groups)
        )
        restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        host = msg.HostedActor(
            header.actor, new.name, new.type, restarted, new.rules.max_concurrency, new.concurrent
        )
        work = self._begin(header, packed, inputs, host=tuple(host))
        me = ray.get_runtime_context().current_actor
        self._worker.objects.table.add((header.actor, backend.HANDLE), me)
        with self._worker.captured(), self._ending(work) as ending:
            try:
                self._interrupts.begin((header.task, work.attempt))
                self._runner.call(work, [])
            finally:
                self._interrupts.end()
        if self._interrupts.several:
            _tag_output(self._runner)
        if ending.report == "ok":
            self._link.report(Made(header.task, self._runner.title))
            return
        if ending.report == "exit":
            self._leave(header.actor, ending.results)
        failure = failures.failed(ending.results[0])
        self._link.report(ConstructorFailed(header.actor, failure.data))
        self._link.flush()
        raise failure

    def _begin(
        self,
        header: CallHeader,
        packed: RayPayload,
        inputs: Sequence[Any],
        *,
        host: tuple[Any, ...] | None = None,
        several: bool = False,
    ) -> msg.Execute:
        """Prepare for a call, and report that it begins."""
        inputs = [opened(each) for each in inputs]
        for each in inputs:
            if each.failed:
                raise failures.failed(self._worker.objects.unpack(each))
        if self._fresh:
            self._settle(header)
        env = self._fetch_job_env(header)
        self._worker.enter_call(header, env)
        attempt = (
            ray._private.worker.global_worker.core_worker.get_current_task_attempt_number() + 1
        )
        gpus = self._devices(header)
        runner, of_cell = self._runner, header.kind == "cell"
        code, known = None, header.function and header.function in runner.functions
        if not known or header.kind == "create":
            code = header.code if isinstance(header.code, bytes) else ray.get(header.code[0])
        arguments, *values = (self._worker.objects.unpack(each) for each in (packed, *inputs))
        work = msg.Execute(
            header.task,
            attempt,
            header.name,
            header.kind,
            None
            if several or (runner.host is not None and host is None)
            else self._setups.of(env, gpus, header.share, of_cell or self._link.session),
            header.function,
            code,
            (arguments.wire(), 0),
            tuple([(each.wire(), 0) for each in values]),
            (),
            header.returns,
            header.retry,
            False,
            host,
        )
        self._received = arguments, values
        runner.prepare(work)
        if not several:
            self._worker.enter(
                runner.context(work, lambda: self._interrupts.is_cancelled(header.task))
            )
        self._link.report(
            Began(
                header.task,
                attempt,
                os.getpid(),
                self._node,
                gpus,
                worker=self._link.key,
                log=self._worker.fatal,
                name=header.name,
                kind=header.kind,
                parent=header.parent,
                sink=header.sink,
                actor=header.actor,
                share=header.share,
                rank=header.code if of_cell and isinstance(header.code, bytes) else b"",
            )
        )
        return work

    def _devices(self, header: CallHeader) -> tuple[int | str, ...]:
        """The devices that Ray has given to this call, or for good to this actor."""
        if not header.actor:
            return _gpu_ids() if header.gpus else ()
        if self._gpu_ids is None:
            self._gpu_ids = _gpu_ids()
        return self._gpu_ids

    def _settle(self, header: CallHeader) -> None:
        """Prepare for the first call. A process that works on a GPU ends after it, and a search for
        garbage among all that was loaded would take most of the time of that end."""
        self._fresh = False
        if not header.gpus or header.actor:
            return  # what is there by now may become garbage while it lives on
        if header.kind == "cell":
            from gpunb.worker.cell import run as cell_run  # noqa: F401 - loaded now
            from gpunb.worker.cell import shell

            shell.prepare()
        gc.freeze()

    def _report_of(self, work: msg.Execute, error: BaseException) -> tuple[str, list[Payload]]:
        """The report of an attempt that raised."""
        self._interrupts.end()
        task = work.task
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            label = f"{work.name} (#{task})"
            if (too_late := self._limits.error(label, task)) is not None:
                return "raised", [serialize.dump_failure(too_late, task=label)]
            if self._interrupts.signals.hit or self._interrupts.is_cancelled(task):
                cancelled = exceptions.TaskCancelledError(f"{label} was cancelled")
                return "interrupted", [serialize.dumps(cancelled)]
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_HERE):
            frame = frame.tb_next
        report: tuple[str, list[Payload]] = self._runner.failure(work, error.with_traceback(frame))
        return report

    def _end(self, header: CallHeader, ending: AttemptEnd) -> Any:
        """Report the end of a call to the kernel, and hand its results, or its failure, to Ray."""
        report, results = ending.report, ending.results
        states = {"ok": "done", "exit": "done", "interrupted": "cancelled"}
        again = report == "retry"
        state = "again" if again else states.get(report, "failed")
        if ending.cancelled and state == "done":
            state = "cancelled"
        self._link.report(Ended(header.task, state))
        self._interrupts.forget(header.task)
        output_of = 0
        if (
            self._worker.wrote
            or header.gpus
            or header.kind in INTERRUPTED
            or self._interrupts.several
        ):
            self._link.flush()
            output_of = header.task
        self._received = None
        if report == "exit":
            self._leave(header.actor, results)
        if report != "ok" and (again or len(results) == 1):
            raise failures.failed(results[0], again=again, output_of=output_of)
        packed = [self._worker.objects.pack(each, output_of=output_of) for each in results]
        if report != "ok":  # of a generator that gave some results
            failure, *packed = packed
            failure.failed = True
            packed += [failure] * (header.returns - len(packed))
        if ending.cancelled:
            packed[0].cancelled = True
        if header.returns == DYNAMIC:
            self._worker.release_pinned()
        if header.returns == STREAMING or not packed:
            return None
        sent = [light(each) for each in packed]
        return sent[0] if header.returns in (1, DYNAMIC) else sent

    def _leave(self, actor: int, reasons: Sequence[Payload]) -> None:
        """End this process, which is an actor, for a reason if it failed."""
        texts = [plain.loads(each.stream) for each in reasons]
        self._link.report(Left(actor, next((text for text, failed in texts if failed), None)))
        self._link.flush()
        ray.actor.exit_actor()

    # ------------------------------------------------------------------------ several calls at once

    async def run_async(self, sent: Any, inputs: Sequence[Any]) -> Any:
        """Run a call as a coroutine."""
        header, packed = separated(sent)
        work = self._begin(header, packed, inputs, several=True)
        value = None
        with self._ending(work) as ending:
            value = self._runner.call(work, [])
            if inspect.iscoroutine(value):
                value = await time_limits.within(header, value)
            if inspect.isasyncgen(value):
                value = await collected(value, work.returns)
            ending.results = self._runner.results(work, value)
        result = await self._ended(header, ending)
        del value
        return result

    async def stream_async(self, sent: Any, inputs: Sequence[Any]) -> AsyncIterator[Any]:
        """Run a generator of an actor on its event loop."""
        header, packed = separated(sent)
        work = self._begin(header, packed, inputs, several=True)
        index = 0
        with self._ending(work) as ending:
            value = self._runner.call(work, [])
            if not inspect.isasyncgen(value):
                value = _awaited(value)
            async for each in value:
                self._runner.yielded(work, index, each)
                index += 1
                yield self._worker.pack_yielded(header.task)
        await self._ended(header, ending)

    async def _ended(self, header: CallHeader, ending: AttemptEnd) -> Any:
        """Do what `_end` does, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        if ending.report == "exit":
            return self._end(header, ending)
        self._received = None
        return await loop.run_in_executor(None, self._end, header, ending)

    @contextlib.contextmanager
    def _ending(self, work: msg.Execute) -> Iterator[AttemptEnd]:
        """Note how an attempt ends: the block sets its results, or raises its error."""
        ending = AttemptEnd()
        with self._within(work):
            try:
                yield ending
            except GeneratorExit:
                self._link.report(Ended(work.task, "cancelled"))
                raise
            except BaseException as error:
                ending.report, ending.results = self._report_of(work, error)
            self._runner.finish(work, ending.report, ending.results)

    @contextlib.contextmanager
    def _around(self, header: CallHeader) -> Iterator[None]:
        """Capture the output of a call, keep its time limit, and read the kernel's messages."""
        alone = not self._interrupts.several
        own = self._worker.captured() if alone else contextlib.nullcontext()
        limit = self._limits.watching(header, on_main_thread=alone)
        with own, limit, self._link.reading(header):
            yield

    @contextlib.contextmanager
    def _within(self, work: msg.Execute) -> Iterator[None]:
        """This is what runs in this thread or coroutine, among others."""
        if not self._interrupts.several:
            yield
            return
        context = self._runner.context(work, lambda: self._interrupts.is_cancelled(work.task))
        token = here.set(context)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # a generator that ends in another context
                here.reset(token)

    def _end_process(self, task: TaskId, seconds: float) -> None:
        """End this process, because a call did not end when it was interrupted."""
        self._link.report(Late(task, seconds))
        self._link.flush()
        exit_at_once(1)

    def _fetch_job_env(self, header: CallHeader) -> JobEnv:
        key = header.job_env.key
        env = self._job_envs.get(key)
        if env is None:
            env = self._job_envs[key] = ray.get(header.job_env.open())
        return env


async def _awaited(generator: Any) -> AsyncIterator[Any]:
    for each in generator:
        yield each
        await asyncio.sleep(0)


def _gpu_ids() -> tuple[int | str, ...]:
    """The devices that Ray has given to this process, ascending."""
    ids = [int(each) if str(each).isdigit() else str(each) for each in ray.get_gpu_ids()]
    return tuple(sorted(ids, key=lambda each: (isinstance(each, str), each)))
