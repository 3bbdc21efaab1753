"""Large buffers that did not change are not copied again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from gpunb import pages, serialize
from gpunb.serialize import Payload
from gpunb.serialize.reuse import LARGE, Reuse

N = LARGE // 8


@pytest.fixture(params=["watched", "compared"])
def reuse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reuse:
    if request.param == "compared":

        def fails(self: Any, raw: memoryview) -> None:
            raise OSError("not here")

        monkeypatch.setattr(pages.Watch, "__init__", fails)
    return Reuse(1 << 30)


def again(payload: Payload) -> Any:
    wires, segments = serialize.to_wires([payload])
    (arrived,) = serialize.from_wires(wires, segments)
    return serialize.loads(arrived)


def places(payload: Payload) -> list[int]:
    return [segment.fileno() for segment in payload.shared]


def test_the_same_segment_serves_again(reuse: Reuse) -> None:
    value = {"x": np.arange(3 * N), "small": np.arange(10), "text": "t" * 100_000}
    first, second = (serialize.dumps(value, reuse=reuse) for _ in range(2))
    assert len(first.shared) == 1
    assert places(first) == places(second)
    for payload in (first, second):
        made = again(payload)
        assert np.array_equal(made["x"], value["x"])
        assert np.array_equal(made["small"], value["small"])
        assert made["text"] == value["text"]


def test_what_the_receiver_writes_nobody_else_sees(reuse: Reuse) -> None:
    x = np.ones(N)
    payload = serialize.dumps([x], reuse=reuse)
    (mine,), (other,) = again(payload), again(payload)
    mine[:] = 5
    assert other.sum() == N
    assert x.sum() == N
    assert again(serialize.dumps([x], reuse=reuse))[0].sum() == N


@pytest.mark.parametrize("at", [0, N // 2, N - 1])
def test_a_change_is_sent(reuse: Reuse, at: int) -> None:
    x = np.zeros(N)
    first = serialize.dumps([x], reuse=reuse)
    x[at] = 1
    second = serialize.dumps([x], reuse=reuse)
    assert again(second)[0][at] == 1
    assert again(first)[0][at] == 0
    assert places(serialize.dumps([x], reuse=reuse)) == places(second)


def test_views_and_several_arrays(reuse: Reuse) -> None:
    x = np.arange(4.0 * N).reshape(4, N)
    value = [x, x[1:], x[2], np.asfortranarray(x), x[:, ::2]]
    for _ in range(2):
        made = again(serialize.dumps(value, reuse=reuse))
        assert all(np.array_equal(a, b) for a, b in zip(made, value, strict=True))
    x += 1
    made = again(serialize.dumps(value, reuse=reuse))
    assert all(np.array_equal(a, b) for a, b in zip(made, value, strict=True))


def test_read_only_and_small_buffers_travel_as_before(reuse: Reuse) -> None:
    x = np.ones(N)
    x.flags.writeable = False
    payload = serialize.dumps([x, np.ones(N // 2), b"b" * LARGE], reuse=reuse)
    assert not payload.shared
    assert again(payload)[0].sum() == N


def test_memory_goes_with_its_owner(reuse: Reuse) -> None:
    x = np.ones(N)
    serialize.dumps([x], reuse=reuse)
    serialize.dumps([x[1:]], reuse=reuse)
    assert len(reuse) >= 1
    del x
    gc.collect()
    assert len(reuse) == 0


def test_the_limit(reuse: Reuse) -> None:
    few = Reuse(3 * LARGE)
    arrays = [np.full(N, number) for number in range(5)]
    for array in arrays:
        serialize.dumps([array], reuse=few)
    assert len(few) == 3
    assert not serialize.dumps([np.ones(4 * N)], reuse=few).shared
    made = again(serialize.dumps(arrays, reuse=few))
    assert [each[0] for each in made] == list(range(5))


def test_many_buffers(reuse: Reuse) -> None:
    arrays = [np.full(N, number) for number in range(150)]
    for _ in range(2):
        payload = serialize.dumps(arrays, reuse=reuse)
        assert [each[-1] for each in again(payload)] == list(range(150))


def test_a_segment_that_is_missing_is_said() -> None:
    payload = serialize.dumps([np.ones(N)], reuse=Reuse(1 << 30))
    (wire, count), segments = serialize.to_wires([payload])[0][0], payload.segments
    assert count == 2
    with pytest.raises(ValueError, match=r"needs a segment of 1,048,576 bytes and got none"):
        serialize.from_wires([(wire, count)], segments[:1])
