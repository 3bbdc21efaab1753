"""Answers the requests of workers, whose tasks call the API."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar, assert_never

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.engine.admission import Admission
from gpunb.engine.jobs import Job, Owner
from gpunb.engine.share_checks import ShareChecks
from gpunb.engine.state import EngineState
from gpunb.engine.status import Status
from gpunb.engine.waits import Asker, Client, Waiting, Waits, enough
from gpunb.exceptions import GetTimeoutError, OutOfMemoryError
from gpunb.protocol import messages as msg
from gpunb.protocol import verbs
from gpunb.protocol.backend import HANDLE, Call, ObjectId
from gpunb.protocol.plain import Malformed
from gpunb.protocol.ranks import rank_of
from gpunb.protocol.records import Function
from gpunb.protocol.sink import LeadSink, RankSink, Sink
from gpunb.protocol.verbs import Verb
from gpunb.scheduler import events as ev
from gpunb.scheduler.tasks import TaskId

R = TypeVar("R")


def only(payloads: Sequence[Payload]) -> Payload:
    """Return the value that comes with a request.

    Raises:
        Malformed: there is none, or there are several.
    """
    if len(payloads) != 1:
        raise Malformed(f"a request came with {len(payloads)} values in place of one")
    return payloads[0]


class Requests(ABC):
    """Answers each request once, unless the sender is gone by then.

    Attributes:
        known: the requests that may come, by name.
    """

    known: ClassVar[Mapping[str, type[Verb[Any]]]]

    def __init__(
        self, engine: EngineState, admission: Admission, facts: Status, sampler: ShareChecks
    ) -> None:
        self.engine = engine
        self.admission = admission
        self.facts = facts
        self.sampler = sampler
        self.waits = Waits(engine)

    def handle(self, client: Client, request: msg.Request, segments: list[Segment]) -> None:
        """Answer a request. A request that cannot be understood is answered with the error."""
        asker = Asker(client, client.holder, request.request, request.task, request.attempt)
        try:
            wires = request.payloads
            payloads = serialize.from_wires(wires, segments) if wires else []
            self.engine.store.memory.take_in(payloads)
            verb = verbs.decode(self.known, request.verb, request.arguments)
            self._answer(asker, verb, payloads)
        except Exception as error:
            self.fail(asker, error)

    @abstractmethod
    def _answer(self, asker: Asker, verb: Any, payloads: list[Payload]) -> None:
        """Answer one of the known requests."""

    def _answer_shared(self, asker: Asker, verb: verbs.Shared, payloads: list[Payload]) -> None:
        """Answer a request that workers and attached kernels send."""
        match verb:
            case verbs.Fetch():
                self._fetch(asker, verb)
            case verbs.Put():
                self._put(asker, verb, only(payloads))
            case verbs.Wait():
                self._wait(asker, verb)
            case verbs.Watch():
                self._watch(asker, verb)
            case verbs.Take():
                self._take(asker, verb)
            case verbs.FindActor():
                self._find_actor(asker, verb)
            case verbs.Kill():
                self.engine.kill(verb.actor, restart=verb.restart)
                self._reply(asker, verb, None)
            case verbs.Cancel():
                self._cancel(asker, verb)
            case verbs.Interrupt():
                self.engine.feed(ev.InterruptRequested(verb.object[0]))
                self._reply(asker, verb, None)
            case verbs.Ask():
                self._ask(asker, verb)
            case _:
                assert_never(verb)

    def _reply(self, asker: Asker, _: Verb[R], value: R, payloads: Sequence[Payload] = ()) -> None:
        """Send a reply, whose value has the type that belongs to the request."""
        self._send(asker, value, payloads)

    def fail(self, asker: Asker, error: Exception | Payload) -> None:
        """Send an error as the reply."""
        failure = error if isinstance(error, Payload) else serialize.dumps(error)
        self._send(asker, None, [failure], failed=True)

    def _send(
        self, asker: Asker, value: object, payloads: Sequence[Payload], *, failed: bool = False
    ) -> None:
        wires, segments = serialize.to_wires(payloads) if payloads else ((), [])
        reply = msg.Reply(asker.number, value, wires, failed)
        asker.client.outbox.send(reply, segments)

    def _hand_in(
        self,
        asker: Asker,
        call: Call,
        owner: Owner | None,
        ident: TaskId | None = None,
        *,
        cleanup: bool = False,
    ) -> tuple[Job | None, list[ObjectId]]:
        """Submit a call. Return its job, and the objects that its caller gets; there is no job if
        there is such an actor already."""
        engine, job = self.engine, None
        found = self.admission.existing(call)
        if found is not None:
            results = [found]
            engine.store.hold(found)
        else:
            job = self.admission.admit(call, asker.task or None, owner, ident, asker.holder)
            self.admission.submitted(job, cleanup=cleanup)
            results = list(job.handed_out)
        engine.store.granted(asker.holder, results)
        return job, results

    def _take(self, asker: Asker, verb: verbs.Take) -> None:
        there = self.engine.store.take(verb.object)
        if there:
            self.engine.store.granted(asker.holder, [verb.object])
        self._reply(asker, verb, there)

    def _find_actor(self, asker: Asker, verb: verbs.FindActor) -> None:
        record = self.engine.actors.find(verb.name, verb.namespace)
        obj = (record.id, HANDLE)
        self.engine.store.hold(obj)
        self.engine.store.granted(asker.holder, [obj])
        self._reply(asker, verb, (obj, record.new.type))

    def _cancel(self, asker: Asker, verb: verbs.Cancel) -> None:
        self.engine.check_force(verb.object, verb.force)
        self.engine.feed(ev.CancelRequested(verb.object[0], verb.force, verb.recursive))
        self._reply(asker, verb, None)

    def _ask(self, asker: Asker, verb: verbs.Ask) -> None:
        if verb.what == "memory":
            table: Any = self.sampler.table
            facts = table(asker.holder, *verb.arguments)
        else:
            facts = self.facts.get(verb.what, *verb.arguments)
        self._reply(asker, verb, facts)

    def _put(self, asker: Asker, verb: verbs.Put, payload: Payload) -> None:
        store = self.engine.store

        def there(error: OutOfMemoryError | None) -> None:
            if error is not None:
                self.fail(asker, error)
            else:
                if not asker.client.gone:
                    obj = self.admission.keep(payload, failed=verb.failed)
                    store.hold_inner(payload)
                    store.granted(asker.holder, [obj])
                    self._reply(asker, verb, obj)
                store.memory.release(payload)
            store.drop_inner(payload)

        store.hold_inner(payload)
        store.memory.admit_soon([payload], "the value of put", there)

    # ------------------------------------------------------------------------------------- waiting

    def _fetch(self, asker: Asker, verb: verbs.Fetch) -> None:
        entries = {obj: self.engine.store.entry(obj) for obj in verb.objects}
        if enough(entries.values(), len(entries), fail_fast=True):
            self._send_values(asker, verb)
        elif verb.timeout == 0:
            self._send_late(asker, verb)
        else:
            finish = functools.partial(self._send_values, asker, verb)
            late = functools.partial(self._send_late, asker, verb)
            waiting = Waiting(self.waits, asker, finish, late, self.fail, fail_fast=True)
            waiting.begin(entries, len(entries), verb.timeout)

    def _send_values(self, asker: Asker, verb: verbs.Fetch) -> None:
        store = self.engine.store
        outcomes = [store.entry(obj).outcome for obj in verb.objects]
        failed = [each for each in outcomes if each is not None and each.failed]
        chosen = failed[:1] if failed else outcomes if verb.values else []
        payloads = [each.payload for each in chosen if each is not None]
        for each in payloads:
            store.memory.touch(each)
        self._reply(asker, verb, bool(failed), payloads)

    def _send_late(self, asker: Asker, verb: verbs.Fetch) -> None:
        missing = sum(self.engine.store.get(obj) is None for obj in verb.objects)
        error = GetTimeoutError(
            f"{missing} of {len(verb.objects)} results were not there after "
            f"{verb.timeout or 0:g} s; the tasks go on"
        )
        self.fail(asker, error)

    def _wait(self, asker: Asker, verb: verbs.Wait) -> None:
        entries = {obj: self.engine.store.entry(obj) for obj in verb.objects}
        if verb.timeout == 0 or enough(entries.values(), verb.count):
            self._send_there(asker, verb)
        else:
            finish = functools.partial(self._send_there, asker, verb)
            waiting = Waiting(self.waits, asker, finish, finish, self.fail)
            waiting.begin(entries, verb.count, verb.timeout)

    def _send_there(self, asker: Asker, verb: verbs.Wait) -> None:
        store = self.engine.store
        there = [obj for obj in verb.objects if store.entry(obj).outcome is not None]
        self._reply(asker, verb, there)

    def _watch(self, asker: Asker, verb: verbs.Watch) -> None:
        entries = {verb.object: self.engine.store.entry(verb.object)}
        if enough(entries.values(), 1):
            self._reply(asker, verb, None)
        else:
            finish = functools.partial(self._reply, asker, verb, None)
            waiting = Waiting(self.waits, asker, finish, finish, self.fail, watch=True)
            waiting.begin(entries, 1, None)


class WorkerRequests(Requests):
    """Answers workers."""

    known = verbs.names(verbs.OfWorker)

    def _answer(self, asker: Asker, verb: verbs.OfWorker, payloads: list[Payload]) -> None:
        match verb:
            case verbs.Submit():
                self._submit(asker, verb, only(payloads))
            case verbs.Input():
                self._input(asker, verb)
            case _:
                self._answer_shared(asker, verb, payloads)

    def _submit(self, asker: Asker, verb: verbs.Submit, arguments: Payload) -> None:
        submission = verb.call
        sink = self._sink_of(asker, submission.function)
        owner = self._owner_of(asker)
        call = submission.call(arguments, sink)
        _, results = self._hand_in(asker, call, owner, cleanup=verb.cleanup)
        self._reply(asker, verb, results)

    def _sink_of(self, asker: Asker, function: Function) -> Sink | None:
        """The sink for a task that a task, or an actor between its calls, submits."""
        job = self.engine.jobs.get(asker.task)
        actor = self.engine.actors.on(asker.holder)
        sink = job.sink if job is not None else actor.sink if actor is not None else None
        if sink is not None and function.kind == "cell":
            rank = rank_of(function.code)
            return (LeadSink if rank.leads else RankSink)(sink, rank.rank)
        name = function.spec.name
        made = self.engine.outlets.call(sink.named, name) if sink is not None else None
        return made if made is not None else sink

    def _owner_of(self, asker: Asker) -> Owner | None:
        """The owner of a task that a task, or an actor between its calls, submits."""
        job = self.engine.jobs.get(asker.task)
        actor = self.engine.actors.on(asker.holder)
        return job.owner if job is not None else actor.owner if actor is not None else None

    def _input(self, asker: Asker, verb: verbs.Input) -> None:
        """Ask the user. Without a prompt, only reply that this is possible."""
        engine = self.engine
        job = engine.jobs.get(asker.task)
        sink = (job.sink if job is not None else None) or Sink()

        def answer(value: str | None, error: Exception | Payload | None) -> None:
            if asker.client.gone:
                return
            if error is not None:
                self.fail(asker, error)
            else:
                self._reply(asker, verb, value)

        # Not through the outlets: the task waits for a reply, and an error is a reply, too.
        sink.ask(verb.prompt, verb.password, lambda *answers: engine.loop.post((answer, *answers)))
