"""What is too large to come home unless it is asked for; in a real kernel."""

from __future__ import annotations

import sys
import time
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gpunb.worker.cell.sizes import larger, size_of
from tests.notebook.kernels import Kernel

MIB = 1 << 20


@pytest.fixture
def small(cell: Kernel) -> Iterator[Kernel]:
    """The limit is 1 MiB."""
    cell.ok("import numpy as np\n%config GpuMagics.largest = '1MiB'")
    yield cell
    cell.ok("%config GpuMagics.largest = '2GiB'")


# ---------------------------------------------------------------------------------------- in cells


@pytest.mark.kernel
def test_a_large_value_stays_in_the_worker_with_a_reason(small: Kernel) -> None:
    result = small.ok("%%gpu\nbig = np.zeros(1 << 20)\nfine = np.ones(3)")
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpunb: 'big' stays in the worker: ")
    for part in ("8 MiB", "1 MiB", "GpuMagics.largest", "--session NAME", "--out big"):
        assert part in line
    assert small.value("('big' in globals(), fine.tolist())") == (False, [1.0, 1.0, 1.0])


@pytest.mark.kernel
def test_a_value_named_by_out_comes_home_whatever_its_size(small: Kernel) -> None:
    result = small.ok("%%gpu --out asked\nasked = np.zeros(1 << 20)")
    assert not result.stderr
    assert small.value("asked.nbytes") == 8 * MIB
    assert not small.ok("length = %gpu 0 np.zeros(1 << 20)").stderr
    assert small.value("length.nbytes") == 8 * MIB


@pytest.mark.kernel
def test_each_name_is_measured_by_itself(small: Kernel) -> None:
    result = small.ok(
        "%%gpu\nparts = [np.zeros(1 << 16) for _ in range(8)]\nsame = parts[0]\n"
        "table = {'rows': [{'row': np.ones(1 << 17)} for _ in range(3)]}"
    )
    assert {line.split("'")[1] for line in result.stderr.splitlines()} == {"parts", "table"}
    assert small.value("same.nbytes") == MIB // 2


@pytest.mark.kernel
def test_a_large_value_that_is_shown_is_not_kept(small: Kernel) -> None:
    small.ok("'before'")
    result = small.ok("%%gpu\nnp.zeros(1 << 20)")
    assert result.value is not None
    assert result.value.startswith("array([0.")
    assert not result.stderr
    assert small.value("_") == "before"


@pytest.mark.kernel
def test_a_sent_value_that_became_too_large_stays_unchanged(small: Kernel) -> None:
    small.ok("grows = [1]")
    result = small.ok("%%gpu\ngrows.append(np.zeros(1 << 20))")
    assert "'grows' stays in the worker" in result.stderr
    assert small.value("grows") == [1]


@pytest.mark.kernel
def test_a_session_keeps_a_large_value(small: Kernel) -> None:
    try:
        result = small.ok("%%gpu 0 -s large\nheld = np.ones(1 << 20)")
        assert "'held' stays in the worker" in result.stderr
        result = small.ok("%%gpu -s large\ntotal = float(held.sum())")
        assert not result.stderr
        assert small.value("(total, 'held' in globals())") == (float(MIB), False)
        small.ok("%%gpu -s large --out held\nheld = held[:]")
        assert small.value("held.nbytes") == 8 * MIB
    finally:
        small("%gpu stop large")


@pytest.mark.kernel
def test_in_the_background_the_reason_comes_with_the_names(small: Kernel) -> None:
    result = small.ok("%%gpu 0 --bg\nlate_big = np.zeros(1 << 20)\nlate = 1")
    small.ok("%gpu wait")
    small.late(lambda: "'late_big' stays in the worker" in result.stderr)
    assert small.value("(late, 'late_big' in globals())") == (1, False)


