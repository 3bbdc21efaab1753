"""Calls that are sent ahead: when it is worth it, and what is taken back before which event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.engine import sent_ahead
from gpunb.engine.jobs import Job
from gpunb.engine.sent_ahead import QUIET, SHORT, SHORT_TASK, SentAhead
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.permits import PermitReader, Permits
from gpunb.scheduler import events as ev
from gpunb.scheduler.tasks import ActorSpec, Succeeded
from tests.engine.parts import Parts as EngineParts
from tests.engine.parts import RecordingSink, call, constructor, method, worker_process

ACTOR, WORKER = 7, 3


class Ahead:
    """Calls that one worker was sent, and the worker's end of its permits."""

    def __init__(self) -> None:
        self.fed: list[ev.Event] = []
        self.read: list[WorkerProcess] = []
        self.surroundings: object = None
        self.book = SentAhead(self.fed.append, lambda job: self.surroundings, self.read.append)
        self.process = worker_process(WORKER)
        self.process.permits = Permits()
        self.book.agreed(self.process)
        self.reader = PermitReader(self.process.permits.fileno())

    def send(self, *tasks: int, actor: int = ACTOR) -> None:
        work = [
            msg.Execute(task, 1, "f", "method", None, "f", None, ((), 0), (), (), 1, False, False)
            for task in tasks
        ]
        self.book.send(actor, self.process, work)

    def sent(self) -> list[Any]:
        """The messages, with each task that was sent ahead as one."""
        outbox: Any = self.process.outbox
        found: list[Any] = []
        for message, _ in outbox.sent:
            if isinstance(message, msg.ExecuteAhead):
                for at, fields in enumerate(message.tasks):
                    found.append(msg.Execute(*fields, message.permit + at))
            else:
                found.append(message)
        return found

    def begin(self, number: int) -> None:
        """The worker begins so many calls."""
        for message in self.sent()[:number]:
            assert self.reader.take(message.permit)


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    made = Ahead()
    yield made
    assert made.process.permits is not None
    made.process.permits.close()


def test_each_call_is_sent_with_a_permit_of_its_own(ahead: Ahead) -> None:
    assert not ahead.book
    ahead.send(1, 2, 3)
    assert ahead.book
    assert [each.task for each in ahead.sent()] == [1, 2, 3]
    assert len({each.permit for each in ahead.sent()} - {0}) == 3


@pytest.mark.parametrize("begun", [0, 1, 3])
@pytest.mark.parametrize(
    "event", [ev.CancelRequested(9), ev.TimeReached(), ev.WorkerExited(WORKER, "")]
)
def test_what_has_not_begun_is_taken_back(ahead: Ahead, event: ev.Event, begun: int) -> None:
    ahead.send(1, 2, 3)
    ahead.begin(begun)
    assert ahead.book.before(event) == [ev.TakenBack(WORKER, 3 - begun)]
    assert ahead.read == ([ahead.process] if begun else []), "what the task before has written"
    assert not ahead.book
    assert ahead.book.before(event) == []


@pytest.mark.parametrize(
    "event", [ev.WorkerExited(WORKER + 1, ""), ev.Finished(1, 1, WORKER, Succeeded())]
)
def test_other_events_take_nothing_back(ahead: Ahead, event: ev.Event) -> None:
    ahead.send(1, 2, 3)
    assert ahead.book.before(event) == []
    ahead.begin(3)


@pytest.mark.parametrize("actor", [0, ACTOR])
def test_a_task_that_waits_takes_back_all_but_calls(ahead: Ahead, actor: int) -> None:
    """It may wait for one that has not begun. Calls start in their order all the same."""
    ahead.send(1, 2, 3, actor=actor)
    taken_back = [] if actor else [ev.TakenBack(WORKER, 3)]
    assert ahead.book.before(ev.Blocked(9, 1, (2,))) == taken_back
    ahead.book.take_back(WORKER)


def test_a_call_that_counts_as_begun_and_was_taken_back_is_sent_again(ahead: Ahead) -> None:
    """The worker has reported the call before it, and not yet looked for its permit."""
    ahead.send(1, 2, 3)
    ahead.book.begins(WORKER)
    assert ahead.book.before(ev.TimeReached()) == [ev.TakenBack(WORKER, 2)]
    (again,) = ahead.sent()[3:]
    assert (again.task, again.permit) == (1, 0)
    assert not ahead.reader.take(ahead.sent()[0].permit)


