"""Devices of which other kernels hold a part."""

from __future__ import annotations

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import UNIT
from gpunb.scheduler.snapshot import available, snapshot
from gpunb.scheduler.tasks import ActorDied, Cancelled, Succeeded
from tests.scheduler.world import acts, ask, machine

HALF = UNIT // 2


def test_shares_of_other_sessions_are_not_given_out(core):
    world = core(gpus=2)
    world.peers_hold(0, 0.6)
    small, large = world.fresh(ask(gpus=0.4)), world.fresh(ask(gpus=0.5))
    assert world.gpus(small) == [0]
    assert world.gpus(large) == [1]
    assert world.waits(world.fresh(ask(gpus=1)))


def test_a_share_that_others_give_back_goes_to_a_waiting_task(core):
    world = core(gpus=1)
    world.peers_hold(0, 0.6)
    task = world.fresh(ask(gpus=0.5))
    assert world.waits(task)
    assert world.claim == (("gpu-0", HALF),)
    world.peers_hold(0, 0.5)
    assert world.gpus(task) == [0]
    assert world.claim is None


def test_a_task_whose_lease_is_refused_waits_in_its_old_place(core):
    world = core(gpus=1)
    world.peers_hold(0, 1, report=False)
    first = world.fresh(ask(gpus=0.5))
    second = world.fresh(ask(gpus=0.5))
    assert world.waits(first, second)
    world.peers_hold(0, 0.5)
    assert world.running() == [first]
    world.peers_hold(0, 0)
    assert world.running() == [first, second]
    assert world.runs[first].attempt == world.runs[second].attempt == 1


def test_tasks_with_refused_leases_keep_their_order(core):
    world = core(gpus=2)
    blocker = world.fresh(ask(gpus=2))
    tasks = [world.fresh(ask(gpus=0.5)) for _ in range(6)]
    world.others = {"gpu-0": (0, 0), "gpu-1": (0, 0)}
    world.others["gpu-0"] = (HALF, 0)
    world.others["gpu-1"] = (UNIT, 0)
    world.done(blocker)
    assert world.running() == tasks[:1]
    world.peers_hold(1, 0)
    assert world.running() == tasks[:3]


def test_a_task_with_a_refused_lease_keeps_its_age(core):
    world = core(gpus=1, age=10)
    world.advance(5)
    world.peers_hold(0, 0.5, report=False)
    large = world.fresh(ask(gpus=1))
    world.advance(9)
    world.report_peers()
    assert world.scheduler.queue.reservation is None
    world.advance(1)
    world.report_peers()
    assert world.scheduler.queue.reservation is not None
    assert world.waits(large)


def test_a_task_with_a_refused_lease_keeps_its_whole_timeout(core):
    world = core(gpus=1)
    world.peers_hold(0, 1, report=False)
    task = world.fresh(ask(gpus=1), timeout=5)
    world.advance(100)
    world.peers_hold(0, 0)
    assert world.running() == [task]
    assert acts(world.advance(4.9)) == []
    assert ev.Interrupt(world.worker(task), task, 1) in world.advance(0.1)


def test_a_task_cancelled_before_its_lease_was_refused_is_cancelled(core):
    world = core(gpus=1)
    scheduler = world.scheduler
    run = scheduler.handle(ev.Submitted(1, spec(ask(gpus=1))), 0)[0]
    scheduler.handle(ev.CancelRequested(1), 0)
    taken = ev.PeersChanged((ev.PeerShare("gpu-0", UNIT),))
    scheduler.handle(taken, 0)
    assert ev.Settle(1, Cancelled()) in scheduler.handle(ev.LeaseRefused(run.worker), 0)
    assert not scheduler.state.workers
    assert scheduler.handle(ev.LeaseRefused(run.worker), 0) == []
    world.broken = True


def spec(demand):
    from gpunb.scheduler.tasks import TaskSpec

    return TaskSpec("t", demand, max_calls=1)


def test_an_actor_killed_before_its_lease_was_refused_ends(core):
    from gpunb.scheduler.tasks import ActorSpec

    world = core(gpus=1)
    scheduler = world.scheduler
    run = scheduler.handle(ev.ActorCreated(1, spec(ask(gpus=1)), ActorSpec()), 0)[0]
    scheduler.handle(ev.KillRequested(1), 0)
    decisions = scheduler.handle(ev.LeaseRefused(run.worker), 0)
    assert decisions[0] == ev.Settle(1, ActorDied(1, "it was killed"))
    assert isinstance(decisions[1], ev.ActorEnded)
    assert not scheduler.state.actors
    world.broken = True


def test_an_actor_with_a_refused_lease_starts_later(core):
    world = core(gpus=1)
    world.peers_hold(0, 0.6, report=False)
    actor = world.actor(ask(gpus=0.5), max_restarts=0)
    call = world.call(actor)
    assert world.waits(actor)
    world.peers_hold(0, 0.2)
    world.finish(actor)
    world.finish(call)
    assert world.settled[call] == Succeeded()


def test_idle_workers_end_if_others_wait_for_their_device(core):
    world = core(gpus=2)
    first = world.submit(ask(gpus=1), function="f")
    second = world.submit(ask(gpus=1), function="f")
    busy = world.worker(second)
    idle = world.worker(first)
    world.finish(first)
    assert ev.Retire(idle) in world.report_peers(wanted=["gpu-0", "gpu-1"])
    assert ev.Retire(busy) in world.finish(second)


def test_idle_workers_on_other_devices_are_kept(core):
    world = core(gpus=2)
    task = world.submit(ask(gpus=1), function="f")
    world.finish(task)
    assert acts(world.report_peers(wanted=["gpu-1"])) == []


