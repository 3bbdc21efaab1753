"""The view: plain data, consistent with itself, and in words that help."""

from __future__ import annotations

import json

import pytest

from gpunb.scheduler.resources import UNIT, Device, Machine
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.snapshot import SHOWN_PER_LINE, ActorView, available, snapshot
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import World, ask


def view(world: World) -> dict[str, object]:
    return snapshot(world.scheduler, world.now).as_dict()


def test_snapshot_of_an_idle_machine(core: MakeWorld) -> None:
    world = core([("A100", 40)], cpus=2, resources={"port": 1})
    assert view(world) == {
        "devices": [
            {
                "id": 0,
                "key": "gpu-0",
                "name": "device 0",
                "type": "A100",
                "memory": 40 * 1024**3,
                "logical": False,
                "free": 1.0,
                "held": [],
                "resource": "GPU",
                "vendor": "logical",
                "capability": None,
                "kept": None,
            }
        ],
        "cpus": 2.0,
        "cpus_free": 2.0,
        "total": {"CPU": 2.0, "GPU": 1.0, "accelerator_type:A100": 1.0, "port": 1.0},
        "available": {"CPU": 2.0, "GPU": 1.0, "accelerator_type:A100": 1.0, "port": 1.0},
        "running": [],
        "waiting": [],
        "queued": 0,
        "workers": 0,
        "actors": [],
        "unmet": {},
    }


def busy(core: MakeWorld) -> World:
    """Something of everything: running, warm, leaving, waiting in line and for inputs, actors."""
    world = core([("A100", 40), ("V100", 16), ("A100", 80)], cpus=4, resources={"port": 1})
    world.now = 100.0
    actor = world.ready_actor(ask(gpus=0.25, cpus=1))
    call = world.call(actor)
    world.call(actor, needs=[call])
    world.finish(world.submit(ask(memory=4), function="warm"))
    world.finish(world.fresh(ask(gpus=0.5, types=("V100",))))
    parent = world.fresh(ask(gpus=1), timeout=60)
    child = world.submit(parent=parent, needs=[call])
    world.fresh(ask(gpus=2), parent=child)
    world.submit(ask(cpus=4, resources={"port": 1}))
    world.now = 103.5
    return world


def test_a_snapshot_is_plain_data(core: MakeWorld) -> None:
    world = busy(core)
    assert json.loads(json.dumps(view(world))) == view(world)


def test_snapshot_of_jobs(core: MakeWorld) -> None:
    world = busy(core)
    seen = snapshot(world.scheduler, world.now)
    running = {job.id: job for job in seen.running}
    assert set(running) == {2, 6}
    assert running[6].name == "t6"
    assert running[6].state == "running"
    assert running[6].seconds == 3.5
    assert running[6].attempt == 1
    assert running[6].gpus == ((2, 1.0),)
    assert running[6].devices == (("GPU", 2, 1.0),)
    assert running[6].waits_for is None
    assert running[2].gpus == ((0, 0.25),)
    waiting = {job.id: job for job in seen.waiting}
    assert {ident: job.waits_for for ident, job in waiting.items()} == {
        3: "takes the result of #2",
        7: "takes the result of #2",
        8: "needs 2 whole GPUs; 0 of 3 are wholly free, held by #1, #5, #6",
        9: "needs 4 CPUs; 3 of 4 are free",
    }
    assert waiting[7].parent == 6
    assert waiting[7].state == "queued"
    assert waiting[7].worker is None
    assert seen.queued == 4


def test_snapshot_of_devices(core: MakeWorld) -> None:
    world = busy(core)
    first, second, third = snapshot(world.scheduler, world.now).devices
    # What a warm worker keeps counts as free; what a leaving one has not given back does not.
    assert (first.free, first.held) == (0.75, ((1, 0.25),))
    assert (second.free, second.held) == (0.5, ((5, 0.5),))
    assert (third.free, third.held) == (0.0, ((6, 1.0),))