def test_a_call_that_has_begun_is_not_sent_again(ahead: Ahead) -> None:
    ahead.send(1, 2, 3)
    ahead.book.begins(WORKER)
    ahead.begin(1)
    ahead.book.take_back(WORKER)
    assert ahead.fed == [ev.TakenBack(WORKER, 2)]
    assert len(ahead.sent()) == 3


def test_nothing_is_sent_to_a_process_that_is_gone(ahead: Ahead) -> None:
    ahead.send(1, 2)
    ahead.book.begins(WORKER)
    ahead.process.gone = True
    assert ahead.book.before(ev.WorkerExited(WORKER, "")) == [ev.TakenBack(WORKER, 1)]
    assert len(ahead.sent()) == 2


def test_output_takes_back_what_has_not_begun(ahead: Ahead) -> None:
    ahead.process.quiet = QUIET
    ahead.send(1, 2)
    ahead.book.heard(ahead.process)
    assert ahead.fed == [ev.TakenBack(WORKER, 2)]
    assert ahead.process.quiet == 0


# ------------------------------------------------------------------------------ when it is worth it


def ended(
    ahead: Ahead, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0, *, actor: int = ACTOR
) -> bool:
    """Whether the worker may be sent others, after a task or call that took so long."""
    job = Job(1, method(actor) if actor else call(), (), (), alike="a")
    job.process = ahead.process
    monkeypatch.setattr(sent_ahead.time, "monotonic", lambda: job.since + seconds)
    return ahead.book.is_steady(job)


def test_an_actor_is_steady_after_some_short_calls_without_output(
    ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [ended(ahead, monkeypatch) for _ in range(QUIET)] == [False] * QUIET
    assert ended(ahead, monkeypatch)
    assert not ended(ahead, monkeypatch, SHORT * 1.1)
    assert ended(ahead, monkeypatch)
    ahead.book.heard(ahead.process)
    assert not ended(ahead, monkeypatch)


def test_a_worker_that_a_task_would_have_to_change_is_not_steady(
    ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.process.quiet = QUIET
    ahead.surroundings = object()
    assert ended(ahead, monkeypatch), "an actor keeps what it was made with"
    assert not ended(ahead, monkeypatch, actor=0)
    ahead.process.surroundings = ahead.surroundings
    assert ended(ahead, monkeypatch, actor=0)
    assert not ended(ahead, monkeypatch, SHORT_TASK * 1.1, actor=0)


def test_a_worker_gets_the_pipe_of_permits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Ahead()
    assert ahead.process.permits is not None
    ahead.process.permits.close()
    ahead.process.permits, ahead.process.quiet = None, QUIET
    assert not ended(ahead, monkeypatch)
    assert not ended(ahead, monkeypatch), "the worker has not said that it has got the pipe"
    assert ahead.sent() == [msg.Permits()]
    ahead.book.agreed(ahead.process)
    assert ended(ahead, monkeypatch)
    made: Any = ahead.process.permits
    made.close()


def test_a_task_that_is_never_sent_ahead_is_not_steady(ahead: Ahead) -> None:
    job = Job(1, call(), [], [])
    job.process, ahead.process.quiet = ahead.process, QUIET
    assert not ahead.book.is_steady(job)


# -------------------------------------------------------------------------------------- what fits


def alike(parts: EngineParts, *calls: Any, **options: Any) -> list[object]:
    """What calls of one actor have in common, for each."""
    actor = parts.submit(constructor(**options))
    found = []
    for make in calls:
        parts.submit(make(actor.id))
        event = parts.engine.fed[-1]
        assert isinstance(event, ev.CallSubmitted)
        found.append(event.alike)
    return found


def test_calls_with_one_name_and_one_place_of_output_are_alike(parts: EngineParts) -> None:
    def sink(cell: int) -> RecordingSink:
        return RecordingSink(place=(cell, "id"))

    first, second, other, elsewhere = alike(
        parts,
        lambda actor: method(actor, sink=sink(1)),
        lambda actor: method(actor, sink=sink(1)),
        lambda actor: method(actor, "Counter.read", sink=sink(1)),
        lambda actor: method(actor, sink=sink(2)),
    )
    assert first is not None
    assert first == second
    assert len({first, other, elsewhere}) == 3


def test_a_call_that_needs_more_than_its_message_is_not_sent_ahead(parts: EngineParts) -> None:
    before = parts.submit(call())
    needs = alike(parts, lambda actor: method(actor, inputs=(before.results[0],)))
    several = alike(parts, method, concurrent=True)
    several += alike(parts, method, rules=ActorSpec(max_concurrency=2))
    several += alike(parts, method, rules=ActorSpec(groups=(("io", 1),)))
    assert needs + several == [None] * 4
