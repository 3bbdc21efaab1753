"""An attached kernel, as the head process sees it.

It sends requests as a worker does (`engine.requests.Client`), but runs no task, and the scheduler
does not know it. When it leaves, its references are dropped, as those of a worker are. Then its
tasks are stopped if nobody else wants their results, but for its background cells and sessions.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.engine import ids
from gpunb.engine.job_log import Log
from gpunb.engine.jobs import Job
from gpunb.engine.publisher import StatusWatch
from gpunb.engine.requests import Requests, only
from gpunb.engine.waits import Asker
from gpunb.exceptions import ObjectLostError
from gpunb.head import discovery
from gpunb.head.output_server import RelayedSinks
from gpunb.head.retention import Retention
from gpunb.processes.outbox import Outbox
from gpunb.protocol import messages as msg
from gpunb.protocol import records, verbs
from gpunb.protocol.backend import HANDLE, SESSIONS, NewActor, ObjectId, Outcome
from gpunb.protocol.channel import Channel, ChannelClosed, encode
from gpunb.protocol.plain import Malformed
from gpunb.protocol.sink import Sink
from gpunb.scheduler import events as ev

if TYPE_CHECKING:
    from gpunb.engine.engine import Engine

AT_ONCE = 32
"""Messages of one kernel that are read before other kernels have their turn."""

_MOST_NUMBERS = 1 << 53

OWED = 2000, 64 << 20
"""Messages, and bytes of them, that may wait for a kernel. Beyond that, text is left out."""


class Peer:
    """One attached kernel; on the loop's thread.

    Attributes:
        holder: the number under which the store counts its references; no worker has such a number.
    """

    def __init__(
        self,
        engine: Engine,
        retention: Retention,
        channel: Channel,
        *,
        ident: int,
        about: Mapping[str, Any],
        left: Callable[[Peer], object],
    ) -> None:
        """`ident` is its number in this head process; `left` is called when it is gone."""
        self.ident = ident
        self.holder = -ident
        self.about = about
        self.pid: int | None = about.get("pid")
        self.gone = False
        self.outbox = Outbox(engine.loop, channel, encode, self.go)
        self.channel = channel
        self.engine = engine
        self.retention = retention
        self.requests = KernelRequests(engine, self)
        self.surroundings = verbs.Surroundings({}, None, [], [])
        self.watches: dict[int, StatusWatch] = {}
        self._left = left
        self._sinks = RelayedSinks(self)
        engine.loop.watch(channel.fileno(), self._stirs)

    @property
    def sinks(self) -> RelayedSinks:
        """The sinks of its jobs."""
        return self._sinks

    def _stirs(self) -> None:
        if self.outbox.waiting:
            self.outbox.send_waiting()
        for _ in range(AT_ONCE):
            if self.gone:
                return
            try:
                message, descriptors = self.channel.receive(wait=False)
            except BlockingIOError:
                return
            except ChannelClosed:
                self.go()
                return
            except (Malformed, OSError) as error:
                self.dismiss(f"a message of this kernel could not be received: {error}")
                return
            try:
                self._on_message(message, [Segment.adopt(each) for each in descriptors])
            except Exception as error:
                self.dismiss(f"a message of this kernel could not be understood: {error!r}")
                self.engine.faults.note(f"kernel {self.pid} was sent away: {error!r}", error)
                return

    def dismiss(self, why: str) -> None:
        """End the connection, and tell the kernel why."""
        self.send(msg.Output(0, "dismissed", {"why": why}))
        self.go()

    def look(self) -> None:
        """Read its last messages, if it is gone."""
        ended = select.poll()
        ended.register(self.channel, 0)  # for the end of the other side alone
        while not self.gone and ended.poll(0):
            self._stirs()

    def _on_message(self, message: msg.Message, segments: list[Segment]) -> None:
        store = self.engine.store
        match message:
            case msg.Request():
                self.requests.handle(self, message, segments)
            case msg.Held(obj, change):
                # A reference of an earlier session may have the number of another kernel's object.
                held = store.held_by(self.holder, obj)
                if change > 0 or held >= -change:
                    store.hold_for(self.holder, obj, change)
            case _:
                raise Malformed(f"a kernel does not send {type(message).__name__}")

    def send(self, message: msg.Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message, unless the kernel is gone."""
        if not self.gone:
            self.outbox.send(message, segments)

    @property
    def behind(self) -> bool:
        """Whether it reads too slowly."""
        messages, size = OWED
        waiting = len(self.outbox.waiting)
        return waiting >= 50 and (waiting > messages or self.outbox.size() > size)

    def go(self) -> None:
        """End the connection. Stop the tasks and actors that nobody else wants."""
        if self.gone:
            return
        self.gone = True
        engine = self.engine
        engine.loop.unwatch(self.channel.fileno())
        self.channel.close()
        self.outbox.waiting.clear()
        for watch in self.watches.values():
            watch.stop()
        engine.store.forget(self.holder)
        for job in list(engine.jobs.values()):
            if job.owner is not self or job.call.new is not None or self.retention.keeps(job):
                continue
            if not any(map(engine.store.wanted, job.handed_out)):
                force = not job.call.actor
                engine.feed(ev.CancelRequested(job.id, force, recursive=True))
        for actor in engine.actors:
            if actor.owner is self and not engine.store.wanted((actor.id, HANDLE)):
                engine.kill(actor.id, restart=False)
        self.retention.left(self)
        engine.feed(ev.ReleaseRequested(self.ident))
        self._left(self)

    def unwatch(self, number: int) -> None:
        """Send no more snapshots under this number."""
        if (watch := self.watches.pop(number, None)) is not None:
            watch.stop()

    def cancel_all(self) -> None:
        """Stop all tasks of this kernel, but no actors."""
        for job in list(self.engine.jobs.values()):
            if job.owner is self and job.call.new is None:
                self.engine.feed(ev.CancelRequested(job.id, force=False, recursive=True))

    @property
    def sessions(self) -> str:
        """The namespace of its sessions of cells, which no other kernel uses."""
        return f"{SESSIONS}{self.ident}"


