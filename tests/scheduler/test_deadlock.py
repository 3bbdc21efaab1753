"""Deadlocks: found where there are any, and nowhere else, and said in words."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from gpunb.scheduler import events as ev
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import ActorDied, Deadlocked, Raised, TaskId, TaskSpec, UpstreamFailed
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.steps import Id, lines_of
from tests.scheduler.world import World, acts, ask, machine

EXAMPLES = int(os.environ.get("GPUNB_EXAMPLES") or 400)


def deadlocked(world: World) -> list[TaskId]:
    """The tasks that gave way, in the order in which they did."""
    return [task for task, end in world.settled.items() if isinstance(end, Deadlocked)]


def reason(world: World, task: TaskId) -> str:
    outcome = world.settled[task]
    assert isinstance(outcome, Deadlocked)
    return outcome.reason


# ---------------------------------------------------------------------------------------- devices


def test_a_child_that_needs_the_device_of_its_waiting_parent_is_deadlocked(core: MakeWorld) -> None:
    world = core(gpus=1, deadlock_after=0.25)
    parent = world.fresh(ask(gpus=1))
    child = world.fresh(ask(gpus=1), parent=parent)
    assert world.block(parent, child) == [ev.WakeAt(0.25)]
    assert acts(world.advance(0.24)) == []
    (settled,) = acts(world.advance(0.01))
    assert settled == ev.Settle(
        child, Deadlocked("it needs 1 GPU, and GPU 0 is held by #1 (t1), which waits for it")
    )
    world.unblock(parent)
    world.finish(parent)


def test_only_a_child_that_does_not_fit_beside_its_parent_is_deadlocked(core: MakeWorld) -> None:
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=0.5))
    fits, large = (world.fresh(ask(gpus=share), parent=parent) for share in (0.5, 0.6))
    world.block(parent, fits, large)
    world.advance(1)
    assert deadlocked(world) == [large]
    assert "it needs 0.6 GPU, and GPU 0 is held by #1 (t1)" in reason(world, large)
    assert fits in world.runs


def test_a_child_is_not_deadlocked_while_another_task_can_free_a_device(core: MakeWorld) -> None:
    """Others hold the second device, and will give it back."""
    world = core(gpus=2)
    parent, other = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    child = world.fresh(ask(gpus=1), parent=parent)
    world.block(parent, child)
    assert acts(world.advance(100)) == []
    world.done(other)
    assert child in world.runs


def test_devices_of_idle_workers_cause_no_deadlock(core: MakeWorld) -> None:
    world = core(gpus=2, idle_limit=1000)
    parent = world.submit(ask(gpus=1), function="f")
    world.finish(world.submit(ask(gpus=1), function="g"))
    child = world.submit(ask(gpus=1), function="h", parent=parent)
    world.block(parent, child)
    assert world.waits(child)
    world.advance(1)
    assert deadlocked(world) == []


def test_cpus_are_lent_and_deadlock_nobody(core: MakeWorld) -> None:
    world = core(cpus=1)
    chain = [world.submit()]
    for _ in range(5):
        chain.append(world.submit(parent=chain[-1]))
        world.block(chain[-2], chain[-1])
    blocked = world.submit(parent=chain[-1])
    assert world.waits(blocked)
    world.advance(100)
    assert deadlocked(world) == []


def test_custom_resources_are_not_lent(core: MakeWorld) -> None:
    world = core(cpus=2, resources={"port": 2})
    parents = [world.submit(ask(cpus=1, resources={"port": 1})) for _ in range(2)]
    child = world.submit(ask(cpus=1, resources={"port": 2}), parent=parents[0])
    world.block(parents[0], child)
    world.advance(10)
    assert reason(world, child) == (
        "it needs 2 port, and 'port' is held by #1 (t1), which waits for it"
    )


def test_the_last_submitted_task_of_a_deadlock_ends(core: MakeWorld) -> None:
    """Two hold what the other's child needs."""
    world = core(gpus=2)
    parents = [world.fresh(ask(gpus=1)) for _ in range(2)]
    children = [world.fresh(ask(gpus=1), parent=parent) for parent in parents]
    for parent, child in zip(parents, children, strict=True):
        world.block(parent, child)
    world.advance(0.25)
    assert deadlocked(world) == [children[1]]
    assert reason(world, children[1]) == (
        "it needs 1 GPU, and GPU 0 is held by #1 (t1) and GPU 1 by #2 (t2), which wait for it"
    )
    world.unblock(parents[1])
    world.done(parents[1])
    assert children[0] in world.runs
    world.advance(100)
    assert deadlocked(world) == [children[1]]


