"""Restarts of actors: pauses, calls in flight, and constructors that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import Allocation
from gpunb.scheduler.snapshot import snapshot
from gpunb.scheduler.tasks import (
    ActorDied,
    ActorUnavailable,
    Cancelled,
    Crashed,
    Exited,
    Interrupted,
    Raised,
    Succeeded,
)
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import acts, ask

CRASH = "killed by signal 11"


def killed(actor: int) -> ActorDied:
    return ActorDied(actor, "it was killed")


def crashed(actor: int) -> ActorDied:
    return ActorDied(actor, CRASH)


def while_made(actor: int) -> ActorDied:
    return ActorDied(actor, f"its process ended while it was made: {CRASH}")


def lost(actor: int) -> ActorUnavailable:
    return ActorUnavailable(actor, CRASH)


def test_an_actor_restarts_after_a_crash_and_loses_the_running_call(core: MakeWorld) -> None:
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


def test_calls_that_ran_at_a_crash_are_retried_in_order(core: MakeWorld) -> None:
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


def test_a_call_with_a_retryable_exception_runs_again(core: MakeWorld) -> None:
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
def test_a_constructor_that_crashes_runs_again_up_to_max_restarts(
    core: MakeWorld, restarts: int
) -> None:
    world = core()
    actor = world.actor(max_restarts=restarts)
    call = world.call(actor)
    for _ in range(restarts):
        world.crash(actor)
        assert actor not in world.settled
        world.advance(0.2)
    world.crash(actor)
    assert world.settled[actor] == Crashed("killed by signal 11")
    reason = "its process ended while it was made: killed by signal 11"
    assert world.settled[call] == ActorDied(actor, reason, actor)


def test_an_actor_ends_if_its_constructor_fails_after_a_restart(core: MakeWorld) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1), max_restarts=5)
    call, waiting = world.call(actor), world.call(actor)
    world.crash(call)
    world.finish(actor, Raised())
    assert world.settled[waiting] == ActorDied(actor, "its constructor failed", actor)
    assert acts(world.answers[-1])[0] == ev.Retire(2)
    assert world.settled[actor] == Succeeded()
    world.exit(2)
    assert world.free() == [1.0]


def test_an_actor_ends_if_its_last_restart_crashes(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    world.exit(1, "killed by signal 11")
    waiting = world.call(actor, retries=1)
    world.crash(actor)
    assert world.settled[waiting] == while_made(actor)
    assert not world.scheduler.state.actors


def test_actor_whose_constructor_crashes_starts_again_after_longer_and_longer_pauses(
    core: MakeWorld,
) -> None:
    world = core(restart_after=0.1, restart_limit=10)
    actor = world.actor(max_restarts=-1)
    call = world.call(actor)
    pauses = []
    for _ in range(10):
        world.crash(actor)
        begin = world.now
        assert world.waits(actor)
        while actor not in world.runs:
            assert world.wake is not None
            world.advance(world.wake - world.now)
        pauses.append(round(world.now - begin, 6))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]
    world.finish(actor)
    assert call in world.runs
    world.crash(call)
    assert actor in world.runs  # it worked once, so that it starts again at once
    world.crash(actor)
    world.advance(0.1)
    assert actor in world.runs


def test_snapshot_explains_the_pause_before_a_restart(core: MakeWorld) -> None:
    world = core()
    actor = world.actor(max_restarts=-1)
    call = world.call(actor)
    world.crash(actor)
    seen = snapshot(world.scheduler, world.now)
    assert seen.actors[0].state == "restarting"
    reasons = {each.id: each.waits_for for each in seen.waiting}
    pause = "starts again after a pause, as its process has ended once while it was made"
    assert reasons[actor] == pause
    assert reasons[call] == f"waits for actor #{actor} to start: {pause}"


@pytest.mark.parametrize("when", ["before", "in the pause", "in line"])
def test_released_actor_does_not_start_again(core: MakeWorld, when: str) -> None:
    world = core(cpus=1)
    actor = world.actor(ask(cpus=1), max_restarts=-1)
    if when == "before":
        world.release(actor)
    world.crash(actor)
    if when == "in line":
        world.submit()
        world.advance(0.2)
    if when != "before":
        assert world.waits(actor)
        world.release(actor)
    assert actor in world.settled
    assert not world.scheduler.state.actors
    assert actor not in world.runs


def test_released_actor_starts_again_for_the_calls_that_it_has(core: MakeWorld) -> None:
    world = core()
    actor = world.actor(max_restarts=-1)
    call = world.call(actor)
    world.release(actor)
    world.crash(actor)
    world.advance(0.1)
    world.finish(actor)
    assert world.running() == [call]
    assert ev.Retire(2) in world.finish(call)


@pytest.mark.parametrize("when", ["before", "in the pause"])
def test_released_actor_ends_at_the_second_crash_of_its_constructor_in_a_row(
    core: MakeWorld, when: str
) -> None:
    world = core()
    actor = world.actor(max_restarts=-1)
    call = world.call(actor)
    if when == "before":
        world.release(actor)
    world.crash(actor)
    if when == "in the pause":
        world.release(actor)
    world.advance(0.1)
    world.crash(actor)
    assert world.settled[actor] == Crashed(CRASH)
    assert world.settled[call] == replace(while_made(actor), task=actor)
    assert not world.scheduler.state.actors


def test_released_actor_ends_at_the_second_crash_of_its_new_constructor(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=-1)
    call = world.call(actor, retries=-1)
    world.release(actor)
    world.crash(call)
    world.crash(actor)
    world.advance(0.1)
    world.crash(actor)
    assert world.settled[call] == while_made(actor)
    assert not world.scheduler.state.actors


def test_released_actor_starts_as_often_as_max_restarts_allows(core: MakeWorld) -> None:
    world = core()
    actor = world.actor(max_restarts=4)
    call = world.call(actor)
    world.release(actor)
    for _ in range(4):
        world.crash(actor)
        world.advance(1)
    world.finish(actor)
    assert call in world.runs


@pytest.mark.parametrize("retries", [0, 1])
def test_call_to_an_actor_that_is_started_again_does_not_wait_unless_it_may_be_retried(
    core: MakeWorld, retries: int
) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=2)
    world.exit(1, "killed by signal 11")
    call = world.call(actor, retries=retries)
    if not retries:
        assert world.settled[call] == lost(actor)
        assert world.answers[-1] == [ev.Settle(call, lost(actor))]
    world.finish(actor)
    assert (call in world.runs) == bool(retries)
    assert world.call(actor, retries=1) in world.scheduler.tasks


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_kill_with_restart_before_the_start_counts_as_a_restart(
    core: MakeWorld, restarts: int
) -> None:
    world = core(cpus=1)
    blocker = world.submit()
    actor = world.actor(ask(cpus=1), max_restarts=restarts)
    call = world.call(actor)
    assert world.waits(actor)
    for _ in range(restarts):
        assert world.kill(actor, restart=True) == []
        assert world.waits(actor, call)
    if restarts == 2:
        world.finish(blocker)
        world.crash(actor)  # it has no restart left
        assert world.settled[call].reason.endswith("killed by signal 11")
    else:
        world.kill(actor, restart=True)
        assert world.settled[actor] == world.settled[call] == killed(actor)


@pytest.mark.parametrize("restarts", [0, 1])
def test_an_actor_restarts_after_a_failed_exit_if_it_may(core: MakeWorld, restarts: int) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1), max_restarts=restarts)
    call, again, waiting = world.call(actor), world.call(actor, retries=1), world.call(actor)
    decisions = acts(world.finish(call, Exited("it called sys.exit(1)", failed=True)))
    if not restarts:
        gone = ActorDied(actor, "it called sys.exit(1)")
        assert world.settled == {actor: Succeeded(), call: gone, again: gone, waiting: gone}
        return
    gone = ActorUnavailable(actor, "it called sys.exit(1)")
    assert decisions == [ev.Settle(call, gone), ev.Retire(1)]
    assert world.settled[world.call(actor)] == gone  # made before the process is gone
    assert world.waits(again, waiting)
    world.exit(1, "exit code 0")
    assert world.runs[actor].worker == 2
    world.finish(actor)
    assert world.running() == [again]
    assert ev.Settle(again, Succeeded()) in world.finish(again)


def test_a_released_actor_does_not_restart_after_a_failed_exit(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call = world.call(actor)
    world.release(actor)
    world.finish(call, Exited("it called sys.exit(1)", failed=True))
    world.exit(1)
    assert world.settled[call] == ActorDied(actor, "it called sys.exit(1)")
    assert not world.scheduler.state.actors


def test_kill_of_a_leaving_actor_ends_it(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call, waiting = world.call(actor), world.call(actor)
    world.finish(call, Exited("it called sys.exit(1)", failed=True))
    world.kill(actor)
    assert world.settled[waiting] == killed(actor)
    world.exit(1)
    assert not world.scheduler.state.actors


def test_an_actor_survives_the_interrupt_of_a_call(core: MakeWorld) -> None:
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