class KernelRequests(Requests):
    """Answers an attached kernel, which can name only objects that it has references to."""

    known = verbs.names(verbs.OfKernel)

    def __init__(self, engine: Engine, client: Peer) -> None:
        super().__init__(engine, engine.admission, engine.facts, engine.sampler)
        self._server = engine.control_server
        self._publisher = engine.publisher
        self._client = client
        self._functions: dict[int, records.Function] = {}

    def _answer(  # noqa: C901 - one case for each request
        self, asker: Asker, verb: verbs.OfKernel, payloads: list[Payload]
    ) -> None:
        client = self._client
        match verb:
            case verbs.SubmitNumbered():
                self._submit(asker, verb, only(payloads))
            case verbs.Fetch(objects):
                self._check(objects)
                self._client.retention.fetched(client, objects)
                self._answer_shared(asker, verb, payloads)
            case verbs.Wait(objects):
                self._check(objects)
                self._answer_shared(asker, verb, payloads)
            case verbs.Watch(obj) | verbs.Take(obj):
                self._check((obj,))
                self._answer_shared(asker, verb, payloads)
            case verbs.Attach():
                self._attach(asker, verb)
            case verbs.Numbers():
                self._numbers(asker, verb)
            case verbs.Ask("log"):
                self._reply(asker, verb, None)  # the kernel has the log itself
            case verbs.Answer():
                client.sinks.answered(verb.question, verb.text, payloads)
            case verbs.SendComm():
                self._send_comm(verb, payloads)
            case verbs.Control():
                self._control(asker, verb)
            case verbs.WatchStatus():
                self._publish(verb)
            case verbs.Unwatch():
                client.unwatch(verb.number)
            case verbs.CancelAll():
                client.cancel_all()
                self._reply(asker, verb, None)
            case (
                verbs.ListRetained()
                | verbs.Adopt()
                | verbs.BroughtHome()
                | verbs.ReadLog()
                | verbs.FindSession()
            ):
                self._answer_left(asker, verb)
            case _:
                self._answer_shared(asker, verb, payloads)

    def _answer_left(self, asker: Asker, verb: verbs.Left) -> None:
        """Answer a request about the cells and sessions that kernels have left."""
        client, retention = self._client, self._client.retention
        match verb:
            case verbs.ListRetained():
                self._reply(asker, verb, retention.facts())
            case verbs.Adopt():
                self._reply(asker, verb, retention.adopt(client, verb.job))
            case verbs.BroughtHome():
                retention.brought_home(client, verb.job)
            case verbs.ReadLog():
                self._reply(asker, verb, retention.log(verb.job, verb.position))
            case verbs.FindSession():
                sink = client.sinks.sink(verb.sink)
                self._reply(asker, verb, retention.session(client, verb.name, sink))
            case _:
                assert_never(verb)

    def _attach(self, asker: Asker, verb: verbs.Attach) -> None:
        if not all(0 <= each < _MOST_NUMBERS for each in verb.reached):
            raise Malformed(f"{verb.reached!r} are no numbers of tasks and objects")
        self._client.surroundings = verb.surroundings
        ids.go_on(*verb.reached)
        machine = records.flat(self.engine.scheduler.machine)
        self._reply(asker, verb, (self._client.ident, machine))

    def _numbers(self, asker: Asker, verb: verbs.Numbers) -> None:
        if not 0 < verb.count <= verbs.NUMBERS_AT_ONCE:
            raise Malformed(f"{verb.count} numbers at once")
        self._reply(asker, verb, tuple(ids.task() for _ in range(verb.count)))

    def _send_comm(self, verb: verbs.SendComm, payloads: list[Payload]) -> None:
        sinks = self._client.sinks
        worker = sinks.workers.get(verb.worker)
        if worker is not None:
            worker.send_comm(verb.kind, verb.content, payloads, sinks.sink(verb.sink))

    def _control(self, asker: Asker, verb: verbs.Control) -> None:
        server = self._server
        assert server is not None
        server.carry_out(verb.request, lambda facts: self._reply(asker, verb, facts))

    def _publish(self, verb: verbs.WatchStatus) -> None:
        client = self._client

        def show(snapshot: dict[str, Any] | None) -> bool:
            if client.outbox.waiting and snapshot is not None:
                return False  # it reads slowly, and gets a later one instead
            client.send(msg.Output(verb.number, "snapshot", {"snapshot": snapshot}))
            return True

        client.watches[verb.number] = self._publisher.watch(show, verb.interval)

    def _check(self, objects: Sequence[ObjectId]) -> None:
        """Raises ObjectLostError for an object to which the kernel has no reference."""
        for obj in objects:
            if not self.engine.store.may_name(self._client.holder, obj):
                raise ObjectLostError(
                    f"the object {obj} is not there: it belongs to a session that was shut down, "
                    "or its last reference was dropped"
                )

    def _submit(self, asker: Asker, verb: verbs.SubmitNumbered, arguments: Payload) -> None:
        client = self._client
        function = self._function(verb)
        if verb.surroundings is not None:
            client.surroundings = verb.surroundings
        sink = client.sinks.sink(verb.sink) if verb.sink is not None else None
        if sink is not None:
            sink.log = Log()
        try:
            job = self._submit_checked(asker, verb, function, arguments, sink)
        except Exception as error:
            if sink is not None:
                sink.end()
            if not verb.task:
                raise
            self._failed(verb.task, function.returns, error)
            return
        if sink is not None and job is None:
            sink.end()  # there was such an actor already

    def _submit_checked(
        self,
        asker: Asker,
        verb: verbs.SubmitNumbered,
        function: records.Function,
        arguments: Payload,
        sink: Sink | None,
    ) -> Job | None:
        """Submit a call that names only objects of this kernel, and reply."""
        made = self._own(verb.new) if verb.new is not None else None
        submission = records.Submission(function, verb.inputs, verb.actor, made)
        call = submission.call(arguments, sink)
        self._check(call.needed())
        job, results = self._hand_in(asker, call, self._client, verb.task)
        actor = self.engine.actors.get(call.actor) if call.actor else None
        self._reply(asker, verb, (results, actor is None or actor.new.max_pending < 0))
        is_cell = function.kind in ("cell", "ranks")
        if job is not None and is_cell and sink is not None and sink.background:
            self._client.retention.add(job, self._client)
        return job

    def _function(self, verb: verbs.SubmitNumbered) -> records.Function:
        """Return the function of a call. It comes with the first call, and is then remembered."""
        number, function = verb.number, verb.function
        if function is None:
            return self._functions[number]
        if number:
            self._functions[number] = function
            if len(self._functions) > 2 * discovery.KINDS:  # the client keeps half of that
                del self._functions[next(iter(self._functions))]
        return function

    def _failed(self, ident: int, returns: int, error: Exception) -> None:
        """Make an error the result of a call that cannot be submitted: it waits for no reply."""
        store, objects = self.engine.store, [(ident, index) for index in range(max(1, returns))]
        for obj in objects:
            store.create(obj, Outcome(serialize.dumps(error), failed=True))
        store.granted(self._client.holder, objects)

    def _send(self, asker: Asker, *reply: Any, **more: Any) -> None:
        if asker.number:  # else the kernel waits for no reply
            super()._send(asker, *reply, **more)

    def _own(self, new: NewActor) -> NewActor:
        """Mark cells and sessions of cells as this kernel's own."""
        if new.namespace == SESSIONS:
            new = replace(new, namespace=self._client.sessions)
        if new.origin is not None:
            new = replace(new, origin=f"{self._client.ident}:{new.origin}")
        return new