def test_many_holders_are_counted(core: MakeWorld) -> None:
    world = core(gpus=7)
    parents = [world.fresh(ask(gpus=1)) for _ in range(7)]
    child = world.fresh(ask(gpus=7))
    for parent in parents:
        world.block(parent, child)
    world.advance(1)
    assert reason(world, child) == (
        "it needs 7 GPU, and GPU 0 is held by #1 (t1), GPU 1 by #2 (t2), GPU 2 by #3 (t3), "
        "GPU 3 by #4 (t4) and 3 more by others, which wait for it"
    )


def test_one_task_of_a_deadlock_ends_at_a_time(core: MakeWorld) -> None:
    """The parent may take the first failure for its own, and make room for the other children."""
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    children = [world.fresh(ask(gpus=1), parent=parent) for _ in range(3)]
    world.block(parent, *children)
    world.advance(0.25)
    assert deadlocked(world) == children[2:]
    world.unblock(parent)
    world.done(parent, Raised())
    assert children[0] in world.runs


def test_all_children_that_need_the_device_of_their_parent_end(core: MakeWorld) -> None:
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    children = [world.fresh(ask(gpus=1), parent=parent) for _ in range(3)]
    world.block(parent, *children)
    world.advance(10)
    assert deadlocked(world) == children[::-1]


def test_no_deadlock_if_enough_of_the_awaited_tasks_can_end(core: MakeWorld) -> None:
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    lacks, runs = world.fresh(ask(gpus=1)), world.submit()
    world.block(parent, lacks, runs, count=1)
    world.advance(10)
    assert deadlocked(world) == []
    world.block(parent, lacks, runs, count=2)
    world.advance(10)
    assert deadlocked(world) == [lacks]


def test_only_tasks_on_the_cycle_end(core: MakeWorld) -> None:
    """The child that came last waits only for the device of the one that is deadlocked."""
    world = core(gpus=1, cpus=4)
    holder, other = world.fresh(ask(gpus=1)), world.submit()
    cause = world.fresh(ask(gpus=1), parent=holder)
    bystander = world.fresh(ask(gpus=1), parent=other)
    world.block(holder, cause)
    world.block(other, bystander)
    world.advance(10)
    assert deadlocked(world) == [cause]
    world.unblock(holder)
    world.done(holder)
    assert bystander in world.runs


def test_two_deadlocks_at_once(core: MakeWorld) -> None:
    world = core([("A", 1), ("B", 1)], cpus=4)
    parents = [world.fresh(ask(gpus=1, types=(kind,))) for kind in "AB"]
    children = [world.fresh(ask(gpus=1, types=(kind,))) for kind in "AB"]
    for parent, child in zip(parents, children, strict=True):
        world.block(parent, child)
    world.advance(0.25)
    assert sorted(deadlocked(world)) == children
    assert "type B, and GPU 1 is held by #2 (t2)" in reason(world, children[1])


def test_a_deadlock_through_the_inputs_of_tasks_is_found(core: MakeWorld) -> None:
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    first = world.fresh(ask(gpus=1), parent=parent)
    second = world.submit(needs=[first])
    third = world.submit(needs=[second])
    world.block(parent, third)
    world.advance(1)
    assert deadlocked(world) == [first]
    assert world.settled[third] == UpstreamFailed(second)


def test_a_deadlocked_task_ends_before_its_inputs_are_there(core: MakeWorld) -> None:
    """It is certain before the inputs are there."""
    world = core(gpus=1)
    parent, source = world.fresh(ask(gpus=1)), world.submit()
    child = world.fresh(ask(gpus=1), parent=parent, needs=[source])
    world.block(parent, child)
    world.advance(1)
    assert deadlocked(world) == [child]


def test_a_deadlock_through_blocked_tasks_is_found(core: MakeWorld) -> None:
    """The task that holds the device waits for one that waits for one that needs the device."""
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    middle = world.submit(parent=parent)
    child = world.fresh(ask(gpus=1), parent=middle)
    world.block(parent, middle)
    world.block(middle, child)
    world.advance(1)
    assert reason(world, child) == (
        "it needs 1 GPU, and GPU 0 is held by #1 (t1), which waits for it"
    )