def test_snapshot_of_actors(core: MakeWorld) -> None:
    world = core(gpus=2, cpus=4)
    source = world.submit()
    queued = world.actor(needs=[source])
    starting = world.actor()
    alive = world.ready_actor(ask(gpus=0.5))
    world.call(alive)
    world.call(alive, needs=[source])
    restarting = world.ready_actor(max_restarts=1)
    world.exit(world.scheduler.state.actors[restarting].worker or 0)
    ending = world.ready_actor()
    world.kill(ending)
    gone = world.ready_actor()
    world.kill(gone)
    world.exit(world.scheduler.state.actors[gone].worker or 0)
    seen = snapshot(world.scheduler, world.now).actors
    assert {each.id: (each.state, each.restarts) for each in seen} == {
        queued: ("queued", 0),
        starting: ("starting", 0),
        alive: ("alive", 0),
        restarting: ("restarting", 1),
        ending: ("ending", 0),
    }
    by_id = {each.id: each for each in seen}
    assert by_id[queued].worker is None
    assert by_id[alive] == ActorView(
        alive, f"a{alive}", "alive", 0, 3, ((0, 0.5),), (("GPU", 0, 0.5),), waiting=1, running=1
    )


def test_why_a_call_waits_for_its_actor(core: MakeWorld) -> None:
    world = core(gpus=1)
    source = world.fresh(ask(gpus=1))
    queued, unready, starting = world.actor(ask(gpus=1)), world.actor(needs=[source]), world.actor()
    texts = [world.why(world.call(each)) for each in (queued, unready, starting)]
    assert texts == [
        "waits for actor #2 to start: needs 1 whole GPU; 0 of 1 are wholly free, held by #1",
        "waits for actor #3 to start: takes the result of #1",
        "waits for actor #4 to start",
    ]
    world.finish(starting)
    running, waits = world.call(starting), world.call(starting)
    assert running
    assert world.why(waits) == f"waits for its turn in actor #{starting}"


def test_available_resources(core: MakeWorld) -> None:
    world = busy(core)
    assert available(world.scheduler) == {
        "CPU": 3.0,
        "GPU": 1.25,
        "accelerator_type:A100": 0.75,
        "accelerator_type:V100": 0.5,
        "port": 1.0,
    }


def test_overdrawn_cpus_are_shown_as_none_free(core: MakeWorld) -> None:
    world = core(cpus=1)
    parent = world.submit()
    world.block(parent)
    world.submit(parent=parent)
    world.unblock(parent)
    waits = world.submit()
    assert view(world)["cpus_free"] == 0.0
    assert "CPU" not in available(world.scheduler)
    assert world.why(waits) == "needs 1 CPU; 0 of 1 are free"


def test_why_a_task_waits(core: MakeWorld) -> None:
    world = core(gpus=2, cpus=4, max_workers=3)
    first, second = world.fresh(ask(gpus=0.7)), world.fresh(ask(gpus=0.6))
    waits = world.fresh(ask(gpus=0.6))
    assert world.why(waits) == (
        f"needs 0.6 of one GPU; the largest free share is 0.4 on GPU 1, held by #{second}"
    )
    assert world.why(first) is None
    assert world.why(99) is None
    sources = [world.submit() for _ in range(2)]
    limited = world.submit()
    assert world.why(limited) == ("3 worker processes run, which is the most allowed")
    many = world.submit(needs=[first, second, waits, *sources])
    assert world.why(many) == "takes the result of #1, #2, #3, #4 and others"
    actor = world.actor()
    call = world.call(actor)
    assert world.why(call) == (
        f"waits for actor #{actor} to start: 3 worker processes run, which is the most allowed"
    )


def test_why_a_task_waits_behind_a_reservation(core: MakeWorld) -> None:
    world = core(cpus=2, age=10)
    world.submit()
    world.submit(ask(cpus=2))
    world.advance(11)
    waits = world.submit()
    assert world.why(waits) == ("what is free is kept for #2 (2 CPU), which has waited longest")


def test_many_waiting_are_counted(core: MakeWorld) -> None:
    world = core(cpus=1)
    source = world.submit()
    for _ in range(SHOWN_PER_LINE + 5):
        world.submit()
        world.submit(needs=[source])
    seen = snapshot(world.scheduler, world.now)
    assert len(seen.waiting) == 2 * SHOWN_PER_LINE
    assert seen.queued == 2 * (SHOWN_PER_LINE + 5)
    ready = range(source + 1, source + 1 + 2 * SHOWN_PER_LINE, 2)
    assert [job.id for job in seen.waiting] == [*ready, *(each + 1 for each in ready)]


@pytest.mark.parametrize("ident", [3, "GPU-8f2a", "MIG-1"])
def test_device_ids_are_shown_unchanged(ident: int | str) -> None:
    scheduler = Scheduler(Machine((Device("uuid", ident, "name"),), UNIT))
    seen = snapshot(scheduler, 0.0)
    assert seen.devices[0].id == ident
    assert seen.devices[0].free == 1.0
