"""Who is next: first come first served for equal demands, overtaking, and its end."""

from __future__ import annotations

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.auto_share import Choice
from gpunb.scheduler.resources import UNIT, Demand
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import World, ask

BIG = [
    pytest.param(2, ask(gpus=2), ask(gpus=1), id="two devices, behind one at a time"),
    pytest.param(1, ask(gpus=1), ask(gpus=0.3), id="a whole device, behind parts"),
    pytest.param(1, ask(gpus=0.9), ask(gpus=0.3), id="most of a device, behind parts"),
    pytest.param(0, ask(cpus=2), ask(cpus=1), id="all CPUs, behind one at a time"),
    pytest.param(1, ask(cpus=2, gpus=1), ask(cpus=1, gpus=0.5), id="CPUs and a device"),
    pytest.param(0, ask(resources={"port": 1}), ask(resources={"port": 0.5}), id="a resource"),
]


def stream(world: World, small: Demand, seconds: int, **options: object) -> None:
    """Small tasks that take two seconds, a new one every second: there is always one running."""
    for _ in range(seconds):
        world.advance(1)
        for task in world.running():
            run = world.scheduler.tasks[task]
            if run.spec.demand == small and world.now - run.since >= 2:
                world.done(task)
        for worker in sorted(world.ending):
            if not world.tasks_on(worker):
                world.exit(worker)
        world.submit(small, **options)  # type: ignore[arg-type]


def test_equal_demands_are_served_in_order(core: MakeWorld) -> None:
    world = core(gpus=1)
    tasks = [world.fresh(ask(gpus=1)) for _ in range(5)]
    for at, task in enumerate(tasks):
        assert world.running() == [task]
        assert world.waits(*tasks[at + 1 :])
        world.done(task)


def test_a_smaller_demand_may_overtake(core: MakeWorld) -> None:
    world = core(gpus=2)
    first = world.fresh(ask(gpus=0.5))
    large = world.fresh(ask(gpus=2))
    small = world.fresh(ask(gpus=0.5))
    assert world.running() == [first, small]
    assert world.waits(large)
    assert world.gpus(small) == [0]
    world.done(first)
    world.done(small)
    assert world.gpus(large) == [0, 1]


def test_the_longest_waiting_task_that_fits_starts_first(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ask(gpus=1))
    half = world.fresh(ask(gpus=0.5))
    whole = world.fresh(ask(gpus=1))
    third = world.fresh(ask(gpus=0.3))
    world.done(first)
    assert world.running() == [half, third]
    world.done(half)
    world.done(third)
    assert world.running() == [whole]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("gpus", "large", "small"), BIG)
def test_an_endless_stream_does_not_starve_a_large_request(
    core: MakeWorld, gpus: int, large: Demand, small: Demand, reuse: bool
) -> None:
    world = core(gpus=gpus, cpus=2, resources={"port": 1}, age=10)
    options = {"max_calls": 0 if reuse else 1, "function": "small"}
    stream(world, small, 5, **options)
    task = world.fresh(large)
    assert world.waits(task)
    stream(world, small, 8, **options)
    assert world.waits(task), "nobody overtook, so this shows nothing"
    stream(world, small, 8, **options)
    assert task in world.runs
    stream(world, small, 3, **options)


def test_devices_with_long_runs_are_not_chosen_for_a_reservation(core: MakeWorld) -> None:
    """The device with most room is that of a task that runs for ever."""
    world = core(gpus=3, age=10)
    forever = world.fresh(ask(gpus=0.1))
    world.advance(1000)
    busy = [world.fresh(ask(gpus=1)) for _ in range(2)]
    large = world.fresh(ask(gpus=2))
    world.advance(11)
    small = world.fresh(ask(gpus=1))
    for task in busy:
        assert world.waits(large, small)
        world.done(task)
    assert world.gpus(large) == [1, 2]
    assert forever in world.runs


def test_a_reservation_lets_others_use_what_it_does_not_need(core: MakeWorld) -> None:
    world = core(gpus=3, age=10)
    busy = [world.fresh(ask(gpus=0.5)) for _ in range(5)]
    large = world.fresh(ask(gpus=2))
    world.advance(11)
    world.submit()
    reservation = world.scheduler.queue.reservation
    assert reservation is not None
    assert reservation.reserved.devices == {0, 2}
    small = [world.fresh(ask(gpus=0.5)) for _ in range(2)]
    assert world.waits(*small)
    world.done(busy[2])
    assert world.gpus(small[0]) == [1]
    assert world.why(small[1]) == (
        "GPU 0 and GPU 2 are kept for #6 (2 GPU), which has waited longest"
    )
    for task in (busy[0], busy[1], busy[4]):
        world.done(task)
    assert world.gpus(large) == [0, 2]
    assert world.scheduler.queue.reservation is None


