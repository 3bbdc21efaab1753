"""The call of a coordinator, which runs another call in several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.exceptions import InfeasibleRequestError
from gpunb.protocol import backend
from gpunb.protocol.backend import Call, Context
from gpunb.protocol.plain import Malformed
from gpunb.protocol.ranks import (
    GRACE,
    RankOfCell,
    Ranks,
    code_for_rank,
    coordinated,
    of_coordinator,
    rank_of,
)
from gpunb.protocol.sink import Sink
from gpunb.scheduler.resources import UNIT, Demand, Gang
from gpunb.scheduler.tasks import TaskSpec

ONE = Demand(gpus=UNIT)
SINK = Sink()


class Machine:
    """A backend that refuses demands with `refusal`, and notes what it was asked."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.task: int | None = None
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, *question: Any) -> str | None:
        self.asked.append(question)
        return self.refusal

    def context(self) -> Context:
        return Context(task=self.task)


@pytest.fixture(autouse=True)
def machine() -> Iterator[Machine]:
    before = backend.existing()
    machine: Any = Machine()
    backend.install(machine)
    yield machine
    backend.install(before)


def call(demand: Demand = ONE, **fields: Any) -> Call:
    spec = TaskSpec(
        "train",
        demand,
        function="digest",
        max_retries=3,
        timeout=5.0,
        environment=(("A", "1"),),
        owner=4,
        priority=2,
    )
    arguments = serialize.dumps(((1,), {}))
    return Call(spec, b"code", arguments, returns=2, retry=True, sink=SINK, **fields)


@pytest.mark.parametrize(
    ("ranks", "running"),
    [(Ranks(3), (0, 1, 2)), (Ranks(1), (0,)), (Ranks(3, only=(2, 0)), (2, 0))],
)
def test_ranks_that_run_a_call(ranks: Ranks, running: tuple[int, ...]) -> None:
    assert ranks.running == running
    assert ranks.grace == GRACE


def test_coordinator_needs_no_resources() -> None:
    made = coordinated(call(), Ranks(2))
    assert made.spec == TaskSpec("train", environment=(("A", "1"),), owner=4, priority=2)
    assert (made.kind, made.returns, made.retry, made.sink) == ("ranks", 1, False, SINK)


def test_coordinator_holds_what_the_call_takes() -> None:
    made = coordinated(call(inputs=((7, 0),), held=((8, 0),)), Ranks(2))
    assert set(made.needed()) == {(7, 0), (8, 0)}


@pytest.mark.parametrize(
    "ranks",
    [Ranks(2), Ranks(4, isolate=True, gather=("loss",), only=(1, 3), grace=0.5)],
)
def test_coordinator_knows_the_call_and_its_ranks(ranks: Ranks) -> None:
    before = call(inputs=((7, 0),), actor=9)
    found, of = of_coordinator(coordinated(before, ranks).code, before.arguments)
    assert of == ranks
    assert (found.spec, found.code, found.inputs, found.actor) == (
        before.spec,
        b"code",
        ((7, 0),),
        9,
    )
    assert (found.returns, found.retry, found.kind, found.sink) == (2, True, "call", None)
    assert found.arguments is before.arguments


def test_all_ranks_must_have_room_together(machine: Machine) -> None:
    coordinated(call(), Ranks(3))
    assert machine.asked == [("refusal", Gang.of([ONE] * 3))]
    machine.refusal = "there are only 2 GPUs"
    with pytest.raises(InfeasibleRequestError, match="train: there are only 2 GPUs"):
        coordinated(call(), Ranks(3))


@pytest.mark.parametrize(("demand", "task"), [(Demand(), None), (ONE, 5)])
def test_room_is_not_asked_for_where_another_will_find_out(
    machine: Machine, demand: Demand, task: int | None
) -> None:
    """The call needs nothing; or a task makes it, and its coordinator finds out."""
    machine.task, machine.refusal = task, "there is no room"
    coordinated(call(demand), Ranks(3))
    assert machine.asked == []


@pytest.mark.parametrize(
    "rank", [RankOfCell(0, True, True), RankOfCell(3, False, True), RankOfCell(1, False, False)]
)
def test_rank_of_a_cell_is_read_from_its_code(rank: RankOfCell) -> None:
    assert rank_of(code_for_rank(rank)) == rank


@pytest.mark.parametrize("code", [b"", b"garbage", code_for_rank(RankOfCell(0, True, True))[:-2]])
def test_code_that_is_of_no_rank_is_refused(code: bytes) -> None:
    with pytest.raises(Malformed):
        rank_of(code)
