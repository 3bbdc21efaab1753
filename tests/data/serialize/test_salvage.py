"""Values that arrive although others of the same payload cannot be unpickled."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest

from gpunb.data.serialize import (
    dumps,
    dumps_function,
    loads,
    loads_arguments,
    loads_function,
    loads_names,
    why_lost,
)


class Refused(Exception):
    pass


def refuse(*_: Any) -> None:
    raise Refused("not here")


class Unmade:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()


class Unset:
    """Can be unpickled, but not given its state."""

    def __setstate__(self, state: Any) -> None:
        refuse(state)


class SetApart:
    """Like `Unset`, with a function that sets the state."""

    def __reduce__(self) -> Any:
        return SetApart, (), {"x": 1}, None, None, refuse


class Filled(list):
    """Cannot be filled while it is unpickled."""

    def extend(self, _: Any) -> None:
        refuse()

    append = extend


class Hashed:
    """Cannot be put into a set while it is unpickled."""

    def __init__(self) -> None:
        self.gone = False

    def __hash__(self) -> int:
        return hash(self.gone)


@dataclasses.dataclass
class Holder:
    held: Any


def names(**values: Any) -> tuple[Any, dict[str, Any], dict[str, Exception]]:
    return loads_names(dumps(("first", values)), namespace={})


def of_refused(error: Exception) -> bool:
    return type(error) is Refused and str(error) == "not here"


@pytest.mark.parametrize("kind", [Unmade, Unset, SetApart])
def test_values_that_fail_are_left_out_and_the_others_share_objects(kind: type) -> None:
    unset = kind()
    vars(unset)["x"] = 1
    shared, array = [1], np.arange(100_000)
    first, there, lost = names(
        unset=unset,
        shared=shared,
        with_it=[shared, unset],
        deep={"a": (1, [Holder(unset)])},
        holder=Holder(shared),
        array=array,
        view={"array": array},
        function=lambda: shared,
        bad_function=lambda: unset,
    )
    assert first == "first"
    assert lost.keys() == {"unset", "with_it", "deep", "bad_function"}
    assert all(map(of_refused, lost.values()))
    assert there["holder"].held is there["shared"] is there["function"]()
    assert there["view"]["array"] is there["array"]
    assert (there["array"] == array).all()


def test_container_that_fails_while_filled_is_left_out() -> None:
    filled = Filled()
    list.append(filled, 1)
    assert list(names(a=filled, b=[filled], c=2)[1].items()) == [("c", 2)]
    single = Filled()
    list.extend(single, [1, 2])
    assert names(a=single, c=2)[1] == {"c": 2}


def test_failed_list_with_itself_is_left_out_with_the_values_that_hold_it() -> None:
    ring: list[Any] = [Unmade()]
    good: list[Any] = []
    ring.append(ring)
    good.append(good)
    _, there, lost = names(ring=ring, other=(ring,), good=good)
    assert lost.keys() == {"ring", "other"}
    assert there["good"][0] is there["good"]


def test_failed_class_loses_only_its_instances() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("class A: pass\nclass B: pass\na, b = A(), B()", space)
    space["A"].broken = Unmade()
    _, there, lost = names(a=space["a"], b=space["b"])
    assert lost.keys() == {"a"}
    assert isinstance(there["b"], space["B"])


def test_errors_keep_no_reference_to_other_values() -> None:
    held = names(good=Holder(1), bad=Unmade())[1]
    gone = weakref.ref(held["good"])
    held.clear()
    assert gone() is None


def test_failed_first_value_raises_its_error() -> None:
    with pytest.raises(Refused):
        loads_names(dumps((Unmade(), {"a": 1})), namespace={})


def test_argument_that_cannot_be_unpickled_is_named() -> None:
    for pair, text_of_pair in (
        (((1, [Unmade()]), {}), "argument 2 cannot be made again"),
        (((1,), {"parameters": {"a": Unmade()}}), "argument 'parameters' cannot be made again"),
    ):
        with pytest.raises(Refused) as info:
            loads_arguments(dumps(pair))
        assert text_of_pair in info.value.__notes__[0]
        assert "Refused: not here" in info.value.__notes__[0]


FUNCTIONS = """
def reader(): return helper
def caller(): return reader(), caller
class Reader:
    def read(self): return helper
def outer():
    held = helper
    def inner(): return held
    return inner
"""


@pytest.mark.parametrize(
    ("expression", "cause"),
    [
        ("reader", "'helper', a global of the function 'reader'"),
        ("caller", "'helper', a global of the function 'reader'"),
        ("Reader()", "'helper', a global of the function 'Reader.read'"),
        ("outer()", "'held', a variable of the function 'outer.<locals>.inner'"),
    ],
)
def test_variable_of_a_function_that_cannot_be_made_is_named(expression: str, cause: str) -> None:
    space: dict[str, Any] = {"__name__": "__main__", "helper": Unset()}
    space["helper"].x = 1
    exec(FUNCTIONS, space)
    value = eval(expression, space)
    reason = f"Refused: not here (the cause is {cause})"
    _, there, lost = names(value=value, again=[value], good=1)
    assert there == {"good": 1}
    assert {name: why_lost(error) for name, error in lost.items()} == {
        "value": reason,
        "again": reason,
    }
    with pytest.raises(Refused) as info:
        loads_arguments(dumps(((value,), {})))
    assert info.value.__notes__ == [f"argument 1 cannot be made again in the worker: {reason}"]
    if callable(value):
        with pytest.raises(Refused) as info:
            loads_function(dumps_function(value))
        assert why_lost(info.value) == reason


def test_memory_views_arrive_as_memory_views() -> None:
    own, array = bytearray(b"abcdefgh"), np.arange(6.0).reshape(2, 3)
    for view in (
        memoryview(own),
        memoryview(own)[2:4],
        memoryview(own)[::2],
        memoryview(b"12345678").cast("i"),
        memoryview(b"12345678")[2:],
        memoryview(array),
        memoryview(array)[1:],
        memoryview(np.arange(6))[::-1],
        memoryview(np.zeros((0, 3))),
        memoryview(np.arange(100_000)),
    ):
        (made,) = loads(dumps([view]))
        assert type(made) is memoryview
        assert (made.format, made.readonly, made.nbytes) == (
            view.format,
            view.readonly,
            view.nbytes,
        )
        assert made.tobytes() == view.tobytes()
        assert 0 in view.shape or made.shape == view.shape
    view, its = loads(dumps([memoryview(own), own]))
    assert view.obj is its
