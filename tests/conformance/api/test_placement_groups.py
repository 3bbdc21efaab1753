"""Placement groups."""

from __future__ import annotations

import gc
import importlib

import pytest

from tests.conformance.api.backends import BACKEND, OVER_RAY, errors, get, here, ray
from tests.conformance.api.differences import ON_THE_BACKEND, differs
from tests.waiting import PATIENCE, eventually

groups = importlib.import_module(f"{BACKEND}.util.placement_group")
strategies = importlib.import_module(f"{BACKEND}.util.scheduling_strategies")

pytestmark = pytest.mark.skipif(OVER_RAY, reason=ON_THE_BACKEND["backend-placement-groups"])


def within(group, bundle=-1, capture=None):
    return strategies.PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=bundle,
        placement_group_capture_child_tasks=capture,
    )


@pytest.fixture
def group():
    """Two bundles, which are all the machine's devices."""
    made = groups.placement_group([{"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}])
    yield made
    groups.remove_placement_group(made)
    eventually(lambda: ray.available_resources().get("GPU") == 2)


@ray.remote(num_gpus=1, num_cpus=0)
def devices():
    return ray.get_gpu_ids()


@ray.remote(num_gpus=1, num_cpus=0)
def hold(gate, name="task"):
    gate.enter(name)


@ray.remote(num_gpus=1, num_cpus=1)
class Model:
    def devices(self):
        return ray.get_gpu_ids()

    def current(self):
        return groups.get_current_placement_group()


def test_a_group_is_ready_when_all_its_bundles_are_placed(group):
    assert get(group.ready()) == group
    assert group.wait(timeout_seconds=PATIENCE)
    assert group.bundle_count == 2
    assert group.bundle_specs == [{"GPU": 1.0, "CPU": 1.0}] * 2
    assert "GPU" not in ray.available_resources()


def test_tasks_and_actors_run_in_their_bundles(group):
    first, second = (
        devices.options(scheduling_strategy=within(group, bundle)).remote() for bundle in (0, 1)
    )
    assert sorted(get([first, second])) == [[0], [1]]
    model = Model.options(scheduling_strategy=within(group, 1)).remote()
    assert get(model.devices.remote()) == get(second)


def test_a_bundle_is_shared_by_the_tasks_in_it(group, gate):
    half = hold.options(num_gpus=0.5, scheduling_strategy=within(group, 0))
    refs = [half.remote(gate, name) for name in range(3)]
    eventually(lambda: gate.count() == 2)
    gate.open()
    get(refs)


def test_the_group_of_the_caller_is_known(group):
    model = Model.options(scheduling_strategy=within(group)).remote()
    assert get(model.current.remote()) == group
    assert groups.get_current_placement_group() is None


def test_children_run_in_the_group_if_it_captures_them(group):
    @ray.remote(num_gpus=1, num_cpus=1)
    def parent(**options):
        return get(child.options(**options).remote())

    @ray.remote(num_gpus=0, num_cpus=1)
    def child():
        return groups.get_current_placement_group()

    captures = parent.options(scheduling_strategy=within(group, capture=True))
    assert get(captures.remote()) == group
    assert get(captures.remote(scheduling_strategy="DEFAULT")) is None
    assert get(parent.options(scheduling_strategy=within(group)).remote()) is None


def test_a_group_that_waits_holds_nothing(gate):
    holder = hold.remote(gate)
    gate.await_()
    group = groups.placement_group([{"GPU": 1}, {"GPU": 1}])
    assert not group.wait(timeout_seconds=0.1)
    assert get(devices.remote())
    gate.open()
    get(holder)
    assert group.wait(timeout_seconds=PATIENCE)
    groups.remove_placement_group(group)


def test_a_group_is_found_by_its_name():
    group = groups.placement_group([{"CPU": 1}], name="the group")
    assert group.wait(timeout_seconds=PATIENCE)
    assert groups.get_placement_group("the group") == group
    groups.remove_placement_group(group)
    with pytest.raises(ValueError, match="the group"):
        eventually(lambda: groups.get_placement_group("the group") and False)


def test_the_table_shows_the_state_of_a_group(group):
    get(group.ready())
    row = groups.placement_group_table(group)
    assert (row["state"], row["strategy"]) == ("CREATED", "PACK")
    assert row["bundles"] == {0: {"GPU": 1.0, "CPU": 1.0}, 1: {"GPU": 1.0, "CPU": 1.0}}
    assert row["placement_group_id"] == group.id.hex()
    assert row["placement_group_id"] in groups.placement_group_table()


def test_tasks_of_a_removed_group_fail(gate):
    group = groups.placement_group([{"GPU": 1}])
    task = hold.options(scheduling_strategy=within(group), max_retries=0)
    running = task.remote(gate)
    gate.await_()
    waiting = task.remote(gate)
    groups.remove_placement_group(group)
    with pytest.raises(errors.GroupRemoved):
        get(waiting)
    with pytest.raises((errors.GroupRemoved, errors.Crashed)):
        get(running)
    eventually(lambda: ray.available_resources().get("GPU") == 2)


def test_a_task_that_does_not_fit_in_a_bundle_is_refused(group):
    with pytest.raises(ValueError, match="fit in"):
        devices.options(num_gpus=2, scheduling_strategy=within(group)).remote()
    with pytest.raises(ValueError, match="index"):
        devices.options(scheduling_strategy=within(group, 2)).remote()


@pytest.mark.parametrize("bundles", [[], [{}], {"GPU": 1}, [{"GPU": 0}]])
def test_bundles_that_ask_for_nothing_are_refused(bundles):
    with pytest.raises(ValueError, match=r"[Bb]undles"):
        groups.placement_group(bundles)


@pytest.mark.parametrize("options", [{"strategy": "CLOSE"}, {"lifetime": "long"}])
def test_unknown_options_of_groups_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options.values()))):
        groups.placement_group([{"CPU": 1}], **options)


@differs("infeasible-requests")
def test_a_group_that_is_larger_than_the_machine():
    def larger():
        return groups.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")

    if here(ray=True, gpunb=False):
        group = larger()
        assert not group.wait(timeout_seconds=0.1)
        groups.remove_placement_group(group)
    else:
        with pytest.raises(ValueError, match="a node for each"):
            larger()


@differs("groups-end-with-their-handles")
def test_a_group_of_which_no_handle_is_left():
    group = groups.placement_group([{"GPU": 1}])
    assert group.wait(timeout_seconds=PATIENCE)
    ident = group.id.hex()
    del group
    gc.collect()
    if here(ray=True, gpunb=False):
        assert groups.placement_group_table()[ident]["state"] == "CREATED"
        groups.remove_placement_group(groups.PlacementGroup(_ray_id(ident)))
    else:
        eventually(lambda: ident not in groups.placement_group_table())


def _ray_id(ident):
    return importlib.import_module("ray").PlacementGroupID(bytes.fromhex(ident))
