"""Turns the reports of workers into objects, and settles tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.engine.errors import error_of
from gpunb.engine.jobs import HISTORY, Job
from gpunb.engine.peak_history import Row
from gpunb.engine.share_checks import ShareChecks
from gpunb.engine.state import EngineState
from gpunb.engine.timeline import JobTimeline, past_of
from gpunb.exceptions import GpunbError, ObjectLostError, OutOfMemoryError
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol import plain
from gpunb.protocol.backend import COMPLETED, HANDLE, SESSIONS, Call, ObjectId, Outcome
from gpunb.protocol.plain import Malformed
from gpunb.scheduler import events as ev
from gpunb.scheduler import tasks
from gpunb.scheduler.auto_share import Choice, Run, choose, units_for
from gpunb.scheduler.resources import UNIT, amount, size_text
from gpunb.scheduler.tasks import ActorId, TaskId, WorkerId

_REPORTS: dict[str, tasks.Report] = {
    "ok": tasks.Succeeded(),
    "raised": tasks.Raised(),
    "retry": tasks.Raised(retry=True),
    "interrupted": tasks.Interrupted(),
    "exit": tasks.Exited(),
}


class Results:
    """Accepts the reports of workers when there is memory for their results, and settles tasks."""

    def __init__(self, engine: EngineState, sampler: ShareChecks, timeline: JobTimeline) -> None:
        self._engine = engine
        self._sampler = sampler
        self._timeline = timeline
        # Code with a share that chooses itself, whose use of memory could not be measured.
        self._unmeasured: set[str] = set()

    def done(self, process: WorkerProcess, message: msg.Done, segments: list[Segment]) -> None:
        """Note the end of an attempt. Its worker counts as busy until there is memory for the
        results: otherwise it could fill the memory while other objects still move to disk."""
        engine, worker = self._engine, process.worker
        job = engine.jobs.get(message.task)
        if worker is None:
            return
        report = _REPORTS[message.report]
        if job is None:  # an abandoned call is over, and its result is not needed
            engine.feed(ev.Finished(message.task, message.attempt, worker, report))
            return
        if isinstance(report, tasks.Succeeded) and job.call.kind in ("cell", "ranks"):
            report = tasks.Succeeded(cell=True)
        failed = isinstance(report, tasks.Raised)
        wanted = 1 if failed else len(job.results) if isinstance(report, tasks.Succeeded) else 0
        if len(message.results) < wanted:
            raise Malformed(f"{job.label} has {wanted} results, {len(message.results)} came")
        try:
            # After the failure of a generator, its earlier results follow.
            arrived = payloads(message.results, segments)
            outcomes = [Outcome(each, failed and not at) for at, each in enumerate(arrived)]
        except ValueError as error:  # the system had no descriptor for a segment
            lost = ObjectLostError(f"the result of {job.label} did not arrive: {error}")
            report, outcomes = tasks.Raised(), [Outcome(serialize.dumps(lost), failed=True)]
        if segments:
            engine.store.memory.take_in(each.payload for each in outcomes)
        if isinstance(report, tasks.Exited) and outcomes:
            reason, failed_itself = plain.loads(outcomes[0].payload.stream)
            report, outcomes = tasks.Exited(str(reason), failed_itself is True), []
        if job.call.kind == "create" and isinstance(report, tasks.Succeeded) and outcomes:
            engine.actors.set_title(job.id, str(plain.loads(outcomes[0].payload.stream)))
        if not job.streams and not any(each.payload.segment for each in outcomes[failed:]):
            self._report(job, message, worker, report, outcomes)
            return
        self._report_soon(job, message, worker, report, outcomes)

    def _report_soon(
        self,
        job: Job,
        message: msg.Done,
        worker: WorkerId,
        report: tasks.Report,
        outcomes: list[Outcome],
    ) -> None:
        """Report the end of an attempt when there is memory for its results."""
        store = self._engine.store
        values = [each.payload for each in outcomes if not each.failed]
        # The worker reports the references that it drops right after the results.
        for payload in values:
            store.hold_inner(payload)

        def there(error: OutOfMemoryError | None) -> None:
            if error is None:
                self._report(job, message, worker, report, outcomes)
                store.memory.release(*values)
            elif isinstance(report, tasks.Raised):
                self._report(job, message, worker, report, outcomes[:1])
            else:
                failure = Outcome(serialize.dumps(error), failed=True)
                self._report(job, message, worker, tasks.Raised(), [failure])
            for payload in values:
                store.drop_inner(payload)

        what = f"the result of {job.label}"
        # The end of a generator must not overtake its values.
        store.memory.admit_soon(values, what, there, in_order=job.streams)
        if job.reported is None and job.id in self._engine.jobs:
            self._engine.ahead.take_back(worker)  # the next call waits for memory, too

    def _report(
        self,
        job: Job,
        message: msg.Done,
        worker: WorkerId,
        report: tasks.Report,
        outcomes: list[Outcome],
    ) -> None:
        engine = self._engine
        job.reported = message.attempt, outcomes
        failure = outcomes[0] if isinstance(report, tasks.Raised) else None
        if isinstance(report, tasks.Raised) and (job.streams or len(outcomes) > 1):
            report = tasks.Raised(report.retry, self._spared(job, len(outcomes) - 1))
        # Asked before the event, which settles the first report of a constructor.
        again = engine.actors.constructed_again(job, failure)
        steady = engine.ahead.is_steady(job)
        engine.feed(
            ev.Finished(message.task, message.attempt, worker, report, message.short, steady)
        )
        job.reported = None
        if again:
            engine.jobs.pop(job.id, None)
            running = engine.by_worker.get(worker, [])
            if job.id in running:
                running.remove(job.id)

    def _spared(self, job: Job, early: int) -> tuple[TaskId, ...]:
        """Return the jobs that need only results from before the error of a generator. The first
        `early` of its results are there, those that it has yielded, and its end."""
        store = self._engine.store

        def is_there(obj: ObjectId) -> bool:
            outcome = store.get(obj)
            yielded = outcome is not None and not outcome.failed
            return yielded or obj[1] == COMPLETED or obj[1] in range(early)

        return tuple(
            other.id
            for other in list(self._engine.jobs.values())
            if (taken := [obj for obj in other.call.inputs if obj[0] == job.id])
            and all(map(is_there, taken))
        )

    def yielded(self, message: msg.Yielded, segments: list[Segment]) -> None:
        """Store the next value of a generator."""
        engine = self._engine
        job = engine.jobs.get(message.task)
        if job is None or job.attempt != message.attempt:
            return
        obj = (job.id, message.position)
        try:
            (payload,) = payloads([message.result], segments)
        except ValueError as error:
            lost = ObjectLostError(f"a value of {job.label} did not arrive: {error}")
            engine.store.yielded(obj, Outcome(serialize.dumps(lost), failed=True))
            return
        engine.store.memory.take_in([payload])
        engine.store.hold_inner(payload)

        def there(error: OutOfMemoryError | None) -> None:
            if error is None:
                engine.store.yielded(obj, Outcome(payload))
                engine.store.memory.release(payload)
            else:
                engine.store.yielded(obj, Outcome(serialize.dumps(error), failed=True))
            engine.store.drop_inner(payload)

        engine.store.memory.admit_soon([payload], f"a value of {job.label}", there, in_order=True)

    def end(self, job: Job, outcome: tasks.Outcome) -> None:
        """Settle a task with its results, or with the error that stands for its outcome."""
        engine = self._engine
        if job.reported is not None and isinstance(outcome, (tasks.Succeeded, tasks.Raised)):
            outcomes = job.reported[1]
            failed = isinstance(outcome, tasks.Raised)
            if failed:
                self.settle(job, outcomes[0], "failed", outcomes[1:])
            else:
                self.settle(job, outcomes, "done")
            return
        if isinstance(outcome, tasks.UpstreamFailed):
            there = [engine.store.get(obj) for obj in job.call.inputs]
            self.settle(job, next(each for each in there if each and each.failed), "failed")
            return
        if isinstance(outcome, tasks.ActorDied):
            engine.actors.over(outcome.actor)
        error = error_of(job, outcome, engine.actors)
        own = isinstance(error, GpunbError)
        payload = (
            serialize.dumps(error)
            if own
            else serialize.dump_failure(error, task=engine.actors.label(job), process=job.pid)
        )
        failure = Outcome(payload, failed=True)
        killed = isinstance(outcome, tasks.ActorDied) and outcome.end == "cancelled"
        unmade = job.call.kind == "create" and killed
        cancelled = unmade or isinstance(outcome, tasks.Cancelled)
        self.settle(job, failure, "cancelled" if cancelled else "failed")

    def settle(
        self,
        job: Job,
        outcomes: Outcome | Sequence[Outcome],
        state: str,
        early: Sequence[Outcome] = (),
    ) -> None:
        """Settle a task with these results, or with one failure for all of them except the first,
        which were there `early`."""
        engine, kind = self._engine, job.call.kind
        failure: Outcome | None = None
        if isinstance(outcomes, Outcome):
            failure = outcomes
            outcomes = [*early, *[failure] * len(job.results)]
        if job.failure is not None and job.sink is not None:
            engine.outlets.call(job.sink.show, "failed", *job.failure)
        peak = self._sampler.peak(job.id) if job.held else None
        if job.choice is not None:
            self._note_peak(job, peak, state)
        if kind != "create" and job.sink is not None:
            engine.outlets.call(job.sink.end)
        del engine.jobs[job.id]
        running = engine.by_worker.get(job.worker or 0)
        if running is not None and job.id in running:
            running.remove(job.id)
        engine.actors.settled(job, failure)
        if job.held:
            self._sampler.ends(job)
        past = engine.past[job.id] = past_of(job, state, peak)
        self._timeline.settled(past)
        if len(engine.past) > HISTORY:
            engine.past.popitem(last=False)
        for obj, each in zip(job.results, outcomes, strict=False):
            engine.store.settle(obj, each)
        if kind == "ranks" and failure is not None:  # its process may have ended before the ranks
            engine.feed(ev.CancelRequested(job.id, force=True))
        if job.streams:
            raised = job.reported is not None and failure in job.reported[1]
            engine.store.end_stream(job.id, failure, raised=raised)
        if kind != "create" or not engine.actors.keeps(job, failure):
            self.let_inputs_go(job)

    def grown(self, decision: ev.Grown) -> None:
        """Tell the user that a task ran out of memory, and runs again with a larger share."""
        job = self._engine.jobs[decision.task]
        job.failure = None
        ((key, units),) = decision.shares
        scheduler, demand = self._engine.scheduler, decision.demand
        device = scheduler.machine.devices[scheduler.capacity.position[key]]
        size = f" ({size_text(device.memory * units // UNIT)})" if device.memory else ""
        more = size_text(demand.gpu_memory) if demand.gpu_memory else amount(demand.gpus)
        self._sampler.note(
            job,
            f"ran out of memory at {amount(units)} of {device.resource} {device.id}{size}; "
            f"again with {more}",
        )

    def _note_peak(self, job: Job, peak: int | None, state: str) -> None:
        """Note the peak and the time of a task that succeeded, for its next run. Tell the user
        of the first one."""
        auto, choice = job.call.spec.auto, job.choice
        assert auto is not None
        assert choice is not None
        if state != "done" or job.shown.failed or len(job.held) != 1:
            return
        ((key, units),) = job.held
        machine = self._engine.scheduler
        memory = machine.machine.devices[machine.capacity.position[key]].memory
        if memory and peak:
            name, now = job.call.spec.name, time.time()
            seconds = time.monotonic() - job.since
            row = Row(auto.code, choice.size, memory, peak, units, name, now, seconds)
            self._engine.peaks.add(row)
            later = f"next time {amount(units_for(peak, memory))}"
        elif auto.code in self._unmeasured:
            return  # said at its first run
        else:
            self._unmeasured.add(auto.code)
            later = "its use of GPU memory was not measured, so the next run gets the same"
        if choice.first:
            if peak:
                self._choose_again(auto.code)
            what = "cell" if job.call.kind == "cell" else "function"
            self._sampler.note(job, f"first run of this {what}: one whole GPU; {later}")

    def _choose_again(self, code: str) -> None:
        """After the first run of some code, choose the shares of its tasks that wait: they were
        submitted when nothing was known."""
        engine, runs = self._engine, self._engine.peaks.runs(code)
        for job in list(engine.jobs.values()):
            auto, before = job.call.spec.auto, job.choice
            if auto is None or before is None or auto.code != code or not before.first:
                continue
            choice = choose_share(engine, job.call, runs)
            if not choice.first:
                engine.feed(ev.Chosen(job.id, choice))

    def let_inputs_go(self, job: Job) -> None:
        """Release the inputs of a task."""
        store = self._engine.store
        if job.worker is not None:
            for outcome in map(store.get, job.call.inputs):
                if outcome is not None:
                    store.memory.unpin(outcome.payload)
        for obj in job.call.needed():
            store.drop(obj)

    def actor_ended(self, ident: ActorId, outcome: tasks.Outcome) -> None:
        """Note that an actor has ended for good, and that its process is gone."""
        engine = self._engine
        actor = engine.actors.get(ident)
        if actor is None:
            return
        died = outcome if isinstance(outcome, tasks.ActorDied) else None
        reason = died.reason if died is not None else "it has ended"
        self._timeline.over(actor, died.end if died is not None else "failed")
        engine.actors.ended(actor, engine.actors.why(ident, reason))
        engine.jobs.pop(ident, None)
        if actor.constructor is not None:
            self.let_inputs_go(actor.constructor)
        if actor.new.detached:
            engine.store.drop((ident, HANDLE))
        if actor.within is not None:
            engine.store.drop((actor.within.group, HANDLE))
        if actor.kind == "group":
            engine.store.drop((ident, 0))
        if actor.sink is not None:
            engine.outlets.call(actor.sink.end)
        if actor.new.namespace.startswith(SESSIONS):
            for rank in engine.actors:
                if rank.parent == ident:
                    engine.kill(rank.id, restart=False)


def choose_share(engine: EngineState, call: Call, runs: Sequence[Run]) -> Choice:
    """Choose the share of a task from the earlier runs of the same code."""
    spec, machine = call.spec, engine.scheduler.machine
    assert spec.auto is not None
    there = [engine.store.get(obj) for obj in call.inputs]
    size = call.arguments.nbytes + sum(each.payload.nbytes for each in there if each)
    choice = choose(spec.demand, machine, runs, size, by_memory=spec.auto.by_memory)
    if engine.peaks.problem:
        choice = choice._replace(why=f"{choice.why} ({engine.peaks.problem})")
    return choice


def payloads(wires: Sequence[tuple[msg.Wire, int]], segments: Sequence[Segment]) -> list[Payload]:
    """Return the payloads of a message.

    Raises:
        ValueError: a segment did not arrive.
    """
    return serialize.from_wires(wires, segments)
