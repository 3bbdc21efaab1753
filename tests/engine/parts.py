"""An engine's state with real parts and without processes, for tests of one part at a time."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.engine.actors import ActorRecord
from gpunb.engine.admission import Admission
from gpunb.engine.jobs import Job
from gpunb.engine.object_memory import Memory
from gpunb.engine.object_store import Store
from gpunb.engine.results import Results
from gpunb.engine.share_checks import ShareChecks
from gpunb.engine.state import EngineState
from gpunb.engine.timeline import JobTimeline
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import Call, NewActor, ObjectId
from gpunb.protocol.sink import Sink
from gpunb.scheduler import events as ev
from gpunb.scheduler import tasks
from gpunb.scheduler.resources import UNIT, Demand, Device, Machine, Shares
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import ActorId, ActorSpec, TaskSpec
from gpunb.system.loop import Loop

GIB = 1 << 30

TWO_GPUS = Machine(
    tuple(
        Device(f"gpu-{at}", at, "A100", "A100", 40 * GIB, vendor="simulated", logical=True)
        for at in range(2)
    ),
    cpus=4 * UNIT,
)

LARGE = bytes(100_000)
"""A value that takes a memory segment."""


NO_RULES = ActorSpec()


class FedState(EngineState):
    """The state of an engine that notes the events for the scheduler, which decides nothing.

    Attributes:
        fed: the events, the last one at the end.
        decide: is called with each event, in place of the decisions that the scheduler would make.
    """

    def __init__(self, machine: Machine = TWO_GPUS, limit: int = GIB) -> None:
        super().__init__(Scheduler(machine), Loop(), Store(Memory(limit)))
        self.fed: list[ev.Event] = []
        self.decide: Callable[[ev.Event], object] = id

    def feed(self, event: ev.Event) -> None:
        self.fed.append(event)
        self.decide(event)

    def changed(self) -> None:
        pass

    def surroundings(self, job: Job) -> Any:
        return None


class RecordingOutbox:
    """Notes the messages for another process in place of the socket to it."""

    def __init__(self) -> None:
        self.sent: list[tuple[msg.Message, list[Any]]] = []

    def send(self, message: msg.Message, segments: Any = ()) -> None:
        self.sent.append((message, list(segments)))


class RecordingSink(Sink):
    """Notes the calls of its methods in `calls`, each with its arguments."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def text(self, stream: str, text: str) -> None:
        self.calls.append(("text", stream, text))

    def show(self, kind: str, content: Any, payloads: Any) -> None:
        self.calls.append(("show", kind, content, payloads))

    def stop_sweep(self) -> None:
        self.calls.append(("stop_sweep",))

    def end(self) -> None:
        self.calls.append(("end",))


class Parts:
    """The parts of an engine that make and settle jobs, around one state."""

    def __init__(self, machine: Machine = TWO_GPUS, limit: int = GIB) -> None:
        self.engine = FedState(machine, limit)
        self.store = self.engine.store
        self.sampler = ShareChecks(self.engine)
        self.timeline = JobTimeline(self.engine, self.sampler)
        self.results = Results(self.engine, self.sampler, self.timeline)
        self.admission = Admission(self.engine, self.results)
        self._workers = itertools.count(1)

    def close(self) -> None:
        self.sampler.close()
        self.store.clear()
        self.engine.loop.close()

    def submit(self, made: Call, **more: Any) -> Job:
        """Admit a call and hand its job to the scheduler."""
        job = self.admission.admit(made, more.pop("parent", None), **more)
        self.admission.submitted(job)
        return job

    def start(self, job: Job, attempt: int = 1, held: Shares = ()) -> WorkerProcess:
        """Note in the job's record that a new worker runs this attempt, and return its process."""
        process = worker_process(next(self._workers))
        assert process.worker is not None
        job.worker, job.attempt, job.process, job.held = process.worker, attempt, process, held
        self.engine.by_worker[process.worker] = [job.id]
        if job.call.new is not None and job.call.kind == "create":
            self.engine.actors.move_in(job, process)
        return process

    def done(
        self, job: Job, process: WorkerProcess, report: str = "ok", *results: Payload
    ) -> list[ev.Event]:
        """Report the end of the job's attempt, and return the events that follow."""
        before = len(self.engine.fed)
        wires, segments = serialize.to_wires(results)
        message = msg.Done(job.id, job.attempt, report, wires)
        self.results.done(process, message, segments)
        return self.engine.fed[before:]

    def finish(self, job: Job, report: str = "ok", *results: Payload) -> list[ev.Event]:
        """Report the end of the job's attempt, and settle the job as the scheduler would while it
        handles the report. Return the events that follow."""
        process = job.process or self.start(job)

        def decide(event: ev.Event) -> None:
            if isinstance(event, ev.Finished):
                assert isinstance(event.report, tasks.Succeeded | tasks.Raised)
                self.results.end(job, event.report)

        self.engine.decide = decide
        try:
            return self.done(job, process, report, *results)
        finally:
            self.engine.decide = id


