"""The scheduler's own process as backend: a thread that feeds events and carries out decisions.

It only routes. Processes are the pool's, objects the store's, what workers ask the requests'.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, assert_never

from gpunb import serialize
from gpunb.accelerators import pin_environment
from gpunb.backend import Call, Context, ObjectId, Outcome
from gpunb.core import events as ev
from gpunb.core import tasks
from gpunb.core.placement import refusal
from gpunb.core.resources import Demand, Machine
from gpunb.core.scheduler import Policy, Scheduler
from gpunb.core.snapshot import available, snapshot, why
from gpunb.core.tasks import TaskId, WorkerId
from gpunb.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    GpunbError,
    InfeasibleRequestError,
    ObjectLostError,
    OutOfMemoryError,
    TaskCancelledError,
    WorkerCrashedError,
)
from gpunb.objects import Segment
from gpunb.runtime.jobs import Job, Past
from gpunb.runtime.output import Sink
from gpunb.runtime.requests import Requests
from gpunb.runtime.setup import Setups
from gpunb.runtime.store import Store
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers import system
from gpunb.workers.forking import ForkSource
from gpunb.workers.launching import Launched
from gpunb.workers.loop import Loop
from gpunb.workers.pool import Pool, Process
from gpunb.workers.remote import BATCH
from gpunb.workers.spawning import SpawnSource

T = TypeVar("T")

# Numbers go on in the next session: a ref of an earlier one never means something else.
_TASKS = itertools.count(1)
_PUTS = itertools.count(1)

HISTORY = 10_000
"""Events kept for a look back, and tasks remembered after their end."""

_DESCRIPTORS = 8192
"""Open files that this process should be allowed: a worker takes four, a large object one."""

_REPORTS: dict[str, tasks.Report] = {
    "ok": tasks.Succeeded(),
    "raised": tasks.Raised(),
    "retry": tasks.Raised(retry=True),
    "interrupted": tasks.Interrupted(),
}


class Local:
    """The backend of a kernel. Public methods may be called from any thread."""

    def __init__(
        self,
        machine: Machine,
        *,
        preload: Sequence[str] = (),
        method: str = "fork",
        launched: Launched | None = None,
        vendors: Sequence[str] = (),
        standbys: int = 2,
        policy: Policy | None = None,
    ) -> None:
        self.machine = machine
        self.loop = Loop()
        self.store = Store()
        self.jobs: dict[TaskId, Job] = {}
        self.past: dict[TaskId, Past] = {}
        self.history: deque[tuple[ev.Event, float]] = deque(maxlen=HISTORY)
        self.pool = Pool(self.loop, self, standbys)
        self.source: ForkSource | SpawnSource | None = None
        descriptors = system.allow_descriptors(_DESCRIPTORS)
        if policy is None:
            policy = Policy(max_workers=min(Policy().max_workers, descriptors // 8))
        self._scheduler = Scheduler(machine, policy)
        self._requests = Requests(self)
        self._setups = Setups(machine, functools.partial(pin_environment, vendors=tuple(vendors)))
        self._refusals: dict[Demand, str | None] = {}
        self._by_worker: dict[WorkerId, set[TaskId]] = {}
        self._events: deque[ev.Event] = deque()
        self._feeding = False
        self._wake: float | None = None
        self._closed = False
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(method, tuple(preload), launched), name="gpunb", daemon=True
        )
        self._thread.start()
        atexit.register(self.shutdown)
        _sessions.add(self)

    # ================================================================ the backend, for any thread

    def submit(self, call: Call) -> list[ObjectId]:
        self._check_alive()
        return self._accept(call, call.sink, None, posted=True)

    def accept(self, call: Call, sink: Sink | None, parent: TaskId | None) -> list[ObjectId]:
        """As `submit`, on the loop's thread and for a task."""
        return self._accept(call, sink, parent, posted=False)

    def _accept(
        self, call: Call, sink: Sink | None, parent: TaskId | None, *, posted: bool
    ) -> list[ObjectId]:
        demand = call.spec.demand
        if demand not in self._refusals:
            self._refusals[demand] = refusal(demand, self.machine)
        reason = self._refusals[demand]
        if reason:
            raise InfeasibleRequestError(f"{call.spec.name}: {reason}")
        for obj in call.inputs:
            self.store.entry(obj)
        ident = next(_TASKS)
        results = [(ident, index) for index in range(call.returns)]
        for each in results:
            self.store.create(each)
        job = Job(ident, call, results, sink, parent)
        self.jobs[ident] = job
        if posted:
            self.loop.post((self._submitted, job))
        else:
            self._submitted(job)
        return results

    def put(self, payload: Payload) -> ObjectId:
        self._check_alive()
        obj = (0, next(_PUTS))
        self.store.create(obj, Outcome(payload))
        for inner in payload.references:
            self.loop.post((self.store.hold, inner))
        return obj

    def keep(self, payload: Payload) -> ObjectId:
        """As `put`, on the loop's thread."""
        obj = (0, next(_PUTS))
        for inner in payload.references:
            self.store.hold(inner)
        self.store.create(obj, Outcome(payload))
        return obj

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        self._check_alive()
        self._check_may_wait(objects, len(objects), timeout)
        return self.store.fetch(objects, timeout)

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        self._check_alive()
        self._check_may_wait(objects, count, timeout)
        return self.store.wait(objects, count, timeout)

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        self._check_alive()
        self.store.notify(obj, callback)

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        self._check_alive()
        self.store.entry(obj)
        if obj[0]:
            self.loop.post((self.feed, ev.CancelRequested(obj[0], force, recursive)))

    def interrupt(self, obj: ObjectId) -> None:
        self._check_alive()
        self.loop.post((self.feed, ev.InterruptRequested(obj[0])))

    def hold(self, obj: ObjectId) -> None:
        self._check_alive()
        self.loop.post((self.store.hold, obj))

    def drop(self, obj: ObjectId) -> None:
        if not self._closed and os.getpid() == self._pid:
            self.loop.post((self.store.drop, obj))

    def ask(self, what: str, *arguments: Any) -> Any:
        if what == "total":
            return self.machine.totals()
        if what == "job":
            return self._job_facts(*arguments)
        self._check_alive()
        return self._on_loop(functools.partial(self.tell, what, *arguments))

    def context(self) -> Context:
        return Context()

    def shutdown(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        self.loop.post((self._stop,))
        self._thread.join(10)

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise GpunbError(
                "this process was forked from one that uses gpunb, and gpunb does not work in "
                "forks: call gpunb.shutdown() and gpunb.init() here, or use gpunb.remote instead"
            )
        if self._failure is not None:
            raise GpunbError(
                f"the runtime stopped after an error: {self._failure!r}; call gpunb.shutdown() "
                "and gpunb.init() to go on"
            ) from self._failure
        if self._closed:
            raise GpunbError("this session was shut down: call gpunb.init() for a new one")

    def _check_may_wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> None:
        if timeout == 0 or threading.get_ident() != self._thread.ident:
            return
        if len(self.store.wait(objects, count, 0)) < count:
            raise GpunbError(
                "a callback of a future must not wait for other tasks: it runs on the thread that "
                "hears of their end"
            )

    def forked(self) -> None:
        """In a child that somebody forked off the kernel: let go of what is the parent's."""
        for process in self.pool.processes():
            process.channel.close()
            os.close(process.interrupts)

    def _on_loop(self, function: Callable[[], T]) -> T:
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.loop.post((call,))
        while True:
            try:
                return future.result(1.0)
            except TimeoutError:
                if future.done():
                    raise
                self._check_alive()

    # ================================================================== below: the loop's thread

    def _run(self, method: str, preload: Sequence[str], launched: Launched | None) -> None:
        try:
            if method == "fork":
                self.source = ForkSource(self.loop, self.pool, preload, launched)
            else:
                self.source = SpawnSource(self.loop, self.pool)
            self.pool.open(self.source)
            self.loop.run(self._receive)
        except BaseException as error:
            self._failure = error
            self._fail_all(error)
            self.pool.close()
        finally:
            self.loop.close()
            self.store.clear()

    def _receive(self, item: tuple[Any, ...]) -> None:
        item[0](*item[1:])

    def _stop(self) -> None:
        self._fail_all(GpunbError("the session was shut down"))
        self.pool.close()
        self.loop.stop()

    def _fail_all(self, error: BaseException) -> None:
        """Nobody may wait for ever."""
        shown = error if isinstance(error, GpunbError) else GpunbError(f"runtime error: {error!r}")
        failure = Outcome(serialize.dumps(shown), failed=True)
        for job in list(self.jobs.values()):
            for obj in job.results:
                self.store.settle(obj, failure)

    # ------------------------------------------------------------------------------- events in

    def _submitted(self, job: Job) -> None:
        call = job.call
        needs = []
        for obj in (*call.inputs, *call.arguments.references):
            self.store.hold(obj)
        for obj in call.inputs:
            outcome = self.store.get(obj)
            if outcome is None:
                needs.append(obj[0])
            elif outcome.failed:
                self._settle(job, outcome, "failed")
                return
        self.feed(ev.Submitted(job.id, call.spec, tuple(needs), job.parent))

    def feed(self, event: ev.Event) -> None:
        """Let the scheduler know, now or after the events that are being handled."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                event = self._events.popleft()
                now = time.monotonic()
                self.history.append((event, now))
                for decision in self._scheduler.handle(event, now):
                    self._carry_out(decision)
        finally:
            self._feeding = False

    def said(self, process: Process, message: msg.Message, segments: list[Segment]) -> None:
        """A worker sent a message."""
        match message:
            case msg.Done():
                self._done(process, message, segments)
            case msg.Request():
                self._requests.handle(process, message, segments)
            case msg.Held():
                assert process.worker is not None
                self.store.hold_for(process.worker, message.object, message.change)
            case msg.Shown():
                job = self.jobs.get(message.task)
                if job is not None and job.sink is not None:
                    payloads = _payloads(message.payloads, segments)
                    job.sink.show(message.kind, message.content, payloads)
            case _:
                pass

    def _done(self, process: Process, message: msg.Done, segments: list[Segment]) -> None:
        job = self.jobs.get(message.task)
        if job is None or process.worker is None:
            return
        report = _REPORTS[message.report]
        failed = isinstance(report, tasks.Raised)
        try:
            outcomes = [Outcome(each, failed) for each in _payloads(message.results, segments)]
        except ValueError as error:  # the system gave no descriptor for it
            lost = ObjectLostError(f"the result of {job.label} did not arrive: {error}")
            report, outcomes = tasks.Raised(), [Outcome(serialize.dumps(lost), failed=True)]
        job.reported = message.attempt, outcomes
        self.feed(ev.Finished(message.task, message.attempt, process.worker, report))
        job.reported = None

    def printed(self, process: Process, name: str, data: bytes) -> None:
        """A worker wrote to a stream: it goes to the job it runs."""
        job = self._job_on(process)
        if job is None:
            return
        text = job.feed(name, data)
        if text and job.sink is not None:
            if (on := getattr(job.sink, "on", None)) is not None:
                on(process.pid)
            job.sink.text(name, text)

    def _job_on(self, process: Process) -> Job | None:
        running = self._by_worker.get(process.worker or 0)
        return self.jobs.get(next(iter(running))) if running else None

    def exited(self, process: Process, reason: str) -> None:
        """A worker is gone, and all that it started."""
        assert process.worker is not None
        out_of_memory = "SIGKILL" in reason and _memory_was_short()
        self.feed(ev.WorkerExited(process.worker, reason, out_of_memory))
        self._by_worker.pop(process.worker, None)
        self.store.forget(process.worker)

    # --------------------------------------------------------------------------- decisions out

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Run():
                self._start(decision)
            case ev.Settle():
                self._end(self.jobs[decision.task], decision.outcome)
            case ev.WakeAt():
                self._wake_at(decision.time)
            case ev.Interrupt():
                self.pool.interrupt(decision.worker, decision.task, decision.attempt)
            case ev.Kill():
                self.pool.kill(decision.worker)
            case ev.Retire():
                self.pool.retire(decision.worker)
            case _:
                assert_never(decision)

    def _wake_at(self, when: float) -> None:
        self._wake = when

        def reached() -> None:
            if self._wake == when:
                self._wake = None
                self.feed(ev.TimeReached())

        self.loop.at(when, reached)

    def _start(self, run: ev.Run) -> None:
        job = self.jobs[run.task]
        try:
            process = self.pool.start(run.worker) if run.new else self.pool.process(run.worker)
        except OSError as error:
            reason = f"it could not be started: {error.strerror}"
            self.feed(ev.WorkerExited(run.worker, reason))
            return
        if process is None:
            return  # it is gone, and `exited` is on its way
        call, spec = job.call, job.call.spec
        job.worker, job.attempt, job.process = run.worker, run.attempt, process
        job.since = time.monotonic()
        job.gpus = self._setups.ids(run.allocation)
        setup = None
        now = self._setups.now()
        if process.surroundings is not now:
            before = process.surroundings
            known = before.environment if before is not None else process.environment
            setup = self._setups.of(run.allocation, spec.environment, known, now)
            process.surroundings = now
        self._by_worker[run.worker] = {job.id}
        known = spec.function in process.functions
        process.functions.add(spec.function)
        payloads = [call.arguments]
        for obj in call.inputs[:BATCH]:
            outcome = self.store.entry(obj).outcome
            assert outcome is not None
            payloads.append(outcome.payload)
        wires = tuple([(each.wire(), each.segment is not None) for each in payloads])
        work = msg.Execute(
            task=job.id,
            attempt=run.attempt,
            name=spec.name,
            kind=call.kind,
            setup=setup,
            function=spec.function,
            code=None if known else call.code,
            arguments=wires[0],
            inputs=wires[1:],
            late=call.inputs[BATCH:],
            returns=call.returns,
            retry=call.retry,
            last=run.last,
        )
        segments = [each.segment for each in payloads if each.segment is not None]
        self.pool.send(process, work, segments)

    def _end(self, job: Job, outcome: tasks.Outcome) -> None:
        """The task is over: its results are there, or what came in their place."""
        if job.reported is not None and isinstance(outcome, (tasks.Succeeded, tasks.Raised)):
            outcomes = job.reported[1]
            failed = isinstance(outcome, tasks.Raised)
            if failed:
                self._settle(job, outcomes[0], "failed")
            else:
                self._settle(job, outcomes, "done")
            return
        if isinstance(outcome, tasks.UpstreamFailed):
            there = [self.store.get(obj) for obj in job.call.inputs]
            self._settle(job, next(each for each in there if each and each.failed), "failed")
            return
        error = self._error(job, outcome)
        own = isinstance(error, GpunbError)
        payload = serialize.dumps(error) if own else serialize.dump_failure(error, task=job.label)
        failure = Outcome(payload, failed=True)
        cancelled = isinstance(outcome, tasks.Cancelled)
        self._settle(job, failure, "cancelled" if cancelled else "failed")

    def _settle(self, job: Job, outcomes: Outcome | Sequence[Outcome], state: str) -> None:
        if job.parent is None and (end := getattr(job.sink, "end", None)) is not None:
            end()
        del self.jobs[job.id]
        seconds = time.monotonic() - job.since
        self.past[job.id] = Past(job.id, job.call.spec.name, state, seconds, job.gpus, job.pid)
        if len(self.past) > HISTORY:
            del self.past[next(iter(self.past))]
        for index, obj in enumerate(job.results):
            each = outcomes if isinstance(outcomes, Outcome) else outcomes[index]
            self.store.settle(obj, each)
        for obj in (*job.call.inputs, *job.call.arguments.references):
            self.store.drop(obj)

    def _error(self, job: Job, outcome: tasks.Outcome) -> Exception:
        """What to raise for a task that ended without a result of its own."""
        match outcome:
            case tasks.Cancelled():
                return TaskCancelledError(f"{job.label} was cancelled")
            case tasks.TimedOut():
                return TimeoutError(
                    f"{job.label} ran longer than its timeout of {outcome.seconds:g} s and was "
                    "stopped"
                )
            case tasks.Crashed():
                tried = f" (attempt {job.attempt})" if job.attempt > 1 else ""
                where = f"process {job.pid}" if job.pid else "process"
                text = (
                    f"{job.label}: its worker {where} ended before the task did{tried}: "
                    f"{outcome.reason}{job.last_words()}"
                )
                if outcome.out_of_memory:
                    return OutOfMemoryError(f"{text}\nThe machine was short of memory.")
                return WorkerCrashedError(text)
            case tasks.Refused():
                return InfeasibleRequestError(f"{job.label}: {outcome.reason}")
            case tasks.ActorDied():
                return ActorDiedError(f"{job.label}: the actor is gone: {outcome.reason}")
            case _:
                return GpunbError(f"{job.label} ended without a report: {outcome}")

    # ------------------------------------------------------------------------------------- facts

    def late(self, missing: int, total: int, timeout: float) -> GetTimeoutError:
        return GetTimeoutError(
            f"{missing} of {total} results were not there after {timeout:g} s; the tasks go on"
        )

    def tell(self, what: str, *arguments: Any) -> Any:
        """Facts as plain values; on the loop's thread."""
        if what == "total":
            return self.machine.totals()
        if what == "available":
            return available(self._scheduler)
        if what == "status":
            return self._status()
        if what == "job":
            return self._job_facts(*arguments)
        if what == "why":
            return why(self._scheduler, *arguments)
        if what == "notes":
            return list(self.source.notes) if self.source is not None else []
        raise ValueError(f"nobody knows {what!r}")

    def _status(self) -> dict[str, Any]:
        facts = snapshot(self._scheduler, time.monotonic()).as_dict()
        for job in facts["running"]:
            job["pid"] = self.jobs[job["id"]].pid if job["id"] in self.jobs else None
        recent = list(itertools.islice(reversed(self.past.values()), 50))
        facts["finished"] = [each.facts() for each in recent]
        facts["objects"] = self.store.facts()
        facts["preload"] = getattr(self.source, "preloaded", None)
        facts["notes"] = self.tell("notes")
        return facts

    def _job_facts(self, ident: TaskId) -> dict[str, Any] | None:
        job = self.jobs.get(ident) or self.past.get(ident)
        return job.facts() if job is not None else None


def _payloads(wires: Sequence[tuple[msg.Wire, bool]], segments: Sequence[Segment]) -> list[Payload]:
    taken = iter(segments)
    return [Payload.from_wire(wire, next(taken, None) if own else None) for wire, own in wires]


def _memory_was_short(path: str = "/sys/fs/cgroup/memory.events") -> bool:
    """Whether the kernel has killed for want of memory here since this was last asked."""
    global _oom_kills
    before, _oom_kills = _oom_kills, _count_oom_kills(path)
    return _oom_kills > before


def _count_oom_kills(path: str = "/sys/fs/cgroup/memory.events") -> int:
    try:
        with open(path) as events:
            counts = dict(line.split() for line in events)
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


_oom_kills = _count_oom_kills()

_sessions: weakref.WeakSet[Local] = weakref.WeakSet()


def _forked() -> None:
    for session in list(_sessions):
        session.forked()


os.register_at_fork(after_in_child=_forked)
