"""Large buffers that did not change are not copied again."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
from typing import Any

import numpy as np
import pytest

from gpunb.data import page_map, serialize
from gpunb.data.serialize import Payload
from gpunb.data.serialize.reuse import LARGE, ROUNDS, Reuse

N = LARGE // 8


@pytest.fixture(params=["watched", "compared"])
def reuse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reuse:
    if request.param == "compared":

        def fails(self: Any, raw: memoryview) -> None:
            raise OSError("not here")

        monkeypatch.setattr(page_map.Watch, "__init__", fails)
    return Reuse(1 << 30)


def again(payload: Payload) -> Any:
    wires, segments = serialize.to_wires([payload])
    (arrived,) = serialize.from_wires(wires, segments)
    return serialize.loads(arrived)


def places(payload: Payload) -> list[int]:
    return [segment.fileno() for segment in payload.shared]


def test_unchanged_array_is_sent_with_the_same_segment(reuse: Reuse) -> None:
    value = {"x": np.arange(3 * N), "small": np.arange(10), "text": "t" * 100_000}
    first, second = (serialize.dumps(value, reuse=reuse) for _ in range(2))
    assert len(first.shared) == 1
    assert places(first) == places(second)
    for payload in (first, second):
        made = again(payload)
        assert np.array_equal(made["x"], value["x"])
        assert np.array_equal(made["small"], value["small"])
        assert made["text"] == value["text"]


def test_write_of_a_receiver_changes_no_other_copy(reuse: Reuse) -> None:
    x = np.ones(N)
    payload = serialize.dumps([x], reuse=reuse)
    (mine,), (other,) = again(payload), again(payload)
    mine[:] = 5
    assert other.sum() == N
    assert x.sum() == N
    assert again(serialize.dumps([x], reuse=reuse))[0].sum() == N


@pytest.mark.parametrize("at", [0, N // 2, N - 1])
def test_changed_array_is_sent_again(reuse: Reuse, at: int) -> None:
    x = np.zeros(N)
    first = serialize.dumps([x], reuse=reuse)
    x[at] = 1
    second = serialize.dumps([x], reuse=reuse)
    assert again(second)[0][at] == 1
    assert again(first)[0][at] == 0
    assert places(serialize.dumps([x], reuse=reuse)) == places(second)


def test_views_and_several_arrays_arrive_equal(reuse: Reuse) -> None:
    x = np.arange(4.0 * N).reshape(4, N)
    value = [x, x[1:], x[2], np.asfortranarray(x), x[:, ::2]]
    for _ in range(2):
        made = again(serialize.dumps(value, reuse=reuse))
        assert all(np.array_equal(a, b) for a, b in zip(made, value, strict=True))
    x += 1
    made = again(serialize.dumps(value, reuse=reuse))
    assert all(np.array_equal(a, b) for a, b in zip(made, value, strict=True))


def test_small_buffers_and_bytes_share_no_segment(reuse: Reuse) -> None:
    payload = serialize.dumps([np.ones(N // 2), b"b" * LARGE], reuse=reuse)
    assert not payload.shared


def test_read_only_view_arrives_read_only(reuse: Reuse) -> None:
    x = np.ones(N)
    view = x[:]
    view.flags.writeable = False
    first = serialize.dumps([view], reuse=reuse)
    assert places(serialize.dumps([view], reuse=reuse)) == places(first)
    (made,) = again(first)
    assert not made.flags.writeable
    x[N // 2] = 5
    assert again(serialize.dumps([view], reuse=reuse))[0][N // 2] == 5


@pytest.mark.parametrize("first", [0, 1])
def test_change_is_seen_in_each_of_two_overlapping_arrays(reuse: Reuse, first: int) -> None:
    x = np.zeros(4 * N)
    views = [x, x[1:]]
    for view in views:
        serialize.dumps([view], reuse=reuse)
    for at in (2 * N, 3 * N):
        x[at] = at
        order = (views[first], views[1 - first])
        for view in order:
            assert again(serialize.dumps([view], reuse=reuse))[0].sum() == x.sum()


def test_write_of_another_process_is_sent(reuse: Reuse) -> None:
    with mmap.mmap(-1, 2 * LARGE) as memory:  # shared
        x = np.frombuffer(memory)
        serialize.dumps([x], reuse=reuse)
        child = os.fork()
        if not child:
            x[N] = 5
            os._exit(0)
        os.waitpid(child, 0)
        assert again(serialize.dumps([x], reuse=reuse))[0][N] == 5
        del x
        gc.collect()


class Storage:
    """Owns memory, like a tensor's storage."""

    def __init__(self) -> None:
        self.memory = np.zeros(N)