class _Over(BaseException):
    """Ends a turn of a loop."""


def _end() -> None:
    raise _Over


def _run(loop: Loop) -> None:
    with contextlib.suppress(_Over):
        loop.run(lambda item: item[0](*item[1:]))


def turn(loop: Loop) -> None:
    """Let a loop handle its descriptors and its inbox as they are now, and no timers."""
    loop.post((_end,))
    _run(loop)


def reach_timers(loop: Loop) -> None:
    """Let a loop call the timers whose time has come."""
    loop.at(time.monotonic(), _end)
    _run(loop)


def worker_process(worker: int, pid: int = 4711) -> WorkerProcess:
    """Return the record of a worker without a process, whose outbox notes its messages."""
    outbox: Any = RecordingOutbox()
    channel: Any = None
    process = WorkerProcess(worker, channel, outbox, (-1, -1, -1))
    process.worker, process.pid = worker, pid
    return process


def call(name: str = "train", *, demand: Demand = Demand(), **fields: Any) -> Call:
    """Return a call of a function without arguments."""
    options = {each: fields.pop(each) for each in list(fields) if each in TaskSpec.__slots__}
    spec = TaskSpec(name, demand, function=name, **options)
    arguments = fields.pop("arguments", None) or serialize.dumps(((), {}))
    return Call(spec, b"", arguments, **fields)


def constructor(class_name: str = "Counter", *, rules: ActorSpec = NO_RULES, **fields: Any) -> Call:
    """Return the call that makes an actor; `fields` are those of `NewActor`, and `sink`, `demand`
    and `inputs` those of the call."""
    own = {each: fields.pop(each) for each in ("sink", "demand", "inputs") if each in fields}
    return call(class_name, kind="create", new=NewActor(rules, b"", **fields), **own)


def method(actor: ActorId, name: str = "Counter.add", **fields: Any) -> Call:
    """Return a call of an actor's method."""
    return call(name, kind="method", actor=actor, **fields)


def actor_record(ident: ActorId = 7, class_name: str = "Counter", **fields: Any) -> ActorRecord:
    """Return the record of an actor; `sink`, `owner` and the like are its own fields, the others
    those of `NewActor`."""
    own = {each: fields.pop(each) for each in list(fields) if each in ActorRecord.__slots__}
    rules = fields.pop("rules", NO_RULES)
    return ActorRecord(
        ident, class_name, NewActor(rules, b"", **fields), own.pop("sink", None), **own
    )


def value(parts: Parts, obj: ObjectId) -> Any:
    """Return the value of an object that is there; raise its error if it failed."""
    from gpunb.api.refs import value_of

    outcome = parts.store.get(obj)
    assert outcome is not None, f"{obj} is not there"
    return value_of(outcome)
