"""Messages of workers to a kernel: the begin and end of work, its output and its questions."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, assert_never

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.protocol.ranks import rank_of
from gpunb.protocol.sink import LeadSink, Pipe, RankSink, Sink
from gpunb.ray.jobs import LEFT, RayJob, RayJobs
from gpunb.ray.messages import (
    Answer,
    Ask,
    Began,
    Comm,
    ConstructorFailed,
    Ended,
    Exits,
    GroupMade,
    Late,
    Left,
    Made,
    Mark,
    Show,
    Text,
    ToKernel,
    ToWorker,
)
from gpunb.ray.objects import RayObjects
from gpunb.ray.prewarm import Prewarmer
from gpunb.ray.transport import RayPayload
from gpunb.scheduler.resources import Demand
from gpunb.scheduler.tasks import ActorId, TaskId


class EventTarget(Protocol):
    """The parts of a kernel that messages of workers reach.

    Attributes:
        changed: is set when the status of the session may have changed.
        closed: whether the session was shut down.
        marks: events to set when the message with that mark arrives.
        sinks: sinks of calls, by the number that travels with the call.
        session_sinks: sinks of sessions of cells, by worker, for output between two cells.
    """

    changed: threading.Event
    closed: bool
    jobs: RayJobs
    marks: dict[int, threading.Event]
    objects: RayObjects
    prewarmer: Prewarmer
    session_sinks: dict[str, Any]
    sinks: weakref.WeakValueDictionary[int, Any]

    def ended(self, actor: ActorId, why: str) -> None: ...
    def send_to_worker(self, worker: str, message: ToWorker) -> None: ...
    def stop(self, job: RayJob) -> None: ...


class WorkerEvents:
    """Handles messages, on the thread that reads the mailbox."""

    def __init__(self, kernel: EventTarget) -> None:
        self._kernel = kernel
        self._jobs = kernel.jobs
        self._titles: dict[ActorId, str] = {}

    def handle(self, message: ToKernel) -> None:  # noqa: C901 - one case for each message
        match message:
            case Began():
                self._began(message)
            case Text():
                self._text(*message)
            case Show():
                self._show(*message)
            case Made():
                self._made(*message)
            case Ended():
                self._ended(*message)
            case ConstructorFailed():
                failure = serialize.load_failure(Payload(*message.failure))
                self._kernel.ended(message.actor, f"its constructor failed: {failure}")
            case Left():
                self._kernel.ended(message.actor, message.reason or LEFT)
            case GroupMade():
                self._jobs.groups[message.owner] = message.group
            case Exits():
                self._exits(*message)
            case Mark():
                self._kernel.marks.pop(message.number).set()
            case Late():
                self._late(*message)
            case Ask():
                self._ask(message)
            case _:
                assert_never(message)
        self._kernel.changed.set()

    def _began(self, message: Began) -> None:
        job = self._jobs.get(message.task) or self._nested(message)
        job.state = job.state if job.over else "running"  # its result may come before this message
        job.attempt, job.pid, job.worker = message.attempt, message.pid, message.worker
        job.node_id, job.gpus, job.began = message.node, message.gpus, time.monotonic()
        job.log, job.exit, job.stderr = message.log, None, Pipe()
        self._kernel.prewarmer.began(job)
        if job.sink is not None:
            job.sink.on(message.pid, self._titles.get(job.actor, ""))

    def _text(self, task: TaskId, stream: str, text: str) -> None:
        job = self._jobs.get(task)
        if job is not None and stream == "stderr":
            job.stderr.feed(text)
        if job is not None and (sink := self._sink(job)) is not None:
            self._by(sink, job)
            sink.text(stream, text)

    def _show(
        self, task: TaskId, kind: str, content: dict[str, Any], packed: Sequence[RayPayload]
    ) -> None:
        job = self._jobs.get(task)
        if job is not None and (sink := self._sink(job)) is not None:
            self._by(sink, job)
            sink.show(kind, content, [self._kernel.objects.unpack(each) for each in packed])

    def _made(self, task: TaskId, title: str) -> None:
        if title:
            self._titles[task] = title
        job, actor = self._jobs.get(task), self._jobs.actors.get(task)
        if actor is not None:
            actor.made = True
        if job is not None:
            job.reported.set()

    def _ended(self, task: TaskId, state: str) -> None:
        job = self._jobs.get(task)
        if job is None:
            return
        if state == "again":
            job.state, job.began = "queued", None
            return
        if job.kind != "create":
            self._jobs.end(job, state)
            self._kernel.prewarmer.over()
        job.reported.set()

    def _exits(self, task: TaskId, status: int) -> None:
        job = self._jobs.get(task)
        if job is None or job.over:
            return
        job.exit = status
        actor = self._jobs.actors.get(job.actor)
        if actor is not None and not actor.new.rules.max_restarts:
            why = f"its process exited with status {status}{job.error_lines()}"
            self._kernel.ended(job.actor, why)

    def _late(self, task: TaskId, seconds: float) -> None:
        job = self._jobs.get(task)
        if job is not None:
            job.late = seconds
            if job.ref is not None:
                self._kernel.stop(job)

    def _ask(self, question: Ask) -> None:
        kernel, number, worker = self._kernel, question.number, question.worker
        job = self._jobs.get(question.task) if question.task is not None else None
        sink = job.sink if job is not None else None
        if sink is None or not sink.asks:
            error = NotImplementedError("only a cell in the foreground can ask its user")
            kernel.send_to_worker(worker, Answer(number, None, error))
            return

        def answer(text: str | None, error: Exception | None) -> None:
            if not kernel.closed:
                kernel.send_to_worker(worker, Answer(number, text, error))

        sink.ask(question.prompt, question.password, answer)

    def _nested(self, message: Began) -> RayJob:
        """A task that a worker has submitted shows where that worker's own does."""
        name, parent = message.name, message.parent
        shows = self._kernel.sinks.get(message.sink)
        above = self._jobs.get(parent) if parent is not None else None
        if message.rank and shows is not None:
            place = rank_of(message.rank)
            shows = (LeadSink if place.leads else RankSink)(shows, place.rank)
        elif above is not None and above.sink is not None and above.name != name:
            made = above.sink.named(name)
            shows = made if made is not above.sink else shows
        job = RayJob(
            message.task,
            name,
            message.kind,
            Demand(gpus=message.share),
            shows,
            None,
            message.actor,
            parent,
        )
        job.of_ranks = parent in self._jobs.groups or (above is not None and above.kind == "ranks")
        self._jobs.add(job)
        if job.of_ranks and parent not in self._jobs.groups:  # it was ended with its coordinator
            self._jobs.end(job, "failed")
        return job

    def _sink(self, job: RayJob) -> Any:
        """Return the sink for output of a job; once the job is over, the one of the last message
        to its worker, if it is the worker of a session."""
        return self._kernel.session_sinks.get(job.worker, job.sink) if job.over else job.sink

    def _by(self, sink: Sink, job: RayJob) -> None:
        """Name the worker of the output that follows to the sink."""
        sink.by(DisplayingWorker(self._kernel, job.worker, lasting=bool(job.actor)))


class DisplayingWorker:
    """A worker that has shown something, such as a widget, to which messages can be sent."""

    def __init__(self, kernel: EventTarget, key: str, *, lasting: bool) -> None:
        self._kernel = kernel
        self._key = key
        self._lasting = lasting

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DisplayingWorker) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def gone(self) -> bool:
        """Whether the worker receives nothing any more."""
        return self._kernel.closed

    def send_comm(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Sink
    ) -> None:
        """Send a comm message of the front end, as in Jupyter's messages."""
        if self._lasting:
            self._kernel.session_sinks[self._key] = sink
        packed = [self._kernel.objects.pack(each) for each in payloads]
        self._kernel.send_to_worker(self._key, Comm(kind, dict(content), packed))
