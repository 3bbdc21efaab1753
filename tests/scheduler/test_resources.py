"""Reading what a user wrote, and writing amounts for people."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.scheduler.resources import (
    UNIT,
    Demand,
    Machine,
    Within,
    amount,
    merged,
    parse_amount,
    parse_gpus,
    parse_resources,
    parse_size,
    parse_types,
    size_text,
)
from tests.scheduler.world import GiB, gpu
from tests.sessions import ROOT


@pytest.mark.parametrize(
    ("value", "units"),
    [
        (0, 0),
        (-0.0, 0),
        (0.0001, 1),
        (0.1, 1000),
        (0.3, 3000),
        (0.9999, 9999),
        (1, UNIT),
        (1.0, UNIT),
        (16, 16 * UNIT),
        (Fraction(1, 4), 2500),
        (np.float64(0.5), 5000),
        (np.float32(0.1), 1000),
        (np.float16(0.7), 7000),
        (np.int64(2), 2 * UNIT),
    ],
)
def test_gpus(value: float, units: int) -> None:
    assert parse_gpus(value) == units


def test_sums_are_exact() -> None:
    assert sum(map(parse_gpus, (0.8, 0.1, 0.1))) == UNIT
    assert sum(parse_gpus(0.1) for _ in range(10)) == UNIT


@given(st.integers(min_value=0, max_value=10**9))
def test_four_decimals_are_read_back_exactly(units: int) -> None:
    assert parse_amount(units / UNIT, "x") == units
    assert parse_amount(float(amount(units)), "x") == units


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, r"num_gpus=-1 must not be negative"),
        (-0.5, "must not be negative"),
        (1.5, r"above 1 and not whole: .* \(1 or 2\)"),
        (2.0001, "above 1 and not whole"),
        (math.nan, "finite"),
        (math.inf, "finite"),
        (-math.inf, "finite"),
        (10**400, "finite"),
        (0.00001, "finer than 0.0001"),
        (0.00005, "finer than 0.0001"),
        (0.12345, "finer than 0.0001"),
        (1 / 3, "finer than 0.0001"),
        (1e-300, "finer than 0.0001"),
    ],
)
def test_gpus_refuses_values(value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_gpus(value)


@pytest.mark.parametrize("value", ["x", "1", True, False, None, [1], 1j, Decimal(1), np.True_])
def test_amounts_refuse_types(value: object) -> None:
    with pytest.raises(TypeError, match="num_gpus must be a number"):
        parse_gpus(value)  # type: ignore[arg-type]


def test_cpus_need_not_be_whole() -> None:
    assert parse_amount(1.5, "num_cpus") == 15_000


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (1.9, 1),
        (np.int64(5), 5),
        ("1", 1),
        ("512B", 512),
        ("10GiB", 10 * GiB),
        ("10 gib", 10 * GiB),
        (" 10G ", 10 * GiB),
        ("10GB", 10 * 1000**3),
        ("1.5g", 3 * GiB // 2),
        (".5KiB", 512),
        ("2TiB", 2 * 1024**4),
        ("1PB", 1000**5),
        ("3 MB", 3_000_000),
        ("1k", 1024),
    ],
)
def test_sizes(value: float | str, size: int) -> None:
    assert parse_size(value, "gpu_memory") == size


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("ten GiB", "is not a size"),
        ("10 XB", "is not a size"),
        ("10GiBs", "is not a size"),
        ("-10GiB", "is not a size"),
        ("1e9", "is not a size"),
        ("1 2", "is not a size"),
        ("0", "at least one byte"),
        ("0.5B", "at least one byte"),
        (0, "at least one byte"),
        (-5, "at least one byte"),
        (0.5, "at least one byte"),
        (math.nan, "at least one byte"),
        (math.inf, "at least one byte"),
        (10**400, "at least one byte"),
        ("9" * 400, "at least one byte"),
    ],
)
def test_sizes_refuse_values(value: float | str, message: str) -> None:
    with pytest.raises(ValueError, match=f"gpu_memory=.*{message}"):
        parse_size(value, "gpu_memory")


@pytest.mark.parametrize("value", [True, None, [1], b"1GiB", 1j])
def test_sizes_refuse_types(value: object) -> None:
    with pytest.raises(TypeError, match="gpu_memory must be a number of bytes"):
        parse_size(value, "gpu_memory")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "units"),
    [
        (None, {}),
        ({}, {}),
        ({"port": 1}, {"port": UNIT}),
        ({"port": 0.5, "disk": 2}, {"port": 5000, "disk": 2 * UNIT}),
        ({"port": 0}, {}),
    ],
)
def test_custom_resources(value: dict[str, float] | None, units: dict[str, int]) -> None:
    assert parse_resources(value) == units


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"CPU": 1}, ValueError, "must not hold 'CPU': use num_cpus="),
        ({"GPU": 1}, ValueError, "must not hold 'GPU': use num_gpus="),
        ({"port": -1}, ValueError, r"resources\['port'\]=-1 must not be negative"),
        ({"port": 0.00001}, ValueError, "finer than 0.0001"),
        ({"port": math.nan}, ValueError, "finite"),
        ({"port": "1"}, TypeError, r"resources\['port'\] must be a number"),
        ({"port": True}, TypeError, "must be a number"),
        ({1: 1}, TypeError, "has the name 1"),
        ({"": 1}, TypeError, "has the name ''"),
        ([("port", 1)], TypeError, "must be a dict"),
        ("port", TypeError, "must be a dict"),
    ],
)
def test_custom_resources_refuse(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_resources(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "types"),
    [
        (None, ()),
        ("A100", ("A100",)),
        (["A100", "V100"], ("A100", "V100")),
        (("V100", "A100"), ("V100", "A100")),
        (["A100", "V100", "A100"], ("A100", "V100")),
    ],
)
def test_types(value: object, types: tuple[str, ...]) -> None:
    assert parse_types(value) == types  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1, TypeError, "must be a text or a list"),
        ({"A100"}, TypeError, "must be a text or a list"),
        (["A100", 1], TypeError, "must hold texts, not 1"),
        ("", ValueError, "must not be empty"),
        (["A100", " "], ValueError, "must not be empty"),
    ],
)
def test_types_refuse(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_types(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("units", "text"), [(0, "0"), (1, "0.0001"), (5000, "0.5"), (UNIT, "1"), (100_000, "10")]
)
def test_amounts_for_people(units: int, text: str) -> None:
    assert amount(units) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (40 * GiB, "40 GiB"),
        (1024**4, "1 TiB"),
        (2 * 1024**5, "2048 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("demand", "text"),
    [
        (Demand(), "nothing"),
        (Demand(gpus=5000), "0.5 GPU"),
        (Demand(gpus=20_000, cpus=UNIT, types=("A100", "V100")), "2 GPU, type A100 or V100, 1 CPU"),
        (Demand(gpu_memory=10 * GiB), "10 GiB of GPU memory"),
        (Demand(resources=(("port", 5000),)), "0.5 port"),
    ],
)
def test_demands_for_people(demand: Demand, text: str) -> None:
    assert str(demand) == text


def test_demands_that_differ_in_any_field_are_told_apart() -> None:
    first = Demand(gpus=1000, types=("A100",))
    assert {first: "line"}[Demand(gpus=1000, types=("A100",))] == "line"
    changes: list[dict[str, Any]] = [
        {"gpus": 2000},
        {"cpus": 1},
        {"resources": (("port", 1),)},
        {"types": ()},
        {"min_memory": GiB},
        {"within": Within(7, 0)},
        {"within": Within(7, 1)},
        {"devices": ("GPU-1",)},
    ]
    assert len({first, *(replace(first, **each) for each in changes)}) == len(changes) + 1


FOUND = """
import pickle, sys
from gpunb.scheduler.resources import Demand
demand = pickle.loads(sys.stdin.buffer.read())
assert demand in {Demand(gpus=1000, types=("A100",))}
"""


def test_a_demand_is_found_in_a_process_that_hashes_otherwise() -> None:
    demand = Demand(gpus=1000, types=("A100",))
    hash(demand)
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", FOUND],
            input=pickle.dumps(demand),
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            timeout=60,
        )


def test_totals() -> None:
    devices = (gpu(0, "A100", 40 * GiB), gpu(1, "A100", 80 * GiB), gpu(2, "V100"), gpu(3))
    made = Machine(devices, 4 * UNIT, (("none", 0), ("port", 5000)))
    assert made.totals() == {
        "CPU": 4.0,
        "GPU": 4.0,
        "accelerator_type:A100": 2.0,
        "accelerator_type:V100": 1.0,
        "port": 0.5,
    }
    assert Machine().totals() == {}


def test_a_device_with_several_shares_is_listed_once() -> None:
    shares = [("GPU", 0, 0.1), ("NPU", 0, 1.0), ("GPU", 1, 0.5), ("GPU", 0, 0.2)]
    assert merged(shares) == [["GPU", 0, 0.3], ["NPU", 0, 1.0], ["GPU", 1, 0.5]]
