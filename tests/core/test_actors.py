"""The lives of actors: calls in order, concurrency, restarts, and every way to end."""

from __future__ import annotations

import time

import pytest

from gpunb.core import events as ev
from gpunb.core.resources import Allocation
from gpunb.core.scheduler import Scheduler
from gpunb.core.snapshot import snapshot
from gpunb.core.tasks import (
    ActorDied,
    ActorSpec,
    ActorUnavailable,
    Cancelled,
    Crashed,
    Exited,
    Interrupted,
    Raised,
    Refused,
    Succeeded,
    TaskSpec,
    TimedOut,
    UpstreamFailed,
)
from tests.core.conftest import MakeWorld
from tests.core.world import acts, ask, machine


def killed(actor: int) -> ActorDied:
    return ActorDied(actor, "it was killed")


def crashed(actor: int) -> ActorDied:
    return ActorDied(actor, "killed by signal 11")


def lost(actor: int) -> ActorUnavailable:
    return ActorUnavailable(actor, "killed by signal 11")


# ------------------------------------------------------------------------------------------- calls


def test_the_life_of_an_actor(core: MakeWorld) -> None:
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


def test_a_call_without_its_inputs_lets_none_of_its_caller_pass(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    source, caller = world.submit(), world.submit()
    first, second = (world.call(actor, needs=needs, parent=caller) for needs in ([source], []))
    assert world.waits(first, second)
    world.finish(source)
    assert world.running() == [caller, first]
    world.finish(first)
    assert world.running() == [caller, second]


def test_a_call_without_its_inputs_lets_other_callers_pass(core: MakeWorld) -> None:
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


def test_of_several_callers_the_earliest_call_is_first(core: MakeWorld) -> None:
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


def test_a_call_that_is_tried_again_is_the_first_of_its_caller(core: MakeWorld) -> None:
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
def test_many_waiting_calls_cost_nothing(core: MakeWorld, first: str) -> None:
    """Each of its own caller, or all of one; started, or cancelled in any order."""
    scheduler = Scheduler(machine(cpus=1))
    spec = TaskSpec("c", ask())
    scheduler.handle(ev.ActorCreated(1, spec, ActorSpec()), 0.0)
    scheduler.handle(ev.Submitted(2, TaskSpec("t", ask(cpus=1))), 0.0)
    scheduler.handle(ev.Submitted(3, TaskSpec("t", ask(cpus=1)), parent=2), 0.0)
    count = 20_000
    calls = range(10, 10 + count)
    for call in calls:
        needs, parent = ((3,), call) if call % 2 else ((), 2)
        scheduler.handle(ev.CallSubmitted(call, 1, spec, needs, parent), 0.0)
    slowest = 0.0
    for call in reversed(calls) if first == "youngest" else calls:
        start = time.perf_counter()
        scheduler.handle(ev.CancelRequested(call), 0.0)
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 0.5
    calls_ = scheduler.actors.book[1].calls
    assert not calls_._tasks
    assert not calls_._lines
    assert len(calls_._heads) <= 64


def test_the_time_of_a_call_starts_when_it_runs(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    source = world.submit()
    call = world.call(actor, needs=[source], timeout=10)
    world.advance(100)
    world.finish(source)
    assert acts(world.advance(9)) == []
    assert acts(world.advance(1)) == [ev.Interrupt(1, call, 1)]


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_calls_behind_one_that_will_never_run(core: MakeWorld, how: str) -> None:
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


def test_calls_of_a_call(core: MakeWorld) -> None:
    world = core()
    actor, other = world.ready_actor(), world.ready_actor()
    parent = world.call(actor)
    child = world.call(other, parent=parent)
    assert world.cancel(parent) == [ev.Interrupt(1, parent, 1), ev.Interrupt(2, child, 1)]


def test_actors_do_not_use_workers_of_others(core: MakeWorld) -> None:
    world = core()
    world.finish(world.submit())
    actor = world.actor()
    assert world.worker(actor) == 2
    world.finish(actor)
    world.kill(actor)
    world.exit(2)
    assert world.worker(world.submit()) == 1


def test_a_doubled_call(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    first, second = world.call(actor), world.call(actor)
    for call in (first, second):
        assert world.send(ev.CallSubmitted(call, actor, world.specs[call])) == []
    assert world.send(world.log[0][0]) == []
    world.finish(first)
    world.finish(second)
    assert not world.runs


def test_a_call_blocks_and_lends_what_the_actor_holds(core: MakeWorld) -> None:
    world = core(cpus=1)
    actor = world.ready_actor(ask(cpus=1), max_concurrency=2)
    first = world.call(actor)
    task = world.submit()
    assert world.waits(task)
    world.block(first)
    assert task in world.runs
    second = world.call(actor)
    assert world.scheduler.capacity.cpus < 0
    world.finish(task)
    assert world.waits(world.submit())
    world.block(second)
    assert len(world.runs) == 3


# ---------------------------------------------------------------------------------------- restarts


def test_restart(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1), max_restarts=1)
    running, waiting = world.call(actor), world.call(actor)
    world.crash(running)
    assert world.settled[running] == lost(actor)
    assert world.runs[actor].attempt == 2
    assert world.runs[actor].worker == 2
    assert world.waits(waiting)
    assert world.finish(actor)[0] == ev.Run(
        waiting, 1, 2, Allocation((("gpu-0", 10_000),)), new=False, last=False
    )
    world.crash(waiting)
    assert world.settled[waiting] == crashed(actor)
    assert world.settled[world.call(actor)] == ActorDied(actor, "it has ended")
    assert world.free() == [1.0]


def test_restart_waits_for_room(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=0.5), max_restarts=-1)
    other = world.fresh(ask(gpus=0.5))
    first = world.fresh(ask(gpus=0.6))
    world.exit(1, "crash")
    assert actor in world.runs
    assert world.waits(first)
    world.done(other)


def test_calls_in_flight_are_tried_again_in_order(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=-1, max_concurrency=3)
    calls = [world.call(actor, retries=1) for _ in range(5)]
    world.exit(1, "killed by signal 11")
    assert world.running() == [actor]
    assert snapshot(world.scheduler, world.now).queued == 5
    runs = [each for each in world.finish(actor) if isinstance(each, ev.Run)]
    assert [(run.task, run.attempt) for run in runs] == [(call, 2) for call in calls[:3]]
    world.exit(2, "killed by signal 11")
    assert [world.settled[call] for call in calls[:3]] == [lost(actor)] * 3
    world.finish(actor)
    assert world.running() == calls[3:]
    assert [world.runs[call].attempt for call in calls[3:]] == [1, 1]


def test_exceptions_of_calls_are_retried_if_they_are_to_be(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    call, after = world.call(actor, retries=1), world.call(actor)
    world.finish(call, Raised(retry=True))
    assert world.running() == [call]
    assert world.runs[call].attempt == 2
    world.finish(call, Raised(retry=True))
    assert world.settled[call] == Raised(retry=True)
    assert world.running() == [after]


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_constructor_that_crashes(core: MakeWorld, restarts: int) -> None:
    world = core()
    actor = world.actor(max_restarts=restarts)
    call = world.call(actor)
    for _ in range(restarts):
        world.crash(actor)
        assert actor not in world.settled
    world.crash(actor)
    assert world.settled[actor] == Crashed("killed by signal 11")
    reason = "its process ended while it was made: killed by signal 11"
    assert world.settled[call] == ActorDied(actor, reason, actor)


def test_a_constructor_that_fails_after_a_restart(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1), max_restarts=5)
    call = world.call(actor)
    world.crash(call)
    waiting = world.call(actor)
    world.finish(actor, Raised())
    assert world.settled[waiting] == ActorDied(actor, "its constructor failed", actor)
    assert acts(world.answers[-1])[0] == ev.Retire(2)
    assert world.settled[actor] == Succeeded()
    world.exit(2)
    assert world.free() == [1.0]


def test_a_restart_that_crashes(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    world.exit(1, "killed by signal 11")
    waiting = world.call(actor)
    world.crash(actor)
    assert world.settled[waiting] == crashed(actor)
    assert not world.scheduler.actors.book


def test_a_session_survives_an_interrupt(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    call, after = world.call(actor), world.call(actor)
    assert world.interrupt(after) == [ev.Settle(after, Cancelled())]
    assert world.interrupt(call) == [ev.Interrupt(1, call, 1)]
    world.finish(call, Interrupted())
    assert world.settled[call] == Cancelled()
    assert world.call(actor) in world.runs


def test_a_doubled_exit_restarts_once(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    world.exit(1)
    assert world.exit(1) == []
    assert world.runs[actor].worker == 2


# ------------------------------------------------------------------------------------ constructors


@pytest.mark.parametrize(
    ("report", "outcome", "reason"),
    [
        (Raised(), Raised(), "its constructor failed"),
        (Raised(retry=True), Raised(retry=True), "its constructor failed"),
        (Interrupted(), Cancelled(), "it was cancelled before it was made"),
    ],
)
def test_a_constructor_that_fails(
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


def test_a_constructor_whose_input_fails(core: MakeWorld) -> None:
    world = core()
    source = world.submit()
    actor = world.actor(needs=[source])
    call = world.call(actor)
    world.finish(source, Raised())
    assert world.settled[actor] == UpstreamFailed(source)
    assert world.settled[call] == ActorDied(actor, "its constructor failed", source)


def test_an_actor_that_can_never_be_made(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.actor(ask(gpus=2))
    assert isinstance(world.settled[actor], Refused)
    assert world.settled[world.call(actor)] == ActorDied(actor, "it has ended")


def test_a_constructor_that_takes_too_long(core: MakeWorld) -> None:
    world = core(stop_grace=5)
    actor = world.actor(timeout=10, max_restarts=5)
    call = world.call(actor)
    assert acts(world.advance(10)) == [ev.Interrupt(1, actor, 1)]
    assert acts(world.advance(5)) == [ev.Kill(1)]
    world.exit(1)
    assert world.settled[actor] == TimedOut(10)
    assert world.settled[call] == ActorDied(actor, "its constructor failed", actor)


def test_a_constructor_that_is_done_after_the_interrupt(core: MakeWorld) -> None:
    """The result is kept, so the actor lives."""
    world = core()
    actor = world.actor(timeout=10)
    call = world.call(actor)
    world.advance(12)
    world.finish(actor)
    assert world.settled[actor] == Succeeded()
    assert call in world.runs
    assert acts(world.advance(60)) == []


# -------------------------------------------------------------------------------------- cancelling


@pytest.mark.parametrize("force", [False, True])
def test_cancel_a_running_constructor(core: MakeWorld, force: bool) -> None:
    world = core(gpus=1)
    actor = world.actor(ask(gpus=1), max_restarts=5)
    call = world.call(actor)
    decisions = world.cancel(actor, force=force)
    assert decisions == [ev.Kill(1) if force else ev.Interrupt(1, actor, 1)]
    if not force:
        world.finish(actor, Succeeded())
    world.exit(1)
    assert world.settled[actor] == Cancelled()
    assert world.settled[call] == ActorDied(actor, "it was cancelled before it was made", actor)
    assert world.free() == [1.0]


@pytest.mark.parametrize("waits", ["in line", "for inputs"])
def test_cancel_a_waiting_constructor(core: MakeWorld, waits: str) -> None:
    world = core(gpus=1)
    source = world.fresh(ask(gpus=1))
    actor = world.actor(ask(gpus=1), needs=[source] if waits == "for inputs" else [])
    call = world.call(actor)
    world.cancel(actor)
    assert world.settled[actor] == Cancelled()
    assert world.settled[call] == ActorDied(actor, "it was cancelled before it was made", actor)


def test_cancel_a_waiting_call(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    calls = [world.call(actor) for _ in range(3)]
    assert world.cancel(calls[1]) == [ev.Settle(calls[1], Cancelled())]
    world.finish(calls[0])
    assert world.running() == [calls[2]]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("report", [Interrupted(), Succeeded(), Raised(retry=True)])
def test_cancel_a_running_call(core: MakeWorld, force: bool, report: Interrupted) -> None:
    """By force or not: other calls and the actor's state are not to be lost."""
    world = core()
    actor = world.ready_actor()
    call, after = world.call(actor, retries=5), world.call(actor)
    assert world.cancel(call, force=force) == [ev.Interrupt(1, call, 1)]
    world.finish(call, report)
    assert world.settled[call] == Cancelled()
    assert world.running() == [after]


def test_cancel_by_force_spares_the_actors_that_children_called(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    parent = world.submit()
    call = world.call(actor, parent=parent)
    assert world.cancel(parent, force=True) == [ev.Kill(2), ev.Interrupt(1, call, 1)]


def test_a_cancelled_call_whose_actor_crashes(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call = world.call(actor, retries=5)
    world.cancel(call)
    world.crash(call)
    assert world.settled[call] == Cancelled()
    assert world.running() == [actor]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_call_that_takes_too_long(core: MakeWorld, restarts: int) -> None:
    world = core(stop_grace=5)
    actor = world.ready_actor(max_restarts=restarts)
    call = world.call(actor, timeout=10, retries=5)
    after = world.call(actor)
    assert acts(world.advance(10)) == [ev.Interrupt(1, call, 1)]
    assert acts(world.advance(5)) == [ev.Kill(1)]
    world.exit(1, "killed by signal 9")
    assert world.settled[call] == TimedOut(10)
    if restarts:
        world.finish(actor)
        assert world.running() == [after]
    else:
        why = "because #2 (c2) did not stop within 5 s of its timeout of 10 s"
        assert world.settled[after] == ActorDied(actor, f"gpunb ended its process, {why}")


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_others_of_it_are_told_then(core: MakeWorld, restarts: int) -> None:
    """They run in the process that is ended."""
    world = core(stop_grace=5)
    actor = world.ready_actor(max_restarts=restarts, max_concurrency=2)
    call, other = world.call(actor, timeout=0.5), world.call(actor)
    assert ev.Kill(1) in world.advance(6)
    world.exit(1, "killed by signal 9")
    assert world.settled[call] == TimedOut(0.5)
    why = "because #2 (c2) did not stop within 5 s of its timeout of 0.5 s"
    end = ActorUnavailable if restarts else ActorDied
    assert world.settled[other] == end(actor, f"gpunb ended its process, {why}")


def test_a_call_in_a_thread_is_left_when_its_time_is_over(core: MakeWorld) -> None:
    world = core(stop_grace=5)
    actor = world.ready_actor(max_concurrency=2, threads=True)
    call, other = world.call(actor, timeout=10, retries=5), world.call(actor)
    after = world.call(actor)
    takes = world.submit(needs=[call])
    assert acts(world.advance(10)) == [
        ev.Interrupt(1, call, 1),
        ev.Settle(call, TimedOut(10, left=True)),
        ev.Settle(takes, UpstreamFailed(call)),
    ]
    assert acts(world.advance(1000)) == []
    assert world.waits(after), "its thread is still taken"
    # What is handed in now finds it over.
    assert world.submit(needs=[call]) in world.runs
    assert acts(world.finish(call)) == [ev.Run(after, 1, 1, Allocation(), new=False, last=False)]
    assert other in world.runs


@pytest.mark.parametrize("how", ["raises", "crashes", "exits", "waits", "was cancelled"])
def test_a_call_that_was_left_ends_in_any_way(core: MakeWorld, how: str) -> None:
    world = core(gpus=1, stop_grace=5)
    actor = world.ready_actor(ask(gpus=1), max_concurrency=2, threads=True)
    call, other = world.call(actor, timeout=10, retries=5), world.call(actor)
    if how == "waits":
        world.block(call, world.fresh(ask(gpus=1)))
    if how == "was cancelled":
        world.cancel(call)
    world.advance(10)
    left = Cancelled() if how == "was cancelled" else TimedOut(10, left=True)
    assert world.settled[call] == left
    if how == "crashes":
        world.crash(call)
        assert world.settled[other] == ActorDied(actor, "killed by signal 11")
        return
    world.finish(call, Exited("it has had enough") if how == "exits" else Raised(retry=True))
    assert world.settled[call] == left
    assert other in world.runs
    if how == "exits":
        world.exit(1)
        assert world.settled[other] == world.ended[actor] == ActorDied(actor, "it has had enough")


@pytest.mark.parametrize("report", [Interrupted(), Raised(), Raised(retry=True)])
def test_a_call_that_is_interrupted_after_its_time(core: MakeWorld, report: Raised) -> None:
    world = core()
    actor = world.ready_actor()
    call, after = world.call(actor, timeout=10, retries=5), world.call(actor)
    world.advance(10)
    world.finish(call, report)
    assert world.settled[call] == TimedOut(10)
    assert world.running() == [after]


def test_no_call_starts_in_a_process_that_is_about_to_be_killed(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    first, second = world.call(actor), world.call(actor)
    assert world.kill(actor, restart=True) == [ev.Kill(1)]
    world.finish(first)
    third = world.call(actor)
    assert world.waits(second, third)
    world.exit(1)
    world.finish(actor)
    assert world.running() == [second]


# ------------------------------------------------------------------------------------------- kills


def test_kill(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1), max_restarts=5)
    running, waiting = world.call(actor, retries=5), world.call(actor, retries=5)
    assert world.kill(actor) == [ev.Settle(waiting, killed(actor)), ev.Kill(1)]
    assert world.settled[world.call(actor)] == killed(actor)
    assert world.free() == [0.0]
    assert world.exit(1) == [
        ev.Settle(running, killed(actor)),
        ev.ActorEnded(actor, killed(actor)),
    ]
    assert world.settled[world.call(actor)] == ActorDied(actor, "it has ended")
    assert world.free() == [1.0]


def test_a_call_that_ends_before_the_kill_is_carried_out(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_concurrency=2)
    first, second = world.call(actor), world.call(actor, retries=5)
    world.kill(actor)
    world.finish(first)
    assert world.settled[first] == Succeeded()
    world.finish(second, Raised(retry=True))
    world.exit(1)
    assert world.settled[second] == killed(actor)


def test_kill_twice_and_too_late(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    world.kill(actor)
    assert world.kill(actor) == [ev.Kill(1)]
    world.exit(1)
    assert world.kill(actor) == []
    assert world.kill(actor, restart=True) == []


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("heard", [False, True])
def test_kill_while_it_is_made(core: MakeWorld, restart: bool, heard: bool) -> None:
    world = core(gpus=1)
    actor = world.actor(ask(gpus=1), max_restarts=1)
    call = world.call(actor)
    decisions = world.kill(actor, restart=restart)
    assert decisions[-1] == ev.Kill(1)
    if heard:
        world.finish(actor)
        assert call not in world.runs
    world.exit(1)
    if restart:
        assert world.runs[actor].worker == 2
        assert world.waits(call)
    else:
        assert world.settled[call] == killed(actor)
        assert world.settled[actor] == (Succeeded() if heard else killed(actor))
        assert world.free() == [1.0]


@pytest.mark.parametrize("again", [False, True])
def test_kill_while_it_waits(core: MakeWorld, again: bool) -> None:
    """Before the first start, or before a restart."""
    world = core(cpus=1)
    if again:
        actor = world.ready_actor(ask(cpus=1), max_restarts=1)
        world.block(world.call(actor))
        world.submit()
        world.exit(1)
    else:
        world.submit()
        actor = world.actor(ask(cpus=1))
    call = world.call(actor)
    assert world.waits(actor, call)
    assert world.kill(actor, restart=True) == []
    assert world.waits(actor, call)
    world.kill(actor)
    assert world.settled[call] == killed(actor)
    assert world.settled[actor] == (Succeeded() if again else killed(actor))
    assert not world.scheduler.queue.lines


@pytest.mark.parametrize("restarts", [0, 1])
def test_kill_with_restart(core: MakeWorld, restarts: int) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1), max_restarts=restarts)
    running, waiting = world.call(actor), world.call(actor)
    assert world.kill(actor, restart=True) == [ev.Kill(1)]
    world.exit(1, "killed by signal 9")
    died = ActorDied(actor, "killed by signal 9")
    if restarts:
        assert world.settled[running] == ActorUnavailable(actor, "killed by signal 9")
        world.finish(actor)
        assert world.running() == [waiting]
    else:
        assert world.settled[running] == died
        assert world.settled[waiting] == died
        assert world.free() == [1.0]


# ----------------------------------------------------------------------------------------- exiting


def exited(actor: int) -> ActorDied:
    return ActorDied(actor, "it called exit_actor()")


def test_exit(core: MakeWorld) -> None:
    world = core(gpus=1, exit_grace=5)
    actor = world.ready_actor(ask(gpus=1), max_restarts=-1)
    call, waiting = world.call(actor, retries=3), world.call(actor, retries=3)
    assert acts(world.finish(call, Exited())) == [
        ev.Settle(call, exited(actor)),
        ev.Settle(waiting, exited(actor)),
        ev.Retire(1),
    ]
    assert world.settled[world.call(actor)] == exited(actor)
    assert world.free() == [0.0]
    assert acts(world.advance(5)) == [ev.Kill(1)]
    assert world.exit(1) == [ev.ActorEnded(actor, exited(actor))]
    assert world.free() == [1.0]


def test_exit_while_other_calls_run(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_concurrency=4, max_restarts=1)
    calls = [world.call(actor, retries=1) for _ in range(4)]
    world.finish(calls[1], Exited())
    assert world.running() == [calls[0], calls[2], calls[3]]
    world.finish(calls[0])
    assert world.settled[calls[0]] == Succeeded()
    assert acts(world.finish(calls[2], Exited())) == [ev.Settle(calls[2], exited(actor))]
    assert world.exit(1) == [
        ev.Settle(calls[3], exited(actor)),
        ev.ActorEnded(actor, exited(actor)),
    ]


def test_exit_in_the_constructor(core: MakeWorld) -> None:
    world = core()
    actor = world.actor(max_restarts=1)
    call = world.call(actor)
    world.finish(actor, Exited())
    assert world.settled == {actor: exited(actor), call: exited(actor)}
    assert world.exit(1) == [ev.ActorEnded(actor, exited(actor))]


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_exit_of_what_was_stopped(core: MakeWorld, how: str) -> None:
    world = core()
    actor = world.ready_actor()
    call, waiting = world.call(actor), world.call(actor)
    if how == "killed":
        world.kill(actor)
    else:
        world.cancel(call)
    decisions = acts(world.finish(call, Exited()))
    assert (ev.Retire(1) in decisions) == (how == "cancelled")
    assert world.settled[call] == (Cancelled() if how == "cancelled" else exited(actor))
    end = killed(actor) if how == "killed" else exited(actor)
    assert world.settled[waiting] == end
    assert world.exit(1) == [ev.ActorEnded(actor, end)]


# --------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("killed", "it was killed"),
        ("released", "its last handle is gone"),
        ("crashed", "killed by signal 11"),
        ("exits", "it called exit_actor()"),
        ("fails", "its constructor failed"),
        ("cancelled", "it was cancelled before it was made"),
        ("upstream", "its constructor failed"),
        ("refused", "it can never be made: a request for 2 GPU"),
        ("killed while it waits", "it was killed"),
    ],
)
def test_the_end_is_said_once_when_the_process_is_gone(
    core: MakeWorld, how: str, reason: str
) -> None:
    world = core(gpus=1)
    source = world.submit()
    needs = [source] if how in ("cancelled", "upstream", "killed while it waits") else []
    actor = world.actor(ask(gpus=2 if how == "refused" else 1), needs=needs)
    if how in ("killed", "released", "crashed", "exits"):
        world.finish(actor)
    match how:
        case "killed" | "killed while it waits":
            world.kill(actor)
        case "released":
            world.release(actor)
        case "exits":
            world.finish(world.call(actor), Exited())
        case "fails":
            world.finish(actor, Raised())
        case "cancelled":
            world.cancel(actor)
        case "upstream":
            world.finish(source, Raised())
    if needs or how == "refused":
        assert 2 not in world.live
    else:
        assert actor not in world.ended
        world.exit(2, "killed by signal 11")
    end = world.ended[actor]
    assert isinstance(end, ActorDied)
    assert end.reason.startswith(reason)
    assert isinstance(acts(world.answers[-1])[-1], ev.ActorEnded)
    assert world.settled[world.call(actor)] == ActorDied(actor, "it has ended")


# --------------------------------------------------------------------------------------- releasing


def test_release_lets_calls_end(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    first, second = world.call(actor), world.call(actor)
    assert world.release(actor) == []
    world.finish(first)
    assert second in world.runs
    assert acts(world.finish(second)) == [ev.Settle(second, Succeeded()), ev.Retire(1)]
    assert acts(world.advance(5)) == [ev.Kill(1)]


def test_release_before_it_is_made(core: MakeWorld) -> None:
    world = core()
    actor = world.actor()
    call = world.call(actor)
    world.release(actor)
    world.finish(actor)
    assert call in world.runs
    assert ev.Retire(1) in world.finish(call)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_release_when_the_last_call_never_runs(core: MakeWorld, how: str) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1))
    source = world.submit()
    call = world.call(actor, needs=[source])
    assert world.release(actor) == []
    decisions = world.cancel(call) if how == "cancelled" else world.finish(source, Raised())
    assert ev.Retire(1) in decisions


def test_release_twice(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    assert acts(world.release(actor)) == [ev.Retire(1)]
    assert acts(world.release(actor)) == []
    world.exit(1)
    assert world.release(actor) == []


def test_calls_after_the_end(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    source = world.submit()
    world.release(actor)
    late = world.call(actor, needs=[source])
    assert world.settled[late] == ActorDied(actor, "its last handle is gone")
    world.exit(1)
    assert world.settled[world.call(actor)] == ActorDied(actor, "it has ended")
    assert world.settled[world.call(99)] == ActorDied(99, "it has ended")


def test_a_released_actor_that_is_killed_for_a_restart(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call = world.call(actor)
    world.kill(actor, restart=True)
    world.finish(call)
    assert acts(world.release(actor)) == []
    world.exit(1)
    assert not world.scheduler.actors.book


def test_what_needs_a_lost_call_fails(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call = world.call(actor)
    task = world.submit(needs=[call])
    chained = world.call(actor, needs=[call])
    world.crash(call)
    assert world.settled[task] == UpstreamFailed(call)
    assert world.settled[chained] == UpstreamFailed(call)
