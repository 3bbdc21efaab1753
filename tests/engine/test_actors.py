"""The table of actors: their names, their workers and the reasons of their ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.engine.actors import ActorTable
from gpunb.engine.jobs import Job
from gpunb.exceptions import ActorAlreadyExistsError, ActorDiedError, GpunbError
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import GROUPS, SESSIONS, Call, Outcome
from gpunb.scheduler.resources import UNIT, Demand
from gpunb.scheduler.tasks import ActorSpec
from tests.engine.parts import RecordingSink, actor_record, call, constructor, method
from tests.engine.parts import worker_process as process

GROUP = ActorSpec(bundles=(Demand(gpus=UNIT),))
RESTARTS = ActorSpec(max_restarts=1)

_numbers = itertools.count(1000)


@pytest.fixture
def table() -> ActorTable:
    return ActorTable()


def job(made: Call, ident: int | None = None, **fields: Any) -> Job:
    return Job(ident or next(_numbers), made, [], [], **fields)


def failure(error: Exception) -> Outcome:
    return Outcome(serialize.dump_failure(error, task="Counter"), failed=True)


# ------------------------------------------------------------------------------------------- names


def test_actor_is_found_by_its_name_in_its_namespace(table: ActorTable) -> None:
    one, other = (actor_record(at, name="tally", namespace=f"lab {at}") for at in (1, 2))
    table.add(one)
    table.add(other)
    assert table.find("tally", "lab 1") is one
    assert table.find("tally", "lab 2") is other
    assert table.named(other.new) is other
    assert table.named(actor_record().new) is None


@pytest.mark.parametrize(
    ("name", "namespace", "text"),
    [
        ("sum", "", "no actor has the name 'sum': there are 'mean', 'tally'"),
        ("sum", "other", "no actor has the name 'sum': none has a name"),
        ("sum", GROUPS, "no placement group has the name 'sum': none has a name"),
    ],
)
def test_search_for_an_unknown_name_lists_the_others(
    table: ActorTable, name: str, namespace: str, text: str
) -> None:
    table.add(actor_record(1, name="tally"))
    table.add(actor_record(2, name="mean"))
    with pytest.raises(ValueError, match=text):
        table.find(name, namespace)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, r"taken by the actor Counter \(#1\): .*gpunb.kill"),
        ({"rules": GROUP}, r"taken by placement group #1: .*remove_placement_group"),
    ],
)
def test_second_actor_of_a_name_is_refused(
    table: ActorTable, fields: dict[str, Any], text: str
) -> None:
    first = actor_record(1, name="tally", **fields)
    table.add(first)
    with pytest.raises(ActorAlreadyExistsError, match=text):
        table.add(actor_record(2, name="tally", **fields))
    assert list(table) == [first]


def test_name_is_free_as_soon_as_the_end_is_asked_for(table: ActorTable) -> None:
    """The process may live on for a while."""
    first, second = (actor_record(at, name="tally") for at in (1, 2))
    table.add(first)
    table.leave(first)
    table.add(second)
    table.leave(first)  # again: the name belongs to the second one now
    assert table.find("tally", "") is second
    assert [each.leaving for each in table] == [True, False]


def test_names_of_sessions_and_groups_are_not_names_of_actors(table: ActorTable) -> None:
    for at, namespace in enumerate(("b", SESSIONS, f"{GROUPS}b", "a")):
        table.add(actor_record(at, name="tally", namespace=namespace))
    table.add(actor_record(9))
    assert table.names() == [("a", "tally"), ("b", "tally")]


def test_session_that_is_taken_over_has_its_name_elsewhere(table: ActorTable) -> None:
    actor = actor_record(1, name="lab", namespace=f"{SESSIONS}-1")
    table.add(actor)
    table.move(actor, f"{SESSIONS}-2")
    assert table.find("lab", f"{SESSIONS}-2") is actor
    with pytest.raises(ValueError, match="none has a name"):
        table.find("lab", f"{SESSIONS}-1")
    table.leave(actor)
    with pytest.raises(ValueError, match="none has a name"):
        table.find("lab", f"{SESSIONS}-2")


# ------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "actor"),
        ({"namespace": f"{SESSIONS}-3"}, "session"),
        ({"rules": GROUP, "namespace": f"{GROUPS}lab"}, "group"),
    ],
)
def test_kind_of_an_actor(fields: dict[str, Any], kind: str) -> None:
    assert actor_record(**fields).kind == kind


def test_handle_shows_the_state_of_its_actor(table: ActorTable) -> None:
    actor = actor_record(1, name="tally", sink=RecordingSink(place=(3, "id")))
    table.add(actor)
    assert (actor.facts()["state"], actor.facts()["pid"]) == ("starting", None)
    table.move_in(job(constructor(), 1, worker=5, since=2.5, gpus=(0,)), process(5, pid=99))
    assert actor.facts() == {
        "id": 1,
        "name": "tally",
        "class": "Counter",
        "type": b"",
        "state": "alive",
        "gpus": [0],
        "pid": 99,
        "session": False,
    }
    table.leave(actor)
    assert actor.facts()["state"] == "ending"
    assert actor.place == (3, "id")
    assert actor_record().place is None


@pytest.mark.parametrize(
    ("made", "label"),
    [
        (constructor(), "Counter(3) (#7)"),
        (method(7, "Counter.add"), "Counter(3).add (#8)"),
        (method(7, "adding"), "adding (#8)"),
        (method(5, "Counter.add"), "Counter.add (#8)"),
        (call("train"), "train (#8)"),
    ],
    ids=["constructor", "call", "call with a name", "call of another", "function"],
)
def test_job_of_an_actor_is_described_with_the_title_of_the_actor(
    table: ActorTable, made: Call, label: str
) -> None:
    table.add(actor_record(7))
    table.set_title(7, "Counter(3)")
    table.set_title(99, "gone")
    assert table.label(job(made, 7 if made.kind == "create" else 8)) == label


# ------------------------------------------------------------------------------------------ workers


def test_worker_of_a_constructor_becomes_the_actor(table: ActorTable) -> None:
    rules = ActorSpec(max_concurrency=3, groups=(("io", 2),))
    actor = actor_record(7, name="tally", rules=rules, concurrent=True)
    table.add(actor)
    made = job(constructor(), 7, worker=5, held=(("gpu-0", UNIT),))
    for restarted in (False, True):
        hosted = table.move_in(made, process(5))
        assert hosted is not None
        assert msg.HostedActor(*hosted) == msg.HostedActor(
            7, "tally", b"", restarted, 3, True, (("io", 2),)
        )
    assert table.on(5) is actor
    assert actor.held == (("gpu-0", UNIT),)


@pytest.mark.parametrize(("ident", "worker"), [(7, None), (8, 5)])
def test_no_worker_becomes_an_actor_that_is_gone_or_waits(
    table: ActorTable, ident: int, worker: int | None
) -> None:
    table.add(actor_record(7))
    assert table.move_in(job(constructor(), ident, worker=worker), process(5)) is None
    assert table.on(5) is None


def test_actor_without_its_worker_holds_nothing(table: ActorTable) -> None:
    actor = actor_record(7)
    table.add(actor)
    table.move_in(job(constructor(), 7, worker=5, gpus=(0,), held=(("gpu-0", 1),)), process(5))
    table.moved_out(5)
    table.moved_out(6)
    assert table.on(5) is None
    assert (actor.process, actor.gpus, actor.held, actor.since) == (None, (), (), 0.0)


def test_late_end_of_the_former_worker_leaves_the_new_one(table: ActorTable) -> None:
    actor, made = actor_record(7), job(constructor(), 7, worker=5)
    table.add(actor)
    table.move_in(made, process(5))
    made.worker = 6
    new = process(6)
    table.move_in(made, new)
    table.moved_out(5)
    assert (actor.process, table.on(6)) == (new, actor)


def test_placement_group_has_room_and_no_process(table: ActorTable) -> None:
    group = actor_record(7, rules=GROUP)
    table.add(group)
    table.place(job(constructor(), 7, worker=5, gpus=(1,), held=(("gpu-1", UNIT),), since=3.0))
    assert table.on(5) is group
    assert (group.process, group.gpus, group.held, group.since) == (
        None,
        (1,),
        (("gpu-1", UNIT),),
        3.0,
    )


# ----------------------------------------------------------------------------- calls and their end


def test_call_that_is_over_waits_no_more(table: ActorTable) -> None:
    actor = actor_record(7)
    table.add(actor)
    first, second = job(method(7)), job(method(7))
    actor.pending.update({first.id: 0, second.id: 0})
    table.settled(first, failure(KeyError("x")))
    assert list(actor.pending) == [second.id]
    assert not actor.leaving


@pytest.mark.parametrize("failed", [False, True])
def test_actor_leaves_if_its_constructor_failed(table: ActorTable, failed: bool) -> None:
    actor = actor_record(7)
    table.add(actor)
    outcome = failure(KeyError("x")) if failed else None
    table.settled(job(constructor(), 7), outcome)
    assert (actor.leaving, actor.failure) == (failed, outcome)


@pytest.mark.parametrize(
    ("rules", "failed", "ident", "keeps"),
    [
        (RESTARTS, False, 7, True),
        (ActorSpec(max_restarts=-1), False, 7, True),
        (ActorSpec(), False, 7, False),
        (RESTARTS, True, 7, False),
        (RESTARTS, False, 8, False),
    ],
)
def test_constructor_is_kept_for_an_actor_that_may_start_again(
    table: ActorTable, rules: ActorSpec, failed: bool, ident: int, keeps: bool
) -> None:
    actor = actor_record(7, rules=rules)
    table.add(actor)
    made = job(constructor(), ident)
    assert table.keeps(made, failure(KeyError("x")) if failed else None) is keeps
    assert actor.constructor is (made if keeps else None)


@pytest.mark.parametrize("failed", [False, True])
def test_second_run_of_a_constructor_is_no_job_of_its_own(table: ActorTable, failed: bool) -> None:
    actor, made = actor_record(7, rules=RESTARTS), job(constructor(), 7, worker=5)
    table.add(actor)
    table.move_in(made, process(5))
    table.keeps(made, None)
    outcome = failure(KeyError("x")) if failed else None
    assert not table.constructed_again(made, outcome)
    assert not actor.leaving
    table.move_in(made, process(6))
    assert not table.constructed_again(job(constructor(), 7), outcome)
    assert table.constructed_again(made, outcome)
    assert (actor.leaving, actor.failure) == (failed, outcome)


# ---------------------------------------------------------------------------- the reason of an end


def test_reason_of_an_end_is_remembered(table: ActorTable) -> None:
    actor = actor_record(7, name="tally")
    table.add(actor)
    table.ended(actor, "it was killed")
    assert table.get(7) is None
    assert table.names() == []
    assert table.why(7, "nothing is known") == "it was killed"
    assert table.why(8, "nothing is known") == "nothing is known"


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (None, "it was killed", "it was killed"),
        ("bad size\nhint", "it failed", "it failed: bad size\nhint"),
        ("bad size\nhint", "it failed: bad size", "it failed: bad size\nhint"),
        ("bad size", "it failed: bad size", "it failed: bad size"),
    ],
    ids=["no error", "an error", "the same words and more", "the same words"],
)
def test_reason_of_an_end_has_the_error_of_the_constructor_once(
    table: ActorTable, error: str | None, reason: str, text: str
) -> None:
    table.add(actor_record(7))
    if error is not None:
        outcome = Outcome(serialize.dumps(GpunbError(error)), failed=True)
        table.settled(job(constructor(), 7), outcome)
    assert table.why(7, reason) == text


def test_calls_of_actors_of_this_session_have_a_target(table: ActorTable) -> None:
    here, ended = actor_record(7), actor_record(8)
    table.add(here)
    table.add(ended)
    table.over(8)
    assert ended.leaving
    table.over(99)
    table.ended(ended, "it was killed")
    assert (table.target(7), table.target(8)) == (here, None)
    with pytest.raises(ActorDiedError, match="the actor #9 is not there"):
        table.target(9)