class Bytes:
    """Makes a new object each time it is pickled, like `devices._Storage`."""

    def __init__(self, owner: Storage | None, memory: np.ndarray) -> None:
        self.owner = owner
        self.memory = memory

    def __reduce__(self) -> Any:
        made = (ctypes.c_ubyte * self.memory.nbytes).from_address(self.memory.ctypes.data)
        if self.owner is not None:
            made.owner = self.owner  # type: ignore[attr-defined]
        return np.frombuffer, (pickle.PickleBuffer(memoryview(made).cast("B")),)


def test_segment_is_kept_as_long_as_the_owner_of_the_memory(reuse: Reuse) -> None:
    storage = Storage()
    value = Bytes(storage, storage.memory)
    first = serialize.dumps(value, reuse=reuse)
    gc.collect()
    assert places(serialize.dumps(value, reuse=reuse)) == places(first)
    storage.memory[N // 2] = 3
    changed = serialize.dumps(value, reuse=reuse)
    assert again(changed)[N // 2] == 3
    assert places(serialize.dumps(value, reuse=reuse)) == places(changed)
    del storage, value
    gc.collect()
    assert len(reuse) == 0


class Tree:
    """Owns memory, and cannot be referred to weakly."""

    __slots__ = ("memory",)

    def __init__(self, size: int = N) -> None:
        self.memory = np.zeros(size)

    def __reduce__(self) -> Any:
        return np.array, (Bytes(None, self.memory),)


def test_unchanged_memory_without_a_known_owner_is_not_copied_again(reuse: Reuse) -> None:
    tree = Tree()
    first = serialize.dumps(tree, reuse=reuse)
    gc.collect()
    assert places(serialize.dumps(tree, reuse=reuse)) == places(first)
    tree.memory[7] = 1
    assert again(serialize.dumps(tree, reuse=reuse))[7] == 1


def test_segment_without_an_owner_is_dropped_after_some_values_without_it(reuse: Reuse) -> None:
    tree, x = Tree(), np.ones(N)
    serialize.dumps([tree, x], reuse=reuse)
    assert len(reuse) == 2
    for _ in range(ROUNDS - 1):
        serialize.dumps([x], reuse=reuse)
    assert len(reuse) == 2
    serialize.dumps([x], reuse=reuse)
    assert len(reuse) == 1
    assert serialize.dumps([x], reuse=reuse).shared


def test_segments_without_an_owner_have_a_limit(reuse: Reuse) -> None:
    few = Reuse(40 * LARGE)
    serialize.dumps([Tree() for _ in range(10)], reuse=few)
    assert len(few) == 5


def test_segment_is_dropped_with_the_owner_of_the_memory(reuse: Reuse) -> None:
    x = np.ones(N)
    serialize.dumps([x], reuse=reuse)
    serialize.dumps([x[1:]], reuse=reuse)
    assert len(reuse) >= 1
    del x
    gc.collect()
    assert len(reuse) == 0


def test_segments_together_stay_below_the_limit(reuse: Reuse) -> None:
    few = Reuse(3 * LARGE)
    arrays = [np.full(N, number) for number in range(5)]
    for array in arrays:
        serialize.dumps([array], reuse=few)
    assert len(few) == 3
    assert not serialize.dumps([np.ones(4 * N)], reuse=few).shared
    made = again(serialize.dumps(arrays, reuse=few))
    assert [each[0] for each in made] == list(range(5))


def test_value_with_more_buffers_than_one_payload_shares_arrives(reuse: Reuse) -> None:
    arrays = [np.full(N, number) for number in range(150)]
    for _ in range(2):
        payload = serialize.dumps(arrays, reuse=reuse)
        assert [each[-1] for each in again(payload)] == list(range(150))


def test_missing_segment_is_named_in_the_error() -> None:
    payload = serialize.dumps([np.ones(N)], reuse=Reuse(1 << 30))
    (wire, count), segments = serialize.to_wires([payload])[0][0], payload.segments
    assert count == 2
    with pytest.raises(
        ValueError, match=r"needs a segment of 1,048,576 bytes and got none.*ulimit -n"
    ):
        serialize.from_wires([(wire, count)], segments[:1])
