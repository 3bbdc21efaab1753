"""The ends of actors: cancels, kills, exits, and the last handle."""

from __future__ import annotations

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import Allocation
from gpunb.scheduler.tasks import (
    ActorDied,
    ActorUnavailable,
    Cancelled,
    Exited,
    Interrupted,
    Raised,
    Succeeded,
    TimedOut,
    UpstreamFailed,
)
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import acts, ask


def killed(actor: int) -> ActorDied:
    return ActorDied(actor, "it was killed")


@pytest.mark.parametrize("force", [False, True])
def test_cancel_of_a_running_constructor_ends_the_actor(core: MakeWorld, force: bool) -> None:
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
def test_cancel_of_a_waiting_constructor_ends_the_actor(core: MakeWorld, waits: str) -> None:
    world = core(gpus=1)
    source = world.fresh(ask(gpus=1))
    actor = world.actor(ask(gpus=1), needs=[source] if waits == "for inputs" else [])
    call = world.call(actor)
    world.cancel(actor)
    assert world.settled[actor] == Cancelled()
    assert world.settled[call] == ActorDied(actor, "it was cancelled before it was made", actor)


def test_cancel_of_a_waiting_call_spares_the_others(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    calls = [world.call(actor) for _ in range(3)]
    assert world.cancel(calls[1]) == [ev.Settle(calls[1], Cancelled())]
    world.finish(calls[0])
    assert world.running() == [calls[2]]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("report", [Interrupted(), Succeeded(), Raised(retry=True)])
def test_cancel_of_a_running_call_interrupts_it(
    core: MakeWorld, force: bool, report: Interrupted
) -> None:
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


def test_a_cancelled_call_is_cancelled_although_its_actor_crashes(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call = world.call(actor, retries=5)
    world.cancel(call)
    world.crash(call)
    assert world.settled[call] == Cancelled()
    assert world.running() == [actor]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_call_that_ignores_its_timeout_ends_the_process(core: MakeWorld, restarts: int) -> None:
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
def test_other_calls_get_the_reason_when_a_timeout_ends_their_process(
    core: MakeWorld, restarts: int
) -> None:
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


def test_a_call_in_a_thread_is_abandoned_at_its_timeout(core: MakeWorld) -> None:
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
def test_an_abandoned_call_keeps_its_outcome_however_it_ends(core: MakeWorld, how: str) -> None:
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
def test_a_call_that_ends_by_the_interrupt_has_timed_out(core: MakeWorld, report: Raised) -> None:
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


def test_kill_ends_the_actor_and_its_calls(core: MakeWorld) -> None:
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


def test_a_second_or_late_kill_changes_nothing(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    world.kill(actor)
    assert world.kill(actor) == [ev.Kill(1)]
    world.exit(1)
    assert world.kill(actor) == []
    assert world.kill(actor, restart=True) == []


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("received", [False, True])
def test_kill_while_the_constructor_runs(core: MakeWorld, restart: bool, received: bool) -> None:
    world = core(gpus=1)
    actor = world.actor(ask(gpus=1), max_restarts=1)
    call = world.call(actor)
    decisions = world.kill(actor, restart=restart)
    assert decisions[-1] == ev.Kill(1)
    if received:
        world.finish(actor)
        assert call not in world.runs
    world.exit(1)
    if restart:
        world.advance(0.1)
        assert world.runs[actor].worker == 2
        assert world.waits(call)
    else:
        assert world.settled[call] == killed(actor)
        assert world.settled[actor] == (Succeeded() if received else killed(actor))
        assert world.free() == [1.0]


@pytest.mark.parametrize("again", [False, True])
def test_kill_while_the_constructor_waits(core: MakeWorld, again: bool) -> None:
    """Before the first start, or before a restart."""
    world = core(cpus=1)
    if again:
        actor = world.ready_actor(ask(cpus=1), max_restarts=2)
        world.block(world.call(actor))
        world.submit()
        world.advance(0.1)
        world.exit(1)
    else:
        world.submit()
        actor = world.actor(ask(cpus=1), max_restarts=1)
    call = world.call(actor, retries=1)
    assert world.waits(actor, call)
    assert world.kill(actor, restart=True) == []
    assert world.waits(actor, call)
    world.kill(actor)
    assert world.settled[call] == killed(actor)
    assert world.settled[actor] == (Succeeded() if again else killed(actor))
    assert not world.scheduler.queue.lines


@pytest.mark.parametrize("restarts", [0, 1])
def test_kill_with_restart_starts_the_actor_again(core: MakeWorld, restarts: int) -> None:
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


def exited(actor: int) -> ActorDied:
    return ActorDied(actor, "it called exit_actor()")


def test_exit_actor_ends_the_actor_and_its_calls(core: MakeWorld) -> None:
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


def test_exit_actor_lets_running_calls_finish_or_die(core: MakeWorld) -> None:
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


def test_exit_actor_in_the_constructor_ends_the_actor(core: MakeWorld) -> None:
    world = core()
    actor = world.actor(max_restarts=1)
    call = world.call(actor)
    world.finish(actor, Exited())
    assert world.settled == {actor: exited(actor), call: exited(actor)}
    assert world.exit(1) == [ev.ActorEnded(actor, exited(actor))]


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_exit_actor_after_a_cancel_or_kill(core: MakeWorld, how: str) -> None:
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
def test_actor_ended_is_decided_once_when_the_process_is_gone(
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


def test_a_released_actor_ends_after_its_calls(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    first, second = world.call(actor), world.call(actor)
    assert world.release(actor) == []
    world.finish(first)
    assert second in world.runs
    assert acts(world.finish(second)) == [ev.Settle(second, Succeeded()), ev.Retire(1)]
    assert acts(world.advance(5)) == [ev.Kill(1)]


def test_an_actor_released_before_its_start_ends_after_its_calls(core: MakeWorld) -> None:
    world = core()
    actor = world.actor()
    call = world.call(actor)
    world.release(actor)
    world.finish(actor)
    assert call in world.runs
    assert ev.Retire(1) in world.finish(call)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_released_actor_ends_if_its_last_call_never_runs(core: MakeWorld, how: str) -> None:
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1))
    source = world.submit()
    call = world.call(actor, needs=[source])
    assert world.release(actor) == []
    decisions = world.cancel(call) if how == "cancelled" else world.finish(source, Raised())
    assert ev.Retire(1) in decisions


def test_a_second_release_changes_nothing(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    assert acts(world.release(actor)) == [ev.Retire(1)]
    assert acts(world.release(actor)) == []
    world.exit(1)
    assert world.release(actor) == []


def test_calls_after_the_end_fail(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    source = world.submit()
    world.release(actor)
    late = world.call(actor, needs=[source])
    assert world.settled[late] == ActorDied(actor, "its last handle is gone")
    world.exit(1)
    assert world.settled[world.call(actor)] == ActorDied(actor, "it has ended")
    assert world.settled[world.call(99)] == ActorDied(99, "it has ended")


def test_a_released_actor_does_not_restart_after_a_kill(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call = world.call(actor)
    world.kill(actor, restart=True)
    world.finish(call)
    assert acts(world.release(actor)) == []
    world.exit(1)
    assert not world.scheduler.state.actors


def test_a_task_that_needs_a_lost_call_fails(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor(max_restarts=1)
    call = world.call(actor)
    task = world.submit(needs=[call])
    chained = world.call(actor, needs=[call])
    world.crash(call)
    assert world.settled[task] == UpstreamFailed(call)
    assert world.settled[chained] == UpstreamFailed(call)
