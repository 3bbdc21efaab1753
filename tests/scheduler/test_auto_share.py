"""The share that a task gets from its earlier runs."""

from __future__ import annotations

import pytest

from gpunb.scheduler.auto_share import MIB, Run, choose, grown, similar, units_for
from gpunb.scheduler.resources import UNIT, Demand
from tests.scheduler.world import GiB, machine

WHOLE = Demand(gpus=UNIT)
CARDS = machine([("A100", 40), ("A100", 40)])


@pytest.mark.parametrize(
    ("peak", "share"),
    [
        (3 * GiB, 0.1),
        (10 * MIB, 0.05),
        (int(3.5 * GiB) - 1, 0.15),  # 15 percent more than 3.5 GiB is more than a tenth
        (20 * GiB, 0.6),
        (39 * GiB, 1),
        (50 * GiB, 1),
    ],
)
def test_share_is_the_peak_with_a_margin_in_steps_of_a_twentieth(peak: int, share: float) -> None:
    assert units_for(peak, 40 * GiB) == round(share * UNIT)


def test_margin_is_at_least_half_a_gibibyte() -> None:
    assert units_for(GiB, 10 * GiB) == round(0.15 * UNIT)
    assert units_for(GiB // 2, 10 * GiB) == round(0.1 * UNIT)


def test_first_run_gets_a_whole_device_and_says_so() -> None:
    choice = choose(WHOLE, CARDS, [], 0)
    assert choice.demand == WHOLE
    assert choice.first
    assert choice.why == "one whole GPU, because no run of this code was measured"


def test_largest_peak_of_the_last_five_runs_counts() -> None:
    peaks = [1, 6, 2, 3, 1, 39]  # the newest first: the last one is the sixth
    choice = choose(WHOLE, CARDS, [Run(0, 40 * GiB, each * GiB) for each in peaks], 0)
    assert choice.demand == Demand(gpus=round(0.2 * UNIT))
    assert not choice.first
    assert "at most 6 GiB in its last 5 runs" in choice.why


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([None, None], "is a margin"),
        ([0.2], "it runs for less than 1 s"),
        ([300, None, 30, 45], "it runs for about 45 s"),
    ],
)
def test_time_is_that_of_the_middle_one_of_the_runs(
    seconds: list[float | None], words: str
) -> None:
    runs = [Run(0, 40 * GiB, GiB, each) for each in seconds]
    assert choose(WHOLE, CARDS, runs, 0).why.endswith(words)


def test_runs_with_inputs_of_another_size_do_not_count() -> None:
    runs = [Run(100 * MIB, 40 * GiB, 3 * GiB)]
    assert choose(WHOLE, CARDS, runs, 200 * MIB).demand.gpus == UNIT // 10
    other = choose(WHOLE, CARDS, runs, 201 * MIB)
    assert other.demand == WHOLE
    assert "with inputs of about 201 MiB" in other.why


def test_sizes_of_small_inputs_are_all_similar() -> None:
    assert similar(0, MIB)
    assert similar(10, 2 * MIB)
    assert not similar(10, 2 * MIB + 1)


def test_runs_on_devices_with_another_memory_do_not_count() -> None:
    choice = choose(WHOLE, CARDS, [Run(0, 16 * GiB, 3 * GiB)], 0)
    assert choice.demand == WHOLE
    assert choice.why.endswith("on a GPU with 40 GiB")


def test_share_on_a_mixed_machine_is_an_amount_of_memory() -> None:
    mixed = machine([("A100", 40), ("V100", 16)])
    runs = [Run(0, 40 * GiB, 3 * GiB)]
    assert choose(WHOLE, mixed, runs, 0).demand == Demand(gpu_memory=4 * GiB)
    one_type = Demand(gpus=UNIT, types=("A100",))
    assert choose(one_type, mixed, runs, 0).demand == Demand(gpus=UNIT // 10, types=("A100",))
    assert choose(Demand(gpus=UNIT, types=("V100",)), mixed, runs, 0).first


def test_share_by_memory_is_an_amount_of_memory() -> None:
    runs = [Run(0, 40 * GiB, 3 * GiB)]
    assert choose(WHOLE, CARDS, runs, 0, by_memory=True).demand == Demand(gpu_memory=4 * GiB)


def test_devices_without_a_known_memory_are_given_out_whole() -> None:
    choice = choose(WHOLE, machine(2), [Run(0, 40 * GiB, 3 * GiB)], 0)
    assert choice.demand == WHOLE
    assert "the memory of the GPUs is not known" in choice.why


def test_share_doubles_up_to_the_whole_device() -> None:
    assert grown(Demand(gpus=2500), 2500, None) == Demand(gpus=5000)
    assert grown(Demand(gpus=6000), 6000, None) == WHOLE
    assert grown(WHOLE, UNIT, None) is None
    assert grown(Demand(gpus=2 * UNIT), 2 * UNIT, None) is None


def test_share_by_memory_doubles_up_to_the_device_it_was_on() -> None:
    asked = Demand(gpu_memory=10 * GiB)
    assert grown(asked, 2500, 40 * GiB) == Demand(gpu_memory=20 * GiB)
    assert grown(asked, 6250, 16 * GiB) == Demand(gpus=UNIT, min_memory=16 * GiB)
    assert grown(asked, UNIT, 10 * GiB) is None
