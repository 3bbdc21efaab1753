"""Prepared workers: they have a context on a device, and wait for a task with a share of it."""

from __future__ import annotations

from gpunb.scheduler import events as ev
from gpunb.scheduler.prepared import TRIES, room
from gpunb.scheduler.resources import UNIT
from gpunb.scheduler.tasks import Succeeded
from tests.scheduler.world import acts, ask, gpu

BOTH = ("gpu-0", "gpu-1")


def wake(world):
    """An event that changes nothing; the decisions after it."""
    return acts(world.send(ev.TimeReached()))


def devices(world):
    """The devices with a prepared worker."""
    return sorted(key for each in world.prepared for key, _ in world.live[each].shares)


def test_none_is_prepared_unless_the_policy_names_devices(core):
    assert wake(core(gpus=2)) == []


def test_each_named_device_has_one_prepared_worker(core):
    world = core(gpus=3, prepare=BOTH)
    assert [type(each) for each in wake(world)] == [ev.Prepare, ev.Prepare]
    assert devices(world) == ["gpu-0", "gpu-1"]
    assert wake(world) == []


def test_a_prepared_worker_holds_the_room_of_a_context():
    assert room(gpu(0, "H200", 160 * 2**30)) == UNIT // 250
    assert room(gpu(0, "small", 2**20)) == UNIT
    assert 0 < room(gpu(0)) < UNIT // 10


def test_a_task_gets_the_prepared_worker_of_its_device(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    (worker,) = world.prepared
    for share in (0.5, 1):
        task = world.fresh(ask(gpus=share))
        run = world.runs[task]
        assert (run.worker, run.new, run.prepared, run.last) == (worker, False, True, True)
        assert dict(run.allocation.shares) == {"gpu-0": share * UNIT}
        world.done(task)
        (worker,) = world.prepared


def test_the_next_worker_is_prepared_as_soon_as_there_is_room(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    half = world.fresh(ask(gpus=0.5))
    assert devices(world) == ["gpu-0"]
    other = world.fresh(ask(gpus=0.5))
    assert world.runs[other].prepared
    assert devices(world) == []
    world.done(half)
    assert devices(world) == ["gpu-0"]


def test_a_reused_worker_goes_before_a_prepared_one(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    first = world.submit(ask(gpus=0.5), function="f")
    worker = world.worker(first)
    world.finish(first)
    again = world.submit(ask(gpus=0.5), function="f")
    assert world.worker(again) == worker
    assert not world.runs[again].prepared


def test_an_actor_gets_a_prepared_worker(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    actor = world.ready_actor(ask(gpus=0.5))
    call = world.call(actor)
    assert world.gpus(actor if actor in world.runs else call) == [0]
    world.finish(call)
    world.kill(actor)


def test_prepared_workers_end_for_a_task_with_several_devices(core):
    world = core(gpus=2, prepare=BOTH)
    wake(world)
    old = set(world.prepared)
    task = world.fresh(ask(gpus=2))
    assert world.ending == old
    assert world.waits(task)
    for worker in old:
        world.exit(worker)
    assert world.gpus(task) == [0, 1]
    assert world.runs[task].new


def test_none_is_prepared_while_tasks_wait(core):
    world = core(gpus=1, cpus=1, prepare=BOTH)
    world.submit(ask(cpus=1))
    world.submit(ask(cpus=1))
    assert devices(world) == ["gpu-0"]  # made before a task waited
    (worker,) = world.prepared
    world.exit(worker, "killed")
    assert devices(world) == []


def test_a_prepared_worker_ends_when_another_session_wants_its_device(core):
    world = core(gpus=2, prepare=BOTH)
    wake(world)
    world.report_peers(wanted=["gpu-0"])
    (worker,) = world.ending
    world.exit(worker)
    assert devices(world) == ["gpu-1"]
    world.report_peers()
    assert devices(world) == ["gpu-0", "gpu-1"]


def test_a_device_that_others_hold_wholly_has_none(core):
    world = core(gpus=2, prepare=BOTH)
    world.peers_hold(0, 1)
    assert devices(world) == ["gpu-1"]


def test_a_refused_lease_is_not_asked_for_again_before_the_others_change(core):
    world = core(gpus=1, prepare=BOTH)
    world.peers_hold(0, 1, report=False)
    assert [type(each) for each in wake(world)] == [ev.Prepare]
    assert devices(world) == []
    assert wake(world) == []
    world.peers_hold(0, 0)
    assert devices(world) == ["gpu-0"]


def test_idle_workers_that_are_released_are_not_prepared_again(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    (worker,) = world.prepared
    world.send(ev.ReleaseRequested())
    world.exit(worker)
    assert devices(world) == []


def test_a_prepared_worker_that_is_released_alone_has_a_successor(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    for _ in range(TRIES + 1):
        (worker,) = world.prepared
        world.send(ev.ReleaseRequested(ev.PREPARED))
        world.exit(worker)
        assert list(world.prepared) != [worker]
        assert devices(world) == ["gpu-0"]


def test_a_prepared_worker_does_not_end_for_being_idle(core):
    world = core(gpus=1, prepare=BOTH, idle_limit=5)
    wake(world)
    world.finish(world.submit())
    world.advance(60)
    assert devices(world) == ["gpu-0"]


def test_no_more_are_started_after_some_have_failed(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    for _ in range(TRIES):
        (worker,) = world.prepared
        world.exit(worker, "no context")
    assert devices(world) == []
    task = world.fresh(ask(gpus=1))
    assert world.runs[task].new
    world.done(task)
    assert world.settled[task] == Succeeded()


def test_a_lost_device_has_none(core):
    world = core(gpus=1, prepare=BOTH)
    wake(world)
    (worker,) = world.prepared
    world.lose(0)
    assert worker in world.killed
    world.exit(worker)
    assert devices(world) == []
