"""Parts of values that the receiver has already."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpunb.data.serialize import dumps, loads, loads_names, part_at, parts


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Unlike(Holder):
    """Is not pickled by its attributes."""

    def __getstate__(self) -> Any:
        return {"held": None}


def test_part_is_found_by_its_path() -> None:
    array = np.arange(3)
    values = {"a": {"x": [array, 1, "s"], 2: Holder(array)}, "b": Holder({"y": (array,)})}
    ways = {path: part for part, path in parts(values, exact=True)}
    assert ("a", (True, "x"), (True, 0)) in ways
    for path, part in ways.items():
        assert part_at(values, pickle.dumps(path)) is part
    assert sum(part is array for part in ways.values()) == 1


def test_exact_paths_leave_out_objects_with_their_own_pickling() -> None:
    inner = [1]
    for exact in (True, False):
        there = [part for part, _ in parts({"a": Unlike(inner)}, exact=exact)]
        assert any(part is inner for part in there) is not exact


def test_few_items_of_large_containers_are_followed() -> None:
    assert len(list(parts({"a": [[] for _ in range(100_000)]}, exact=True))) < 200
    assert len(list(parts({"a": {n: [] for n in range(1000)}}, exact=True))) == 1
    ring: list[Any] = []
    ring.append(ring)
    assert len(list(parts({"a": ring}, exact=True))) == 1


def test_stream_has_paths_in_place_of_objects_of_its_reader() -> None:
    array, rows = np.arange(50_000), [[1], [2]]
    here = {"array": array, "rows": rows}
    shared = list(parts(here, exact=True))
    payload = dumps(
        ("first", {"new": Holder(array), "row": [rows[1], lambda: rows]}), shared=shared
    )
    assert payload.nbytes < 5000
    there = {"array": array.copy(), "rows": [[1], [2]]}
    first, values, lost = loads_names(payload, namespace={}, shared=partial(part_at, there))
    assert (first, lost) == ("first", {})
    assert values["new"].held is there["array"]
    assert values["row"][0] is there["rows"][1]
    assert values["row"][1]() is there["rows"]
    with pytest.raises(pickle.UnpicklingError, match="another process"):
        loads(payload)


def test_missing_part_of_the_reader_loses_only_the_values_with_it() -> None:
    here = {"rows": [[1], [2]], "array": np.arange(3)}
    shared = list(parts(here, exact=True))
    value = ("first", {"one": [here["rows"][1]], "two": [here["array"]]})
    there = {"rows": [[1]], "array": np.arange(3)}
    _, values, lost = loads_names(
        dumps(value, shared=shared), namespace={}, shared=partial(part_at, there)
    )
    assert values["two"][0] is there["array"]
    assert type(lost["one"]) is IndexError
