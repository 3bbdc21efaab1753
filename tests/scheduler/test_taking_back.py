"""Devices that are lost, and workers that take more than their share."""

from __future__ import annotations

from gpunb.scheduler import events as ev
from gpunb.scheduler.snapshot import available, snapshot
from gpunb.scheduler.tasks import (
    ActorDied,
    ActorUnavailable,
    Crashed,
    Raised,
    Refused,
    Succeeded,
    UpstreamFailed,
)
from tests.scheduler.world import World, ask, machine


def kills(decisions: list[ev.Decision]) -> list[int]:
    return [each.worker for each in decisions if isinstance(each, ev.Kill)]


# ---------------------------------------------------------------------------------- a lost device


def test_tasks_on_a_lost_device_end_with_the_reason():
    world = World(machine(gpus=2))
    first, second = (world.fresh(ask(gpus=0.5)) for _ in range(2))
    other = world.fresh(ask(gpus=1))
    worker = world.worker(first)
    assert kills(world.lose(0, "it fell off the bus")) == [worker, world.worker(second)]
    world.exit(worker, "it was killed by SIGKILL")
    assert world.settled[first] == Crashed("GPU 0 was lost: it fell off the bus")
    assert other in world.runs
    world.drain()
    world.replay()


def test_a_task_on_a_lost_device_is_retried_on_another():
    world = World(machine(gpus=2))
    task = world.fresh(ask(gpus=1), max_retries=1)
    world.lose(0)
    world.crash(task)
    assert world.gpus(task) == [1]
    world.drain()


def test_a_task_without_another_device_ends_with_the_loss():
    world = World(machine(gpus=1))
    task = world.fresh(ask(gpus=1), max_retries=5)
    world.lose(0, "gone")
    world.crash(task)
    assert world.settled[task] == Crashed("GPU 0 was lost: gone")
    world.drain()


def test_a_waiting_task_that_needs_the_lost_device_is_refused():
    world = World(machine(gpus=[("A100", 40), ("V100", 16)]))
    world.fresh(ask(gpus=2))
    both, big, small = (world.fresh(each) for each in (ask(gpus=2), ask(memory=30), ask(gpus=1)))
    taker = world.submit(ask(), needs=[big])
    unready = world.fresh(ask(gpus=1, types=("A100",)), needs=[small])
    world.lose(0, "an error of its memory")
    for task in (both, big, unready):
        outcome = world.settled[task]
        assert isinstance(outcome, Refused)
        assert outcome.reason.endswith("out of service: GPU 0 (an error of its memory)")
    assert world.settled[taker] == UpstreamFailed(big)
    assert world.waits(small)
    world.drain()
    assert world.settled[small] == Succeeded()


def test_a_later_request_for_the_lost_device_is_refused():
    world = World(machine(gpus=1))
    world.lose(0, "gone")
    task = world.fresh(ask(gpus=0.5))
    assert isinstance(world.settled[task], Refused)
    assert world.submit(ask(cpus=1)) in world.runs


def test_fractions_go_to_the_devices_that_are_left():
    world = World(machine(gpus=3))
    world.lose(1)
    tasks = [world.fresh(ask(gpus=0.6)) for _ in range(3)]
    assert [world.gpus(task) for task in tasks[:2]] == [[0], [2]]
    assert world.waits(tasks[2])
    assert "largest free share is 0.4" in str(snapshot(world.scheduler, 0).waiting[0].waits_for)


def test_an_idle_worker_on_a_lost_device_ends():
    world = World(machine(gpus=2))
    task = world.submit(ask(gpus=1), function="f")
    worker = world.worker(task)
    world.finish(task)
    assert kills(world.lose(0)) == [worker]
    again = world.submit(ask(gpus=1), function="f")
    assert world.gpus(again) == [1]
    world.drain()


def test_a_reservation_of_a_lost_device_ends():
    world = World(machine(gpus=2))
    world.fresh(ask(gpus=0.5))
    first = world.fresh(ask(gpus=0.5))
    large = world.fresh(ask(gpus=2))
    world.advance(60)
    small = world.fresh(ask(gpus=0.5))
    assert world.scheduler.queue.reservation is not None
    assert world.waits(small)
    world.lose(0)
    assert isinstance(world.settled[large], Refused)
    assert world.gpus(small) == [1]
    assert first in world.runs
    world.drain()


