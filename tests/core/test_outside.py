"""Devices of which other kernels hold a part."""

from __future__ import annotations

import pytest

from gpunb.core import events as ev
from gpunb.core.resources import UNIT
from gpunb.core.snapshot import available, snapshot, why
from gpunb.core.tasks import ActorDied, Cancelled, Succeeded
from tests.core.world import acts, ask, machine

HALF = UNIT // 2


def test_what_others_hold_is_not_given_out(core):
    world = core(gpus=2)
    world.hold(0, 0.6)
    small, large = world.fresh(ask(gpus=0.4)), world.fresh(ask(gpus=0.5))
    assert world.gpus(small) == [0]
    assert world.gpus(large) == [1]
    assert world.waits(world.fresh(ask(gpus=1)))


def test_what_they_give_back_goes_to_whoever_waits(core):
    world = core(gpus=1)
    world.hold(0, 0.6)
    task = world.fresh(ask(gpus=0.5))
    assert world.waits(task)
    assert world.claim == (("gpu-0", HALF),)
    world.hold(0, 0.5)
    assert world.gpus(task) == [0]
    assert world.claim is None


def test_a_task_whose_lease_is_refused_waits_in_its_old_place(core):
    world = core(gpus=1)
    world.hold(0, 1, tell=False)
    first = world.fresh(ask(gpus=0.5))
    second = world.fresh(ask(gpus=0.5))
    assert world.waits(first, second)
    world.hold(0, 0.5)
    assert world.running() == [first]
    world.hold(0, 0)
    assert world.running() == [first, second]
    assert world.runs[first].attempt == world.runs[second].attempt == 1


def test_several_that_are_refused_keep_their_order(core):
    world = core(gpus=2)
    blocker = world.fresh(ask(gpus=2))
    tasks = [world.fresh(ask(gpus=0.5)) for _ in range(6)]
    world.others = {"gpu-0": (0, 0), "gpu-1": (0, 0)}
    world.others["gpu-0"] = (HALF, 0)
    world.others["gpu-1"] = (UNIT, 0)
    world.done(blocker)
    assert world.running() == tasks[:1]
    world.hold(1, 0)
    assert world.running() == tasks[:3]


def test_a_refused_task_keeps_its_age(core):
    world = core(gpus=1, age=10)
    world.advance(5)
    world.hold(0, 0.5, tell=False)
    large = world.fresh(ask(gpus=1))
    world.advance(9)
    world.tell()
    assert world.scheduler.queue.reservation is None
    world.advance(1)
    world.tell()
    assert world.scheduler.queue.reservation is not None
    assert world.waits(large)


def test_a_refused_task_has_all_its_time_left(core):
    world = core(gpus=1)
    world.hold(0, 1, tell=False)
    task = world.fresh(ask(gpus=1), timeout=5)
    world.advance(100)
    world.hold(0, 0)
    assert world.running() == [task]
    assert acts(world.advance(4.9)) == []
    assert ev.Interrupt(world.worker(task), task, 1) in world.advance(0.1)


def test_a_task_that_was_cancelled_before_its_lease_was_refused(core):
    world = core(gpus=1)
    scheduler = world.scheduler
    run = scheduler.handle(ev.Submitted(1, spec(ask(gpus=1))), 0)[0]
    scheduler.handle(ev.CancelRequested(1), 0)
    outside = ev.OutsideChanged((ev.Outside("gpu-0", UNIT),))
    scheduler.handle(outside, 0)
    assert ev.Settle(1, Cancelled()) in scheduler.handle(ev.LeaseRefused(run.worker), 0)
    assert not scheduler.workforce.workers
    assert scheduler.handle(ev.LeaseRefused(run.worker), 0) == []
    world.broken = True


def spec(demand):
    from gpunb.core.tasks import TaskSpec

    return TaskSpec("t", demand, max_calls=1)


def test_an_actor_that_was_killed_before_its_lease_was_refused(core):
    from gpunb.core.tasks import ActorSpec

    world = core(gpus=1)
    scheduler = world.scheduler
    run = scheduler.handle(ev.ActorCreated(1, spec(ask(gpus=1)), ActorSpec()), 0)[0]
    scheduler.handle(ev.KillRequested(1), 0)
    decisions = scheduler.handle(ev.LeaseRefused(run.worker), 0)
    assert decisions[0] == ev.Settle(1, ActorDied(1, "it was killed"))
    assert isinstance(decisions[1], ev.ActorEnded)
    assert not scheduler.actors.book
    world.broken = True


def test_an_actor_waits_and_comes(core):
    world = core(gpus=1)
    world.hold(0, 0.6, tell=False)
    actor = world.actor(ask(gpus=0.5), max_restarts=0)
    call = world.call(actor)
    assert world.waits(actor)
    world.hold(0, 0.2)
    world.finish(actor)
    world.finish(call)
    assert world.settled[call] == Succeeded()


def test_idle_workers_give_up_what_others_wait_for(core):
    world = core(gpus=2)
    first = world.submit(ask(gpus=1), function="f")
    second = world.submit(ask(gpus=1), function="f")
    busy = world.worker(second)
    idle = world.worker(first)
    world.finish(first)
    assert ev.Retire(idle) in world.tell(wanted=["gpu-0", "gpu-1"])
    assert ev.Retire(busy) in world.finish(second)


def test_idle_workers_elsewhere_are_kept(core):
    world = core(gpus=2)
    task = world.submit(ask(gpus=1), function="f")
    world.finish(task)
    assert acts(world.tell(wanted=["gpu-1"])) == []


