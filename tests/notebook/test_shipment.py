"""The state of the notebook's names since a cell was sent."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from gpunb.notebook.shipment import Since


class Thing:
    """An object with weak references; a list has none."""

    def __init__(self) -> None:
        self.items = [1]


@pytest.fixture
def space() -> dict[str, Any]:
    return {"values": [1], "thing": Thing(), "gone": "x"}


@pytest.fixture
def since(space: dict[str, Any]) -> Since:
    return Since(space, {*space, "missing"}, dict(space))


def test_names_that_nothing_has_changed_are_untouched(since: Since) -> None:
    assert [each for each in ("values", "thing", "gone", "missing") if since.touched(each)] == []


def test_a_name_is_touched_if_it_was_bound_anew_or_deleted(
    space: dict[str, Any], since: Since
) -> None:
    space["values"] = [1]
    space["missing"] = 2
    del space["gone"]
    assert [each for each in ("values", "missing", "gone") if since.touched(each)] == [
        "values",
        "missing",
        "gone",
    ]
    assert not since.touched("thing")


def test_a_name_is_touched_if_its_object_was_changed_in_place(
    space: dict[str, Any], since: Since
) -> None:
    space["values"].append(2)
    space["thing"].items.append(2)
    assert since.touched("values")
    assert since.touched("thing")


def test_the_value_that_an_earlier_cell_has_bound_counts_as_unchanged(
    space: dict[str, Any], since: Since
) -> None:
    space["values"] = [5]
    del space["gone"]
    for name in ("values", "gone"):
        since.now(name)
        assert not since.touched(name)
    space["values"] = [5]
    assert since.touched("values")


def test_an_object_is_not_kept_alive_if_weak_references_to_it_are_possible(
    space: dict[str, Any],
) -> None:
    since, thing = Since(space, {"thing"}, {}), weakref.ref(space["thing"])
    del space["thing"]
    gc.collect()
    assert thing() is None
    assert since.touched("thing")
