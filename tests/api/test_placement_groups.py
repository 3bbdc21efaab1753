"""Placement groups: what only gpunb's own session shows of them."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import pytest

import gpunb
from gpunb.exceptions import (
    ActorAlreadyExistsError,
    DeadlockError,
    InfeasibleRequestError,
    TaskPlacementGroupRemoved,
)
from gpunb.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from gpunb.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tests.sessions import session
from tests.waiting import Gate, eventually


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with session(num_cpus=2, simulate="2xA100:40GiB,1xV100:16GiB"):
        yield


@pytest.fixture(autouse=True)
def _all_free() -> Iterator[None]:
    yield
    gc.collect()
    eventually(lambda: gpunb.available_resources() == gpunb.cluster_resources(), "all free", 10)


def within(group: PlacementGroup, bundle: int = -1, capture: bool | None = None):
    return PlacementGroupSchedulingStrategy(group, bundle, capture)


@gpunb.remote(num_gpus=1)
def devices():
    return gpunb.get_gpu_ids()


@gpunb.remote(num_gpus=1)
def hold(gate, name="task"):
    gate.enter(name)
    return gpunb.get_gpu_ids()


@gpunb.remote(num_gpus=1)
class Holder:
    def devices(self):
        return gpunb.get_gpu_ids()


def test_bundles_may_ask_for_memory_and_types():
    group = placement_group(
        [{"GPU": 1}, {"GPU": 1, "accelerator_type": "V100"}, {"gpu_memory": "10GiB", "CPU": 1}]
    )
    assert group.wait(10)
    on = [
        devices.options(num_gpus=share, scheduling_strategy=within(group, at)).remote()
        for at, share in enumerate((1, 1, 0.25))
    ]
    assert gpunb.get(on) == [[0], [2], [1]]
    by_memory = devices.options(
        num_gpus=None, gpu_memory="10GiB", scheduling_strategy=within(group, 2)
    )
    assert gpunb.get(by_memory.remote()) == [1]
    assert group.bundle_specs[2] == {"CPU": 1.0, "gpu_memory": 10 * 2**30}


@pytest.mark.parametrize(
    ("bundles", "text"),
    [
        ([], "must be a list of dicts of resources"),
        ({"GPU": 1}, "must be a list of dicts of resources"),
        ([1], r"bundles\[0\]=1 must be a dict"),
        ([{"GPU": 1}, {}], r"bundles\[1\]={} asks for nothing"),
        ([{"GPU": -1}], r"bundles\[0\].*num_gpus=-1 must not be negative"),
        ([{"GPU": 1.5}], "above 1 and not whole"),
    ],
)
def test_bundles_are_checked(bundles, text):
    with pytest.raises(ValueError, match=text):
        placement_group(bundles)


@pytest.mark.parametrize(
    ("bundles", "options", "text"),
    [
        ([{"GPU": 4}], {}, "bundle 0 of the placement group: a request for 4 GPU can never"),
        ([{"GPU": 1}] * 4, {}, "can never be placed together on this machine: there are 2 x A100"),
        ([{"CPU": 1}] * 2, {"strategy": "STRICT_SPREAD"}, "wants a node for each of the 2 bundles"),
    ],
)
def test_a_group_that_can_never_be_placed_is_refused_at_once(bundles, options, text):
    with pytest.raises(InfeasibleRequestError, match=text):
        placement_group(bundles, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "CLOSE"}, "'CLOSE' must be one of PACK, SPREAD, STRICT_PACK"),
        ({"lifetime": "long"}, "lifetime='long' must be 'detached' or None"),
    ],
)
def test_options_of_a_group_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        placement_group([{"CPU": 1}], **options)


def test_a_task_larger_than_its_bundle_is_an_error_where_it_is_said():
    group = placement_group([{"GPU": 0.5}, {"GPU": 1}])
    with pytest.raises(ValueError, match=r"1 GPU does not fit in bundle 0 .* has \[0.5 GPU\]"):
        devices.options(scheduling_strategy=within(group, 0))
    with pytest.raises(ValueError, match=r"2 is no bundle of .*: there are 0 to 1"):
        devices.options(scheduling_strategy=within(group, 2))
    with pytest.raises(ValueError, match=r"ask for less \(num_cpus=0 for no CPU\)"):
        devices.options(num_gpus=0, scheduling_strategy=within(group))


def test_a_group_waits_without_holding_anything_and_says_why(gate: Gate):
    ref = hold.remote(gate)
    gate.await_()
    group = placement_group([{"GPU": 1}] * 3)
    inner = devices.options(scheduling_strategy=within(group)).remote()
    assert not group.wait(0)
    assert gpunb.get(devices.remote()) in ([1], [2])
    (row,) = placement_group_table().values()
    assert row["state"] == "PENDING"
    reason = r"all 3 bundles are placed at once; bundle \d needs 1 whole GPU"
    assert re.match(reason, row["why"])
    waits = {each["id"]: each["waits_for"] for each in gpunb.status()["waiting"]}
    assert re.match(reason, waits[group.id])
    waits_for = f"waits for placement group #{group.id} to be placed: {reason}"
    assert re.match(waits_for, waits[inner.task_id])
    gate.open()
    assert gpunb.get(group.ready()) == group
    assert placement_group_table(group)["state"] == "CREATED"
    assert gpunb.get([ref, inner]) == [[0], [0]]


def test_the_status_shows_a_group_with_its_devices():
    group = placement_group([{"GPU": 1}, {"GPU": 0.5}], name="shown")
    assert group.wait(10)
    facts = gpunb.status()
    (actor,) = facts["actors"]
    assert (actor["id"], actor["kind"], actor["state"]) == (group.id, "group", "alive")
    assert actor["devices"] == [["GPU", 0, 1.0], ["GPU", 1, 0.5]]
    assert [each["held"] for each in facts["devices"]] == [[[group.id, 1.0]], [[group.id, 0.5]], []]
    assert gpunb.util.list_named_actors() == []
    remove_placement_group(group)


def test_a_group_ends_with_its_last_handle_and_its_last_task(gate: Gate):
    group = placement_group([{"GPU": 1}])
    ref = hold.options(scheduling_strategy=within(group)).remote(gate)
    holder = Holder.options(num_gpus=0, scheduling_strategy=within(group)).remote()
    del group
    gc.collect()
    gate.await_()
    gate.open()
    assert gpunb.get(ref) == [0]
    assert gpunb.get(holder.devices.remote()) == []
    assert gpunb.available_resources()["GPU"] == 2
    del holder
    gc.collect()
    eventually(lambda: gpunb.available_resources()["GPU"] == 3)


def test_a_named_group_is_there_without_a_handle():
    placement_group([{"GPU": 1}], name="kept")
    gc.collect()
    group = get_placement_group("kept")
    assert group.wait(10)
    with pytest.raises(ActorAlreadyExistsError, match="is taken by placement group #"):
        placement_group([{"GPU": 1}], name="kept")
    remove_placement_group(group)
    with pytest.raises(ValueError, match="no placement group has the name 'kept'"):
        get_placement_group("kept")


def test_removal_ends_what_waits_and_what_runs_in_the_group(gate: Gate):
    group = placement_group([{"GPU": 1}])
    running = hold.options(scheduling_strategy=within(group)).remote(gate)
    waiting = devices.options(scheduling_strategy=within(group)).remote()
    gate.await_()
    remove_placement_group(group)
    for ref in (running, waiting):
        with pytest.raises(TaskPlacementGroupRemoved, match=f"placement group #{group.id}"):
            gpunb.get(ref)
    assert not group.wait(1)
    assert placement_group_table(group)["state"] == "REMOVED"
    late = devices.options(scheduling_strategy=within(group)).remote()
    with pytest.raises(TaskPlacementGroupRemoved):
        gpunb.get(late)


def test_a_worker_that_is_killed_leaves_its_bundle_free():
    group = placement_group([{"GPU": 1}])

    @gpunb.remote(num_gpus=1, max_retries=1)
    def die_once(folder):
        import os
        import signal

        if not os.path.exists(folder):
            os.mkdir(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return gpunb.get_gpu_ids()

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        task = die_once.options(scheduling_strategy=within(group))
        assert gpunb.get(task.remote(f"{folder}/died")) == [0]


def test_a_task_that_waits_for_a_group_that_needs_its_own_device_fails():
    @gpunb.remote(num_gpus=1)
    def wait_for_all():
        group = placement_group([{"GPU": 1}] * 3)
        return gpunb.get(group.ready())

    with pytest.raises(DeadlockError, match="GPU 0 is held by"):
        gpunb.get(wait_for_all.remote())


def test_a_group_that_a_task_made_ends_with_the_task():
    @gpunb.remote(num_cpus=0)
    def make():
        group = placement_group([{"GPU": 1}], name="of the task")
        return group.wait(10), gpunb.get(
            devices.options(scheduling_strategy=within(group)).remote()
        )

    assert gpunb.get(make.remote()) == (True, [0])
    eventually(lambda: not placement_group_table())


def test_a_captured_actor_runs_in_the_group_of_its_parent():
    group = placement_group([{"GPU": 1, "CPU": 1}])

    @gpunb.remote
    class Parent:
        def child(self, **options):
            child = Holder.options(num_gpus=0.5, **options).remote()
            return gpunb.get(child.devices.remote())

    parent = Parent.options(scheduling_strategy=within(group, 0, capture=True)).remote()
    others = [devices.remote() for _ in range(2)]
    assert gpunb.get(parent.child.remote()) == [0]
    assert gpunb.get(parent.child.remote(scheduling_strategy="DEFAULT")) in ([1], [2])
    assert gpunb.get(others)