@pytest.mark.parametrize("how", ["on nothing", "a time-out", "cancelled", "killed", "enough"])
def test_no_deadlock_if_the_wait_ends_by_itself(core: MakeWorld, how: str) -> None:
    world = core(gpus=1, stop_grace=1000)
    parent = world.fresh(ask(gpus=1), timeout=500 if how == "a time-out" else None)
    child = world.fresh(ask(gpus=1))
    if how == "on nothing":
        world.block(parent)
    else:
        world.block(parent, child, count=0 if how == "enough" else 1)
    if how in ("cancelled", "killed"):
        world.cancel(parent, force=how == "killed", recursive=False)
    assert acts(world.advance(100)) == []


def test_finished_and_unknown_tasks_count_as_over(core: MakeWorld) -> None:
    world = core(gpus=1)
    over = world.submit()
    world.finish(over)
    parent = world.fresh(ask(gpus=1))
    child = world.fresh(ask(gpus=1))
    world.block(parent, over, 999, child, count=2)
    world.advance(10)
    assert deadlocked(world) == []


def test_a_wait_that_something_else_may_end_is_no_deadlock(core: MakeWorld) -> None:
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    child = world.fresh(ask(gpus=1), parent=parent)
    world.block(parent, child, sure=False)
    world.advance(60)
    assert world.waits(child)
    world.block(parent, child)
    world.advance(1)
    assert isinstance(world.settled[child], Deadlocked)


def test_the_last_blocked_event_counts(core: MakeWorld) -> None:
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    child = world.fresh(ask(gpus=1))
    world.block(parent, child)
    world.block(parent)
    world.advance(10)
    assert deadlocked(world) == []
    world.block(parent, child)
    world.unblock(parent)
    world.advance(10)
    assert deadlocked(world) == []


# ----------------------------------------------------------------------------------------- actors


def test_a_call_that_waits_for_another_call_of_its_actor_is_deadlocked(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    outer = world.call(actor)
    inner, after = world.call(actor, parent=outer), world.call(actor)
    world.block(outer, inner)
    world.advance(1)
    assert deadlocked(world) == [inner]
    assert reason(world, inner) == (
        "it needs its turn in actor #1 (a1), which is taken by #2 (c2), which waits for it"
    )
    world.unblock(outer)
    world.finish(outer)
    assert after in world.runs


def test_a_call_may_wait_for_another_if_several_run_at_once(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_concurrency=2)
    outer, source = world.call(actor), world.submit()
    inner = world.call(actor, parent=outer, needs=[source])
    world.block(outer, inner)
    world.advance(1)
    assert deadlocked(world) == []
    world.finish(source)
    assert inner in world.runs
    innermost = world.call(actor, parent=inner)
    world.block(inner, innermost)
    world.advance(1)
    assert deadlocked(world) == [innermost]


def test_other_calls_of_a_waiting_actor_go_on(core: MakeWorld) -> None:
    """What the actor holds stays held as long as one of its calls waits; what they may let go of
    does not."""
    world = core(gpus=2)
    actor, other = world.ready_actor(ask(gpus=1), max_concurrency=9), world.ready_actor(ask(gpus=1))
    world.call(actor)
    call = world.call(actor)
    fits, never = world.fresh(ask(gpus=1), parent=call), world.fresh(ask(gpus=2), parent=call)
    world.block(call, fits, never, count=1)
    world.advance(1)
    assert deadlocked(world) == []
    world.block(call, never)
    world.advance(1)
    assert deadlocked(world) == [never]
    world.release(other)
    world.exit(2)
    assert fits in world.runs


def test_two_actors_that_call_each_other_are_deadlocked(core: MakeWorld) -> None:
    world = core()
    first, second = world.ready_actor(), world.ready_actor()
    there = world.call(first)
    back = world.call(second, parent=there)
    world.block(there, back)
    again = world.call(first, parent=back)
    world.block(back, again)
    world.advance(1)
    assert deadlocked(world) == [again]


def test_a_deadlock_through_the_order_of_calls_is_found(core: MakeWorld) -> None:
    """The first call lacks what its caller holds, and the second has to wait for the first."""
    world = core(gpus=1)
    actor = world.ready_actor()
    caller = world.fresh(ask(gpus=1))
    source = world.fresh(ask(gpus=1))
    world.call(actor, parent=caller, needs=[source])
    second = world.call(actor, parent=caller)
    world.block(caller, second)
    world.advance(1)
    assert deadlocked(world) == [source]
    assert second in world.runs


def test_an_actor_holds_its_device_while_a_call_of_it_waits(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1))
    call = world.call(actor)
    child = world.fresh(ask(gpus=1), parent=call)
    world.block(call, child)
    world.advance(1)
    assert reason(world, child) == (
        "it needs 1 GPU, and GPU 0 is held by actor #1 (a1), which waits for it"
    )


