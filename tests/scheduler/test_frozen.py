"""The decorator of values that are made for each task: what a dataclass does, made cheaply."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from gpunb.scheduler.frozen import frozen


@frozen
class Moved:
    """A value with a default, and a field that does not count."""

    task: int
    places: tuple[str, ...] = ()
    note: str = dataclasses.field(default="", compare=False)


@frozen
class Lost:
    """A value with the same fields."""

    task: int
    places: tuple[str, ...] = ()


def test_values_with_equal_fields_are_equal_and_have_one_hash() -> None:
    one, other = Moved(1, ("a",)), Moved(1, places=("a",))
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, Moved(2, ("a",))}) == 2


@pytest.mark.parametrize("other", [Moved(2, ("a",)), Moved(1), Lost(1, ("a",)), (1, ("a",)), None])
def test_other_fields_or_another_class_are_not_equal(other: object) -> None:
    assert Moved(1, ("a",)) != other
    assert not Moved(1, ("a",)) == other  # noqa: SIM201


def test_a_field_that_does_not_count_is_not_compared() -> None:
    one, other = Moved(1, note="first"), Moved(1, note="second")
    assert one == other
    assert hash(one) == hash(other)


def test_the_text_names_the_class_and_all_fields() -> None:
    assert repr(Moved(1, ("a",), "why")) == "Moved(task=1, places=('a',), note='why')"


def test_values_are_copied_replaced_pickled_and_matched() -> None:
    value = Moved(1, ("a",), "why")
    assert copy.copy(value).note == "why"
    assert dataclasses.replace(value, task=3) == Moved(3, ("a",))
    assert pickle.loads(pickle.dumps(value)) == value
    match value:
        case Moved(task, places):
            assert (task, places) == (1, ("a",))


def test_there_is_no_room_for_other_attributes() -> None:
    with pytest.raises(AttributeError):
        Moved(1).other = 2  # type: ignore[attr-defined]
