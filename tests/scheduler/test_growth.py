"""A task that ran out of device memory runs again with twice its share."""

from __future__ import annotations

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import UNIT, Demand
from gpunb.scheduler.tasks import Cancelled, Crashed, Raised, Succeeded
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import GiB, World, ask


def grown(decisions: list[ev.Decision]) -> list[Demand]:
    return [each.demand for each in decisions if isinstance(each, ev.Grown)]


@pytest.mark.parametrize("report", [Raised(), Succeeded()], ids=["a function", "a cell"])
def test_share_doubles_until_the_task_fits_or_has_the_whole_device(
    core: MakeWorld, report: Raised | Succeeded
) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=0.3), grow=True)
    for share in (6000, UNIT):
        worker = world.runs[task].worker
        assert grown(world.done(task, report, short=True)) == [Demand(gpus=share)]
        run = world.runs[task]
        assert run.allocation.shares == (("gpu-0", share),)
        assert run.worker != worker
        assert run.new
    world.done(task, report, short=True)
    assert world.settled[task] == report


def test_share_by_memory_doubles(core: MakeWorld) -> None:
    world = core(gpus=[("A100", 40)])
    task = world.fresh(ask(memory=10), grow=True)
    assert grown(world.done(task, Raised(), short=True)) == [Demand(gpu_memory=20 * GiB)]
    assert world.runs[task].allocation.shares == (("gpu-0", UNIT // 2),)


def test_larger_share_waits_for_room(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ask(gpus=0.5), grow=True)
    other = world.fresh(ask(gpus=0.5))
    world.done(first, Raised(), short=True)
    assert world.waits(first)
    world.done(other)
    assert world.running() == [first]
    world.done(first)
    assert world.settled[first] == Succeeded()


def test_process_that_was_ended_for_its_use_of_the_device_runs_again(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=0.5), grow=True)
    worker = world.runs[task].worker
    world.send(ev.ShareExceeded(worker, "it has too much"))
    assert grown(world.exit(worker)) == [Demand(gpus=UNIT)]
    assert world.running() == [task]


@pytest.mark.parametrize("short", [False, True])
def test_only_tasks_that_may_grow_do_and_only_for_want_of_memory(
    core: MakeWorld, short: bool
) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=0.5), grow=not short)
    world.done(task, Raised(), short=short)
    assert world.settled[task] == Raised()


def test_growing_takes_none_of_the_retries(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=0.25), grow=True, max_retries=1)
    world.done(task, Raised(retry=True), short=True)
    world.done(task, Raised(retry=True), short=True)
    world.done(task, Raised(retry=True))
    assert world.running() == [task]
    world.done(task, Raised(retry=True))
    assert world.settled[task] == Raised(retry=True)


def test_cancelled_task_does_not_run_again(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=0.5), grow=True)
    world.cancel(task)
    world.done(task, Raised(), short=True)
    assert world.settled[task] == Cancelled()


def test_crash_of_another_kind_keeps_the_share(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=0.5), grow=True, max_retries=0)
    world.crash(task)
    assert isinstance(world.settled[task], Crashed)


def test_actor_keeps_its_share(core: MakeWorld) -> None:
    world: World = core(gpus=1)
    actor = world.actor(ask(gpus=0.5))
    world.done(actor)
    call = world.call(actor)
    assert not grown(world.finish(call, Raised(), short=True))
    assert world.settled[call] == Raised()