@pytest.mark.kernel
@pytest.mark.parametrize("wrong", ["much", "-1GiB", "1.5XB"])
def test_a_limit_that_is_no_size_is_refused(cell: Kernel, wrong: str) -> None:
    result = cell(f"%config GpuMagics.largest = {wrong!r}")
    assert f"GpuMagics.largest='{wrong}'" in result.stderr + result.traceback
    assert not cell.ok("%%gpu 0\nafterwards = 1").stderr


@pytest.mark.kernel
def test_a_huge_value_is_neither_pickled_nor_copied(small: Kernel) -> None:
    result = small.ok(
        "%%gpu\nclass Huge:\n    nbytes = 1 << 40\n    def __reduce__(self):\n"
        "        print('pickled')\n        return int, ()\nhuge = [Huge()]"
    )
    assert "1 TiB" in result.stderr
    assert not result.stdout


# -------------------------------------------------------------------------------------- estimates


class Slots:
    __slots__ = ("data", "unset")

    def __init__(self) -> None:
        self.data = np.zeros(1000)


class Wild:
    """Answers nothing."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def words(count: int) -> list[str]:
    return [f"{number:091}" for number in range(count)]  # 140 bytes each


one = np.zeros(100_000)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (np.zeros(1000), 8000),
        (one[:10], 80),
        ([one, one, {"again": one}], 800_000),
        ([0] * 100_000, 800_000),
        (list(range(1000, 101_000)), 3_600_000),
        (words(10_000), 1_480_000),
        (dict.fromkeys(words(10_000)), 1_700_000),
        (set(words(10_000)), 1_900_000),
        (deque(words(1000)), 148_000),
        (np.array(words(10_000), dtype=object), 1_480_000),
        (pd.DataFrame({"number": np.zeros(10_000), "word": words(10_000)}), 1_560_000),
        (pd.Series(words(10_000), dtype=object), 1_480_000),
        (pd.Index(np.zeros(1000)), 8000),
        ([Slots() for _ in range(100)], 800_000),
        (types.SimpleNamespace(deep=types.SimpleNamespace(deeper=[one])), 800_000),
        (bytearray(5000), 5057),
        (memoryview(bytes(5000)), 5000),
        (np, 0),
        (Slots, 0),
        (words, 0),
        (Wild(), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_size_of_a_value_is_about_right(value: Any, size: int) -> None:
    assert size_of(value) == pytest.approx(size, rel=0.15, abs=1000)


def test_a_value_that_contains_itself_has_a_size() -> None:
    loop: list[Any] = [one]
    loop.append(loop)
    assert size_of(loop) == pytest.approx(800_000, rel=0.01)


def test_values_that_are_too_large_are_found_and_parts_of_small_ones_not_searched_again() -> None:
    class Counted:
        asked = 0

        @property
        def nbytes(self) -> int:
            self.asked += 1
            return 8

    part, inner = Counted(), [one]
    values = {"small": {"part": part}, "part": part, "large": [inner, part], "inner": inner}
    found = larger(values, 500_000)
    assert found == {name: pytest.approx(800_000, rel=0.01) for name in ("large", "inner")}
    assert part.asked == 2, "for the small value and for the large one"


def test_a_part_is_searched_by_itself_if_its_value_had_too_many_parts() -> None:
    part = [[one]]
    many = [*([object() for _ in range(150)] for _ in range(150)), part]
    assert larger({"many": many, "part": part}, 700_000).keys() == {"part"}


def test_an_object_with_any_attribute_is_not_asked_for_its_size() -> None:
    class Warns:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    assert size_of(Warns()) < 1000


def test_estimating_a_size_takes_milliseconds() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    wide = [[Slots() for _ in range(100)] for _ in range(1000)]
    for value in (deep, wide, list(range(1_000_000)), dict.fromkeys(range(1_000_000))):
        took = []
        for _ in range(3):
            begun = time.perf_counter()
            size_of(value)
            took.append(time.perf_counter() - begun)
        assert min(took) < 0.5
    assert sys.getrecursionlimit() < 100_000
    while deep:  # or its end would be as deep
        deep = deep[0]