def test_a_new_reservation_avoids_the_lost_device():
    world = World(machine(gpus=2))
    for _ in range(2):
        world.fresh(ask(gpus=0.6))
    large = world.fresh(ask(gpus=1))
    world.advance(60)
    world.send(ev.TimeReached())
    assert world.scheduler.queue.reservation is not None
    world.lose(0)
    small = world.fresh(ask(gpus=0.3))
    assert world.waits(small), "it keeps the large one from its last chance"
    world.done(min(world.runs))
    world.done(min(world.runs))
    assert world.gpus(large) == [1]
    world.drain()


def test_an_actor_on_a_lost_device_restarts_on_another():
    world = World(machine(gpus=2))
    actor = world.ready_actor(ask(gpus=1), max_restarts=1)
    call = world.call(actor)
    world.lose(0, "gone")
    world.crash(call)
    assert world.settled[call] == ActorUnavailable(actor, "GPU 0 was lost: gone")
    assert world.gpus(actor) == [1]
    world.drain()


def test_an_actor_without_another_device_ends():
    world = World(machine(gpus=1))
    actor = world.ready_actor(ask(gpus=1), max_restarts=-1)
    call = world.call(actor)
    world.lose(0, "gone")
    world.crash(call)
    assert world.ended[actor] == ActorDied(actor, "GPU 0 was lost: gone")
    world.drain()


def test_a_restarting_actor_without_another_device_ends():
    world = World(machine(gpus=2))
    actor = world.ready_actor(ask(gpus=1), max_restarts=-1)
    world.fresh(ask(gpus=1))
    world.lose(0)
    world.exit(min(world.live))
    assert world.waits(actor)
    world.lose(1)
    assert isinstance(world.ended[actor], ActorDied)
    world.drain()


def test_a_repeated_or_unknown_loss_changes_nothing():
    world = World(machine(gpus=2))
    world.lose(0, "first")
    assert world.lose(0, "second") == []
    assert world.lose(7) == []
    assert world.scheduler.capacity.lost == {0: "first"}


def test_a_result_before_the_loss_counts():
    world = World(machine(gpus=1))
    task = world.fresh(ask(gpus=1))
    world.lose(0)
    world.finish(task)
    assert world.settled[task] == Succeeded()
    world.drain()


def test_a_lost_device_is_not_available():
    world = World(machine(gpus=2))
    world.lose(1)
    assert available(world.scheduler)["GPU"] == 1
    assert [each.free for each in snapshot(world.scheduler, 0).devices] == [1, 0]


# ----------------------------------------------------------------------------- more than the share


def test_a_task_above_its_share_is_stopped_without_a_retry():
    world = World(machine(gpus=1))
    task, other = (world.fresh(ask(gpus=0.5), max_retries=3) for _ in range(2))
    worker = world.worker(task)
    assert kills(world.exceeds(worker, "12 of 10 GiB")) == [worker]
    world.crash(task, "it was killed by SIGKILL")
    assert world.settled[task] == Crashed("12 of 10 GiB", out_of_memory=True, stopped=True)
    assert other in world.runs
    world.drain()
    world.replay()


def test_a_repeated_or_late_excess_changes_nothing():
    world = World(machine(gpus=1))
    task = world.fresh(ask(gpus=0.5))
    worker = world.worker(task)
    world.exceeds(worker)
    assert kills(world.exceeds(worker)) == []
    world.crash(task)
    assert world.exceeds(worker) == []
    assert world.exceeds(900) == []


def test_an_excess_after_the_end_of_the_task_changes_nothing():
    world = World(machine(gpus=1))
    task = world.fresh(ask(gpus=0.5))
    worker = world.worker(task)
    world.finish(task, Raised())
    assert kills(world.exceeds(worker)) == []
    assert world.settled[task] == Raised()
    world.drain()


def test_an_idle_worker_above_its_share_ends():
    world = World(machine(gpus=1))
    task = world.submit(ask(gpus=0.5), function="f")
    worker = world.worker(task)
    world.finish(task)
    assert kills(world.exceeds(worker)) == [worker]
    again = world.submit(ask(gpus=0.5), function="f")
    assert world.worker(again) != worker
    world.drain()


def test_an_actor_above_its_share_ends():
    world = World(machine(gpus=1))
    actor = world.ready_actor(ask(gpus=0.5))
    call = world.call(actor)
    world.exceeds(world.worker(call), "too much")
    world.crash(call)
    assert world.settled[call] == ActorDied(actor, "too much")
    world.drain()
