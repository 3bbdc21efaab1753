"""The calls of actors in order, at once and tried again, and their constructors."""

from __future__ import annotations

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import Allocation
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import (
    ActorDied,
    ActorSpec,
    Cancelled,
    Interrupted,
    Raised,
    Refused,
    Succeeded,
    TaskSpec,
    TimedOut,
    UpstreamFailed,
)
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.steps import Id, lines_of
from tests.scheduler.world import acts, ask, machine


def test_actor_runs_its_constructor_then_its_calls_then_ends(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.actor(ask(gpus=0.5))
    given = Allocation((("gpu-0", 5000),))
    assert world.answers[-1] == [ev.Run(actor, 1, 1, given, new=True, last=False)]
    call = world.call(actor)
    assert world.waits(call)
    run = ev.Run(call, 1, 1, given, new=False, last=False)
    assert world.finish(actor) == [ev.Settle(actor, Succeeded()), run]
    assert world.finish(call) == [ev.Settle(call, Succeeded())]
    assert world.free() == [0.5]
    assert acts(world.release(actor)) == [ev.Retire(1)]
    assert world.free() == [0.5]
    world.exit(1)
    assert world.free() == [1.0]


def test_calls_run_one_after_another_in_order(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    calls = [world.call(actor) for _ in range(5)]
    for call in calls:
        assert world.running() == [call]
        world.finish(call)


def test_concurrent_calls_start_in_order(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_concurrency=3)
    calls = [world.call(actor) for _ in range(5)]
    assert world.running() == calls[:3]
    world.finish(calls[1])
    assert world.running() == [calls[0], calls[2], calls[3]]
    world.finish(calls[3])
    assert world.running() == [calls[0], calls[2], calls[4]]


def test_each_group_has_its_own_turns(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(groups=(("io", 2), ("one", 1)))
    groups = ["io", "io", "io", "one", "one", "", "", "unknown"]
    calls = [world.call(actor, group=group) for group in groups]
    assert world.running() == [calls[0], calls[1], calls[3], calls[5]]
    world.finish(calls[5])  # a call of a group that the actor lacks counts among those of none
    assert world.running() == [calls[0], calls[1], calls[3], calls[6]]
    world.finish(calls[6])
    assert world.running() == [calls[0], calls[1], calls[3], calls[7]]
    world.finish(calls[1])
    world.finish(calls[3])
    assert world.running() == [calls[0], calls[2], calls[4], calls[7]]


def test_turns_of_groups_are_free_after_a_crash(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1, groups=(("one", 1),))
    lost = world.call(actor, group="one")
    waiting = world.call(actor, group="one")
    world.exit(1)
    assert lost in world.settled
    world.finish(actor)
    assert world.running() == [waiting]


def test_a_call_that_is_tried_again_takes_one_turn(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(groups=(("one", 1),))
    first = world.call(actor, group="one", retries=1)
    second = world.call(actor, group="one")
    world.finish(first, Raised(retry=True))
    assert world.running() == [first]
    world.finish(first)
    assert world.running() == [second]


def test_a_call_without_its_inputs_holds_up_later_calls_of_its_caller(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    source, caller = world.submit(), world.submit()
    first, second = (world.call(actor, needs=needs, parent=caller) for needs in ([source], []))
    assert world.waits(first, second)
    world.finish(source)
    assert world.running() == [caller, first]
    world.finish(first)
    assert world.running() == [caller, second]


def test_a_call_without_its_inputs_does_not_hold_up_other_callers(core: MakeWorld) -> None:
    """Here the input is there only when a task has called the same actor."""
    world = core()
    actor = world.ready_actor()
    source = world.submit()
    first, second = world.call(actor, needs=[source]), world.call(actor)
    inner = world.call(actor, parent=source)
    assert inner in world.runs
    world.finish(inner)
    assert world.waits(first, second)
    world.finish(source)
    assert world.running() == [first]


def test_the_earliest_call_of_several_callers_runs_first(core: MakeWorld) -> None:
    world = core(cpus=4)
    actor = world.ready_actor()
    callers = [world.submit() for _ in range(3)]
    source = world.submit()
    running = world.call(actor)
    unready = world.call(actor, parent=callers[0], needs=[source])
    calls = [world.call(actor, parent=each) for each in (callers[2], callers[1], callers[2])]
    world.finish(running)
    assert calls[0] in world.runs
    world.finish(source)
    world.finish(calls[0])
    assert unready in world.runs
    world.finish(unready)
    assert calls[1] in world.runs
    world.finish(calls[1])
    assert calls[2] in world.runs


def test_concurrent_calls_do_not_hold_one_another_up(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_concurrency=2)
    source = world.submit()
    first, second, third = (world.call(actor, needs=needs) for needs in ([source], [], []))
    assert world.running() == [source, second, third]
    fourth = world.call(actor)
    world.finish(source)
    world.finish(second)
    assert world.running() == [first, third]
    world.finish(third)
    assert world.running() == [first, fourth]


def test_a_retried_call_runs_before_other_calls_of_its_caller(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    caller = world.submit()
    first = world.call(actor, parent=caller, retries=1)
    other = world.call(actor)
    after = world.call(actor, parent=caller)
    world.crash(first)
    world.finish(actor)
    order = []
    while len(world.runs) > 1:
        (call,) = set(world.runs) - {caller}
        order.append(call)
        world.finish(call)
    assert order == [first, other, after]


@pytest.mark.parametrize("first", ["oldest", "youngest"])
def test_the_cost_of_an_event_does_not_grow_with_the_waiting_calls(first: str) -> None:
    """On average. Each of its own caller, or all of one; started, or cancelled in any order."""
    few, many = cost_of_calls(500, first), cost_of_calls(4000, first)
    assert max(many / few for few, many in zip(few, many, strict=True)) < 1.1


def cost_of_calls(count: int, first: str) -> tuple[float, float]:
    """The lines of Python that it takes to hand in a call, and to cancel one."""
    scheduler = Scheduler(machine(cpus=1))
    spec = TaskSpec("c", ask())
    scheduler.handle(ev.ActorCreated(1, spec, ActorSpec()), 0.0)
    scheduler.handle(ev.Submitted(2, TaskSpec("t", ask(cpus=1))), 0.0)
    scheduler.handle(ev.Submitted(3, TaskSpec("t", ask(cpus=1)), parent=2), 0.0)
    calls = [Id(each) for each in range(10, 10 + count)]

    def submit() -> None:
        for call in calls:
            needs, parent = ((3,), call) if call % 2 else ((), 2)
            scheduler.handle(ev.CallSubmitted(call, 1, spec, needs, parent), 0.0)

    def cancel() -> None:
        for call in reversed(calls) if first == "youngest" else calls:
            scheduler.handle(ev.CancelRequested(call), 0.0)

    costs = lines_of(submit) / count, lines_of(cancel) / count
    calls_ = scheduler.state.actors[1].calls
    assert not calls_._tasks
    assert not calls_._lines
    assert len(calls_._heads) <= 64
    return costs


def test_the_timeout_of_a_call_starts_when_it_runs(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    source = world.submit()
    call = world.call(actor, needs=[source], timeout=10)
    world.advance(100)
    world.finish(source)
    assert acts(world.advance(9)) == []
    assert acts(world.advance(1)) == [ev.Interrupt(1, call, 1)]


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_call_that_will_never_run_lets_the_next_call_start(core: MakeWorld, how: str) -> None:
    world = core()
    actor = world.ready_actor()
    source = world.submit()
    first, second = world.call(actor, needs=[source]), world.call(actor)
    if how == "cancelled":
        world.cancel(first)
        assert world.settled[first] == Cancelled()
    else:
        world.finish(source, Raised())
        assert world.settled[first] == UpstreamFailed(source)
    assert second in world.runs


def test_a_failing_call_does_not_harm_the_actor(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    first, second = world.call(actor), world.call(actor)
    world.finish(first, Raised())
    assert world.settled[first] == Raised()
    world.finish(second)
    assert world.settled[second] == Succeeded()


def test_cancel_of_a_call_cancels_its_child_calls(core: MakeWorld) -> None:
    world = core()
    actor, other = world.ready_actor(), world.ready_actor()
    parent = world.call(actor)
    child = world.call(other, parent=parent)
    assert world.cancel(parent) == [ev.Interrupt(1, parent, 1), ev.Interrupt(2, child, 1)]


def test_an_actor_gets_a_worker_of_its_own(core: MakeWorld) -> None:
    world = core()
    world.finish(world.submit())
    actor = world.actor()
    assert world.worker(actor) == 2
    world.finish(actor)
    world.kill(actor)
    world.exit(2)
    assert world.worker(world.submit()) == 1


def test_a_doubled_submission_of_a_call_changes_nothing(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    first, second = world.call(actor), world.call(actor)
    for call in (first, second):
        assert world.send(ev.CallSubmitted(call, actor, world.specs[call])) == []
    assert world.send(world.log[0][0]) == []
    world.finish(first)
    world.finish(second)
    assert not world.runs


def test_an_actor_lends_its_cpus_while_its_call_is_blocked(core: MakeWorld) -> None:
    world = core(cpus=1)
    actor = world.ready_actor(ask(cpus=1), max_concurrency=2)
    first = world.call(actor)
    task = world.submit()
    assert world.waits(task)
    world.block(first)
    assert world.waits(task), "the CPU is kept for what the call waits for"
    world.advance(0.1)
    assert task in world.runs
    second = world.call(actor)
    assert world.scheduler.capacity.cpus < 0
    world.finish(task)
    assert world.waits(world.submit())
    world.block(second)
    world.advance(0.1)
    assert len(world.runs) == 3


@pytest.mark.parametrize(
    ("report", "outcome", "reason"),
    [
        (Raised(), Raised(), "its constructor failed"),
        (Raised(retry=True), Raised(retry=True), "its constructor failed"),
        (Interrupted(), Cancelled(), "it was cancelled before it was made"),
    ],
)
def test_calls_fail_if_the_constructor_fails(
    core: MakeWorld, report: Raised, outcome: Raised, reason: str
) -> None:
    world = core(gpus=1)
    actor = world.actor(ask(gpus=1), max_restarts=5)
    call = world.call(actor)
    world.finish(actor, report)
    assert world.settled == {actor: outcome, call: ActorDied(actor, reason, actor)}
    assert acts(world.answers[-1])[0] == ev.Retire(1)
    world.exit(1)
    assert world.free() == [1.0]


def test_a_call_that_needs_its_own_constructor_is_settled_once(core: MakeWorld) -> None:
    world = core()
    actor = world.actor()
    call = world.call(actor, needs=[actor])
    world.finish(actor, Raised())
    assert world.settled[call] == UpstreamFailed(actor)


def test_calls_fail_if_an_input_of_the_constructor_fails(core: MakeWorld) -> None:
    world = core()
    source = world.submit()
    actor = world.actor(needs=[source])
    call = world.call(actor)
    world.finish(source, Raised())
    assert world.settled[actor] == UpstreamFailed(source)
    assert world.settled[call] == ActorDied(actor, "its constructor failed", source)


def test_an_actor_that_cannot_fit_is_refused(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.actor(ask(gpus=2))
    assert isinstance(world.settled[actor], Refused)
    assert world.settled[world.call(actor)] == ActorDied(actor, "it has ended")


def test_a_constructor_that_times_out_ends_the_actor(core: MakeWorld) -> None:
    world = core(stop_grace=5)
    actor = world.actor(timeout=10, max_restarts=5)
    call = world.call(actor)
    assert acts(world.advance(10)) == [ev.Interrupt(1, actor, 1)]
    assert acts(world.advance(5)) == [ev.Kill(1)]
    world.exit(1)
    assert world.settled[actor] == TimedOut(10)
    assert world.settled[call] == ActorDied(actor, "its constructor failed", actor)


def test_a_constructor_that_succeeds_after_its_timeout_makes_the_actor(core: MakeWorld) -> None:
    """The result is kept, so the actor lives."""
    world = core()
    actor = world.actor(timeout=10)
    call = world.call(actor)
    world.advance(12)
    world.finish(actor)
    assert world.settled[actor] == Succeeded()
    assert call in world.runs
    assert acts(world.advance(60)) == []
