"""Parking: an idle actor gives its devices back, and has them again for its next call."""

from __future__ import annotations

from gpunb.scheduler import events as ev
from gpunb.scheduler.snapshot import snapshot
from gpunb.scheduler.tasks import ActorDied, Succeeded
from tests.scheduler.world import acts, ask


def parked(world, **demand):
    """A parked actor, and its worker."""
    actor = world.ready_actor(ask(**demand))
    (worker,) = (each for each in world.live if world.history[each][0] == actor)
    decisions = acts(world.park(actor))
    assert decisions[0] == ev.Park(worker)
    return actor, worker


def test_a_parked_actor_gives_its_share_to_others(core):
    world = core(gpus=1)
    _, worker = parked(world, gpus=1)
    assert world.free() == [1]
    assert world.gpus(world.fresh(ask(gpus=1))) == [0]
    assert worker in world.live
    (view,) = snapshot(world.scheduler, 0).actors
    assert (view.state, view.devices) == ("parked", ())


def test_a_call_restores_the_actor_on_the_same_device_and_then_runs(core):
    world = core(gpus=2)
    first = world.fresh(ask(gpus=1))
    actor, worker = parked(world, gpus=0.5)
    world.done(first)
    assert world.free() == [1, 1]
    call = world.call(actor)
    assert world.gpus(actor) == [1]
    assert world.waits(call)
    world.finish(actor)
    assert world.worker(call) == worker
    world.finish(call)
    assert world.settled[call] == Succeeded()
    assert world.free() == [1, 0.5]


def test_a_call_waits_until_the_device_is_free(core):
    world = core(gpus=1)
    actor, _ = parked(world, gpus=0.5)
    other = world.fresh(ask(gpus=1))
    call = world.call(actor)
    assert world.waits(call)
    reason = world.why(call)
    assert reason.startswith(f"waits for actor #{actor} to have its devices again: needs 0.5")
    assert f"held by #{other}" in reason
    world.done(other)
    world.finish(actor)
    assert call in world.runs


def test_an_actor_with_a_call_is_not_parked(core):
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1))
    call = world.call(actor)
    assert acts(world.park(actor)) == []
    world.finish(call)
    assert acts(world.park(actor)) != []


def test_an_actor_without_a_device_is_not_parked(core):
    world = core()
    assert acts(world.park(world.ready_actor())) == []


def test_an_actor_whose_worker_refuses_goes_on(core):
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1))
    world.park(actor, "it shares memory with another process")
    assert world.free() == [0]
    call = world.call(actor)
    assert call in world.runs


def test_a_call_that_comes_while_the_worker_parks_is_run_afterwards(core):
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1))
    (park,) = acts(world.park(actor, None))
    call = world.call(actor)
    assert world.waits(call)
    world.send(ev.Parked(park.worker))
    world.finish(actor)
    assert call in world.runs


def test_a_cancelled_call_leaves_the_actor_parked(core):
    world = core(gpus=1)
    actor, _ = parked(world, gpus=1)
    other = world.fresh(ask(gpus=1))
    call = world.call(actor)
    world.cancel(call)
    assert actor not in world.scheduler.tasks
    world.done(other)
    assert world.free() == [1]


def test_the_wait_for_devices_cannot_be_cancelled_as_a_task(core):
    world = core(gpus=1)
    actor, _ = parked(world, gpus=1)
    other = world.fresh(ask(gpus=1))
    call = world.call(actor)
    world.cancel(actor)
    world.interrupt(actor)
    world.done(other)
    world.finish(actor)
    assert call in world.runs


def test_a_parked_actor_ends_when_it_is_killed_or_released(core):
    world = core(gpus=1)
    for end in (world.kill, world.release):
        actor, worker = parked(world, gpus=1)
        end(actor)
        assert worker in world.ending
        world.exit(worker)
        assert isinstance(world.ended[actor], ActorDied)


def test_an_actor_that_is_killed_while_it_waits_for_devices_ends(core):
    world = core(gpus=1)
    actor, worker = parked(world, gpus=1)
    world.fresh(ask(gpus=1))
    call = world.call(actor)
    world.kill(actor)
    world.exit(worker)
    assert isinstance(world.settled[call], ActorDied)


def test_the_end_of_a_parked_process_starts_the_actor_again(core):
    world = core(gpus=1)
    actor = world.ready_actor(ask(gpus=1), max_restarts=1)
    (worker,) = world.live
    world.park(actor)
    world.exit(worker, "killed by signal 9")
    assert actor in world.runs
    assert world.runs[actor].new


def test_a_parked_actor_dies_with_its_device(core):
    world = core(gpus=2)
    actor, worker = parked(world, gpus=1)
    world.lose(0)
    assert worker in world.killed
    call = world.call(actor)
    world.exit(worker)
    assert isinstance(world.settled[call], ActorDied)


def test_a_refused_lease_leaves_the_actor_parked(core):
    world = core(gpus=1)
    actor, _ = parked(world, gpus=1)
    world.peers_hold(0, 1, report=False)
    call = world.call(actor)
    assert world.waits(call)
    assert world.scheduler.state.actors[actor].state == "parked"
    world.peers_hold(0, 0)
    world.finish(actor)
    assert call in world.runs


def test_idle_actors_are_parked_after_the_time_of_the_policy(core):
    world = core(gpus=1, park_after=10)
    actor = world.ready_actor(ask(gpus=1))
    world.advance(8)
    world.finish(world.call(actor))
    world.advance(8)
    assert not world.parking
    world.advance(3)
    assert world.parking


def test_an_actor_whose_worker_refused_is_not_parked_by_time_again(core):
    world = core(gpus=1, park_after=10)
    actor = world.ready_actor(ask(gpus=1))
    world.park(actor, "MPS")
    world.advance(30)
    assert not world.parking
