"""Placement groups: bundles that are placed together or not at all, and the tasks in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.groups import lacks
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import UNIT, Demand, Gang, Within
from gpunb.scheduler.snapshot import snapshot
from gpunb.scheduler.tasks import ActorDied, Crashed, Deadlocked, Refused, Succeeded
from tests.scheduler.world import World, ask, machine

HALF, ONE, TWO = ask(gpus=0.5), ask(gpus=1), ask(gpus=2)


def inside(demand: Demand, group: int, bundle: int = -1) -> Demand:
    return replace(demand, within=Within(group, bundle))


def placed_on(world: World, group: int) -> list[list[int]]:
    """The devices of each bundle."""
    bundles = world.runs[group].allocation.bundles
    return [[int(key.removeprefix("gpu-")) for key, _ in each.shares] for each in bundles]


def held_group(world: World, *bundles: Demand) -> int:
    """A group that is placed."""
    group = world.group(*bundles)
    world.finish(group)
    return group


def test_all_bundles_are_placed_in_one_decision() -> None:
    world = World(machine(gpus=4, cpus=2))
    group = world.group(ONE, ask(gpus=0.5, cpus=1), HALF)
    assert placed_on(world, group) == [[0], [1], [1]]
    assert world.free() == [0, 0, 1, 1]
    assert world.scheduler.capacity.cpus == UNIT


def test_a_group_waits_until_all_its_bundles_fit() -> None:
    world = World(machine(gpus=2))
    first, second = world.fresh(ONE), world.fresh(ONE)
    group = world.group(ONE, ONE)
    world.done(first)
    assert world.waits(group)
    assert world.free() == [1, 0], "a part of the group is held"
    world.done(second)
    assert placed_on(world, group) == [[0], [1]]


def test_a_group_that_waits_says_which_bundle_has_no_place() -> None:
    world = World(machine(gpus=2))
    task = world.fresh(ONE)
    group = world.group(ONE, ONE)
    reason = world.why(group)
    assert reason is not None
    assert "all 2 bundles are placed at once; bundle 1 needs 1 whole GPU; 0 of 2" in reason
    assert f"held by #{task}" in reason
    inner = world.fresh(inside(ONE, group))
    waits = world.why(inner)
    assert waits == f"waits for placement group #{group} to be placed: {reason}"


def test_bundles_with_few_possible_devices_are_placed_first() -> None:
    world = World(machine(gpus=[("A100", 40), ("V100", 16)]))
    group = world.group(ONE, ask(gpus=1, types=("A100",)))
    assert placed_on(world, group) == [[1], [0]]


def test_a_bundle_moves_to_another_device_if_a_later_one_has_no_place_otherwise() -> None:
    world = World(machine(gpus=[("A100", 40), ("V100", 16), ("H100", 80)]))
    first = ask(gpus=1, types=("A100", "V100"))
    group = world.group(first, ask(gpus=1, types=("A100", "H100")), ask(gpus=1, types=("A100",)))
    assert placed_on(world, group) == [[1], [2], [0]]


@pytest.mark.parametrize(
    ("bundles", "text"),
    [
        ([ONE, TWO], "1 x [1 GPU] + 1 x [2 GPU] can never be placed together on this machine"),
        ([ask(gpus=0.6)] * 3, "3 x [0.6 GPU]"),
        ([ask(gpus=3), ONE], "bundle 0 of the placement group: a request for 3 GPU can never"),
        ([ask(cpus=2), ask(cpus=1)], "there are 2 x logical GPU, 2 CPUs"),
    ],
)
def test_a_group_that_is_larger_than_the_machine_is_refused(
    bundles: list[Demand], text: str
) -> None:
    world = World(machine(gpus=2, cpus=2))
    group = world.group(*bundles)
    outcome = world.settled[group]
    assert isinstance(outcome, Refused)
    assert text in outcome.reason


def test_a_session_with_a_limit_of_gpus_refuses_a_larger_group() -> None:
    world = World(machine(gpus=2, most=1.5))
    outcome = world.settled[world.group(ONE, ONE)]
    assert isinstance(outcome, Refused)
    assert "this session may have 1.5 GPUs at once (max_gpus)" in outcome.reason


def test_tasks_run_on_the_devices_of_their_bundle() -> None:
    world = World(machine(gpus=3))
    group = held_group(world, ONE, TWO)
    big = world.fresh(inside(ask(gpus=2), group, 1))
    small = [world.fresh(inside(HALF, group, 0)) for _ in range(3)]
    assert world.gpus(big) == [0, 1]
    assert [world.gpus(task) for task in small[:2]] == [[2], [2]]
    assert world.waits(small[2])
    world.done(small[0])
    assert world.gpus(small[2]) == [2]


def test_a_task_for_any_bundle_takes_the_first_with_room() -> None:
    world = World(machine(gpus=2))
    group = held_group(world, ONE, ONE)
    tasks = [world.fresh(inside(ONE, group)) for _ in range(3)]
    assert [world.gpus(task) for task in tasks[:2]] == [[0], [1]]
    assert world.waits(tasks[2])


def test_tasks_start_only_when_the_group_has_its_lease() -> None:
    world = World(machine(gpus=2))
    group = world.group(ONE)
    task = world.fresh(inside(ONE, group))
    assert world.waits(task)
    world.finish(group)
    assert world.gpus(task) == [0]


def test_a_group_without_a_lease_waits_again() -> None:
    world = World(machine(gpus=2))
    world.peers_hold(0, 1, report=False)
    group = world.group(ONE, ONE)
    assert world.waits(group)
    assert world.free() == [0, 1]
    world.others.clear()
    world.report_peers()
    assert placed_on(world, group) == [[0], [1]]


def test_other_tasks_do_not_run_in_a_bundle() -> None:
    world = World(machine(gpus=1, cpus=1))
    held_group(world, ask(gpus=1, cpus=1))
    assert world.waits(world.fresh(HALF), world.submit())


def test_a_warm_worker_in_a_bundle_is_reused_there_and_makes_room_there() -> None:
    world = World(machine(gpus=1))
    group = held_group(world, ONE)
    first = world.submit(inside(ONE, group), function="f")
    worker = world.worker(first)
    world.finish(first)
    second = world.submit(inside(ONE, group), function="f")
    assert world.worker(second) == worker
    world.finish(second)
    third = world.submit(inside(HALF, group), function="g")
    assert worker in world.ending
    world.exit(worker)
    assert world.gpus(third) == [0]


def test_a_task_that_waits_in_a_bundle_lends_its_cpus_to_tasks_of_the_group_only() -> None:
    world = World(machine(cpus=2))
    group = held_group(world, ask(cpus=1))
    one = ask(cpus=1)
    parent = world.submit(inside(one, group))
    child = world.submit(inside(one, group), parent=parent)
    outside = [world.submit(one), world.submit(one)]
    world.block(parent, child)
    assert child in world.runs
    assert world.waits(outside[1])


def test_a_request_larger_than_its_bundle_is_refused_when_the_group_is_placed() -> None:
    world = World(machine(gpus=[("A100", 40)]))
    group = world.group(HALF)
    task = world.fresh(inside(ask(memory=30), group))
    world.finish(group)
    outcome = world.settled[task]
    assert isinstance(outcome, Refused)
    assert f"in placement group #{group} can never be met" in outcome.reason
    later = world.settled[world.fresh(inside(ask(memory=30), group, 0))]
    assert isinstance(later, Refused)
    assert world.gpus(world.fresh(inside(ask(memory=20), group))) == [0]


@pytest.mark.parametrize(
    ("demand", "bundle", "lacking"),
    [
        (ONE, HALF, True),
        (HALF, ONE, False),
        (ask(cpus=1), ONE, True),
        (ask(gpus=1, cpus=1), ask(gpus=1, cpus=1), False),
        (ask(memory=2), ask(memory=1), True),
        (ask(memory=2), HALF, False),
        (ask(resources={"port": 1}), ONE, True),
        (ONE, ask(cpus=1), True),
        (Demand(), ONE, False),
    ],
)
def test_a_bundle_is_compared_with_a_demand_before_it_is_placed(
    demand: Demand, bundle: Demand, lacking: bool
) -> None:
    assert lacks(demand, bundle) == lacking


def test_a_removed_group_ends_its_tasks_and_then_gives_its_devices_back() -> None:
    world = World(machine(gpus=2))
    group = held_group(world, ONE, HALF)
    running, queued = world.fresh(inside(ONE, group)), world.fresh(inside(ONE, group))
    actor = world.ready_actor(inside(HALF, group), max_restarts=-1)
    worker, home = world.worker(running), world.scheduler.state.actors[actor].worker
    assert home is not None
    world.kill(group)
    assert isinstance(world.settled[queued], ActorDied)
    assert {worker, home} <= world.killed
    assert world.free() == [0, 0.5]
    world.exit(worker)
    world.exit(home)
    assert world.settled[running] == Crashed(f"placement group #{group} was removed")
    assert actor in world.ended
    assert world.free() == [0, 0.5], "its lease is not given back yet"
    (holder,) = world.ending
    world.exit(holder)
    assert world.free() == [1, 1]
    assert group in world.ended


def test_a_removed_group_takes_no_more_tasks() -> None:
    world = World(machine(gpus=1))
    group = held_group(world, ONE)
    task = world.fresh(inside(ONE, group))
    world.kill(group)
    early = world.fresh(inside(HALF, group))
    world.exit(world.worker(task))
    world.exit(next(iter(world.ending)))
    late = world.fresh(inside(HALF, group))
    for each in (early, late):
        assert isinstance(world.settled[each], ActorDied)
    assert world.free() == [1]


def test_a_group_that_still_waits_can_be_removed() -> None:
    world = World(machine(gpus=1))
    world.fresh(ONE)
    group = world.group(ONE)
    task = world.fresh(inside(ONE, group))
    world.kill(group)
    assert isinstance(world.settled[group], ActorDied)
    assert isinstance(world.settled[task], ActorDied)
    assert group in world.ended


def test_a_group_ends_with_its_last_handle() -> None:
    world = World(machine(gpus=1))
    group = held_group(world, ONE)
    world.release(group)
    world.exit(next(iter(world.ending)))
    assert world.free() == [1]
    assert group in world.ended


def test_a_group_that_loses_a_device_ends_with_the_reason() -> None:
    world = World(machine(gpus=2))
    group = held_group(world, ONE, ONE)
    tasks = [world.fresh(inside(ONE, group, at)) for at in (0, 1)]
    waiting = world.fresh(inside(ONE, group))
    workers = [world.worker(task) for task in tasks]
    world.lose(0)
    for worker in workers:
        world.exit(worker)
    for task in tasks:
        outcome = world.settled[task]
        assert isinstance(outcome, Crashed)
        assert "GPU 0 was lost: it fell off the bus" in outcome.reason
    world.exit(next(iter(world.ending)))
    assert isinstance(world.settled[waiting], ActorDied)
    assert group in world.ended
    assert world.scheduler.capacity.shares == [UNIT, UNIT]


def test_a_group_that_has_waited_long_is_not_passed_by_small_tasks_for_ever() -> None:
    world = World(machine(gpus=2))
    running = [world.fresh(ONE), world.fresh(HALF)]
    group = world.group(ONE, HALF, HALF)
    for _ in range(30):
        world.fresh(HALF)
        world.advance(1)
        running = [task for task in world.running() if task != group]
        world.done(running[0])
        if group in world.runs:
            break
    assert group in world.runs


def test_small_tasks_run_on_devices_that_a_group_that_has_waited_long_does_not_need() -> None:
    world = World(machine(gpus=3))
    first = [world.fresh(ONE) for _ in range(3)]
    group = world.group(ONE, ONE)
    world.advance(60)
    world.done(first[0])
    small = [world.fresh(HALF) for _ in range(2)]
    assert world.waits(*small, group)
    world.done(first[1])
    assert placed_on(world, group) == [[0], [1]]
    world.done(first[2])
    assert [world.gpus(task) for task in small] == [[2], [2]]


def test_a_task_that_waits_for_a_group_that_needs_its_device_is_a_deadlock() -> None:
    world = World(machine(gpus=2))
    task = world.fresh(ONE)
    group = world.group(ONE, ONE, parent=task)
    inner = world.fresh(inside(ONE, group), parent=task)
    world.block(task, inner)
    world.advance(10)
    outcome = world.settled[group]
    assert isinstance(outcome, Deadlocked)
    assert f"GPU 0 is held by #{task}" in outcome.reason
    assert isinstance(world.settled[inner], ActorDied)


def test_a_task_that_waits_for_a_group_that_will_be_placed_is_no_deadlock() -> None:
    world = World(machine(gpus=2))
    other = world.fresh(ONE)
    parent = world.submit(Demand())
    group = world.group(ONE, ONE, parent=parent)
    inner = world.fresh(inside(ONE, group), parent=parent)
    world.block(parent, inner)
    world.advance(60)
    assert group not in world.settled
    world.done(other)
    world.finish(group)
    world.done(inner)
    assert world.settled[inner] == Succeeded()


def test_tasks_in_one_bundle_that_wait_for_each_other_are_a_deadlock() -> None:
    world = World(machine(gpus=3))
    group = held_group(world, ONE, ONE)
    parents = [world.fresh(inside(ONE, group, at)) for at in (0, 1)]
    children = [world.fresh(inside(ONE, group), parent=parent) for parent in parents]
    for parent, child in zip(parents, children, strict=True):
        world.block(parent, child)
    world.advance(10)
    assert [isinstance(world.settled.get(child), Deadlocked) for child in children].count(True) == 1


def test_a_task_that_needs_cpus_which_its_parents_group_keeps_is_a_deadlock() -> None:
    world = World(machine(gpus=1, cpus=2))
    group = held_group(world, ask(cpus=1), ONE)
    parent = world.fresh(inside(ONE, group))
    child = world.submit(ask(cpus=2), parent=parent)
    world.block(parent, child)
    world.advance(10)
    reason = f"it needs 2 CPU, and a CPU is held by #{parent} (t{parent}), which waits for it"
    assert world.settled[child] == Deadlocked(reason)


def test_a_group_takes_no_calls() -> None:
    world = World(machine(gpus=1))
    group = held_group(world, ONE)
    world.checks = False
    assert world.settled[world.call(group)] == ActorDied(group, "it has ended")


def test_the_picture_shows_the_devices_of_a_group_as_held() -> None:
    world = World(machine(gpus=2))
    group = held_group(world, ONE, HALF)
    task = world.fresh(inside(HALF, group))
    view = snapshot(world.scheduler, world.now)
    assert [device.held for device in view.devices] == [
        ((group, 0.5), (task, 0.5)),
        ((group, 0.5),),
    ]
    assert view.available == {"CPU": 2.0, "GPU": 0.5}
    (actor,) = view.actors
    assert (actor.id, actor.state) == (group, "alive")
    assert actor.gpus == ((0, 1.0), (1, 0.5))


def test_a_group_claims_what_other_sessions_hold() -> None:
    world = World(machine(gpus=2))
    world.peers_hold(1, 1)
    group = world.group(ONE, ONE)
    assert world.claim == (("gpu-1", UNIT),)
    world.others.clear()
    world.report_peers()
    assert group in world.runs


def test_the_search_for_a_place_ends_soon() -> None:
    capacity = Capacity(machine(gpus=8, cpus=8))
    capacity.shares = [4000] * 8
    asked = capacity.place
    calls = []
    capacity.copy = lambda: _counting(capacity, calls)  # type: ignore[method-assign]
    assert asked(Gang.of([ask(gpus=0.3)] * 8 + [ask(gpus=0.2)])) is None
    assert len(calls) < 2000


def _counting(capacity: Capacity, calls: list[Demand]) -> Capacity:
    copy = Capacity.copy(capacity)
    place = copy.place

    def counted(demand: Demand, *more: object) -> object:
        calls.append(demand)
        return place(demand, *more)  # type: ignore[arg-type]

    copy.place = counted  # type: ignore[method-assign, assignment]
    return copy


def test_an_event_of_a_group_that_is_gone_changes_nothing() -> None:
    world = World(machine(gpus=1))
    group = held_group(world, ONE)
    world.kill(group)
    world.kill(group)
    world.exit(next(iter(world.ending)))
    assert world.kill(group) == []
    assert world.release(group) == []
    assert world.send(ev.WorkerExited(1, "again")) == []