def test_a_reservation_ends_with_the_request(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    busy = world.fresh(ask(gpus=1))
    large = world.fresh(ask(gpus=2))
    world.advance(11)
    small = world.fresh(ask(gpus=1))
    assert world.waits(small)
    world.cancel(large)
    assert world.running() == [busy, small]


def test_tasks_held_up_by_a_reservation_start_when_it_ends(core: MakeWorld) -> None:
    world = core(gpus=2, cpus=4, age=10)
    busy = world.fresh(ask(gpus=0.5, cpus=1))
    large = world.fresh(ask(gpus=2, cpus=1))
    world.advance(11)
    steps_back = world.submit(ask(cpus=3))
    assert world.waits(steps_back)
    assert "kept for #2 (2 GPU, 1 CPU)" in (world.why(steps_back) or "")
    world.done(busy)
    assert world.running() == [large, steps_back]


def test_the_longest_waiting_task_starts_before_a_reservation_is_made(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    busy = [world.fresh(ask(gpus=0.6)), world.fresh(ask(gpus=0.6))]
    first = world.fresh(ask(gpus=2))
    world.advance(16)
    second = world.fresh(ask(gpus=1))
    world.advance(3)
    third = world.fresh(ask(gpus=0.2))
    assert world.waits(first, second, third)
    world.done(busy[0])
    assert world.waits(first, second, third)
    world.done(busy[1])
    assert world.running() == [first]
    world.done(first)
    assert world.running() == [second, third]


def test_no_reservation_for_room_that_an_actor_holds(core: MakeWorld) -> None:
    world = core(gpus=2, cpus=2, age=10)
    actor = world.ready_actor(ask(gpus=0.5, cpus=1))
    large = [world.fresh(ask(gpus=2)), world.submit(ask(cpus=2))]
    world.advance(100)
    small = [world.fresh(ask(gpus=1)), world.submit(ask(cpus=1))]
    assert world.running() == small
    world.done(small[0])
    assert world.scheduler.queue.reservation is None
    world.kill(actor)
    world.exit(1)
    world.done(small[1])
    assert world.running() == large


def test_a_device_shared_with_an_actor_is_not_reserved(core: MakeWorld) -> None:
    """It has the most room, but never all of it; the other one is free again soon."""
    world = core(gpus=2, age=10)
    world.ready_actor(ask(gpus=0.1))
    small = world.fresh(ask(gpus=0.9, cpus=0))
    world.done(small)
    small = world.fresh(ask(gpus=1))
    assert world.gpus(small) == [1]
    large = world.fresh(ask(gpus=1))
    world.advance(11)
    world.fresh(ask(gpus=0.4))
    waits = world.fresh(ask(gpus=0.6))
    world.done(small)
    assert world.gpus(large) == [1]
    assert world.waits(waits)


def test_no_reservation_while_a_blocked_task_holds_the_device(core: MakeWorld) -> None:
    """The parent ends only after its child, so a large request must let the child pass."""
    world = core(gpus=2, age=10)
    parent = world.fresh(ask(gpus=1))
    large = world.fresh(ask(gpus=2))
    world.advance(11)
    child = world.fresh(ask(gpus=0.5), parent=parent)
    assert world.waits(large, child)
    world.block(parent)
    assert world.running() == [parent, child]
    other = world.fresh(ask(gpus=0.5))
    assert other in world.runs
    world.unblock(parent)
    world.done(child)
    assert world.waits(world.fresh(ask(gpus=0.5)))
    world.done(parent)
    world.done(other)
    assert large in world.runs


def test_a_blocked_parent_does_not_end_a_reservation_elsewhere(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    parent = world.fresh(ask(gpus=1))
    busy = world.fresh(ask(gpus=0.5))
    large = world.fresh(ask(gpus=1))
    world.advance(11)
    world.block(parent)
    small = world.fresh(ask(gpus=0.5))
    assert world.waits(large, small)
    world.done(busy)
    assert world.gpus(large) == [1]


def test_a_reservation_does_not_count_on_lent_cpus(core: MakeWorld) -> None:
    """What an actor lends comes back, so all CPUs can never be kept for a task."""
    world = core(cpus=2, age=10)
    actor = world.ready_actor(ask(cpus=1))
    call = world.call(actor)
    world.block(call)
    busy = world.submit(ask(cpus=1))
    large = world.submit(ask(cpus=2))
    world.advance(11)
    small = world.submit(ask(cpus=1))
    world.advance(0.1)
    assert world.running() == [call, busy, small]
    world.done(small)
    world.unblock(call)
    world.done(busy)
    assert world.waits(large)
    assert world.submit(ask(cpus=1)) in world.runs


def test_many_waiting_and_cancelled_leave_nothing_behind(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ask(gpus=1))
    waiting = [world.fresh(ask(gpus=1)) for _ in range(300)]
    for task in waiting[1:]:
        world.cancel(task)
    (line,) = world.scheduler.queue.lines.values()
    assert line.count == 1
    assert len(line.tasks) < 70
    world.done(first)
    assert world.running() == [waiting[0]]


def test_a_retry_starts_before_tasks_of_the_same_demand(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ask(gpus=1), max_retries=1)
    world.fresh(ask(gpus=1))
    world.crash(first)
    assert world.running() == [first]


def test_a_task_joins_the_queue_when_its_inputs_are_there(core: MakeWorld) -> None:
    world = core(gpus=1)
    source = world.submit()
    waits = world.fresh(ask(gpus=1), needs=[source])
    first, second = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    world.done(source)
    world.done(first)
    # It was handed in first, but could run only after the second stood in line.
    assert world.running() == [second]
    world.done(second)
    assert world.running() == [waits]


def test_when_a_reservation_ends_the_longest_waiting_one_is_next(core: MakeWorld) -> None:
    """Not the one that comes next in the same look."""
    world = core(gpus=1, age=10)
    running = world.fresh(ask(gpus=1))
    first, second = world.fresh(ask(gpus=0.9)), world.fresh(ask(gpus=0.8))
    third = world.fresh(ask(gpus=0.7))
    world.advance(11)
    world.send(ev.TimeReached())
    assert reserved(world) == 0.9
    world.cancel(first)
    assert reserved(world) == 0.8
    world.done(running)
    assert second in world.runs
    assert reserved(world) == 0.7
    assert world.waits(third)


def test_a_task_that_becomes_first_ages_from_its_submission(
    core: MakeWorld,
) -> None:
    world = core(gpus=1, age=10)
    running = world.fresh(ask(gpus=0.6))
    gone = world.fresh(ask(gpus=0.9))
    world.advance(5)
    left = world.fresh(ask(gpus=0.9))
    world.cancel(gone)
    world.advance(8)
    assert world.scheduler.queue.reservation is None
    world.advance(3)
    small = world.fresh(ask(gpus=0.3))
    assert world.waits(left, small)
    world.done(running)
    assert world.running() == [left]


def test_tasks_that_wait_ask_for_a_share_that_is_chosen_anew_in_their_order(
    core: MakeWorld,
) -> None:
    world, half = core(gpus=1), ask(gpus=0.5)
    first = world.fresh(ask(gpus=1))
    whole = [world.fresh(ask(gpus=1)) for _ in range(4)]
    other = world.fresh(half)
    for task in (whole[2], whole[1], whole[0], first, other + 1):
        world.send(ev.Chosen(task, Choice(half, 0, "", False)))
    assert world.scheduler.tasks[first].spec.demand == ask(gpus=1), "it runs"
    world.done(first)
    assert world.running() == whole[:2]
    world.done(whole[0])
    assert world.running() == whole[1:3]
    world.done(whole[1])
    assert world.running() == [whole[2], other]
    world.done(whole[2])
    world.done(other)
    assert world.running() == [whole[3]]


def test_a_lack_of_cpus_does_not_hold_up_tasks_without_cpus(core: MakeWorld) -> None:
    """Tasks that go on take their CPUs back, even if others have them by now."""
    world = core(gpus=1, cpus=1)
    running = world.fresh(ask(gpus=1))
    waits = world.fresh(ask(gpus=1))
    parent = world.submit(ask(cpus=1))
    world.block(parent, running)
    world.submit(ask(cpus=1), parent=parent)
    world.unblock(parent)
    assert world.scheduler.capacity.cpus < 0
    world.done(running)
    assert waits in world.runs


def reserved(world: World) -> float | None:
    """The share of a device that is kept for somebody."""
    reservation = world.scheduler.queue.reservation
    return None if reservation is None else reservation.line.demand.gpus / UNIT


def test_a_line_forgets_the_tasks_that_have_left_it(core: MakeWorld) -> None:
    world = core(cpus=1)
    tasks = [world.submit() for _ in range(200)]
    for task in tasks[100:190]:
        world.cancel(task)
    for task in tasks[:60]:
        world.finish(task)
        (line,) = world.scheduler.queue.lines.values()
        assert len(line.tasks) <= 2 * line.count
