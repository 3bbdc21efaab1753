"""Calls, actors and values are checked before they become jobs."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from gpunb.data import serialize
from gpunb.engine.jobs import Job
from gpunb.engine.peak_history import Row
from gpunb.exceptions import (
    ActorDiedError,
    InfeasibleRequestError,
    ObjectLostError,
    PendingCallsLimitExceeded,
)
from gpunb.protocol.backend import DYNAMIC, HANDLE, STREAM, STREAMING, Call, ObjectId, Outcome
from gpunb.scheduler import events as ev
from gpunb.scheduler import tasks
from gpunb.scheduler.resources import UNIT, Demand, Within
from gpunb.scheduler.tasks import ActorSpec, AutoShare
from tests.engine.parts import GIB, Parts, call, constructor, method, value

HALF = Demand(gpus=UNIT // 2)
THREE = Demand(gpus=3 * UNIT)


class AttachedKernel:
    """The owner of calls that come from another kernel."""

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.about: dict[str, Any] = {}
        self.surroundings: Any = None


def put(parts: Parts, thing: object, *, failed: bool = False) -> ObjectId:
    return parts.admission.keep(serialize.dumps(thing), failed=failed)


# ------------------------------------------------------------------------------------- the results


@pytest.mark.parametrize(
    ("returns", "indices", "given"),
    [
        (0, [], []),
        (1, [0], [0]),
        (3, [0, 1, 2], [0, 1, 2]),
        (DYNAMIC, [0], [0]),
        (STREAMING, [], [STREAM]),
    ],
)
def test_caller_gets_a_reference_to_each_result_or_to_the_generator(
    parts: Parts, returns: int, indices: list[int], given: list[int]
) -> None:
    job = parts.admission.admit(call(returns=returns), None)
    assert job.results == tuple((job.id, each) for each in indices)
    assert job.handed_out == tuple((job.id, each) for each in given)
    assert all(map(parts.store.wanted, job.handed_out))


def test_caller_of_a_constructor_gets_a_reference_to_the_actor(parts: Parts) -> None:
    job = parts.admission.admit(constructor(), None)
    assert job.handed_out == ((job.id, HANDLE),)
    actor = parts.engine.actors.get(job.id)
    assert actor is not None
    assert actor.class_name == "Counter"


def test_call_may_have_a_number_that_was_reserved_for_it(parts: Parts) -> None:
    first, second = parts.admission.admit(call(), None), parts.admission.admit(call(), None)
    assert second.id > first.id
    reserved = parts.admission.admit(call(), None, ident=1_000_000)
    assert parts.engine.jobs[1_000_000] is reserved
    assert reserved.results == ((1_000_000, 0),)


def test_value_that_is_put_is_there_at_once(parts: Parts) -> None:
    obj = put(parts, "kept")
    assert value(parts, obj) == "kept"
    with pytest.raises(KeyError):
        value(parts, put(parts, KeyError("x"), failed=True))


# ------------------------------------------------------------------------------------- the checks


@pytest.mark.parametrize(
    "made",
    [
        call("train", demand=THREE),
        call("train", demand=Demand(gpus=UNIT, types=("V100",))),
        constructor("train", rules=ActorSpec(bundles=(THREE,))),
        call("train", demand=Demand(gpus=3 * UNIT, within=Within(7))),
    ],
    ids=["too many", "no such type", "a bundle", "within a group"],
)
def test_demand_that_the_machine_can_never_meet_is_refused(parts: Parts, made: Call) -> None:
    for _ in range(2):  # also when the answer is remembered
        with pytest.raises(InfeasibleRequestError, match="train: "):
            parts.admission.admit(made, None)
    assert not parts.engine.jobs
    assert len(parts.store) == 0


def test_call_without_its_input_is_refused(parts: Parts) -> None:
    obj = put(parts, "dropped")
    parts.store.drop(obj)
    with pytest.raises(ObjectLostError):
        parts.admission.admit(call(inputs=(obj,)), None)
    assert not parts.engine.jobs


def test_call_of_an_actor_of_another_session_is_refused(parts: Parts) -> None:
    with pytest.raises(ActorDiedError, match="the actor #999999 is not there"):
        parts.admission.admit(method(999_999), None)


def test_call_of_an_actor_that_has_ended_is_left_to_the_scheduler(parts: Parts) -> None:
    job = parts.submit(constructor())
    parts.results.actor_ended(job.id, tasks.ActorDied(job.id, "it was killed"))
    called = parts.submit(method(job.id))
    assert parts.engine.fed[-1] == ev.CallSubmitted(called.id, job.id, called.call.spec)


def test_calls_that_wait_are_limited_for_each_caller(parts: Parts) -> None:
    actor = parts.submit(constructor(max_pending=2)).id
    first, _ = (parts.submit(method(actor), caller=5) for _ in range(2))
    with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=2"):
        parts.admission.admit(method(actor), None, caller=5)
    parts.submit(method(actor), caller=6)
    parts.results.end(first, tasks.Cancelled())
    parts.submit(method(actor), caller=5)


def test_calls_that_wait_are_not_limited_by_default(parts: Parts) -> None:
    actor = parts.submit(constructor()).id
    for _ in range(50):
        parts.submit(method(actor))


def test_call_of_an_attached_kernel_is_its_own(parts: Parts) -> None:
    """Workers are not reused for the calls of another kernel."""
    owner = AttachedKernel(3)
    job = parts.admission.admit(call(), None, owner)
    assert (job.owner, job.call.spec.owner) == (owner, 3)


# ------------------------------------------------------------------------- what a child inherits


def running(parts: Parts, **fields: Any) -> Job:
    """A task that submits others."""
    return parts.submit(call("outer", **fields))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((), (("A", "1"), ("B", "2"))),
        ((("B", "3"), ("C", "4")), (("A", "1"), ("B", "3"), ("C", "4"))),
    ],
)
def test_child_inherits_the_variables_that_it_does_not_set(
    parts: Parts, own: Any, expected: Any
) -> None:
    outer = running(parts, environment=(("A", "1"), ("B", "2")))
    inner = parts.submit(call("inner", environment=own), parent=outer.id)
    assert inner.call.spec.environment == expected


def test_call_of_an_actor_inherits_no_variables(parts: Parts) -> None:
    """The process of the actor has its own."""
    outer = running(parts, environment=(("A", "1"),))
    actor = parts.submit(constructor())
    assert parts.submit(method(actor.id), parent=outer.id).call.spec.environment == ()


def test_task_of_an_actor_inherits_from_the_actor(parts: Parts) -> None:
    outer = running(parts, environment=(("A", "1"),))
    actor = parts.submit(constructor(), parent=outer.id)
    called = parts.submit(method(actor.id))
    inner = parts.submit(call("inner"), parent=called.id)
    assert inner.call.spec.environment == (("A", "1"),)


@pytest.mark.parametrize(
    ("capture", "capturable", "within"),
    [
        (True, True, Within(7, -1, capture=True)),
        (False, True, None),
        (True, False, None),
    ],
)
def test_child_runs_in_the_group_that_captures_it(
    parts: Parts, capture: bool, capturable: bool, within: Within | None
) -> None:
    outer = running(parts, demand=Demand(within=Within(7, 1, capture)))
    inner = parts.submit(call("inner", demand=HALF, capturable=capturable), parent=outer.id)
    assert inner.call.spec.demand == Demand(gpus=UNIT // 2, within=within)


def test_task_of_an_actor_runs_in_the_group_that_captured_the_actor(parts: Parts) -> None:
    actor = parts.submit(constructor(demand=Demand(within=Within(7, 1, capture=True))))
    called = parts.submit(method(actor.id))
    inner = parts.submit(call("inner"), parent=called.id)
    assert inner.call.spec.demand.within == Within(7, -1, capture=True)


def test_child_of_a_task_that_is_over_inherits_nothing(parts: Parts) -> None:
    outer = running(parts, environment=(("A", "1"),))
    parts.results.end(outer, tasks.Cancelled())
    assert parts.submit(call("inner"), parent=outer.id).call.spec.environment == ()


def test_coordinator_knows_its_group_and_its_ranks(parts: Parts) -> None:
    lead = parts.submit(call(kind="ranks"))
    bundles = ActorSpec(bundles=(HALF, HALF))
    group = parts.submit(constructor("group", rules=bundles), parent=lead.id)
    ranks = [parts.submit(call("rank"), parent=lead.id) for _ in range(2)]
    assert (lead.group, lead.ranks) == (group.id, tuple(each.id for each in ranks))
    assert [each.rank for each in (group, *ranks)] == [-1, 0, 1]
    actor = parts.engine.actors.get(group.id)
    assert actor is not None
    assert actor.of_ranks


# ------------------------------------------------------------------------------ the chosen share


def test_share_comes_from_earlier_runs_with_such_inputs(parts: Parts) -> None:
    parts.engine.peaks.add(Row("code", 0, 40 * GIB, 4 * GIB, UNIT, "train", 0.0))
    auto = call(demand=Demand(gpus=UNIT), auto=AutoShare(code="code"))
    job = parts.admission.admit(auto, None)
    assert job.choice is not None
    assert not job.choice.first
    assert job.call.spec.demand == job.choice.demand == Demand(gpus=UNIT * 15 // 100)


# ----------------------------------------------------------------------------- named actors again


@pytest.mark.parametrize(
    ("new", "exists", "ended"),
    [
        ({"name": "tally", "get_if_exists": True}, True, False),
        ({"name": "tally"}, False, False),
        ({"name": "other", "get_if_exists": True}, False, False),
        ({"name": "tally", "origin": "cell 1"}, False, True),
        ({"name": "tally", "origin": "cell 2"}, False, False),
        ({"get_if_exists": True}, False, False),
    ],
    ids=["asked for", "not asked for", "another", "cell again", "another cell", "no name"],
)
def test_existing_actor_is_taken_or_replaced(
    parts: Parts, new: dict[str, Any], exists: bool, ended: bool
) -> None:
    actor = parts.submit(constructor(name="tally", origin="cell 1"))
    parts.engine.fed.clear()
    found = parts.admission.existing(constructor(**new))
    assert found == ((actor.id, HANDLE) if exists else None)
    assert parts.engine.fed == ([ev.KillRequested(actor.id)] if ended else [])
    assert parts.engine.actors.names() == ([] if ended else [("", "tally")])


def test_actors_that_no_cell_made_do_not_replace_each_other(parts: Parts) -> None:
    parts.submit(constructor(name="tally"))
    parts.engine.fed.clear()
    assert parts.admission.existing(constructor(name="tally")) is None
    assert parts.engine.fed == []


def test_call_of_a_function_is_no_existing_actor(parts: Parts) -> None:
    assert parts.admission.existing(call()) is None


# ---------------------------------------------------------------------------- to the scheduler


def test_scheduler_hears_only_of_inputs_that_are_not_there(parts: Parts) -> None:
    above = parts.submit(call())
    inputs = (put(parts, "there"), above.results[0])
    below = parts.submit(call(inputs=inputs))
    assert parts.engine.fed[-1] == ev.Submitted(below.id, below.call.spec, (above.id,))


def test_scheduler_hears_of_actors_and_of_their_calls(parts: Parts) -> None:
    outer = running(parts)
    rules = ActorSpec(max_restarts=2)
    actor = parts.admission.admit(constructor(rules=rules), outer.id)
    parts.admission.submitted(actor, cleanup=True)
    called = parts.submit(method(actor.id), parent=outer.id)
    assert parts.engine.fed[1:] == [
        ev.ActorCreated(actor.id, actor.call.spec, rules, (), outer.id, cleanup=True),
        ev.CallSubmitted(called.id, actor.id, called.call.spec, (), outer.id, alike=ANY),
    ]


def test_task_with_a_failed_input_fails_without_the_scheduler(parts: Parts) -> None:
    failed = put(parts, KeyError("x"), failed=True)
    job = parts.submit(call(inputs=(failed,)))
    assert parts.engine.fed == []
    assert parts.store.get(job.results[0]) is parts.store.get(failed)
    assert job.id not in parts.engine.jobs


def test_actor_with_a_failed_input_ends(parts: Parts) -> None:
    failed = put(parts, KeyError("x"), failed=True)
    job = parts.submit(constructor(name="tally", inputs=(failed,)))
    assert parts.engine.fed == []
    assert parts.engine.actors.get(job.id) is None
    assert "constructor failed" in parts.engine.actors.why(job.id, "")
    parts.submit(constructor(name="tally"))  # the name is free


def test_detached_actor_lives_without_a_handle(parts: Parts) -> None:
    detached, other = parts.submit(constructor(detached=True)), parts.submit(constructor())
    released: list[int] = []
    parts.store.released = released.append
    for each in (detached, other):
        parts.store.drop((each.id, HANDLE))
    assert released == [other.id]


def test_actor_in_a_group_keeps_the_group(parts: Parts) -> None:
    group = parts.submit(constructor("group", rules=ActorSpec(bundles=(HALF,))))
    released: list[int] = []
    parts.store.released = released.append
    actor = parts.submit(constructor(demand=Demand(within=Within(group.id))))
    parts.store.settle(actor.results[0], Outcome(serialize.dumps(None)))
    parts.store.drop((group.id, HANDLE))
    parts.store.drop((group.id, HANDLE))  # what the constructor held
    assert released == []
    parts.results.actor_ended(actor.id, tasks.ActorDied(actor.id, "it was killed"))
    assert released == [group.id]
