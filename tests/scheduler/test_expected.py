"""Tasks with an expected time: short ones go first, and no long one waits for ever."""

from __future__ import annotations

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.auto_share import Choice
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.tasks import TaskId
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import World, ask

SHORT_FIRST = Policy().short_first


def drained(world: World, tasks: set[TaskId]) -> list[TaskId]:
    """The order in which these tasks start, one after the other."""
    order = []
    while tasks:
        (task,) = world.running()
        if task in tasks:
            order.append(task)
            tasks.discard(task)
        world.done(task)
    return order


@pytest.mark.parametrize("shares", [(1, 1, 1), (1, 0.9, 0.8)])
def test_shortest_of_those_that_wait_goes_first(core: MakeWorld, shares: tuple[float, ...]) -> None:
    world = core(gpus=1)
    world.fresh(ask(gpus=1))
    long, short, middle = (
        world.fresh(ask(gpus=share), expected=seconds)
        for share, seconds in zip(shares, (3600, 10, 60), strict=True)
    )
    assert drained(world, {long, short, middle}) == [short, middle, long]


@pytest.mark.parametrize("expected", [None, 60])
def test_equal_ones_go_in_their_order(core: MakeWorld, expected: float | None) -> None:
    world = core(gpus=1)
    world.fresh(ask(gpus=1))
    tasks = [world.fresh(ask(gpus=1), expected=expected) for _ in range(5)]
    assert drained(world, set(tasks)) == tasks


def test_unknown_one_counts_as_a_usual_one(core: MakeWorld) -> None:
    world = core(gpus=1)
    world.fresh(ask(gpus=1))
    usual = world.fresh(ask(gpus=1), expected=100)
    long = world.fresh(ask(gpus=1), expected=300)
    unknown = world.fresh(ask(gpus=1))
    short = world.fresh(ask(gpus=1), expected=50)
    assert drained(world, {usual, long, unknown, short}) == [short, usual, unknown, long]


@pytest.mark.parametrize("long", [60, 1000, 1e6])
@pytest.mark.parametrize("short", [1, 50])
def test_endless_stream_of_short_ones_holds_a_long_one_back_in_proportion(
    core: MakeWorld, long: float, short: float
) -> None:
    """It waits at most `short_first` times its own expected time, and for the running task."""
    world = core(gpus=1)
    world.fresh(ask(gpus=1), expected=short)
    task = world.fresh(ask(gpus=1), expected=long)
    came, step = world.now, SHORT_FIRST * long / 50
    while task not in world.runs:
        assert world.now - came <= SHORT_FIRST * long + 2 * step, "it waits for ever"
        world.fresh(ask(gpus=1), expected=short)
        world.advance(step)
        world.done(world.running()[0])


def test_waiting_task_of_which_more_is_known_gets_another_place(core: MakeWorld) -> None:
    world = core(gpus=1)
    world.fresh(ask(gpus=1))
    first, second, third = (world.fresh(ask(gpus=1)) for _ in range(3))
    for task, seconds in ((first, 1000.0), (second, 100.0), (third, 10.0)):
        world.send(ev.Chosen(task, Choice(ask(gpus=1), 0, "", False, seconds)))
    assert drained(world, {first, second, third}) == [third, second, first]
    assert world.scheduler.queue.lines == {}


def test_known_times_of_others_do_not_change_the_order_of_unknown_ones(core: MakeWorld) -> None:
    """The mean of the known times falls, and rises again."""
    world = core(gpus=1)
    world.fresh(ask(gpus=1), expected=1000)
    unknown = []
    for seconds in (10, 10, 10, 10_000):
        unknown.append(world.fresh(ask(gpus=1)))
        world.fresh(ask(gpus=1), expected=seconds)
    assert drained(world, set(unknown)) == unknown


@pytest.mark.parametrize("priority", [0, 1])
def test_task_with_a_priority_is_not_put_back(core: MakeWorld, priority: int) -> None:
    world = core(gpus=1)
    world.fresh(ask(gpus=1), expected=10)
    first = world.fresh(ask(gpus=1), expected=10)
    long = world.fresh(ask(gpus=1), expected=100_000, priority=priority)
    assert drained(world, {first, long}) == ([long, first] if priority else [first, long])