def test_an_actor_without_calls_causes_no_deadlock(core: MakeWorld) -> None:
    world = core(gpus=2)
    actor = world.ready_actor(ask(gpus=1))
    parent = world.fresh(ask(gpus=1))
    child = world.fresh(ask(gpus=1), parent=parent)
    world.block(parent, child)
    assert acts(world.advance(100)) == []
    world.release(actor)
    world.exit(1)
    assert child in world.runs


def test_an_actor_that_needs_the_device_of_its_caller_is_deadlocked(core: MakeWorld) -> None:
    world = core(gpus=1)
    parent = world.fresh(ask(gpus=1))
    actor = world.actor(ask(gpus=1), parent=parent)
    call = world.call(actor, parent=parent)
    world.block(parent, call)
    world.advance(1)
    held = "it needs 1 GPU, and GPU 0 is held by #1 (t1), which waits for it"
    assert world.settled[actor] == Deadlocked(held)
    died = ActorDied(actor, f"it could not be made: {held}", actor)
    assert world.settled[call] == world.ended[actor] == died


def test_an_actor_that_cannot_restart_is_deadlocked(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=4)
    actor = world.ready_actor(ask(gpus=1), max_restarts=1)
    waits = world.fresh(ask(gpus=1))
    world.exit(1, "killed by signal 11")
    assert world.runs[actor].attempt == 2
    world.exit(2, "killed by signal 11")
    assert waits in world.runs
    actor = world.actor(ask(gpus=1), max_restarts=1)
    call = world.call(actor, parent=waits)
    world.block(waits, call)
    world.advance(1)
    assert isinstance(world.settled[call], ActorDied)
    assert actor in world.ended


# ------------------------------------------------------------------------------------------- time


def test_checks_for_deadlocks_become_less_frequent(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=2, deadlock_after=0.25)
    parent, running = world.fresh(ask(gpus=1)), world.submit()
    waits = world.fresh(ask(gpus=1))
    world.block(parent, running)
    looks = []
    while world.now < 30:
        assert world.wake is not None
        world.advance(world.wake - world.now)
        looks.append(world.now)
    assert looks[:7] == [0.25, 0.75, 1.75, 3.75, 7.75, 12.75, 17.75]
    world.finish(running)
    world.unblock(parent)
    assert world.scheduler.timers.deadlock_check is None
    world.block(parent, waits)
    assert world.scheduler.timers.deadlock_check == world.now + 0.25


def test_no_check_is_due_while_no_deadlock_is_possible(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=2)
    parent = world.fresh(ask(gpus=1))
    child = world.submit(parent=parent)
    assert world.block(parent, child) == []
    world.fresh(ask(gpus=1))
    assert world.answers[-1] == [ev.WakeAt(0.25)]
    world.done(parent)
    assert world.scheduler.timers.deadlock_check is None


def test_outdated_timers_of_checks_are_dropped(core: MakeWorld) -> None:
    world = core(cpus=1)
    parent = world.submit()
    world.checks = False
    for _ in range(3000):
        world.now += 0.001
        child = world.submit(parent=parent)
        world.block(parent, child)
        world.submit(parent=parent)
        world.finish(child)
        world.unblock(parent)
        world.finish(max(world.runs))
    assert len(world.scheduler.timers.heap) < 1100
    wakes = [each for answer in world.answers for each in answer if isinstance(each, ev.WakeAt)]
    assert len(wakes) < 5


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_cost_of_a_check_grows_no_faster_than_the_waiting_tasks(share: float) -> None:
    """Whether the children fit or all lack the parent's device."""
    assert cost_of_check(4000, share) < 1.1 * cost_of_check(500, share)


