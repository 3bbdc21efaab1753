"""Requests of workers: each gets one reply, a value or an error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.engine.jobs import Job
from gpunb.engine.requests import WorkerRequests
from gpunb.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol import ranks, verbs
from gpunb.protocol.backend import HANDLE, STREAM, STREAMING, Call, ObjectId, Outcome
from gpunb.protocol.plain import Malformed
from gpunb.protocol.records import Submission
from gpunb.protocol.sink import LeadSink, RankSink, Sink
from gpunb.scheduler import events as ev
from tests.engine.parts import (
    LARGE,
    Parts,
    RecordingSink,
    call,
    constructor,
    method,
    reach_timers,
    turn,
)


class Facts:
    """Answers in place of the status of a session: with the question."""

    def get(self, what: str, *arguments: Any) -> Any:
        return [what, *arguments]


class Kernel:
    """Requests at one engine, all from one worker that runs a task.

    Attributes:
        job: the task.
        process: its worker.
    """

    def __init__(self, parts: Parts, job: Job | None = None) -> None:
        facts: Any = Facts()
        self.parts = parts
        self.requests = WorkerRequests(parts.engine, parts.admission, facts, parts.sampler)
        self.job = job or parts.submit(call("outer", sink=RecordingSink()))
        self.process: WorkerProcess = parts.start(self.job)
        self.holder = self.process.holder
        self._numbers = itertools.count(1)
        parts.engine.fed.clear()

    @property
    def replies(self) -> list[Any]:
        """The replies that the worker got, the last one at the end."""
        outbox: Any = self.process.outbox
        return [message for message, _ in outbox.sent]

    def send(self, name: str, fields: tuple[Any, ...] = (), *payloads: Payload) -> None:
        """Send a request by its name on the wire."""
        wires, segments = serialize.to_wires(payloads)
        number, task = next(self._numbers), self.job.id
        request = msg.Request(number, task, self.job.attempt, name, fields, wires)
        self.requests.handle(self.process, request, segments)

    def ask(self, verb: Any, *payloads: Payload) -> Any:
        """Send a request. Return the value of its reply; None if there is no reply yet. Raise the
        error if the request failed."""
        before = len(self.replies)
        self.send(*verbs.encode(verb), *payloads)
        return self.answer(before)

    def answer(self, before: int) -> Any:
        """Return the value of the only reply after the first `before` replies, as `ask` does."""
        if len(self.replies) == before:
            return None
        (reply,) = self.replies[before:]
        if reply.failed:
            raise self.values()[0]
        return reply.value

    def values(self) -> list[Any]:
        """Return the values that came with the last reply."""
        outbox: Any = self.process.outbox
        reply, segments = outbox.sent[-1]
        return [serialize.loads(each) for each in serialize.from_wires(reply.payloads, segments)]

    def pending(self) -> ObjectId:
        """Submit a task, and return its result, which is not there yet."""
        return self.parts.submit(call()).results[0]

    def settle(self, obj: ObjectId, result: Any, *, failed: bool = False) -> None:
        self.parts.store.settle(obj, Outcome(serialize.dumps(result), failed))


@pytest.fixture
def kernel(parts: Parts) -> Kernel:
    return Kernel(parts)


# ------------------------------------------------------------------------------------ any request


@pytest.mark.parametrize(
    ("name", "fields", "error"),
    [
        ("Explode", (), Malformed),
        ("Control", ({"do": "status"},), Malformed),  # only attached kernels may
        ("Take", ("no object",), Malformed),
        ("Take", ((99_999, 0), 1), Malformed),
        ("Put", (False,), Malformed),
        ("Take", ((99_999, 0),), ObjectLostError),
    ],
)
def test_request_that_cannot_be_answered_gets_the_error(
    kernel: Kernel, name: str, fields: tuple[Any, ...], error: type[Exception]
) -> None:
    kernel.send(name, fields)
    (reply,) = kernel.replies
    assert reply.failed
    (raised,) = kernel.values()
    assert isinstance(raised, error)


def test_each_reply_has_the_number_of_its_request(kernel: Kernel) -> None:
    kernel.ask(verbs.Ask("total", ()))
    kernel.ask(verbs.Ask("available", ()))
    assert [(each.request, each.value) for each in kernel.replies] == [
        (1, ["total"]),
        (2, ["available"]),
    ]


# ---------------------------------------------------------------------------------------- objects


@pytest.mark.parametrize("failed", [False, True])
def test_value_that_is_put_belongs_to_the_worker(kernel: Kernel, failed: bool) -> None:
    obj = kernel.ask(verbs.Put(failed), serialize.dumps(LARGE))
    outcome = kernel.parts.store.get(obj)
    assert outcome is not None
    assert (serialize.loads(outcome.payload), outcome.failed) == (LARGE, failed)
    assert kernel.parts.store.held_by(kernel.holder, obj) == 1
    kernel.parts.store.forget(kernel.holder)
    assert kernel.parts.store.memory.facts()["used"] == 0


def test_put_without_room_is_an_error_of_that_call() -> None:
    parts = Parts(limit=len(LARGE) // 2)
    with pytest.raises(OutOfMemoryError, match="the value of put"):
        Kernel(parts).ask(verbs.Put(False), serialize.dumps(LARGE))
    parts.close()


def test_reference_within_a_put_value_outlives_the_one_of_the_worker(kernel: Kernel) -> None:
    inner = kernel.ask(verbs.Put(False), serialize.dumps("inner"))
    payload = serialize.dumps("outer")
    payload.references = (inner,)
    outer = kernel.ask(verbs.Put(False), payload)
    kernel.parts.store.hold_for(kernel.holder, inner, -1)
    assert kernel.parts.store.wanted(inner)
    kernel.parts.store.hold_for(kernel.holder, outer, -1)
    assert not kernel.parts.store.wanted(inner)


def test_value_of_a_worker_that_is_gone_is_not_stored(kernel: Kernel) -> None:
    inner = kernel.parts.admission.keep(serialize.dumps("inner"))
    count = len(kernel.parts.store)
    payload = serialize.dumps(LARGE)
    payload.references = (inner,)
    kernel.process.gone = True
    assert kernel.ask(verbs.Put(False), payload) is None
    assert len(kernel.parts.store) == count
    assert kernel.parts.store.memory.facts()["used"] == 0
    kernel.parts.store.drop(inner)
    assert not kernel.parts.store.wanted(inner)


@pytest.mark.parametrize(("wanted", "values"), [(True, ["one", "two"]), (False, [])])
def test_fetch_of_objects_that_are_there(kernel: Kernel, wanted: bool, values: list[str]) -> None:
    objects = tuple(kernel.parts.admission.keep(serialize.dumps(each)) for each in ("one", "two"))
    assert kernel.ask(verbs.Fetch(objects, None, wanted)) is False
    assert kernel.values() == values


def test_fetch_waits_for_a_task_and_lends_its_cpus_meanwhile(kernel: Kernel) -> None:
    obj, job = kernel.pending(), kernel.job
    kernel.parts.engine.fed.clear()
    assert kernel.ask(verbs.Fetch((obj,), None, True)) is None
    assert kernel.parts.engine.fed == [ev.Blocked(job.id, job.attempt, (obj[0],), 1, sure=True)]
    kernel.settle(obj, "result")
    assert kernel.parts.engine.fed[1:] == [ev.Unblocked(job.id, job.attempt)]
    assert kernel.answer(0) is False
    assert kernel.values() == ["result"]


def test_fetch_ends_at_the_first_failure(kernel: Kernel) -> None:
    """Of the results only the failure is sent, also if others are missing."""
    there = kernel.parts.admission.keep(serialize.dumps("there"))
    first, second = kernel.pending(), kernel.pending()
    assert kernel.ask(verbs.Fetch((there, first, second), None, True)) is None
    kernel.settle(second, "failure", failed=True)
    assert kernel.answer(0) is True
    assert kernel.values() == ["failure"]


def test_fetch_without_patience_names_the_missing_results(kernel: Kernel) -> None:
    there = kernel.parts.admission.keep(serialize.dumps("there"))
    verb = verbs.Fetch((kernel.pending(), there, kernel.pending()), 0, True)
    with pytest.raises(GetTimeoutError, match="2 of 3 results were not there after 0 s"):
        kernel.ask(verb)


def test_fetch_ends_when_its_time_is_up(kernel: Kernel) -> None:
    obj = kernel.pending()
    assert kernel.ask(verbs.Fetch((obj,), 1e-9, True)) is None
    reach_timers(kernel.parts.engine.loop)
    with pytest.raises(GetTimeoutError, match="1 of 1 results"):
        kernel.answer(0)
    kernel.settle(obj, "late")
    assert len(kernel.replies) == 1


def test_nothing_is_sent_to_a_worker_that_went_while_it_waited(kernel: Kernel) -> None:
    obj = kernel.pending()
    kernel.ask(verbs.Fetch((obj,), None, True))
    kernel.process.gone = True
    kernel.settle(obj, "result")
    assert kernel.replies == []


def test_wait_ends_when_enough_objects_are_there(kernel: Kernel) -> None:
    objects = [kernel.pending() for _ in range(3)]
    assert kernel.ask(verbs.Wait(tuple(objects), 2, None)) is None
    kernel.settle(objects[2], "one", failed=True)
    assert kernel.replies == []
    kernel.settle(objects[0], "two")
    assert kernel.answer(0) == [objects[0], objects[2]]


def test_wait_without_patience_lists_what_is_there(kernel: Kernel) -> None:
    there = kernel.parts.admission.keep(serialize.dumps("there"))
    assert kernel.ask(verbs.Wait((kernel.pending(), there), 2, 0)) == [there]


def test_watch_is_answered_once_and_leaves_the_task_its_cpus(kernel: Kernel) -> None:
    obj = kernel.pending()
    kernel.parts.engine.fed.clear()
    kernel.ask(verbs.Watch(obj))
    (blocked,) = kernel.parts.engine.fed
    assert isinstance(blocked, ev.Blocked)
    assert not blocked.sure
    kernel.settle(obj, "there")
    assert [each.value for each in kernel.replies] == [None]
    kernel.ask(verbs.Watch(obj))
    assert len(kernel.replies) == 2


def test_values_of_a_generator_are_taken_until_its_end(kernel: Kernel) -> None:
    store = kernel.parts.store
    job = kernel.parts.submit(call(returns=STREAMING))
    store.granted(kernel.holder, [(job.id, STREAM)])
    store.yielded((job.id, 0), Outcome(serialize.dumps("first")))
    assert kernel.ask(verbs.Take((job.id, 0))) is True
    assert store.held_by(kernel.holder, (job.id, 0)) == 1
    store.end_stream(job.id, None)
    assert kernel.ask(verbs.Take((job.id, 1))) is False
    assert store.held_by(kernel.holder, (job.id, 1)) == 0


# ----------------------------------------------------------------------------- tasks and actors


def test_actor_is_found_by_its_name_and_held(kernel: Kernel) -> None:
    actor = kernel.parts.submit(constructor(name="tally", namespace="lab"))
    obj, kind = kernel.ask(verbs.FindActor("tally", "lab"))
    assert (obj, kind) == ((actor.id, HANDLE), b"")
    assert kernel.parts.store.held_by(kernel.holder, obj) == 1
    kernel.parts.store.drop(obj)  # the reference of its creator
    assert kernel.parts.store.wanted(obj)
    with pytest.raises(ValueError, match="no actor has the name 'other'"):
        kernel.ask(verbs.FindActor("other", "lab"))


@pytest.mark.parametrize(
    ("verb", "event"),
    [
        (verbs.Kill(70, restart=True), ev.KillRequested(70, restart=True)),
        (verbs.Interrupt((71, 0)), ev.InterruptRequested(71)),
        (verbs.Cancel((72, 0), False, True), ev.CancelRequested(72, recursive=True)),
        (verbs.Cancel((73, 0), True, False), ev.CancelRequested(73, True, recursive=False)),
    ],
    ids=["kill", "interrupt", "cancel", "cancel by force"],
)
def test_stops_are_left_to_the_scheduler(kernel: Kernel, verb: Any, event: ev.Event) -> None:
    kernel.ask(verb)
    assert kernel.parts.engine.fed == [event]
    assert [each.value for each in kernel.replies] == [None]


def test_call_of_an_actor_cannot_be_stopped_by_force(kernel: Kernel) -> None:
    actor = kernel.parts.submit(constructor())
    called = kernel.parts.submit(method(actor.id))
    kernel.parts.engine.fed.clear()
    with pytest.raises(ValueError, match="force=True would end the process of the actor"):
        kernel.ask(verbs.Cancel(called.results[0], True, True))
    assert kernel.parts.engine.fed == []


def test_memory_is_that_of_the_worker_that_asks(kernel: Kernel) -> None:
    table = kernel.ask(verbs.Ask("memory", ()))
    assert table == kernel.parts.sampler.table(kernel.holder)
    assert kernel.ask(verbs.Ask("job", (3,))) == ["job", 3]


# ------------------------------------------------------------------------------- submitted tasks


def submit(kernel: Kernel, made: Call, *, cleanup: bool = False) -> list[ObjectId]:
    found: list[ObjectId] = kernel.ask(
        verbs.Submit(Submission.of(made), cleanup), serialize.dumps(((), {}))
    )
    return found


@pytest.mark.parametrize("cleanup", [False, True])
def test_submitted_task_is_a_child_of_the_task_that_asks(kernel: Kernel, cleanup: bool) -> None:
    (obj,) = submit(kernel, call("inner"), cleanup=cleanup)
    job = kernel.parts.engine.jobs[obj[0]]
    assert (job.parent, job.call.spec.name) == (kernel.job.id, "inner")
    assert kernel.parts.store.held_by(kernel.holder, obj) == 1
    (event,) = kernel.parts.engine.fed
    parent = kernel.job.id
    assert event == ev.Submitted(job.id, job.call.spec, (), parent, cleanup, job.alike)


def test_submitted_task_writes_where_the_sink_of_its_parent_says(kernel: Kernel) -> None:
    inner = RecordingSink()

    class Naming(Sink):
        def named(self, name: str) -> Sink:
            return {"inner": inner}[name]

    kernel.job.sink = Naming()
    (obj,) = submit(kernel, call("inner"))
    assert kernel.parts.engine.jobs[obj[0]].sink is inner


def test_task_of_an_actor_between_its_calls_has_the_sink_and_the_kernel_of_the_actor(
    parts: Parts,
) -> None:
    class Kept:
        ident = 9

    sink, owner = RecordingSink(), Kept()
    actor = parts.submit(constructor(sink=sink), owner=owner)
    kernel = Kernel(parts, actor)
    del parts.engine.jobs[actor.id]  # the constructor is over
    (obj,) = submit(kernel, call("inner"))
    job = parts.engine.jobs[obj[0]]
    assert (job.sink, job.owner) == (sink, owner)


@pytest.mark.parametrize(
    ("rank", "leads", "kind", "shown"),
    [
        (0, True, LeadSink, []),
        (2, True, LeadSink, [("show", "rank", {"rank": 2, "kind": "leads"}, ())]),
        (1, False, RankSink, []),
    ],
)
def test_cell_of_a_rank_writes_as_its_rank(
    kernel: Kernel, rank: int, leads: bool, kind: type[Sink], shown: list[Any]
) -> None:
    code = ranks.code_for_rank(ranks.RankOfCell(rank, leads, runs=True))
    spec = call("cell").spec
    made = Call(spec, code, serialize.dumps(((), {})), kind="cell")
    (obj,) = submit(kernel, made)
    assert type(kernel.parts.engine.jobs[obj[0]].sink) is kind
    outer: Any = kernel.job.sink
    assert outer.calls == shown


def test_actor_that_exists_is_returned_in_place_of_a_new_one(kernel: Kernel) -> None:
    actor = kernel.parts.submit(constructor(name="tally"))
    kernel.parts.engine.fed.clear()
    found = submit(kernel, constructor(name="tally", get_if_exists=True))
    assert found == [(actor.id, HANDLE)]
    assert kernel.parts.engine.fed == []
    kernel.parts.store.drop((actor.id, HANDLE))
    assert kernel.parts.store.wanted((actor.id, HANDLE))


# --------------------------------------------------------------------------------------- questions


class Asked(Sink):
    """Keeps the questions, for an answer from any thread."""

    def __init__(self) -> None:
        self.questions: list[tuple[Any, ...]] = []

    def ask(self, prompt: str | None, password: bool, answer: Any) -> None:
        self.questions.append((prompt, password, answer))


@pytest.fixture
def sink(kernel: Kernel) -> Asked:
    sink = kernel.job.sink = Asked()
    return sink


def test_answer_of_the_user_comes_through_the_loop(kernel: Kernel, sink: Asked) -> None:
    kernel.ask(verbs.Input("name? ", True))
    ((prompt, password, answer),) = sink.questions
    assert (prompt, password) == ("name? ", True)
    answer("Ada", None)
    assert kernel.replies == []
    turn(kernel.parts.engine.loop)
    assert kernel.answer(0) == "Ada"


def test_question_that_the_user_does_not_answer_is_an_error(kernel: Kernel, sink: Asked) -> None:
    kernel.ask(verbs.Input("name? ", False))
    sink.questions[0][2](None, EOFError("no more input"))
    turn(kernel.parts.engine.loop)
    with pytest.raises(EOFError, match="no more input"):
        kernel.answer(0)


def test_answer_for_a_worker_that_is_gone_is_dropped(kernel: Kernel, sink: Asked) -> None:
    kernel.ask(verbs.Input("name? ", False))
    kernel.process.gone = True
    sink.questions[0][2]("Ada", None)
    turn(kernel.parts.engine.loop)
    assert kernel.replies == []


@pytest.mark.parametrize("sink", [None, Sink()])
def test_question_of_a_task_without_a_user_is_an_error_at_once(
    kernel: Kernel, sink: Sink | None
) -> None:
    kernel.job.sink = sink
    with pytest.raises(NotImplementedError, match="only a cell in the foreground"):
        kernel.ask(verbs.Input("name? ", False))
