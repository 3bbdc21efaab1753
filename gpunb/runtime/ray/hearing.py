"""What workers tell a kernel: that work begins and ends, what it shows, what it asks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpunb import serialize
from gpunb.core.resources import Demand
from gpunb.core.tasks import ActorId, TaskId
from gpunb.runtime.output import Pipe
from gpunb.runtime.ray.jobs import LEFT, Job
from gpunb.runtime.ray.parcels import pack
from gpunb.serialize import Payload

if TYPE_CHECKING:
    from gpunb.runtime.ray.kernel import Kernel


class Hearing:
    """Takes in messages, on the thread that reads the mailbox."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._jobs = kernel.jobs

    def hear(self, item: Any) -> None:
        """One message: what it is, and what belongs to it."""
        getattr(self, f"_{item[0]}")(*item[1:])
        self._kernel.changed.set()

    def _began(
        self,
        task: TaskId,
        *about: Any,
    ) -> None:
        attempt, pid, node, gpus, worker, log, *call = about
        job = self._jobs.get(task) or self._nested(task, *call)
        job.state = job.state if job.over else "running"  # its result may come before its word
        job.attempt, job.pid, job.worker = attempt, pid, worker
        job.node_id, job.gpus, job.began = node, tuple(gpus), time.monotonic()
        job.log, job.exit, job.stderr = log, None, Pipe()
        self._kernel.warming.began(job)
        on = getattr(job.sink, "on", None)
        if on is not None:
            on(pid)

    def _text(self, task: TaskId, stream: str, text: str) -> None:
        job = self._jobs.get(task)
        if job is not None and stream == "stderr":
            job.stderr.feed(text)
        if job is not None and (sink := self._sink(job)) is not None:
            self._by(sink, job)
            sink.text(stream, text)

    def _show(self, task: TaskId, kind: str, content: Any, parcels: Sequence[Any]) -> None:
        job = self._jobs.get(task)
        if job is not None and (sink := self._sink(job)) is not None:
            self._by(sink, job)
            sink.show(kind, content, [self._kernel.arrived(each) for each in parcels])

    def _made(self, task: TaskId) -> None:
        job, actor = self._jobs.get(task), self._jobs.actors.get(task)
        if actor is not None:
            actor.made = True
        if job is not None:
            job.told.set()

    def _ended(self, task: TaskId, state: str) -> None:
        job = self._jobs.get(task)
        if job is None:
            return
        if state == "again":
            job.state, job.began = "queued", None
            return
        if job.kind != "create":
            self._jobs.end(job, state)
            self._kernel.warming.over()
        job.told.set()

    def _failed(self, actor: ActorId, data: tuple[Any, ...]) -> None:
        failure = serialize.load_failure(Payload(*data))
        self._kernel.ended(actor, f"its constructor failed: {failure}")

    def _left(self, actor: ActorId) -> None:
        self._kernel.ended(actor, LEFT)

    def _exits(self, task: TaskId, status: int) -> None:
        job = self._jobs.get(task)
        if job is None or job.over:
            return
        job.exit = status
        actor = self._jobs.actors.get(job.actor)
        if actor is not None and not actor.new.rules.max_restarts:
            why = f"its process exited with status {status}{job.last_words()}"
            self._kernel.ended(job.actor, why)

    def _mark(self, number: int) -> None:
        self._kernel.marks.pop(number).set()

    def _late(self, task: TaskId, seconds: float) -> None:
        job = self._jobs.get(task)
        if job is not None:
            job.late = seconds
            if job.ref is not None:
                self._kernel.stop(job)

    def _ask(
        self, task: TaskId, number: int, prompt: str | None, password: bool, worker: str
    ) -> None:
        kernel, job = self._kernel, self._jobs.get(task)
        ask = getattr(job.sink, "ask", None) if job is not None else None
        if ask is None:
            error = NotImplementedError("only a cell in the foreground can ask its user")
            kernel.say(worker, ("answer", number, None, error))
            return

        def answer(text: str | None, error: Exception | None) -> None:
            if not kernel.closed:
                kernel.say(worker, ("answer", number, text, error))

        ask(prompt, password, answer)

    def _nested(
        self, task: TaskId, name: str, kind: str, parent: TaskId | None, *where: int
    ) -> Job:
        """A task that a worker has submitted shows where that worker's own does."""
        sink, actor = where
        shows = self._kernel.sinks.get(sink)
        above = self._jobs.get(parent) if parent is not None else None
        if above is not None and above.sink is not None and above.name != name:
            named = getattr(above.sink, "named", None)
            shows = named(name) if named is not None else shows
        job = Job(task, name, kind, Demand(), shows, None, actor, parent)
        self._jobs.add(job)
        return job

    def _sink(self, job: Job) -> Any:
        """Where it goes what comes of a job; when that is over, to what a session's worker was told
        last."""
        return self._kernel.told.get(job.worker, job.sink) if job.over else job.sink

    def _by(self, sink: Any, job: Job) -> None:
        """Tell the sink who shows what comes next."""
        by = getattr(sink, "by", None)
        if by is not None:
            by(Worker(self._kernel, job.worker, lasting=bool(job.actor)))


class Worker:
    """A worker that has shown something, to be told something."""

    def __init__(self, kernel: Kernel, key: str, *, lasting: bool) -> None:
        self._kernel = kernel
        self._key = key
        self._lasting = lasting

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Worker) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def gone(self) -> bool:
        """Whether it can be told nothing any more."""
        return self._kernel.closed

    def tell(
        self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload], sink: Any
    ) -> None:
        """Tell it something, as in Jupyter's messages."""
        if self._lasting:
            self._kernel.told[self._key] = sink
        parcels = [pack(each, self._kernel._found) for each in payloads]
        self._kernel.say(self._key, ("told", kind, dict(content), parcels))
