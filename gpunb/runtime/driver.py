"""Carries out what the scheduler decides. It only routes: processes are the pool's, objects the
store's, what comes in is the admission's, what comes out the results', what workers ask the
requests'.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from gpunb import serialize
from gpunb.backend import HANDLE, ObjectId, Outcome
from gpunb.core import events as ev
from gpunb.core import tasks
from gpunb.core.scheduler import Scheduler
from gpunb.core.tasks import ActorId, TaskId, WorkerId
from gpunb.exceptions import GpunbError
from gpunb.objects import Segment
from gpunb.runtime.actors import Actors
from gpunb.runtime.admission import Admission
from gpunb.runtime.desk import Desk
from gpunb.runtime.endings import memory_was_short
from gpunb.runtime.facts import Facts
from gpunb.runtime.jobs import HISTORY, Job, Owner, Past, Wait
from gpunb.runtime.kept import Kept
from gpunb.runtime.leases import Leases
from gpunb.runtime.ledger import Ledger
from gpunb.runtime.output import Sink
from gpunb.runtime.picture import Picture
from gpunb.runtime.requests import Requests
from gpunb.runtime.results import Results, payloads
from gpunb.runtime.setup import Setups, Surroundings
from gpunb.runtime.shares import Shares
from gpunb.runtime.store import Store
from gpunb.runtime.timeline import Timeline
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.forking import ForkSource
from gpunb.workers.loop import Loop
from gpunb.workers.pool import Pool, Process
from gpunb.workers.remote import BATCH
from gpunb.workers.spawning import SpawnSource


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
        share: str = "warn",
    ) -> None:
        self.loop = loop
        self.store = store
        self.jobs: dict[TaskId, Job] = {}
        self.past: dict[TaskId, Past] = {}
        self.history: deque[tuple[ev.Event, float]] = deque(maxlen=HISTORY)
        self.pool = Pool(loop, self, standbys)
        self.source: ForkSource | SpawnSource | None = None
        self.scheduler = scheduler
        self.actors = Actors()
        store.released = self._released
        self.admission = Admission(self)
        self.results = Results(self)
        self.facts = Facts(self)
        self.timeline = Timeline(self)
        self.picture = Picture(self)
        self.sampler = Shares(self, policy=share)
        self.desk: Desk | None = None
        self.kept = Kept(self)
        self.leases = Leases(self)
        self.requests = Requests(self)
        self._setups = setups
        self.by_worker: dict[WorkerId, list[TaskId]] = {}
        self._told: dict[WorkerId, Sink] = {}
        self._events: deque[ev.Event] = deque()
        self._feeding = False
        self._wake: float | None = None

    def open(self, source: ForkSource | SpawnSource) -> None:
        """Have processes from this source."""
        self.source = source
        self.pool.open(source)

    def close(self, error: GpunbError) -> None:
        """End all processes; whoever waits for a task is told why nothing comes."""
        self.picture.close()
        failure = Outcome(serialize.dumps(error), failed=True)
        for job in list(self.jobs.values()):
            for obj in job.results:
                self.store.settle(obj, failure)
            if job.streams:
                self.store.end_stream(job.id, failure)
        self.pool.close()
        self.sampler.close()
        self.leases.close()

    @property
    def ledger(self) -> Ledger | None:
        """What the sessions of this machine hold of its devices; None if nobody shares them."""
        return self.leases.ledger

    # ---------------------------------------------------------------------------------- tasks in

    def kill(self, ident: ActorId, *, restart: bool) -> None:
        """End the process of an actor."""
        actor = self.actors.get(ident)
        if actor is not None and not restart:
            self.actors.leave(actor)
        self.feed(ev.KillRequested(ident, restart))

    def check_force(self, obj: ObjectId, force: bool) -> None:
        """From any thread: raises ValueError if a call of an actor is to be stopped by force,
        also one that is over, if not for long."""
        if not force:
            return
        job = self.jobs.get(obj[0])
        past = self.past.get(obj[0]) if job is None else None
        if (job is not None and job.call.actor) or (past is not None and past.actor):
            label = f"#{past.id} {past.name}" if past is not None else job.label if job else ""
            raise ValueError(
                f"force=True would end the process of the actor of {label}: cancel the call "
                "without it, or end the actor with gpunb.kill"
            )

    def waits(self, task: TaskId, attempt: int, wait: Wait) -> None:
        """A task began to wait for something; with several threads it may wait for more."""
        job = self.jobs.get(task)
        if job is None or job.attempt != attempt:
            return
        job.waits.append(wait)
        self.feed(ev.Blocked(task, attempt, *job.waits_for()))

    def waits_no_more(self, task: TaskId, attempt: int, wait: Wait) -> None:
        """What a task waited for is there."""
        job = self.jobs.get(task)
        if job is None or job.attempt != attempt or wait not in job.waits:
            return
        before = job.waits_for()
        job.waits.remove(wait)
        if not job.waits:
            self.feed(ev.Unblocked(task, attempt))
        elif job.waits_for() != before:
            self.feed(ev.Blocked(task, attempt, *job.waits_for()))

    def awaits(self, task: TaskId, attempt: int, wait: Wait) -> None:
        """What a task needs to go on that only watches."""
        job = self.jobs.get(task)
        if job is None or job.attempt != attempt:
            return
        job.awaits = wait
        if job.waits:
            self.feed(ev.Blocked(task, attempt, *job.waits_for()))

    def _released(self, ident: ActorId) -> None:
        """The last handle of an actor is gone."""
        actor = self.actors.get(ident)
        if actor is not None:
            self.actors.leave(actor)
        self.feed(ev.ActorReleased(ident))

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
        self.picture.changed()

    def said(self, process: Process, message: msg.Message, segments: list[Segment]) -> None:
        """A worker sent a message."""
        match message:
            case msg.Done():
                self.results.done(process, message, segments)
            case msg.Request():
                self.requests.handle(process, message, segments)
            case msg.Held():
                assert process.worker is not None
                self.store.hold_for(process.worker, message.object, message.change)
            case msg.Stock():
                assert process.worker is not None
                self.store.take_stock(process.worker, dict(message.held))
            case msg.Yielded():
                self.results.yielded(message, segments)
            case msg.Used():
                self.sampler.used(process, message)
            case msg.Printed():
                self._printed(process, self.jobs.get(message.task), message.stream, message.text)
            case msg.Shown():
                job = self.jobs.get(message.task)
                sink = job.sink if job is not None else self._sink_between(process)
                if sink is not None:
                    if (by := getattr(sink, "by", None)) is not None:
                        by(Addressee(self, process))
                    shown = payloads(message.payloads, segments)
                    sink.show(message.kind, message.content, shown)
            case _:
                pass

    def printed(self, process: Process, name: str, data: bytes) -> None:
        """A worker wrote to a stream, for the job it runs, or for where its actor was made."""
        running = self.by_worker.get(process.worker or 0)
        self._printed(process, self.jobs.get(running[-1]) if running else None, name, data)

    def _printed(self, process: Process, job: Job | None, name: str, said: bytes | str) -> None:
        """What a call printed goes to its sink; what comes when it is over, from a thread or a
        coroutine that it left, to that of its actor."""
        sink: Sink | None = None
        if job is not None:
            said, sink = job.feed(name, said), job.sink
        else:
            sink = self._sink_between(process)
        if isinstance(said, bytes):
            said = said.decode("utf-8", "backslashreplace")
        if sink is not None and said:
            _write(sink, process, name, said)

    def _sink_between(self, process: Process) -> Sink | None:
        """Where it goes what a worker shows while no job runs there."""
        if (sink := self._told.get(process.worker or 0)) is not None:
            return sink
        actor = self.actors.on(process.worker or 0)
        return actor.sink if actor is not None else None

    def tell(
        self,
        process: Process,
        kind: str,
        content: Mapping[str, Any],
        shown: Sequence[Payload],
        sink: Sink,
    ) -> None:
        """Tell a worker something about what it has shown."""
        if process.gone or process.worker is None:
            return
        self._told[process.worker] = sink
        wires, segments = serialize.to_wires(shown)
        self.pool.send(process, msg.Told(kind, content, wires), segments)

    def sink_of(self, process: Process, task: TaskId, name: str) -> Sink | None:
        """Where the output of a task goes that a task submits, or an actor between its calls."""
        job = self.jobs.get(task)
        actor = self.actors.on(process.worker or 0)
        sink = job.sink if job is not None else actor.sink if actor is not None else None
        named = getattr(sink, "named", None)
        return named(name) if named is not None else sink

    def owner_of(self, process: Process, task: TaskId) -> Owner | None:
        """Whose it is what a task submits, or an actor between its calls."""
        job = self.jobs.get(task)
        actor = self.actors.on(process.worker or 0)
        return job.owner if job is not None else actor.owner if actor is not None else None

    def _surroundings(self, job: Job) -> Surroundings:
        """What of its kernel's process a task's worker shares."""
        return self._setups.now() if job.owner is None else job.owner.surroundings

    def exited(self, process: Process, reason: str) -> None:
        """A worker is gone, and all that it started."""
        assert process.worker is not None
        out_of_memory = "SIGKILL" in reason and memory_was_short()
        self.leases.gone(process.worker)
        if (actor := self.actors.on(process.worker)) is not None:
            self.timeline.left(actor)
        self.feed(ev.WorkerExited(process.worker, reason, out_of_memory))
        self.sampler.gone(process.worker)
        self.by_worker.pop(process.worker, None)
        self._told.pop(process.worker, None)
        self.actors.moved_out(process.worker)
        self.store.forget(process.worker)

    # --------------------------------------------------------------------------- decisions out

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Run():
                self._start(decision)
            case ev.Settle():
                self.results.end(self.jobs[decision.task], decision.outcome)
            case ev.WakeAt():
                self._wake_at(decision.time)
            case ev.Interrupt():
                self.pool.interrupt(decision.worker, decision.task, decision.attempt)
            case ev.Kill():
                self.pool.kill(decision.worker)
            case ev.Retire():
                self.pool.retire(decision.worker)
            case ev.ActorEnded():
                self.actor_ended(decision.actor, decision.outcome)
            case ev.Claim():
                self.leases.claim(decision)
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
        job = self.jobs.get(run.task)
        if job is None:  # the constructor of an actor that starts again
            actor = self.actors.get(run.task)
            assert actor is not None
            assert actor.constructor is not None
            job = self.jobs[run.task] = actor.constructor
        if run.new and not self.leases.take(
            run, job.call.spec.name, lasting=job.call.new is not None
        ):
            return
        try:
            process = self.pool.start(run.worker) if run.new else self.pool.process(run.worker)
        except OSError as error:
            self.leases.gone(run.worker)
            reason = f"it could not be started: {error.strerror}"
            self.feed(ev.WorkerExited(run.worker, reason))
            return
        if process is None:
            return  # it is gone, and `exited` is on its way
        call, spec = job.call, job.call.spec
        if job.worker is None:
            job.waited = time.monotonic() - job.since
            for outcome in map(self.store.get, call.inputs):
                if outcome is not None:
                    self.store.memory.pin(outcome.payload)
        job.worker, job.attempt, job.process = run.worker, run.attempt, process
        job.since = time.monotonic()
        job.gpus, job.held = self._setups.ids(run.allocation), run.allocation.shares
        setup = None
        # An actor keeps what it was made with.
        now = process.surroundings if call.kind == "method" else self._surroundings(job)
        if process.surroundings is not now:
            before = process.surroundings
            known = before.environment if before is not None else process.environment
            setup = self._setups.of(run.allocation, spec.environment, known, now, caps=spec.caps)
            process.surroundings = now
        self.by_worker.setdefault(run.worker, []).append(job.id)
        # What a function refers to should not be kept by its workers.
        kept = call.kind == "call" and not call.held
        known = call.kind == "method" or (kept and process.functions.use(spec.function))
        values = [call.arguments]
        for obj in call.inputs[:BATCH]:
            outcome = self.store.entry(obj).outcome
            assert outcome is not None
            values.append(outcome.payload)
        wires, segments = serialize.to_wires(values)
        work = msg.Execute(
            task=job.id,
            attempt=run.attempt,
            name=spec.name,
            kind=call.kind,
            setup=setup,
            function=spec.function if kept or call.kind == "method" else "",
            code=None if known else call.code,
            arguments=wires[0],
            inputs=wires[1:],
            late=call.inputs[BATCH:],
            returns=call.returns,
            retry=call.retry,
            last=run.last,
            host=self.actors.move_in(job, process) if call.new is not None else None,
        )
        self.pool.send(process, work, segments)
        if run.allocation.shares:
            self.sampler.begins(job, run.worker, process, run.allocation.shares)

    def actor_ended(self, ident: ActorId, outcome: tasks.Outcome) -> None:
        """An actor is over for good, and its process gone."""
        actor = self.actors.get(ident)
        if actor is None:
            return
        died = outcome if isinstance(outcome, tasks.ActorDied) else None
        reason = died.reason if died is not None else "it has ended"
        self.timeline.over(actor, died.end if died is not None else "failed")
        self.actors.ended(actor, self.actors.why(ident, reason))
        self.jobs.pop(ident, None)
        if actor.constructor is not None:
            self.results.let_inputs_go(actor.constructor)
        if actor.new.detached:
            self.store.drop((ident, HANDLE))
        if (end := getattr(actor.sink, "end", None)) is not None:
            end()


class Addressee:
    """A worker that has shown something, for the front end's answers. From any thread."""

    def __init__(self, driver: Driver, process: Process) -> None:
        self._driver = driver
        self._process = process
        self.token = process.token

    @property
    def gone(self) -> bool:
        return self._process.gone

    def tell(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Sink
    ) -> None:
        driver = self._driver
        driver.loop.post((driver.tell, self._process, kind, content, payloads, sink))


def _write(sink: Sink, process: Process, name: str, text: str) -> None:
    if (on := getattr(sink, "on", None)) is not None:
        on(process.pid)
    sink.text(name, text)