def test_an_idle_worker_ends_before_a_share_of_others_is_claimed(core):
    world = core(gpus=1)
    warm = world.submit(ask(gpus=0.5), function="f")
    world.finish(warm)
    world.peers_hold(0, 0.5)
    task = world.fresh(ask(gpus=0.5))
    assert world.claim is None
    world.exit(min(world.ending))
    assert world.running() == [task]


def test_a_claim_includes_the_shares_of_our_actors(core):
    world = core(gpus=1)
    world.ready_actor(ask(gpus=0.3))
    world.peers_hold(0, 0.5)
    world.fresh(ask(gpus=0.5))
    assert world.claim == (("gpu-0", 8000),)


def test_shares_of_other_sessions_actors_are_lacking_and_not_claimed(core):
    world = core(gpus=1)
    world.peers_hold(0, 0.5, lasting=0.5)
    world.fresh(ask(gpus=1))
    assert world.claim == ()
    world.peers_hold(0, 0.5)
    assert world.claim == (("gpu-0", UNIT),)


def test_a_reservation_holds_while_the_large_task_waits_for_others(core):
    world = core(gpus=1, age=10)
    world.peers_hold(0, 0.5)
    large = world.fresh(ask(gpus=1))
    small = world.fresh(ask(gpus=0.5))
    assert world.running() == [small]
    world.advance(10)
    second = world.fresh(ask(gpus=0.5))
    world.done(small)
    assert world.waits(large, second)
    world.peers_hold(0, 0)
    assert world.running() == [large]


def test_no_reservation_for_a_task_that_waits_for_an_actor_of_others(core):
    world = core(gpus=1, age=10)
    world.peers_hold(0, 0.5, lasting=0.5)
    world.fresh(ask(gpus=1))
    world.advance(10)
    small = world.fresh(ask(gpus=0.5))
    assert world.running() == [small]


def test_nothing_is_claimed_while_only_our_tasks_are_in_the_way(core):
    world = core(gpus=1)
    world.peers_hold(0, 0.1)
    world.fresh(ask(gpus=0.9))
    world.fresh(ask(gpus=0.9))
    assert world.claim is None


def test_devices_used_outside_gpunb_are_given_out_last(core):
    world = core(gpus=3)
    world.report_peers(used=["gpu-0"])
    assert world.gpus(world.fresh(ask(gpus=0.5))) == [1]
    assert world.gpus(world.fresh(ask(gpus=1))) == [2]
    assert world.gpus(world.fresh(ask(gpus=1))) == [0]
    world = core(gpus=3)
    world.report_peers(used=["gpu-1"])
    assert world.gpus(world.fresh(ask(gpus=2))) == [0, 2]


def test_a_preferred_type_wins_over_an_unused_device(core):
    world = core(gpus=[("A100", 40), ("V100", 16)])
    world.report_peers(used=["gpu-0"])
    assert world.gpus(world.fresh(ask(gpus=0.5, types=("A100", "V100")))) == [0]


def test_the_holder_of_a_share_is_named(core):
    world = core(gpus=1)
    whose = "held by another kernel (pid 4711, /home/a/train.ipynb)"
    world.others["gpu-0"] = (6000, 0)
    world.send(ev.PeersChanged((ev.PeerShare("gpu-0", 6000, 0, whose),)))
    task = world.fresh(ask(gpus=0.5))
    assert world.why(task) == (
        "needs 0.5 of one GPU; the largest free share is 0.4 on GPU 0; 0.6 of GPU 0 is held by "
        "another kernel (pid 4711, /home/a/train.ipynb)"
    )
    assert available(world.scheduler)["GPU"] == 0.4
    assert snapshot(world.scheduler, 0).devices[0].free == 0.4


# ------------------------------------------------------------------------ what a session may have


def limited(core, most, gpus=2, **policy):
    world = core(gpus=gpus, **policy)
    again = type(world)(machine(gpus=gpus, most=most), world.scheduler.state.policy)
    world.__dict__.update(again.__dict__)
    return world


def test_max_gpus_limits_the_shares_given_out(core):
    world = limited(core, 1.5)
    first, second = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    half = world.fresh(ask(gpus=0.5))
    assert world.running() == [first, half]
    assert "has 1.5 of the 1.5 that it may have at once (max_gpus)" in world.why(second)
    assert "GPU" not in available(world.scheduler)
    world.done(half)
    assert world.waits(second)
    world.done(first)
    assert world.running() == [second]


def test_idle_workers_end_to_keep_max_gpus(core):
    world = limited(core, 1)
    warm = world.submit(ask(gpus=1), function="f")
    world.finish(warm)
    other = world.submit(ask(gpus=1), function="g")
    world.exit(min(world.ending))
    assert world.running() == [other]


def test_a_share_by_memory_goes_to_a_device_within_max_gpus(core):
    world = core(gpus=[("V100", 16), ("A100", 48)])
    again = type(world)(machine(gpus=[("V100", 16), ("A100", 48)], most=0.5))
    world.__dict__.update(again.__dict__)
    assert world.gpus(world.fresh(ask(memory=12))) == [1]


@pytest.mark.parametrize("demand", [ask(gpus=2), ask(gpus=1)])
def test_a_demand_above_max_gpus_is_refused(core, demand):
    world = limited(core, 0.5)
    task = world.fresh(demand)
    assert "may have 0.5 of the GPUs at once (max_gpus)" in world.settled[task].reason


def test_an_overbooked_device_does_not_hold_up_cpu_tasks(core):
    """Others may hold more, for a moment, than we leave them."""
    world = core(gpus=1, cpus=1)
    held = world.fresh(ask(gpus=1, cpus=1))
    waits = world.submit(ask(cpus=1))
    world.peers_hold(0, 0.5)
    world.done(held)
    assert waits in world.runs