def test_an_idle_worker_of_our_own_is_let_go_before_others_are_waited_for(core):
    world = core(gpus=1)
    warm = world.submit(ask(gpus=0.5), function="f")
    world.finish(warm)
    world.hold(0, 0.5)
    task = world.fresh(ask(gpus=0.5))
    assert world.claim is None
    world.exit(min(world.ending))
    assert world.running() == [task]


def test_what_is_claimed_is_a_total_with_what_our_actors_hold(core):
    world = core(gpus=1)
    world.ready_actor(ask(gpus=0.3))
    world.hold(0, 0.5)
    world.fresh(ask(gpus=0.5))
    assert world.claim == (("gpu-0", 8000),)


def test_what_actors_of_others_hold_is_asked_for_but_not_claimed(core):
    world = core(gpus=1)
    world.hold(0, 0.5, lasting=0.5)
    world.fresh(ask(gpus=1))
    assert world.claim == ()
    world.hold(0, 0.5)
    assert world.claim == (("gpu-0", UNIT),)


def test_small_tasks_of_our_own_wait_for_a_large_one_that_waits_for_others(core):
    world = core(gpus=1, age=10)
    world.hold(0, 0.5)
    large = world.fresh(ask(gpus=1))
    small = world.fresh(ask(gpus=0.5))
    assert world.running() == [small]
    world.advance(10)
    second = world.fresh(ask(gpus=0.5))
    world.done(small)
    assert world.waits(large, second)
    world.hold(0, 0)
    assert world.running() == [large]


def test_but_not_for_one_that_waits_for_an_actor_of_others(core):
    world = core(gpus=1, age=10)
    world.hold(0, 0.5, lasting=0.5)
    world.fresh(ask(gpus=1))
    world.advance(10)
    small = world.fresh(ask(gpus=0.5))
    assert world.running() == [small]


def test_nothing_is_claimed_while_only_our_own_are_in_the_way(core):
    world = core(gpus=1)
    world.hold(0, 0.1)
    world.fresh(ask(gpus=0.9))
    world.fresh(ask(gpus=0.9))
    assert world.claim is None


def test_devices_that_others_use_come_last(core):
    world = core(gpus=3)
    world.tell(used=["gpu-0"])
    assert world.gpus(world.fresh(ask(gpus=0.5))) == [1]
    assert world.gpus(world.fresh(ask(gpus=1))) == [2]
    assert world.gpus(world.fresh(ask(gpus=1))) == [0]
    world = core(gpus=3)
    world.tell(used=["gpu-1"])
    assert world.gpus(world.fresh(ask(gpus=2))) == [0, 2]


def test_a_type_that_is_preferred_counts_more_than_being_alone(core):
    world = core(gpus=[("A100", 40), ("V100", 16)])
    world.tell(used=["gpu-0"])
    assert world.gpus(world.fresh(ask(gpus=0.5, types=("A100", "V100")))) == [0]


def test_whose_it_is_is_said(core):
    world = core(gpus=1)
    whose = "held by another kernel (pid 4711, /home/a/train.ipynb)"
    world.others["gpu-0"] = (6000, 0)
    world.send(ev.OutsideChanged((ev.Outside("gpu-0", 6000, 0, whose),)))
    task = world.fresh(ask(gpus=0.5))
    assert why(world.scheduler, task) == (
        "needs 0.5 of one GPU; the largest free share is 0.4 on GPU 0; 0.6 of GPU 0 is held by "
        "another kernel (pid 4711, /home/a/train.ipynb)"
    )
    assert available(world.scheduler)["GPU"] == 0.4
    assert snapshot(world.scheduler, 0).devices[0].free == 0.4


# ------------------------------------------------------------------------ what a session may have


def limited(core, most, gpus=2, **policy):
    world = core(gpus=gpus, **policy)
    again = type(world)(machine(gpus=gpus, most=most), world.scheduler.policy)
    world.__dict__.update(again.__dict__)
    return world


def test_no_more_is_given_out_than_the_session_may_have(core):
    world = limited(core, 1.5)
    first, second = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    half = world.fresh(ask(gpus=0.5))
    assert world.running() == [first, half]
    assert "has 1.5 of the 1.5 that it may have at once (max_gpus)" in why(world.scheduler, second)
    assert "GPU" not in available(world.scheduler)
    world.done(half)
    assert world.waits(second)
    world.done(first)
    assert world.running() == [second]


def test_idle_workers_make_room_for_what_the_session_may_have(core):
    world = limited(core, 1)
    warm = world.submit(ask(gpus=1), function="f")
    world.finish(warm)
    other = world.submit(ask(gpus=1), function="g")
    world.exit(min(world.ending))
    assert world.running() == [other]


def test_a_share_by_memory_goes_where_it_is_within_the_limit(core):
    world = core(gpus=[("V100", 16), ("A100", 48)])
    again = type(world)(machine(gpus=[("V100", 16), ("A100", 48)], most=0.5))
    world.__dict__.update(again.__dict__)
    assert world.gpus(world.fresh(ask(memory=12))) == [1]


@pytest.mark.parametrize("demand", [ask(gpus=2), ask(gpus=1)])
def test_more_than_the_session_may_have_is_refused(core, demand):
    world = limited(core, 0.5)
    task = world.fresh(demand)
    assert "may have 0.5 of the GPUs at once (max_gpus)" in world.settled[task].reason


def test_a_device_that_is_overbooked_keeps_nothing_from_those_who_need_none(core):
    """Others may hold more, for a moment, than we leave them."""
    world = core(gpus=1, cpus=1)
    held = world.fresh(ask(gpus=1, cpus=1))
    waits = world.submit(ask(cpus=1))
    world.hold(0, 0.5)
    world.done(held)
    assert waits in world.runs
