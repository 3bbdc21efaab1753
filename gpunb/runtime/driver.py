"""Carries out what the scheduler decides. It only routes: processes are the pool's, objects the
store's, what workers ask the requests'.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, assert_never

from gpunb import serialize
from gpunb.backend import Call, ObjectId, Outcome
from gpunb.core import events as ev
from gpunb.core import tasks
from gpunb.core.placement import refusal
from gpunb.core.resources import Demand
from gpunb.core.scheduler import Scheduler
from gpunb.core.snapshot import available, snapshot, why
from gpunb.core.tasks import TaskId, WorkerId
from gpunb.exceptions import GpunbError, InfeasibleRequestError, ObjectLostError
from gpunb.objects import Segment
from gpunb.runtime.endings import error_of, memory_was_short
from gpunb.runtime.jobs import Job, Past
from gpunb.runtime.output import Sink
from gpunb.runtime.requests import Requests
from gpunb.runtime.setup import Setups
from gpunb.runtime.store import Store
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.forking import ForkSource
from gpunb.workers.loop import Loop
from gpunb.workers.pool import Pool, Process
from gpunb.workers.remote import BATCH
from gpunb.workers.spawning import SpawnSource

# Numbers go on in the next session: a ref of an earlier one never means something else.
_TASKS = itertools.count(1)
_PUTS = itertools.count(1)

HISTORY = 10_000
"""Events kept for a look back, and tasks remembered after their end."""

_REPORTS: dict[str, tasks.Report] = {
    "ok": tasks.Succeeded(),
    "raised": tasks.Raised(),
    "retry": tasks.Raised(retry=True),
    "interrupted": tasks.Interrupted(),
}


class Driver:
    """Feeds events to the scheduler and does what it decides. All on the loop's thread, but for
    what says otherwise."""

    def __init__(
        self,
        scheduler: Scheduler,
        loop: Loop,
        store: Store,
        setups: Setups,
        *,
        standbys: int,
    ) -> None:
        self.loop = loop
        self.store = store
        self.jobs: dict[TaskId, Job] = {}
        self.past: dict[TaskId, Past] = {}
        self.history: deque[tuple[ev.Event, float]] = deque(maxlen=HISTORY)
        self.pool = Pool(loop, self, standbys)
        self.source: ForkSource | SpawnSource | None = None
        self.scheduler = scheduler
        self._requests = Requests(self)
        self._setups = setups
        self._refusals: dict[Demand, str | None] = {}
        self._by_worker: dict[WorkerId, set[TaskId]] = {}
        self._events: deque[ev.Event] = deque()
        self._feeding = False
        self._wake: float | None = None

    def open(self, source: ForkSource | SpawnSource) -> None:
        """Have processes from this source."""
        self.source = source
        self.pool.open(source)

    def close(self, error: GpunbError) -> None:
        """End all processes; whoever waits for a task is told why nothing comes."""
        failure = Outcome(serialize.dumps(error), failed=True)
        for job in list(self.jobs.values()):
            for obj in job.results:
                self.store.settle(obj, failure)
        self.pool.close()

    # ---------------------------------------------------------------------------------- tasks in

    def admit(self, call: Call, sink: Sink | None, parent: TaskId | None) -> Job:
        """Book a call, from any thread; `submitted` is to follow on the loop's.

        Raises:
            InfeasibleRequestError: the machine can never satisfy the demand.
            ObjectLostError: it takes an object that is not there.
        """
        demand = call.spec.demand
        if demand not in self._refusals:
            self._refusals[demand] = refusal(demand, self.scheduler.machine)
        reason = self._refusals[demand]
        if reason:
            raise InfeasibleRequestError(f"{call.spec.name}: {reason}")
        for obj in call.inputs:
            self.store.entry(obj)
        ident = next(_TASKS)
        results = [(ident, index) for index in range(call.returns)]
        for each in results:
            self.store.create(each)
        job = self.jobs[ident] = Job(ident, call, results, sink, parent)
        return job

    def keep(self, payload: Payload) -> ObjectId:
        """Have an object that somebody put; from any thread, with `hold_inner` to follow."""
        obj = (0, next(_PUTS))
        self.store.create(obj, Outcome(payload))
        return obj

    def hold_inner(self, payload: Payload) -> None:
        """Count the references that an object holds."""
        for inner in payload.references:
            self.store.hold(inner)

    # ------------------------------------------------------------------------------- events in

    def submitted(self, job: Job) -> None:
        """Hand an admitted job to the scheduler."""
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
                for decision in self.scheduler.handle(event, now):
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
        out_of_memory = "SIGKILL" in reason and memory_was_short()
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
        error = error_of(job, outcome)
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

    # ------------------------------------------------------------------------------------- facts

    def tell(self, what: str, *arguments: Any) -> Any:
        """Facts as plain values; on the loop's thread."""
        if what == "total":
            return self.scheduler.machine.totals()
        if what == "available":
            return available(self.scheduler)
        if what == "status":
            return self._status()
        if what == "job":
            return self.job_facts(*arguments)
        if what == "why":
            return why(self.scheduler, *arguments)
        if what == "notes":
            return list(self.source.notes) if self.source is not None else []
        raise ValueError(f"nobody knows {what!r}")

    def _status(self) -> dict[str, Any]:
        facts = snapshot(self.scheduler, time.monotonic()).as_dict()
        for job in facts["running"]:
            job["pid"] = self.jobs[job["id"]].pid if job["id"] in self.jobs else None
        recent = list(itertools.islice(reversed(self.past.values()), 50))
        facts["finished"] = [each.facts() for each in recent]
        facts["objects"] = self.store.facts()
        facts["preload"] = getattr(self.source, "preloaded", None)
        facts["notes"] = self.tell("notes")
        return facts

    def job_facts(self, ident: TaskId) -> dict[str, Any] | None:
        """A job as plain values, from any thread; None if it is not known any more."""
        job = self.jobs.get(ident) or self.past.get(ident)
        return job.facts() if job is not None else None


def _payloads(wires: Sequence[tuple[msg.Wire, bool]], segments: Sequence[Segment]) -> list[Payload]:
    taken = iter(segments)
    return [Payload.from_wire(wire, next(taken, None) if own else None) for wire, own in wires]
