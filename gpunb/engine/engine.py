"""Carries out the decisions of the scheduler.

The engine only routes. The pool owns the processes, the store the objects. Admission checks
submitted tasks, Starts sends them to workers, Results handles reports of workers, and Requests
answers workers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from gpunb.control.server import ControlServer
from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.engine.admission import Admission
from gpunb.engine.errors import memory_was_short
from gpunb.engine.faults import Broken
from gpunb.engine.jobs import Job
from gpunb.engine.object_store import Store
from gpunb.engine.parking import ParkedActors
from gpunb.engine.prepared import PreparedWorkers
from gpunb.engine.publisher import StatusPublisher
from gpunb.engine.requests import WorkerRequests
from gpunb.engine.results import Results, payloads
from gpunb.engine.share_checks import ShareChecks
from gpunb.engine.starts import Starts
from gpunb.engine.state import EngineState
from gpunb.engine.status import Status
from gpunb.engine.timeline import JobTimeline
from gpunb.engine.worker_setup import Setups
from gpunb.exceptions import GpunbError
from gpunb.leases.leases import Leases
from gpunb.processes.followed import installed
from gpunb.processes.fork_source import ForkSource
from gpunb.processes.pool import WorkerPool
from gpunb.processes.spawn_source import SpawnSource
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import Outcome
from gpunb.protocol.plain import Malformed
from gpunb.protocol.sink import Sink
from gpunb.protocol.verbs import Surroundings
from gpunb.protocol.zygote import Imports
from gpunb.scheduler import events as ev
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import ActorId, WorkerId
from gpunb.system.loop import Loop

STANDBYS = 2
"""Standby processes that are kept ready."""


class Engine(EngineState):
    """Feeds events to the scheduler and carries out its decisions. On the loop's thread, unless a
    method says otherwise."""

    def __init__(
        self, scheduler: Scheduler, loop: Loop, store: Store, setups: Setups, *, share: str
    ) -> None:
        super().__init__(scheduler, loop, store)
        self._setups = setups
        self.pool = WorkerPool(loop, self, STANDBYS)
        store.released = self._released
        self.sampler = ShareChecks(self, policy=share)
        self.timeline = JobTimeline(self, self.sampler)
        self.results = Results(self, self.sampler, self.timeline)
        self.admission = Admission(self, self.results)
        self.leases = Leases(self, self.sampler)
        self.sampler.on_seen = self.leases.seen
        self.prepared = PreparedWorkers(self, setups, self.leases, self.sampler)
        self.parked = ParkedActors(self, self.leases, self.sampler, mps=setups.shares_by_driver)
        self.starts = Starts(self, setups, self.leases, self.sampler, self.prepared)
        self.facts = Status(self, self.sampler, self.leases, self.timeline, self.prepared)
        self.publisher = StatusPublisher(loop, self.faults, lambda: self.facts.get("status"))
        self.control_server: ControlServer | None = None
        self.requests = WorkerRequests(self, self.admission, self.facts, self.sampler)
        self._comm_sinks: dict[WorkerId, Sink] = {}
        self._events: deque[ev.Event] = deque()
        self._feeding = False
        self._wake: float | None = None

    def open(self, source: ForkSource | SpawnSource) -> None:
        """Take worker processes from this source from now on."""
        self.source = source
        self.pool.open(source)
        if self.scheduler.state.policy.prepare:
            self.feed(ev.TimeReached())  # any event lets the scheduler prepare workers

    def close(self, error: GpunbError) -> None:
        """End all processes. Each task that is not over fails with this error."""
        self.publisher.close()
        failure = Outcome(serialize.dumps(error), failed=True)
        for job in list(self.jobs.values()):
            for obj in job.results:
                self.store.settle(obj, failure)
            if job.streams:
                self.store.end_stream(job.id, failure)
        self.pool.close()
        self.sampler.close()
        self.peaks.close()
        self.leases.close()

    def _released(self, ident: ActorId) -> None:
        """End an actor whose last handle is gone."""
        actor = self.actors.get(ident)
        if actor is not None:
            self.actors.leave(actor)
        self.feed(ev.ActorReleased(ident))

    def feed(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                event = self._events.popleft()
                if self.ahead and (first := self.ahead.before(event)):
                    self._events.extendleft([event, *first])
                    continue
                now = time.monotonic()
                try:
                    decisions = self.scheduler.handle(event, now)
                except Exception as error:
                    raise Broken(f"the scheduler failed on {event!r}") from error
                if len(decisions) == 2 and self._worker_waits(decisions[1]):
                    decisions.reverse()  # it works while the results of its last task are stored
                for decision in decisions:
                    try:
                        self._carry_out(decision)
                    except Exception as error:
                        self._not_carried_out(decision, error)
        finally:
            self._feeding = False
        self.changed()

    def _worker_waits(self, decision: ev.Decision) -> bool:
        """Return whether a worker that has no device waits for this task, which needs no results of
        others."""
        if type(decision) is not ev.Run or decision.new or decision.allocation.shares:
            return False
        job = self.jobs.get(decision.task)
        return job is not None and not job.call.inputs

    def changed(self) -> None:
        self.publisher.changed()

    def surroundings(self, job: Job) -> Surroundings:
        return self._setups.now() if job.owner is None else job.owner.surroundings

    def _not_carried_out(self, decision: ev.Decision, error: Exception) -> None:
        """Fail the task of a decision that could not be carried out: its caller must not wait for
        ever. The devices of the task are free when its process is gone."""
        text = f"an internal error: {error!r}"
        match decision:
            case ev.Run() | ev.SendAhead():
                process = self.pool.process(decision.worker)
                if process is not None:
                    self.pool.banish(process, text)
                else:
                    self.leases.gone(decision.worker)
                    self.feed(ev.WorkerExited(decision.worker, text))
            case ev.Settle():
                job = self.jobs.pop(decision.task, None)
                failure = Outcome(serialize.dumps(GpunbError(text)), failed=True)
                for obj in job.results if job is not None else ():
                    self.store.settle(obj, failure)
            case _:
                pass
        self.faults.note(f"{type(decision).__name__} could not be carried out: {error!r}", error)

    def on_message(  # noqa: C901 - one case for each message
        self, process: WorkerProcess, message: msg.Message, segments: list[Segment]
    ) -> None:
        """Handle a message of a worker."""
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
            case msg.Prepared():
                self.prepared.reported(process, message)
            case msg.ParkReply():
                self.parked.replied(process, message)
            case msg.Permits():
                self.ahead.agreed(process)
            case msg.Imported():
                self._follow(process, message)
            case msg.Printed():
                self._printed(process, self.jobs.get(message.task), message.stream, message.text)
            case msg.Shown():
                job = self.jobs.get(message.task)
                sink = job.sink if job is not None else self._sink_between(process)
                if sink is not None:
                    shown = payloads(message.payloads, segments)
                    if message.kind == "failed" and job is not None:
                        job.ename = str(message.content.get("ename"))
                    if message.kind == "failed" and job is not None and job.call.spec.grow:
                        job.failure = message.content, shown
                        return
                    if message.kind == "comm_msg" and sink.log is not None:
                        self.outlets.call(sink.log.note_widget, message.content)
                    self.outlets.call(sink.by, Addressee(self, process))
                    self.outlets.call(sink.show, message.kind, message.content, shown)
            case _:
                raise Malformed(f"a worker does not send {type(message).__name__}")

    def _follow(self, process: WorkerProcess, message: msg.Imported) -> None:
        """Have later workers start with what a worker has imported."""
        now = process.surroundings
        if isinstance(self.source, ForkSource) and now is not None:
            path = list(now.path)
            changed, environment = dict(message.changed), dict(now.environment)
            running = [self.jobs.get(each) for each in self.by_worker.get(process.worker or 0, ())]
            shell = next((job.call.shell for job in running if job is not None), ("", ""))
            self.source.follow(
                Imports(message.modules, changed, environment, path, installed(path), shell)
            )

    def on_output(self, process: WorkerProcess, name: str, data: bytes) -> None:
        """Show text that a worker wrote to a stream: in the output of its job, or of its actor."""
        running = self.by_worker.get(process.worker or 0)
        self._printed(process, self.jobs.get(running[-1]) if running else None, name, data)
        self.ahead.heard(process)

    def _printed(
        self, process: WorkerProcess, job: Job | None, name: str, output: bytes | str
    ) -> None:
        """Send text to the sink of the job, or of the actor if the job is over: a thread that the
        job left behind may go on to print."""
        sink: Sink | None = None
        if job is not None:
            output, sink = job.feed(name, output), job.sink
        else:
            sink = self._sink_between(process)
        if isinstance(output, bytes):
            output = output.decode("utf-8", "backslashreplace")
        if sink is not None and output:
            actor = self.actors.on(process.worker or 0)
            self.outlets.call(sink.on, process.pid, actor.title if actor is not None else "")
            self.outlets.call(sink.text, name, output)

    def _sink_between(self, process: WorkerProcess) -> Sink | None:
        """Return the sink for output that a worker produces between jobs."""
        if (sink := self._comm_sinks.get(process.worker or 0)) is not None:
            return sink
        actor = self.actors.on(process.worker or 0)
        return actor.sink if actor is not None else None

    def send_comm(
        self,
        process: WorkerProcess,
        kind: str,
        content: Mapping[str, Any],
        shown: Sequence[Payload],
        sink: Sink,
    ) -> None:
        """Send a worker a message of the front end about output that the worker produced."""
        if process.gone or process.worker is None:
            return
        self._comm_sinks[process.worker] = sink
        wires, segments = serialize.to_wires(shown)
        process.outbox.send(msg.CommMessage(kind, content, wires), segments)

    def on_exit(self, process: WorkerProcess, reason: str) -> None:
        """Note that a worker and its child processes are gone."""
        assert process.worker is not None
        self._gone(process.worker, reason)

    def on_renewed(self) -> None:
        """Replace the prepared workers: the next ones have the modules of the preload."""
        self.feed(ev.ReleaseRequested(ev.PREPARED))

    def _gone(self, worker: WorkerId, reason: str) -> None:
        out_of_memory = "SIGKILL" in reason and memory_was_short()
        self.leases.gone(worker)
        if (actor := self.actors.on(worker)) is not None:
            self.timeline.left(actor)
        self.feed(ev.WorkerExited(worker, reason, out_of_memory))
        self.sampler.gone(worker)
        self.prepared.gone(worker)
        self.parked.gone(worker)
        self.by_worker.pop(worker, None)
        self._comm_sinks.pop(worker, None)
        self.actors.moved_out(worker)
        self.store.forget(worker)

    # --------------------------------------------------------------------------- decisions out

    def _carry_out(  # noqa: C901 - one case for each decision
        self, decision: ev.Decision
    ) -> None:
        match decision:
            case ev.Run():
                self.starts.start(decision)
            case ev.SendAhead():
                self.starts.send_ahead(decision)
            case ev.Prepare():
                self.prepared.start(decision)
            case ev.Park() | ev.Restore():
                self.parked.carry_out(decision)
            case ev.Settle():
                self.results.end(self.jobs[decision.task], decision.outcome)
            case ev.WakeAt():
                self._wake_at(decision.time)
            case ev.Interrupt():
                self.pool.interrupt(decision.worker, decision.task, decision.attempt)
            case ev.Kill():
                self._kill(decision.worker)
            case ev.Retire():
                self.pool.retire(decision.worker)
            case ev.Chosen():
                self.jobs[decision.task].choice = decision.choice
            case ev.Grown():
                self.results.grown(decision)
            case ev.ActorEnded():
                self.results.actor_ended(decision.actor, decision.outcome)
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

    def _kill(self, worker: WorkerId) -> None:
        """Kill a process, or give back the room of a placement group."""
        actor = self.actors.on(worker)
        if actor is not None and actor.kind == "group":
            self._gone(worker, "it was removed")
        else:
            self.pool.kill(worker)


class Addressee:
    """The address of a worker, for messages of the front end. From any thread."""

    def __init__(self, engine: Engine, process: WorkerProcess) -> None:
        self._engine = engine
        self._process = process
        self.token = process.token

    @property
    def gone(self) -> bool:
        return self._process.gone

    def send_comm(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Sink
    ) -> None:
        engine = self._engine
        engine.loop.post((engine.send_comm, self._process, kind, content, payloads, sink))
