"""Devices of other kinds than GPUs: asked for as resources, placed like GPUs, with rules of
their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunb.scheduler.explain import refusal
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import UNIT, Allocation, Demand, Device, Machine
from gpunb.scheduler.snapshot import available, snapshot, unmet
from gpunb.scheduler.tasks import Succeeded
from gpunb.scheduler.waiting import why_demand_waits
from tests.scheduler.world import GiB, World, ask, family, gpu, machine

NPUS = replace(machine(cpus=2, resources={"port": 1}), devices=(gpu(0), *family("NPU", 3)))
TPUS = Machine((*family("TPU", 4, whole=True, counts=(1, 2, 4)), gpu(0, "A100", 40)), 2 * UNIT)


def places(capacity: Capacity, *demands: Demand) -> list[list[str] | None]:
    found: list[list[str] | None] = []
    for demand in demands:
        allocation = capacity.place(demand)
        found.append(None if allocation is None else [key for key, _ in allocation.shares])
        if allocation is not None:
            capacity.take(allocation)
    return found


def test_devices_of_other_kinds_are_resources_of_their_own() -> None:
    totals = {"CPU": 2.0, "GPU": 1.0, "NPU": 3.0, "port": 1.0}
    assert NPUS.totals() == totals
    world = World(NPUS)
    assert available(world.scheduler) == totals
    world.submit(ask(resources={"NPU": 2}), max_calls=1)
    world.submit(ask(resources={"NPU": 0.25}), max_calls=1)
    assert available(world.scheduler) == {**totals, "NPU": 0.75}


def test_a_job_shows_its_devices_of_each_kind() -> None:
    world = World(NPUS)
    world.fresh(ask(gpus=0.5, resources={"NPU": 1}))
    world.actor(ask(resources={"NPU": 0.5}))
    seen = snapshot(world.scheduler, world.now)
    (job,) = [each for each in seen.running if each.gpus]
    assert (job.gpus, job.devices) == (((0, 0.5),), (("GPU", 0, 0.5), ("NPU", 0, 1.0)))
    (actor,) = seen.actors
    assert (actor.gpus, actor.devices) == ((), (("NPU", 1, 0.5),))


def test_a_parked_actor_has_its_devices_of_each_kind_again() -> None:
    world = World(NPUS)
    actor = world.ready_actor(ask(gpus=0.5, resources={"NPU": 1, "port": 1}))
    shares = (("gpu-0", UNIT // 2), ("NPU-0", UNIT))
    world.park(actor)
    call = world.call(actor)
    assert world.runs[actor].allocation.shares == shares
    world.finish(actor)
    assert call in world.runs


def test_devices_of_other_kinds_are_packed_like_gpus() -> None:
    capacity = Capacity(NPUS)
    half, one, two = (ask(resources={"NPU": each}) for each in (0.5, 1, 2))
    found = places(capacity, half, one, half, two, one, half)
    assert found == [["NPU-0"], ["NPU-1"], ["NPU-0"], None, ["NPU-2"], None]


def test_a_demand_may_have_parts_of_several_kinds() -> None:
    both = ask(gpus=0.5, cpus=1, resources={"NPU": 2, "port": 0.5})
    assert Capacity(NPUS).place(both) == Allocation(
        (("gpu-0", 5000), ("NPU-0", UNIT), ("NPU-1", UNIT)), UNIT, (("port", 5000),)
    )
    assert places(Capacity(NPUS), ask(gpus=1), both) == [["gpu-0"], None]


def test_num_gpus_takes_no_device_of_another_kind() -> None:
    assert places(Capacity(NPUS), ask(gpus=1), ask(gpus=0.1)) == [["gpu-0"], None]
    assert refusal(ask(gpus=2), NPUS) is not None


def test_only_allowed_numbers_of_devices_are_given_out() -> None:
    found = places(Capacity(TPUS), *(ask(resources={"TPU": each}) for each in (1, 2, 2, 1)))
    assert found == [["TPU-0"], ["TPU-1", "TPU-2"], None, ["TPU-3"]]


@pytest.mark.parametrize(
    ("demand", "made", "message"),
    [
        (ask(resources={"TPU": 0.5}), TPUS, "TPU devices are given out whole: ask for a whole"),
        (ask(resources={"NPU": 1.5}), NPUS, "NPU devices are given out whole: ask for a whole"),
        (ask(resources={"TPU": 3}), TPUS, "3 TPU devices cannot be used together: ask for one of"),
        (ask(resources={"NPU": 4}), NPUS, "it asks for 4 NPU and there are 3"),
        (ask(resources={"HPU": 1}), NPUS, "1 of the resource 'HPU': there is none"),
        (
            ask(gpus=1),
            Machine(tuple(family("TPU", 2, whole=True))),
            "logical ones), but 1 x TPU 0, 1 x TPU 1: ask for resources={'TPU': 1}",
        ),
    ],
)
def test_demands_that_can_never_be_met_are_refused(
    demand: Demand, made: Machine, message: str
) -> None:
    reason = refusal(demand, made)
    assert reason is not None
    assert message in reason
    assert Capacity(made).place(demand) is None


def test_a_type_selects_devices_of_another_kind() -> None:
    devices = [replace(each, type="TPU-V4") for each in family("TPU", 2, whole=True)]
    made = Machine(tuple(devices), UNIT)
    assert places(Capacity(made), ask(resources={"TPU": 1}, types=("v4",))) == [["TPU-0"]]
    reason = refusal(ask(resources={"TPU": 1}, types=("TPU-V5P",)), made)
    assert reason is not None
    assert "no TPU device is of type TPU-V5P: there are 2 x TPU-V4" in reason


V4 = [replace(each, type="TPU-V4") for each in family("TPU", 2, whole=True, counts=(1, 2))]
V5 = replace(family("TPU", 3, whole=True)[2], type="TPU-V5P", counts=(1, 2, 3))
TYPED = Machine((*V4, V5, *family("NPU", 1), gpu(0, "A100", 40), gpu(1, "V100", 16)))


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (ask(resources={"TPU": 2}, types=("A100",)), "no TPU device is of type A100: there are 2"),
        (ask(resources={"NPU": 1}, types=("TPU-V4",)), "no NPU device is of type TPU-V4: there"),
        (ask(resources={"TPU": 1}, types=("TPU-V6",)), "Did you mean 'TPU-V4' or 'TPU-V5P'?"),
        (ask(resources={"TPU": 2}, types=("v5p",)), "2 TPU, and too few are of the type: there"),
        (ask(resources={"TPU": 3}), "asks for 3 TPU, and only 1 can be used so many at a time"),
    ],
)
def test_the_type_of_another_kind_is_refused(demand: Demand, message: str) -> None:
    reason = refusal(demand, TYPED)
    assert reason is not None
    assert message in reason
    assert Capacity(TYPED).place(demand) is None


TYPES = ["A100", "V100", "TPU-V4", "TPU-V5P"]
SIZES = [None, 16 * GiB, 40 * GiB]
DEVICES = st.tuples(
    st.sampled_from(["GPU", "GPU", "TPU", "NPU"]),
    st.sampled_from([None, *TYPES]),
    st.sampled_from(SIZES),
    st.booleans(),
    st.sampled_from([(), (1,), (1, 2), (2, 3)]),
)
SHARES = st.sampled_from([UNIT // 2, UNIT - 1, UNIT, 2 * UNIT, 3 * UNIT])
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "gpus": SHARES,
        "gpu_memory": st.sampled_from([1, 16 * GiB, 17 * GiB, 41 * GiB]),
        "min_memory": st.sampled_from([1, 17 * GiB, 41 * GiB]),
        "cpus": st.sampled_from([UNIT, 2 * UNIT]),
    },
)


@settings(max_examples=400)
@given(
    st.lists(DEVICES, max_size=6),
    st.sampled_from([None, UNIT // 2, 2 * UNIT]),
    PARTS,
    st.dictionaries(st.sampled_from(["TPU", "NPU", "port"]), SHARES, max_size=2),
    st.lists(st.sampled_from(TYPES), max_size=2),
)
def test_a_demand_that_is_not_refused_fits_on_an_empty_machine(
    devices: list[tuple[str, str | None, int | None, bool, tuple[int, ...]]],
    most: int | None,
    parts: dict[str, int],
    resources: dict[str, int],
    types: list[str],
) -> None:
    """Else it would wait for ever; and what is refused could not run."""
    made = Machine(
        tuple(
            Device(f"d{at}", at, f"device {at}", kind, memory, resource=of, whole=whole, counts=few)
            for at, (of, kind, memory, whole, few) in enumerate(devices)
        ),
        UNIT,
        (("port", UNIT),),
        most,
    )
    if "gpus" in parts:
        parts.pop("gpu_memory", None)
    demand = Demand(**parts, resources=tuple(sorted(resources.items())), types=tuple(types))
    capacity = Capacity(made)
    fits = capacity.place(demand) is not None
    if refusal(demand, made) is None:
        assert fits
    elif demand.wants_device or capacity.fit(demand).parts or not types:
        assert not fits


def test_a_type_selects_gpus_in_a_demand_for_both_kinds() -> None:
    typed = ask(gpus=1, resources={"TPU": 2}, types=("A100",))
    assert places(Capacity(TPUS), typed) == [["TPU-0", "TPU-1", "gpu-0"]]


def test_why_a_task_waits_for_another_kind() -> None:
    capacity = Capacity(NPUS)
    capacity.take(Allocation((("NPU-0", UNIT), ("NPU-1", 5000), ("NPU-2", 8000))))
    holders = {1: [7], 2: [8]}
    assert why_demand_waits(ask(resources={"NPU": 1}), capacity, holders) == (
        "needs 1 whole NPU; 0 of 3 are wholly free, held by #7, #8"
    )
    assert why_demand_waits(ask(resources={"NPU": 0.6}), capacity, holders) == (
        "needs 0.6 of one NPU; the largest free share is 0.5 on NPU 1, held by #8"
    )


def test_a_task_with_devices_of_another_kind_gets_a_fresh_process() -> None:
    """Another task in it would find them in use; so `max_calls` does not matter."""
    world = World(NPUS)
    task = world.submit(ask(resources={"NPU": 1}), max_calls=0)
    run = world.runs[task]
    assert run.last
    world.finish(task, Succeeded())
    assert run.worker in world.ending
    assert not list(world.scheduler.workers.idle)
    world.exit(run.worker)
    assert available(world.scheduler)["NPU"] == 3.0


def test_a_reusable_worker_with_both_kinds_makes_room() -> None:
    world = World(NPUS)
    both = ask(gpus=1, resources={"NPU": 3})
    first = world.submit(both, max_calls=0)
    worker = world.runs[first].worker
    world.finish(first, Succeeded())
    again = world.submit(both, max_calls=0)
    assert world.runs[again].worker == worker
    world.finish(again, Succeeded())
    waits = world.submit(ask(resources={"NPU": 1}), max_calls=1)
    assert worker in world.ending
    world.exit(worker)
    assert waits in world.runs


def test_a_deadlock_over_another_kind_is_explained() -> None:
    world = World(replace(NPUS, devices=tuple(family("NPU", 1))))
    parent = world.submit(ask(resources={"NPU": 1}), max_calls=1)
    child = world.submit(ask(resources={"NPU": 1}), max_calls=1, parent=parent)
    world.block(parent, child)
    world.advance(1)
    assert "NPU 0" in str(world.settled[child])


# --------------------------------------------------------------------------------- size and type

MIXED = machine([("A100", 40), ("V100", 16), ("A100", 80)])


@pytest.mark.parametrize(
    ("demand", "found"),
    [
        (Demand(gpus=UNIT, min_memory=41 * GiB), ["gpu-2"]),
        (Demand(gpus=UNIT, min_memory=17 * GiB), ["gpu-0"]),
        (Demand(gpus=5000, min_memory=80 * GiB), ["gpu-2"]),
        (Demand(gpus=2 * UNIT, min_memory=17 * GiB), ["gpu-0", "gpu-2"]),
        (Demand(gpu_memory=10 * GiB, min_memory=50 * GiB), ["gpu-2"]),
        (Demand(gpus=UNIT, min_memory=1, types=("V100", "A100")), ["gpu-1"]),
        (Demand(gpus=UNIT, types=("a100-80g", "A100")), ["gpu-2"]),
        (Demand(gpus=3 * UNIT, types=("a100-80g", "A100", "v100")), ["gpu-0", "gpu-1", "gpu-2"]),
    ],
)
def test_min_memory_selects_large_devices(demand: Demand, found: list[str]) -> None:
    assert places(Capacity(MIXED), demand) == [found]


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (Demand(gpus=UNIT, min_memory=81 * GiB), "no device has 81 GiB of memory: there are 1 x"),
        (
            Demand(gpus=UNIT, min_memory=17 * GiB, types=("V100",)),
            "no such device has 17 GiB of memory",
        ),
        (Demand(gpus=3 * UNIT, min_memory=17 * GiB), "too few are of 17 GiB or more: there are"),
        (
            Demand(gpus=2 * UNIT, min_memory=50 * GiB, types=("A100",)),
            "too few are of the type and of 50 GiB or more",
        ),
        (Demand(gpu_memory=41 * GiB, types=("V100",)), "no such device has that much memory"),
    ],
)
def test_min_memory_above_all_devices_is_refused(demand: Demand, message: str) -> None:
    reason = refusal(demand, MIXED)
    assert reason is not None
    assert message in reason


def test_slices_are_used_one_at_a_time() -> None:
    card = gpu(0, "A100", 40)
    parts = [
        Device(f"MIG-{at}", f"MIG-{at}", "1g", "A100-MIG-1g.5gb", 5 * GiB, part_of="x", counts=(1,))
        for at in range(2)
    ]
    made = Machine((card, *parts))
    assert places(Capacity(made), *[ask(gpus=1)] * 4) == [["gpu-0"], ["MIG-0"], ["MIG-1"], None]
    assert places(Capacity(made), ask(gpus=0.5, types=("1g.5gb",))) == [None]
    typed = ask(gpus=0.5, types=("A100-MIG-1g.5gb",))
    assert places(Capacity(made), typed, typed) == [["MIG-0"], ["MIG-0"]]
    reason = refusal(ask(gpus=2), made)
    assert reason is not None
    assert "only 1 of them can be used 2 at a time (a process can use one MIG slice only)" in reason


# -------------------------------------------------------------------------------------- unmet


def test_unmet_demands_are_summed_by_resource_and_type() -> None:
    world = World(machine([("A100", 40), ("V100", 16)], cpus=1))
    assert unmet(world.scheduler) == {}
    world.submit(ask(gpus=2, cpus=1), max_calls=1)
    for _ in range(3):
        world.submit(ask(gpus=0.5, types=("v100", "A100")), max_calls=1)
    world.submit(ask(gpus=1, types=("A100",)), max_calls=1)
    world.submit(ask(memory=4, types=("V100",), cpus=1), max_calls=1)
    first = world.submit(ask(cpus=1))
    world.submit(ask(gpus=1), needs=(first,))
    assert unmet(world.scheduler) == {
        "CPU": 2.0,
        "GPU": 2.75,
        "accelerator_type:V100": 1.75,
        "accelerator_type:A100": 1.0,
    }
    assert snapshot(world.scheduler, world.now).unmet == unmet(world.scheduler)


def test_unmet_demands_for_other_kinds_count_under_their_names() -> None:
    world = World(NPUS)
    for _ in range(2):
        world.submit(ask(resources={"NPU": 2, "port": 1}), max_calls=1)
    assert unmet(world.scheduler) == {"NPU": 2.0, "port": 1.0}


def test_the_snapshot_names_the_kind_of_each_device() -> None:
    view = snapshot(World(TPUS).scheduler, 0.0)
    assert [device.resource for device in view.devices] == ["TPU"] * 4 + ["GPU"]
