"""Where demands fit, why they never can, and what they wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.scheduler.explain import describe, refusal
from gpunb.scheduler.feasibility import Reserved, candidates
from gpunb.scheduler.placement import REMEMBERED, Capacity
from gpunb.scheduler.resources import UNIT, Allocation, Demand, Device, Machine, type_resource
from gpunb.scheduler.waiting import why_demand_waits
from tests.scheduler.records import check_allocation
from tests.scheduler.world import GiB, ask, gpu, machine, units

MIXED = [("A100", 40), ("V100", 16), ("A100", 80)]


def place_all(capacity: Capacity, demands: list[Demand]) -> list[object]:
    """Place one after another: the device, or the list of devices, or None if it does not fit."""
    found: list[object] = []
    for demand in demands:
        allocation = capacity.place(demand)
        if allocation is None:
            found.append(None)
            continue
        capacity.take(allocation)
        where = [int(key.removeprefix("gpu-")) for key, _ in allocation.shares]
        found.append(where[0] if len(where) == 1 else where)
    return found


@pytest.mark.parametrize(
    ("gpus", "asked", "found"),
    [
        (3, [0.5, 0.5, 0.5], [0, 0, 1]),
        (2, [0.3, 0.8, 0.2, 0.7], [0, 1, 1, 0]),
        (2, [0.5, 1, 0.5], [0, 1, 0]),
        (3, [0.6, 0.6, 0.6, 0.6], [0, 1, 2, None]),
        (1, [0.8, 0.1, 0.1], [0, 0, 0]),
        (1, [0.8, 0.1, 0.1, 0.0001], [0, 0, 0, None]),
        (1, [0.1] * 11, [0] * 10 + [None]),
        (4, [2, 1, 2, 1], [[0, 1], 2, None, 3]),
        (4, [0.5, 2], [0, [1, 2]]),
        (3, [0.5, 3, 2], [0, None, [1, 2]]),
        (2, [0.7, 0.6, 0.3, 0.3], [0, 1, 0, 1]),
        (2, [0.0001, 1, 0.9999], [0, 1, 0]),
        (0, [0.5, 1, 0], [None, None, []]),
    ],
)
def test_demands_are_packed_onto_devices(
    gpus: int, asked: list[float], found: list[object]
) -> None:
    capacity = Capacity(machine(gpus))
    assert place_all(capacity, [ask(gpus=each) for each in asked]) == found


@pytest.mark.parametrize(
    ("demands", "found"),
    [
        # The share depends on the device: 16 GiB are 0.4, 1 and 0.2 of these.
        ([ask(memory=16)], [1]),
        ([ask(memory=10), ask(memory=10), ask(memory=10)], [1, 0, 0]),
        ([ask(memory=20), ask(memory=20), ask(memory=20)], [0, 0, 2]),
        ([ask(memory=60), ask(memory=60)], [2, None]),
        ([ask(memory=80), ask(memory=80)], [2, None]),
        ([ask(memory=40, types=("A100",))], [0]),
        ([ask(memory=1, types=("V100", "A100")), ask(memory=1, types=("V100",))], [1, 1]),
        ([ask(memory=16, types=("V100", "A100"))] * 2, [1, 0]),
    ],
)
def test_memory_on_a_mixed_machine(demands: list[Demand], found: list[object]) -> None:
    assert place_all(Capacity(machine(MIXED)), demands) == found


@pytest.mark.parametrize(
    ("demands", "found"),
    [
        ([ask(gpus=1, types=("V100",))] * 2, [1, None]),
        ([ask(gpus=1, types=("A100",))] * 3, [0, 2, None]),
        ([ask(gpus=1, types=("V100", "A100"))] * 4, [1, 0, 2, None]),
        ([ask(gpus=0.5, types=("A100", "V100"))] * 5, [0, 0, 2, 2, 1]),
        ([ask(gpus=2, types=("V100", "A100"))], [[0, 1]]),
        ([ask(gpus=3, types=("V100", "A100"))], [[0, 1, 2]]),
        ([ask(gpus=2, types=("V100", "V100"))], [None]),
        ([ask(gpus=0.5, types=("H100",))], [None]),
    ],
)
def test_types_in_order_of_preference(demands: list[Demand], found: list[object]) -> None:
    assert place_all(Capacity(machine(MIXED)), demands) == found


def test_memory_is_never_rounded_down() -> None:
    odd = Machine((gpu(0, "odd", 3),))
    capacity = Capacity(odd)
    third = Demand(gpu_memory=1)
    assert place_all(capacity, [third, third, third]) == [0, 0, None]
    assert capacity.shares == [UNIT - 2 * 3334]


def test_custom_resources_and_cpus() -> None:
    capacity = Capacity(machine(1, cpus=2, resources={"port": 1}))
    demand = ask(gpus=0.1, cpus=0.5, resources={"port": 0.4})
    assert place_all(capacity, [demand] * 3) == [0, 0, None]
    assert capacity.cpus == UNIT
    assert capacity.resources == {"port": 2000}
    assert capacity.place(ask(resources={"disk": 1})) is None
    assert capacity.place(ask(cpus=1.0001)) is None
    assert capacity.place(ask(cpus=1)) == Allocation((), UNIT)


def test_a_demand_for_zero_of_a_resource_fits() -> None:
    capacity = Capacity(machine())
    nothing = ask(resources={"port": 0})
    assert refusal(nothing, capacity.machine) is None
    assert place_all(capacity, [nothing]) == [[]]


def test_a_demand_without_cpus_fits_when_cpus_are_overdrawn() -> None:
    capacity = Capacity(machine(1, cpus=1))
    capacity.take(Allocation((), 2 * UNIT))
    assert not capacity.surely_lacks(UNIT, 0, frozenset())
    assert capacity.place(ask(gpus=1)) is not None
    assert why_demand_waits(ask(gpus=1), capacity) == "is next in line"


def test_reserved_room_is_left_free() -> None:
    capacity = Capacity(machine(2, cpus=2, resources={"port": 1}))
    spare = Allocation((), UNIT, units({"port": 1}))
    place = capacity.place(ask(gpus=1, cpus=1), Reserved(frozenset({0}), spare))
    assert place == Allocation((("gpu-1", UNIT),), UNIT)
    assert capacity.place(ask(gpus=0.5), Reserved(frozenset({0, 1}), Allocation())) is None
    assert capacity.place(ask(gpus=2), Reserved(frozenset({0}), Allocation())) is None
    assert capacity.place(ask(cpus=2), Reserved(frozenset(), spare)) is None
    assert capacity.place(ask(resources={"port": 1}), Reserved(frozenset(), spare)) is None
    assert capacity.place(ask(), Reserved(frozenset({0, 1}), spare)) == Allocation()


def test_held_devices_are_not_chosen_again() -> None:
    capacity = Capacity(machine(1, cpus=1))
    held = (("gpu-0", UNIT),)
    capacity.take(Allocation(held))
    demand = ask(gpus=1, cpus=1)
    assert capacity.place(demand) is None
    assert capacity.place(demand, held=held) == Allocation(held, UNIT)
    capacity.take(Allocation((), UNIT))
    assert capacity.place(demand, held=held) is None


def test_a_copy_is_independent() -> None:
    capacity = Capacity(machine(1, cpus=1, resources={"port": 1}))
    copy = capacity.copy()
    copy.take(Allocation((("gpu-0", UNIT),), UNIT, units({"port": 1})))
    assert (capacity.shares, capacity.cpus, capacity.resources) == ([UNIT], UNIT, {"port": UNIT})
    assert (copy.shares, copy.cpus, copy.resources) == ([0], 0, {"port": 0})


def test_the_number_of_remembered_demands_is_limited() -> None:
    capacity = Capacity(machine(1))
    for share in range(1, 3 * REMEMBERED):
        capacity.fit(Demand(gpus=share))
    assert len(capacity._fits) <= REMEMBERED


fractions = st.integers(min_value=1, max_value=UNIT)
wholes = st.integers(min_value=1, max_value=3).map(lambda count: count * UNIT)
DEMANDS = st.one_of(
    st.builds(Demand, gpus=st.one_of(fractions, wholes)),
    st.builds(Demand, gpu_memory=st.integers(min_value=1, max_value=90 * GiB)),
    st.builds(Demand, gpus=fractions, types=st.sampled_from([("A100",), ("V100", "A100")])),
)


@given(st.lists(DEMANDS, max_size=12))
def test_any_sequence_of_demands_keeps_exact_sums(demands: list[Demand]) -> None:
    capacity = Capacity(machine(MIXED))
    given_out = []
    for demand in demands:
        allocation = capacity.place(demand)
        if allocation is None:
            continue
        check_allocation(capacity.machine, demand, allocation)
        assert not capacity.surely_lacks(capacity.fit(demand).least, demand.cpus, frozenset())
        capacity.take(allocation)
        given_out.append(allocation)
        assert all(0 <= each <= UNIT for each in capacity.shares)
    for allocation in given_out:
        capacity.give(allocation)
    assert capacity.shares == [UNIT] * 3


# ---------------------------------------------------------------------------------------- refusals

NEVER = "can never be met on this machine"


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (ask(gpus=4), f"a request for 4 GPU {NEVER}: there are 3 x logical GPU"),
        (ask(cpus=9), f"a request for 9 CPU {NEVER}: it asks for 9 CPUs and there are 4"),
        (
            ask(resources={"port": 3}),
            f"a request for 3 port {NEVER}: it asks for 3 of the resource 'port': there is 2",
        ),
        (
            ask(resources={"disk": 0.5}),
            (
                f"a request for 0.5 disk {NEVER}: it asks for 0.5 of the resource 'disk': "
                "there is none"
            ),
        ),
        (
            ask(memory=10),
            (
                f"a request for 10 GiB of GPU memory {NEVER}: the devices have no known memory: "
                "there are 3 x logical GPU; ask for num_gpus instead"
            ),
        ),
        (
            ask(gpus=1, types=("A100",)),
            (
                f"a request for 1 GPU, type A100 {NEVER}: no device is of type A100: there are "
                "3 x logical GPU"
            ),
        ),
        (
            ask(gpus=4, cpus=9),
            (
                f"a request for 4 GPU, 9 CPU {NEVER}: there are 3 x logical GPU; it asks for "
                "9 CPUs and there are 4"
            ),
        ),
    ],
)
def test_refusals(demand: Demand, message: str) -> None:
    assert refusal(demand, machine(3, cpus=4, resources={"port": 2})) == message


@pytest.mark.parametrize(
    ("asked", "there", "message"),
    [
        (1, 0, "1 CPU and there are none"),
        (1.5, 1, "1.5 CPUs and there is 1"),
        (3, 2, "3 CPUs and there are 2"),
    ],
)
def test_a_refusal_names_the_number_of_cpus(asked: float, there: int, message: str) -> None:
    text = refusal(ask(cpus=asked), machine(0, cpus=there))
    assert text is not None
    assert text.endswith(f"it asks for {message}")


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (
            ask(gpus=1, types=("H100", "V10")),
            (
                "no device is of type H100 or V10: there are 1 x A100 (40 GiB), 1 x V100 (16 GiB), "
                "1 x A100 (80 GiB). Did you mean 'V100' or 'A100'?"
            ),
        ),
        (ask(gpus=1, types=("A10",)), "Did you mean 'A100'"),
        (ask(gpus=1, types=("TPU",)), "1 x A100 (80 GiB)"),
        (ask(types=("L4",)), "no device is of type L4"),
        (ask(memory=81), "no device has that much memory: there are 1 x A100 (40 GiB), 1 x V100"),
        (ask(memory=17, types=("V100",)), "no such device has that much memory"),
        (ask(gpus=3, types=("A100",)), "too few are of the type: there are 1 x A100"),
        (ask(gpus=2, types=("V100", "V100")), "too few are of the type"),
    ],
)
def test_refusals_on_a_mixed_machine(demand: Demand, message: str) -> None:
    reason = refusal(demand, machine(MIXED))
    assert reason is not None
    assert message in reason
    assert reason.startswith(f"a request for {demand} {NEVER}: ")


def test_refusal_without_gpus() -> None:
    assert refusal(ask(gpus=0.1), machine()) == (
        f"a request for 0.1 GPU {NEVER}: there are no GPUs (`gpunb doctor` says why; "
        "gpunb.shutdown() and then gpunb.init(num_gpus=2) make logical ones)"
    )


@pytest.mark.parametrize(
    "demand",
    [
        ask(),
        ask(gpus=3, cpus=4, resources={"port": 2}),
        ask(gpus=0.0001),
        ask(gpus=2, types=("A100",)),
        ask(memory=80),
        ask(types=("V100",)),
        ask(gpus=3, types=("V100", "A100")),
    ],
)
def test_a_demand_that_fits_later_is_not_refused(demand: Demand) -> None:
    made = machine(MIXED, cpus=4, resources={"port": 2})
    assert refusal(demand, made) is None
    assert Capacity(made).place(demand) is not None


@given(DEMANDS)
def test_refused_or_placed_on_the_empty_machine(demand: Demand) -> None:
    made = machine(MIXED)
    placed = Capacity(made).place(demand)
    assert (refusal(demand, made) is None) == (placed is not None)


def test_devices_in_words() -> None:
    assert describe([]) == "no GPUs"
    assert describe(machine(MIXED).devices[:2]) == "1 x A100 (40 GiB), 1 x V100 (16 GiB)"
    assert describe(machine(2).devices) == "2 x logical GPU"
    assert describe([Device("u", 0, "GeForce 9")]) == "1 x GeForce 9"


def test_candidates_are_grouped_by_preference() -> None:
    demand = ask(gpus=0.5, types=("V100", "T4", "A100", "V100"))
    assert candidates(demand, machine(MIXED)) == (((1, 5000),), ((0, 5000), (2, 5000)))


def test_types_as_resources() -> None:
    assert type_resource("accelerator_type:A100") == "A100"
    assert type_resource("port") is None


# ----------------------------------------------------------------------------------- why it waits


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (
            ask(gpus=0.6),
            "needs 0.6 of one GPU; the largest free share is 0.4 on GPU 1, held by #7",
        ),
        (
            ask(gpus=1),
            "needs 1 whole GPU; 0 of 2 are wholly free, held by #3, #4, #5, #6 and 1 more",
        ),
        (
            ask(gpus=2),
            "needs 2 whole GPUs; 0 of 2 are wholly free, held by #3, #4, #5, #6 and 1 more",
        ),
        (ask(cpus=1), "needs 1 CPU; 0 of 2 are free"),
        (ask(cpus=1.5), "needs 1.5 CPUs; 0 of 2 are free"),
        (ask(resources={"port": 0.5}), "needs 0.5 of 'port'; 0.25 is free"),
        (
            ask(gpus=0.5, cpus=1),
            (
                "needs 0.5 of one GPU; the largest free share is 0.4 on GPU 1, held by #7; "
                "needs 1 CPU; 0 of 2 are free"
            ),
        ),
        (ask(gpus=0.4), "is next in line"),
    ],
)
def test_why_a_demand_waits(demand: Demand, message: str) -> None:
    capacity = Capacity(machine(2, cpus=2, resources={"port": 1}))
    capacity.take(Allocation((("gpu-0", 8000), ("gpu-1", 6000)), 3 * UNIT, units({"port": 0.75})))
    assert why_demand_waits(demand, capacity, {0: [3, 4, 5, 6], 1: [7]}) == message


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (
            ask(memory=20),
            "needs 20 GiB of one GPU; the largest free share is 4 GiB on GPU 0, held by #1",
        ),
        (
            ask(gpus=0.5, types=("V100",)),
            "needs 0.5 of one V100 GPU; the largest free share is 0.2 on GPU 1",
        ),
        (
            ask(gpus=1, types=("V100", "A100")),
            "needs 1 whole V100 or A100 GPU; 0 of 3 are wholly free, held by #1",
        ),
    ],
)
def test_why_a_demand_waits_on_a_mixed_machine(demand: Demand, message: str) -> None:
    capacity = Capacity(machine(MIXED))
    capacity.take(Allocation((("gpu-0", 9000), ("gpu-1", 8000), ("gpu-2", 9900))))
    assert why_demand_waits(demand, capacity, {0: [1]}) == message


def test_why_a_demand_for_two_devices_waits() -> None:
    capacity = Capacity(machine(2))
    capacity.take(Allocation((("gpu-0", 1),)))
    message = "needs 2 whole GPUs; 1 of 2 is wholly free, held by #9"
    assert why_demand_waits(ask(gpus=2), capacity, {0: [9]}) == message
