"""CPUs that waiting tasks lend: which tasks get them, and how many workers there are at most."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpunb.scheduler.resources import UNIT
from gpunb.scheduler.snapshot import snapshot
from gpunb.scheduler.tasks import TaskId
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import World, ask

Children = Callable[[int], int]
"""How many children a task of a level has."""


def work_off(world: World, children: Children, *, count: int | None = None) -> int:
    """Let each task submit its children and wait for all of them or for so many, until nothing is
    left to do. Returns the largest number of workers at once."""
    most, level, waits = 0, dict.fromkeys(world.specs, 0), dict[TaskId, list[TaskId]]()
    while world.runs:
        most = max(most, len(world.live))
        for task in world.running():
            if task in waits:
                over = sum(each in world.settled for each in waits[task])
                if over >= min(count or len(waits[task]), len(waits[task])):
                    world.unblock(task)
                    world.done(task)
            elif number := children(level[task]):
                made = [world.submit(parent=task) for _ in range(number)]
                level.update(dict.fromkeys(made, level[task] + 1))
                waits[task] = made
                world.block(task, *made, count=count)
            else:
                world.done(task)
    return most


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_chains_of_waiting_tasks_need_few_workers(core: MakeWorld, levels: int) -> None:
    world = core(cpus=2)
    for _ in range(30):
        world.submit()
    assert work_off(world, lambda level: level < levels - 1) == 2 * levels
    assert len(world.settled) == 30 * levels


@pytest.mark.parametrize("count", [None, 1])
def test_parents_with_many_children_need_few_workers(core: MakeWorld, count: int | None) -> None:
    """Whether each of them waits for all its children or for one."""
    world = core(cpus=3)
    for _ in range(12):
        world.submit()
    assert work_off(world, lambda level: [10, 2, 0][level], count=count) <= 3 * 3
    assert len(world.settled) == 12 * 31


def test_a_lent_cpu_goes_to_the_child_and_not_to_an_earlier_task(core: MakeWorld) -> None:
    world = core(cpus=1)
    parent, other = world.submit(), world.submit()
    child = world.submit(parent=parent)
    world.block(parent, child)
    assert world.running() == [parent, child]
    world.finish(child)
    assert world.waits(other), "the parent will need its CPU now"
    (view,) = snapshot(world.scheduler, world.now).waiting
    assert view.waits_for is not None
    assert "are lent by tasks that wait, and kept for what they wait for" in view.waits_for
    world.unblock(parent)
    world.finish(parent)
    assert world.running() == [other]


def test_a_cpu_that_is_not_lent_goes_to_the_first_task(core: MakeWorld) -> None:
    world = core(cpus=2)
    parent, busy, other = world.submit(), world.submit(), world.submit()
    children = [world.submit(parent=parent) for _ in range(2)]
    world.block(parent, *children)
    assert world.running() == [parent, busy, children[0]]
    world.finish(busy)
    assert other in world.runs
    assert world.waits(children[1])


@pytest.mark.parametrize("sure", [True, False])
def test_a_lent_cpu_goes_to_a_task_that_is_waited_for(core: MakeWorld, sure: bool) -> None:
    """And to what that task needs, and to its children, whether the wait has a time limit or not.
    All other tasks keep their order."""
    world = core(cpus=1)
    consumer = world.submit()
    others = [world.submit() for _ in range(3)]
    source = world.submit()
    producer = world.submit(needs=[source])
    world.block(consumer, producer, sure=sure)
    assert world.running() == [consumer, source]
    world.finish(source)
    assert world.running() == [consumer, producer]
    child = world.submit(parent=producer)
    world.block(producer, child)
    assert child in world.runs
    world.finish(child)
    world.unblock(producer)
    world.finish(producer)
    world.unblock(consumer)
    world.finish(consumer)
    for other in others:
        assert world.running() == [other]
        world.finish(other)


def test_an_input_of_a_child_gets_the_lent_cpu(core: MakeWorld) -> None:
    world = core(cpus=1)
    parent, other, source = world.submit(), world.submit(), world.submit()
    child = world.submit(parent=parent, needs=[source])
    world.block(parent, child)
    assert world.running() == [parent, source]
    world.finish(source)
    assert world.running() == [parent, child]
    assert world.waits(other)


def test_a_task_that_runs_and_is_waited_for_lends_its_cpu_in_turn(core: MakeWorld) -> None:
    """The first uses the CPU of the second from then on, so that there is one for another task."""
    world = core(cpus=2)
    first, second, third, fourth = [world.submit() for _ in range(4)]
    world.block(first, second)
    assert world.running() == [first, second, third]
    child = world.submit(parent=second)
    world.block(second, child)
    assert world.running() == [first, second, third, child]
    world.finish(child)
    world.unblock(second)
    world.finish(second)
    assert world.waits(fourth)
    world.unblock(first)
    world.finish(first)
    assert world.running() == [third, fourth]


def test_tasks_that_wait_for_each_other_are_no_trouble(core: MakeWorld) -> None:
    world = core(cpus=2)
    first, second = world.submit(), world.submit()
    for _ in range(3):
        world.block(first, second, sure=False)
        world.block(second, first, sure=False)
    world.unblock(first)
    world.unblock(second)


def test_a_waiting_task_with_many_cpus_lends_them_all(core: MakeWorld) -> None:
    world = core(cpus=4)
    parent, small = world.submit(ask(cpus=4)), world.submit()
    children = [world.submit(ask(cpus=2), parent=parent) for _ in range(3)]
    world.block(parent, *children)
    assert world.running() == [parent, *children[:2]]
    world.finish(children[0])
    world.finish(children[1])
    assert world.running() == [parent, children[2]]
    assert world.waits(small), "half of the CPUs are idle, and kept for the parent"


def test_tasks_without_cpus_are_not_held_back(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=1)
    world.block(world.submit())
    assert world.submit(ask()) in world.runs
    assert world.fresh(ask(gpus=1)) in world.runs


# --------------------------------------------------------------- CPUs that are kept for nothing


def test_a_cpu_is_not_kept_while_all_calls_that_a_task_waits_for_run(core: MakeWorld) -> None:
    """As where an actor waits until it has a batch of calls."""
    world = core(cpus=1)
    actor = world.ready_actor(max_concurrency=3)
    tasks = [world.submit() for _ in range(9)]
    for task in tasks[:4]:
        assert task in world.runs
        world.block(task, world.call(actor, parent=task))
    assert world.waits(*tasks[4:]), "the last call waits, and more would wait, too"
    child = world.submit(parent=tasks[0])
    assert child in world.runs


def test_a_cpu_is_not_kept_for_tasks_that_need_none_and_run(core: MakeWorld) -> None:
    world = core(gpus=2, cpus=1)
    tasks = [world.submit() for _ in range(5)]
    for task in tasks[:3]:
        assert task in world.runs
        world.block(task, world.submit(ask(gpus=1), parent=task))
    assert world.waits(*tasks[3:]), "no device is left for what they would start"


def test_a_cpu_is_kept_for_a_task_that_has_just_got_its_result(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=1)
    task, other = world.submit(), world.submit()
    child = world.submit(ask(gpus=1), parent=task)
    world.finish(child)
    world.block(task, child)
    assert world.waits(other)
    world.unblock(task)
    assert world.waits(other)


# ----------------------------------------------------------------------- nothing waits for ever


def test_all_tasks_start_if_each_waits_for_the_last(core: MakeWorld) -> None:
    """The others wait for something that is no task. The pauses between the starts double."""
    world = core(cpus=1, lend_after=0.1, lend_limit=1.0)
    tasks = [world.submit() for _ in range(9)]
    for at, task in enumerate(tasks):
        assert task in world.runs
        world.block(task)
        if at < 8:
            pause = min(0.1 * 2**at, 1.0)
            world.advance(pause * 0.9)
            assert tasks[at + 1] not in world.runs
            world.advance(pause * 0.2)
            assert tasks[at + 1] in world.runs


def test_a_task_of_another_function_goes_before_more_that_would_wait(core: MakeWorld) -> None:
    world = core(cpus=2)
    tasks = [world.submit(function="wait") for _ in range(50)]
    signal = world.submit(function="signal")
    for task in tasks[:2]:
        world.block(task)
    world.advance(0.1)
    assert signal in world.runs
    world.finish(signal)
    assert tasks[2] in world.runs
    assert world.waits(*tasks[3:])


def test_a_cpu_that_was_let_go_is_of_use_to_all_until_its_task_goes_on(core: MakeWorld) -> None:
    world = core(cpus=1)
    parent = world.submit()
    world.block(parent)
    tasks = [world.submit() for _ in range(5)]
    world.advance(0.1)
    for task in tasks:
        assert world.running() == [parent, task]
        world.finish(task)
    world.unblock(parent)
    world.block(parent)
    again = world.submit()
    assert world.waits(again)
    world.advance(0.1)
    assert again in world.runs


def test_short_times_of_an_idle_cpu_add_up(core: MakeWorld) -> None:
    """A task asks again and again whether another has done its part."""
    world = core(cpus=1)
    asks, other = world.submit(), world.submit()
    for _ in range(20):
        world.block(asks)
        world.advance(0.01)
        world.unblock(asks)
        world.advance(0.05)
    assert other in world.runs


def test_children_that_never_end_do_not_hold_up_the_others_for_ever(core: MakeWorld) -> None:
    """The lent CPU is never idle."""
    world = core(cpus=1, age=10)
    parent = world.submit()
    others = [world.submit() for _ in range(3)]
    started = []
    for second in range(45):
        child = world.submit(parent=parent)
        world.block(parent, child)
        started += [(second, each) for each in others if each in world.runs]
        for each in [other for other in others if other in world.runs]:
            world.finish(each)
        world.advance(1)
        world.finish(child)
        world.unblock(parent)
    assert [each for _, each in started] == others[:2]
    assert 9 <= started[0][0] <= 12
    assert 29 <= started[1][0] <= 33


def test_an_old_task_gets_no_reservation_for_lent_cpus(core: MakeWorld) -> None:
    world = core(cpus=1, age=10)
    parent, other = world.submit(), world.submit()
    world.advance(11)
    child = world.submit(parent=parent)
    world.block(parent, child)
    assert world.running() == [parent, child]
    assert world.waits(other)


def test_a_reservation_ends_when_its_task_is_held_back(core: MakeWorld) -> None:
    world = core(cpus=2, age=10)
    parent, busy = world.submit(), world.submit()
    large = world.submit(ask(cpus=2))
    world.advance(11)
    world.finish(busy)
    kept = world.scheduler.queue.reservation
    assert kept is not None
    assert kept.line.demand.cpus == 2 * UNIT
    children = [world.submit(parent=parent) for _ in range(2)]
    assert world.waits(*children)
    world.block(parent, *children)
    assert world.running() == [parent, *children]
    assert world.waits(large)


def test_a_reservation_keeps_no_cpu_from_what_an_actor_waits_for(core: MakeWorld) -> None:
    world = core(cpus=2, age=10)
    actor = world.ready_actor(ask(cpus=1))
    call, busy, old = world.call(actor), world.submit(), world.submit()
    world.advance(11)
    child = world.submit(parent=call)
    assert world.scheduler.queue.reservation is not None
    world.block(call, child)
    assert world.running() == [call, busy, child]
    assert world.waits(old)
    world.finish(busy)
    assert old in world.runs


def test_outdated_timers_of_loans_are_dropped(core: MakeWorld) -> None:
    world = core(cpus=1)
    parent = world.submit()
    world.submit()
    world.checks = False
    for _ in range(3000):
        world.now += 0.00001
        world.block(parent)
        world.now += 0.00001
        world.unblock(parent)
    assert len(world.scheduler.timers.heap) < 1100


# ------------------------------------------------------------------------------------------ actors


def test_an_actor_keeps_its_lent_cpu_for_what_its_calls_wait_for(core: MakeWorld) -> None:
    world = core(cpus=2)
    actor = world.ready_actor(ask(cpus=1), max_concurrency=3)
    calls = [world.call(actor) for _ in range(2)]
    busy, other = world.submit(), world.submit()
    children = [world.submit(parent=call) for call in calls]
    world.block(calls[0], children[0])
    assert world.waits(children[0]), "the other call uses the CPU"
    world.block(calls[1], children[1])
    assert world.running() == [*calls, busy, children[0]]
    world.finish(children[0])
    assert children[1] in world.runs
    assert world.waits(other)


def test_callers_of_a_busy_actor_are_few(core: MakeWorld) -> None:
    world = core(cpus=2)
    actor = world.ready_actor()
    tasks = [world.submit() for _ in range(40)]
    most = 0
    while any(task not in world.settled for task in tasks):
        for task in world.running():
            if task in tasks and task not in world.blocked:
                world.block(task, world.call(actor, parent=task))
        most = max(most, len(world.live))
        world.advance(0.01)
        (call,) = [each for each in world.running() if each in world.calls]
        caller = world.parents[call]
        assert caller is not None
        world.finish(call)
        world.unblock(caller)
        world.finish(caller)
    assert most <= 1 + 2 + 2


# ------------------------------------------------------------------------------- what is left over


@pytest.mark.parametrize("cpus", [1, 2])
def test_after_a_burst_no_more_workers_are_idle_than_cpus(core: MakeWorld, cpus: int) -> None:
    world = core(cpus=cpus)
    for _ in range(10):
        world.submit()
    started = max(world.seen)
    assert work_off(world, lambda level: level < 3) == 4 * cpus
    assert max(world.seen) - started <= 4 * cpus, "workers were ended that were needed again"
    for worker in sorted(world.ending):
        world.exit(worker)
    assert len(world.live) == cpus
    world.advance(60)
    assert set(world.live) == world.ending
