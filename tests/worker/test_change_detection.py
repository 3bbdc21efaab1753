"""What a cell changed in place: nothing is missed, and nothing named that stayed as it was."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import random
from typing import Any

import numpy as np
import pytest

from gpunb.data import page_map
from gpunb.data.segments import Segment
from gpunb.worker.cell.change_detection import LARGE, WATCHED, Fingerprints

N = WATCHED // 8


@pytest.fixture(params=["watched", "hashed"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the system says what was written to, and where it does not."""
    if request.param == "hashed":

        def fails(self: Any, raw: memoryview) -> None:
            raise OSError("not here")

        monkeypatch.setattr(page_map.Watch, "__init__", fails)
    way: str = request.param
    return way


def changed(before: Fingerprints) -> list[str]:
    return list(before.changed())


class Copies:
    """Is pickled as a copy, which lies elsewhere each time."""

    def __init__(self) -> None:
        self.data = np.arange(float(2 * N))

    def __reduce__(self) -> Any:
        return np.array, (self.data.copy(),)


class Views:
    """Is pickled by an object that is made for it alone, and has the memory of this one."""

    def __init__(self) -> None:
        self.data = np.arange(float(2 * N))

    def __reduce__(self) -> Any:
        memory = (ctypes.c_ubyte * self.data.nbytes).from_address(self.data.ctypes.data)
        return np.frombuffer, (pickle.PickleBuffer(memoryview(memory).cast("B")),)


@pytest.mark.parametrize("kind", [Copies, Views])
def test_objects_whose_buffers_are_made_for_the_pickle(kind: Any) -> None:
    value, kept = kind(), []
    before = Fingerprints({"value": value}, "compared")
    for _ in range(5):
        kept.append(np.zeros(2 * N))  # what is free is used
        assert not changed(before)
    value.data[N] = -1
    assert changed(before) == ["value"]


def test_another_array_in_the_place_of_one() -> None:
    value = {"array": np.ones(N)}
    before = Fingerprints({"value": value}, "compared")
    value["array"] = np.zeros(N)
    assert changed(before) == ["value"]
    before = Fingerprints({"value": value}, "compared")
    del value["array"]
    value["array"] = np.zeros(N)  # at the same place, it may be, and without a write
    value["array"][0] = 0
    assert np.array_equal(value["array"], np.zeros(N))
    changed(before)  # whatever it says, it is no harm


def test_what_came_from_another_process_is_looked_at_by_page(way: str) -> None:
    segment, _ = Segment.write([np.ones(N)])
    array = np.frombuffer(segment.map(), dtype="f8")
    for _ in range(2):
        before = Fingerprints({"array": array}, "compared")
        assert not changed(before)
        array[N // 2] += 1
        assert changed(before) == ["array"]


def test_what_other_processes_may_write_is_hashed() -> None:
    array = np.frombuffer(mmap.mmap(-1, 2 * WATCHED))  # shared
    before = Fingerprints({"array": array}, "compared")
    assert not changed(before)
    child = os.fork()
    if not child:
        array[N] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert changed(before) == ["array"]


SIZES = [10, LARGE // 8 - 1, LARGE // 8, N - 1, N, N + 7, 3 * N]


def test_random_writes_against_what_was_there() -> None:
    """Fingerprints of the same data are taken at any time, while others are in force."""
    dice = random.Random(20261121)
    for _ in range(6):
        arrays = [np.zeros(dice.choice(SIZES)) for _ in range(4)]
        values: dict[str, Any] = {f"a{n}": each for n, each in enumerate(arrays)}
        values["view"] = arrays[0][1:]
        values["odd"] = arrays[1][::2]
        values["fixed"] = arrays[2][: len(arrays[2]) // 2]
        values["fixed"].flags.writeable = False
        values["deep"] = {"list": [arrays[3], arrays[3]], "of": Views()}
        arrays.append(values["deep"]["of"].data)
        taken: list[tuple[Fingerprints, dict[str, bytes], int]] = []
        writes = 0
        for _ in range(12):
            match dice.choice(["take", "write", "write", "write nothing"]):
                case "take":
                    some = {n: each for n, each in values.items() if dice.random() < 0.7}
                    oracle = {name: pickle.dumps(each, 5) for name, each in some.items()}
                    taken.append((Fingerprints(some, "compared"), oracle, writes))
                case "write":
                    array = dice.choice(arrays)
                    array[dice.randrange(len(array))] += 1
                    writes += 1
                case "write nothing":
                    dice.choice(arrays).sum()
            for before, oracle, since in taken:
                printed = set(changed(before))
                differ = {n for n, data in oracle.items() if pickle.dumps(values[n], 5) != data}
                assert differ <= printed
                assert not printed or writes > since
