"""Large data: it travels without copies, arrives writable, and goes away."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

import gpunb
from tests.sessions import assert_idle, descriptors, session
from tests.waiting import PATIENCE, eventually

INLINE, LARGE = 100, 1_000_000
"""Items of arrays that travel within a message, and in a segment."""


@pytest.fixture(scope="module")
def started(by_value: None) -> Iterator[None]:
    with session(num_gpus=2, num_cpus=2):
        yield


@pytest.fixture(autouse=True)
def two(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves no object and no descriptor."""
    get(nothing.remote())
    before = descriptors()
    yield
    assert_idle()
    eventually(lambda: descriptors() <= before + 16, "descriptors are left")


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


@gpunb.remote
def nothing():
    return None


@gpunb.remote
def fill(array, value):
    before = float(array.sum())
    array[:] = value
    return before, array


@gpunb.remote
def ones(count):
    return np.ones(count)


@pytest.mark.parametrize("count", [INLINE, LARGE])
@pytest.mark.parametrize("through", ["value", "ref"])
def test_an_argument_is_writable_and_private(count, through):
    mine = np.zeros(count)
    sent = gpunb.put(mine) if through == "ref" else mine
    for value in (1.0, 2.0):
        before, theirs = get(fill.remote(sent, value))
        assert before == 0
        assert theirs[0] == theirs[-1] == value
    assert not mine.any()
    if through == "ref":
        assert not get(sent).any()


@pytest.mark.parametrize("count", [INLINE, LARGE])
def test_a_result_is_writable_and_private(count):
    ref = ones.remote(count)
    first, second = get(ref), get(ref)
    first += 1
    assert first.sum() == 2 * count
    assert second.sum() == count
    assert get(ref).sum() == count
    assert get(fill.remote(ref, 5.0))[0] == count


def test_data_goes_away_with_its_last_reference():
    before = descriptors()
    refs = [gpunb.put(np.zeros(LARGE)) for _ in range(5)] + [ones.remote(LARGE)]
    views = get(refs)
    held = gpunb.status()["objects"]
    assert held["objects"] == 6
    assert 6 * 8 * LARGE <= held["bytes"] < 6 * 8 * LARGE + 100_000
    assert descriptors() >= before + 6
    del refs
    eventually(lambda: gpunb.status()["objects"]["bytes"] == 0)
    assert [float(view[-1]) for view in views] == [0] * 5 + [1]


def test_a_snapshot_is_sent():
    array = np.zeros(LARGE)
    ref = gpunb.put(array)
    array += 7
    assert get(ref).sum() == 0


def test_frames():
    @gpunb.remote
    def enlarge(frame):
        frame["c"] = frame.a * 2
        frame.loc[0, "b"] = "changed"
        return frame

    frame = pd.DataFrame({"a": np.arange(50_000), "b": "text"})
    back = get(enlarge.remote(frame))
    assert list(frame.columns) == ["a", "b"]
    assert frame.b[0] == "text"
    assert back.b[0] == "changed"
    assert (back.c == frame.a * 2).all()
    back["a"] += 1


def test_many_large_results_in_one_get():
    @gpunb.remote
    def total(refs):
        return sum(float(array[0]) for array in gpunb.get(refs))

    refs = [gpunb.put(np.full(10_000, i)) for i in range(230)]
    assert get(total.remote(refs)) == sum(range(230))
    assert sum(float(array[0]) for array in get(refs)) == sum(range(230))


def test_many_large_arguments():
    @gpunb.remote(num_gpus=1)
    def total(*arrays, **named):
        return sum(float(array[0]) for array in (*arrays, *named.values()))

    refs = [gpunb.put(np.full(10_000, i)) for i in range(230)]
    assert get(total.remote(*refs[:200], **{f"k{i}": refs[200 + i] for i in range(30)})) == sum(
        range(230)
    )


def test_many_large_results_of_one_task():
    """More than descriptors fit into one message."""

    @gpunb.remote(num_returns=300)
    def make():
        return [np.full(10_000, i) for i in range(300)]

    assert [float(array[-1]) for array in get(make.remote())] == list(range(300))


def test_messages_larger_than_a_packet():
    @gpunb.remote
    def length(*texts, **more):
        return len(texts) + len(more)

    texts = [gpunb.put("x" * 40_000) for _ in range(60)]
    assert get(length.remote(*texts)) == 60
    assert get(length.remote(*["y" * 1000] * 500)) == 500
    blob = os.urandom(300_000)
    assert get(gpunb.remote(lambda: len(blob)).remote()) == 300_000


def test_refs_within_results():
    @gpunb.remote(num_gpus=1)
    def make():
        inner = gpunb.put(np.ones(LARGE))
        return {"one": [inner], "two": ones.remote(LARGE)}

    ref = make.remote()
    found = get(ref)
    del ref
    gc.collect()
    assert get(found["one"][0]).sum() == get(found["two"]).sum() == LARGE
    deep = gpunb.put([gpunb.put([gpunb.put("deep")])])
    assert get(get(get(deep)[0])[0]) == "deep"


def test_a_ref_that_a_worker_keeps():
    kept = []

    @gpunb.remote
    def keep(refs):
        import builtins

        builtins.kept_by_a_test = refs
        return os.getpid()

    @gpunb.remote
    def use():
        import builtins

        refs = builtins.__dict__.pop("kept_by_a_test")
        return os.getpid(), float(gpunb.get(refs[0]).sum())

    kept.append(gpunb.put(np.ones(LARGE)))
    process = get(keep.remote(kept))
    kept.clear()
    gc.collect()
    assert gpunb.status()["objects"]["objects"] == 1
    assert get(use.remote()) == (process, LARGE)


def test_data_of_a_worker_that_is_killed():
    @gpunb.remote(max_retries=0)
    def put_and_die():
        refs = [gpunb.put(np.ones(LARGE)), ones.remote(LARGE)]
        gpunb.get(refs)
        os.kill(os.getpid(), 9)

    with pytest.raises(gpunb.exceptions.WorkerCrashedError):
        get(put_and_die.remote())
