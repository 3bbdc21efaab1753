"""The results of a task are packed for the kernel."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.exceptions import OutOfMemoryError
from gpunb.protocol import backend
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import DYNAMIC, STREAMING, ObjectId
from gpunb.worker.packing import Packer


class Kernel:
    """Notes what is put and sent, in place of the kernel. It is the backend of the refs, too."""

    def __init__(self) -> None:
        self.stored: dict[ObjectId, tuple[Any, bool]] = {}
        self.sent: list[Any] = []
        self.full = False
        self._numbers = itertools.count(1)

    def put(self, payload: Payload, *, failed: bool = False) -> ObjectId:
        if self.full:
            raise OutOfMemoryError("no room")
        obj = (0, next(self._numbers))
        self.stored[obj] = serialize.loads(payload), failed
        return obj

    def send(self, message: Any, segments: Any = ()) -> None:
        (payload,) = serialize.from_wires([message.result], segments)
        position = message.task, message.attempt, message.position
        self.sent.append((*position, serialize.loads(payload)))

    def hold(self, obj: ObjectId) -> None:
        pass

    drop = hold


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    before = backend.existing()
    kernel: Any = Kernel()
    backend.install(kernel)
    yield kernel
    backend.install(before)


@pytest.fixture
def packer(kernel: Kernel) -> Packer:
    remote: Any = kernel
    return Packer(remote, lambda work: f"{work.name} (#{work.task})")


def attempt(returns: int = 1, kind: str = "call", number: int = 1) -> msg.Execute:
    wire = ((b"", (), (), ()), 0)
    return msg.Execute(
        5, number, "f", kind, None, "digest", None, wire, (), (), returns, False, False
    )


def values(payloads: list[Payload]) -> list[Any]:
    return [serialize.loads(each) for each in payloads]


@pytest.mark.parametrize(
    ("returns", "value", "packed"),
    [
        (1, None, [None]),
        (1, [1, 2], [[1, 2]]),
        (0, "anything", []),
        (2, (1, 2), [1, 2]),
        (2, [1, None], [1, None]),
        (2, "ab", ["a", "b"]),
        (2, {"a": 1, "b": 2}, ["a", "b"]),
        (3, range(3), [0, 1, 2]),
        (2, (each for each in (1, 2)), [1, 2]),
    ],
)
def test_value_becomes_as_many_results_as_the_call_has(
    packer: Packer, returns: int, value: Any, packed: list[Any]
) -> None:
    assert values(packer.results(attempt(returns), value)) == packed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, 2, 3), r"f \(#5\) has num_returns=2, but returned 3"),
        ((), r"has num_returns=2, but returned \(\)"),
        (None, "has num_returns=2, but returned None"),
        (7, "has num_returns=2, but returned 7"),
        ((each for each in (1, 2, 3)), "has num_returns=2, but returned 3"),
    ],
    ids=["too many", "none", "None", "a number", "a generator"],
)
def test_wrong_number_of_results_is_an_error(packer: Packer, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        packer.results(attempt(2), value)


def test_result_that_is_packed_already_is_left_as_it_is(packer: Packer) -> None:
    payload = serialize.dumps(1)
    assert packer.results(attempt(), payload) == [payload]
    assert packer.results(attempt(3, kind="cell"), [payload] * 3) == [payload] * 3


def test_generator_without_results_runs_to_its_end(packer: Packer) -> None:
    done: list[int] = []

    def effects() -> Iterator[None]:
        for each in range(3):
            done.append(each)
            yield

    assert packer.results(attempt(0), effects()) == []
    assert done == [0, 1, 2]


def test_value_that_cannot_be_pickled_is_named(packer: Packer) -> None:
    with pytest.raises(TypeError, match=r"the result of f \(#5\)"):
        packer.results(attempt(), threading.Lock())


# ----------------------------------------------------------------------------------- generators


def fails_after(*yielded: Any) -> Iterator[Any]:
    yield from yielded
    raise KeyError("x")


def test_values_of_a_stream_are_sent_as_they_come(packer: Packer, kernel: Kernel) -> None:
    def counted() -> Iterator[int]:
        for each in range(3):
            assert len(kernel.sent) == each
            yield each

    assert packer.results(attempt(STREAMING, number=2), counted()) == []
    assert kernel.sent == [(5, 2, each, each) for each in range(3)]


@pytest.mark.parametrize("returns", [STREAMING, DYNAMIC])
def test_function_that_was_to_yield_has_to(packer: Packer, returns: int) -> None:
    with pytest.raises(TypeError, match=r"f \(#5\) was to yield its results, but returned \[1\]"):
        packer.results(attempt(returns), [1])


def test_dynamic_result_has_a_ref_to_each_value(packer: Packer, kernel: Kernel) -> None:
    (payload,) = packer.results(attempt(DYNAMIC), iter(["one", "two"]))
    assert list(kernel.stored.values()) == [("one", False), ("two", False)]
    assert [ref.id for ref in serialize.loads(payload)] == list(kernel.stored)
    assert set(payload.references) == set(kernel.stored)


@pytest.mark.parametrize(
    ("returns", "yielded", "early"),
    [(3, ("one", "two"), ["one", "two"]), (3, (), []), (2, ("one", "two"), []), (1, (), [])],
    ids=["before the error", "at once", "after all", "one result"],
)
def test_results_from_before_an_error_are_kept(
    packer: Packer, returns: int, yielded: tuple[str, ...], early: list[str]
) -> None:
    """The error is at the place of a later result, so that the caller sees it."""
    work = attempt(returns)
    if returns > 1:
        with pytest.raises(KeyError):
            packer.results(work, fails_after(*yielded))
    failure = serialize.dumps("failure")
    assert values(packer.results_before(work, failure)) == early
    assert packer.results_before(work, failure) == []


def test_error_of_a_dynamic_result_is_its_last_value(packer: Packer, kernel: Kernel) -> None:
    work = attempt(DYNAMIC)
    with pytest.raises(KeyError):
        packer.results(work, fails_after("one"))
    (payload,) = packer.results_before(work, serialize.dumps("failure"))
    refs = list(serialize.loads(payload))
    assert [kernel.stored[ref.id] for ref in refs] == [("one", False), ("failure", True)]


def test_error_without_room_stands_alone(packer: Packer, kernel: Kernel) -> None:
    work = attempt(DYNAMIC)
    with pytest.raises(KeyError):
        packer.results(work, fails_after("one"))
    kernel.full = True
    assert packer.results_before(work, serialize.dumps("failure")) == []


def test_attempt_that_is_over_leaves_nothing_for_the_next(packer: Packer) -> None:
    first, second = attempt(3), attempt(3, number=2)
    for work in (first, second):
        with pytest.raises(KeyError):
            packer.results(work, fails_after("one"))
    packer.forget(first)
    assert packer.results_before(first, serialize.dumps("failure")) == []
    assert values(packer.results_before(second, serialize.dumps("failure"))) == ["one"]
    assert packer.forget(first) is None