def cost_of_check(count: int, share: float) -> float:
    """The lines of Python that it takes for each of so many waiting tasks."""
    scheduler = Scheduler(machine(gpus=1, cpus=1), Policy(age=1e9))
    device, child = TaskSpec("d", ask(gpus=1), max_calls=1), TaskSpec("c", ask(gpus=share, cpus=1))
    scheduler.handle(ev.Submitted(0, device), 0.0)
    scheduler.handle(ev.Submitted(1, device), 0.0)
    children = tuple(Id(each) for each in range(2, count))
    for each in children:
        scheduler.handle(ev.Submitted(each, child, parent=0), 0.0)
    scheduler.handle(ev.Blocked(0, 1, children, len(children)), 0.0)
    decisions: list[ev.Decision] = []
    lines = lines_of(lambda: decisions.extend(scheduler.handle(ev.TimeReached(), 0.25)))
    settled = [each.task for each in decisions if isinstance(each, ev.Settle)]
    assert settled == ([count - 1] if share else [])
    return lines / count


# -------------------------------------------------------------------------------------- any order

MACHINES = [
    machine(gpus=1, cpus=2),
    machine(gpus=2, cpus=2, resources={"port": 1}),
    machine(gpus=3, cpus=1, resources={"port": 2}),
]
DEMANDS = [
    ask(gpus=1),
    ask(gpus=0.5),
    ask(gpus=0.6, cpus=1),
    ask(cpus=1),
    ask(resources={"port": 1}),
    ask(gpus=1, resources={"port": 1}),
    ask(gpus=2),
]

index = st.integers(min_value=0, max_value=20)
step = st.tuples(
    st.sampled_from(["task", "task", "task", "actor", "call", "call", "finish"]),
    index,
    st.sampled_from([None, 0, 1, 2, 3]),
    st.sampled_from([None, None, None, 0, 1, 2]),
    st.sampled_from([0, 0, 1, 2]),
)


def act(
    world: World, actors: list[int], what: tuple[str, int, int | None, int | None, int]
) -> None:
    """A task hands something in and waits for that, and perhaps for more that it handed in."""
    kind, at, by, need, enough = what
    running = world.running()
    parent = running[by % len(running)] if running and by is not None else None
    if kind == "finish":
        if parent is not None and parent not in world.blocked:
            world.done(parent)
        return
    open_ = sorted(set(world.specs) - set(world.settled) - set(running))
    needs = (open_[need % len(open_)],) if open_ and need is not None else ()
    demand = DEMANDS[at % len(DEMANDS)]
    if kind == "task" or (kind == "call" and not actors):
        world.fresh(demand, parent=parent, needs=needs)
    elif kind == "actor":
        concurrency = 1 + at % 2
        groups = (("one", 1), ("two", 2))[: at % 3]
        actor = world.actor(
            demand, parent=parent, needs=needs, max_concurrency=concurrency, groups=groups
        )
        if actor not in world.ended:
            actors.append(actor)
    else:
        group = ("", "one", "two")[at // len(actors) % 3]
        world.call(actors[at % len(actors)], parent=parent, needs=needs, group=group)
    children = [
        each for each in world.specs if parent is not None and world.parents[each] == parent
    ]
    waits = [each for each in children if each not in world.settled]
    if parent is not None and waits and at % 4:
        world.block(parent, *waits, count=max(1, len(waits) - enough))


@settings(
    max_examples=EXAMPLES,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(MACHINES), st.lists(step, min_size=4, max_size=30))
def test_no_runnable_task_is_ended_and_no_task_waits_for_ever(
    on: object, steps: list[tuple[str, int, int | None, int | None, int]]
) -> None:
    """`World` checks of each task that gives way that it could never have run. In the end all
    that is left comes to its end by itself."""
    world = World(on, Policy(age=3, stop_grace=2, exit_grace=2))  # type: ignore[arg-type]
    actors: list[int] = []
    for each in steps:
        act(world, actors, each)
    world.advance(60)
    world.play_on(kill=True)
    assert not world.scheduler.tasks, "some wait for ever"
    assert set(world.settled) == set(world.specs)
