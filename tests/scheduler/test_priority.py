"""Priorities: the order of the tasks that wait, and its limit."""

from __future__ import annotations

import pytest

from gpunb.scheduler.options import ActorOptions, Options
from gpunb.scheduler.snapshot import snapshot
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import World, ask

ONE = ask(gpus=1)
STEP = 600.0


def drain(world: World) -> list[int]:
    """The tasks in the order in which they start, one after the other on one device."""
    order = []
    while world.running():
        (task,) = world.running()
        order.append(task)
        world.done(task)
    return order


def test_higher_priority_starts_first_and_equal_ones_in_order(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ONE)
    low, a, b, high = (world.fresh(ONE, priority=each) for each in (-1, 0, 0, 5))
    assert drain(world) == [first, high, a, b, low]


def test_priority_holds_between_different_demands(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ONE)
    half = world.fresh(ask(gpus=0.5))
    high = world.fresh(ONE, priority=1)
    world.done(first)
    assert world.running() == [high]
    assert world.waits(half)


def test_running_tasks_keep_their_devices(core: MakeWorld) -> None:
    world = core(gpus=1)
    low = world.fresh(ONE, priority=-5)
    high = world.fresh(ONE, priority=5)
    assert world.running() == [low]
    assert world.waits(high)


@pytest.mark.parametrize(("waited", "first"), [(2 * STEP - 1, "high"), (2 * STEP + 1, "low")])
def test_one_step_counts_as_ten_minutes_of_waiting(
    core: MakeWorld, waited: float, first: str
) -> None:
    world = core(gpus=1)
    running = world.fresh(ONE)
    low = world.fresh(ONE)
    world.advance(waited)
    high = world.fresh(ONE, priority=2)
    world.done(running)
    assert world.running() == [high if first == "high" else low]


def test_endless_stream_of_a_higher_priority_does_not_starve_a_lower_one(core: MakeWorld) -> None:
    world = core(gpus=1)
    world.fresh(ONE, priority=1)
    low = world.fresh(ONE)
    minutes = 0
    while world.running() != [low]:
        world.fresh(ONE, priority=1)
        world.advance(60)
        world.done(*world.running())
        minutes += 1
    assert minutes == 11


def test_higher_priority_goes_before_a_reservation_of_a_lower_one(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    holders = [world.fresh(ONE) for _ in range(2)]
    both = world.fresh(ask(gpus=2))
    world.advance(11)
    world.done(holders[0])
    assert world.waits(both)
    assert world.free() == [1, 0]
    equal = world.fresh(ONE)
    assert world.waits(equal), "the free device is kept"
    high = world.fresh(ONE, priority=1)
    assert world.running() == [holders[1], high]
    world.done(high)
    world.done(holders[1])
    assert world.running() == [both]


def test_aged_request_of_a_higher_priority_takes_the_reservation_over(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    holders = [world.fresh(ONE) for _ in range(2)]
    low = world.fresh(ask(gpus=2))
    world.advance(11)
    high = world.fresh(ask(gpus=2), priority=1)
    world.advance(11)
    world.done(holders[0])
    kept = world.scheduler.queue.reservation
    assert kept is not None
    assert kept.line.priority == 1
    world.done(holders[1])
    assert world.running() == [high]
    assert world.waits(low)


def test_snapshot_and_reason_name_the_priority(core: MakeWorld) -> None:
    world = core(gpus=1)
    world.fresh(ONE)
    high = world.fresh(ONE, priority=5)
    view = snapshot(world.scheduler, world.now)
    assert [(each.priority, each.waits_for) for each in view.waiting] == [
        (5, "priority 5; needs 1 whole GPU; 0 of 1 are wholly free, held by #1")
    ]
    assert (world.why(high) or "").startswith("priority 5; ")


def test_snapshot_lists_what_waits_in_the_order_of_its_turn(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ONE)
    plain, low, high = (world.fresh(ONE, priority=each) for each in (0, -5, 5))
    half, follows = world.fresh(ask(gpus=0.5)), world.fresh(ONE, needs=[first])
    waiting = [each.id for each in snapshot(world.scheduler, world.now).waiting]
    assert waiting == [high, plain, half, low, follows]


@pytest.mark.parametrize("options", [Options(), ActorOptions()])
@pytest.mark.parametrize(
    ("value", "message"),
    [(1.5, "must be a whole number"), (True, "whole number"), (101, "between -100 and 100")],
)
def test_bad_priority_is_refused(
    options: Options | ActorOptions, value: object, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        options.updated({"priority": value})
