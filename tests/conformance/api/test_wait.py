"""`wait`: which of many are ready."""

from __future__ import annotations

import pytest

from tests.conformance.api.backends import get, here, ray
from tests.conformance.api.differences import differs
from tests.waiting import PATIENCE


@ray.remote(num_cpus=0.1)
def late(gate):
    gate.enter()
    return "late"


@pytest.fixture
def three():
    refs = [ray.put(number) for number in range(3)]
    ray.wait(refs, num_returns=3)
    return refs


def test_one_by_default(three):
    ready, rest = ray.wait(three)
    assert len(ready) == 1
    assert sorted([*ready, *rest], key=three.index) == three


def test_all(three):
    assert ray.wait(three, num_returns=3) == (three, [])


def test_no_more_than_asked_for(three):
    ready, rest = ray.wait(three, num_returns=2)
    assert (len(ready), len(rest)) == (2, 1)


def test_both_lists_keep_the_order(three, gate):
    slow = late.remote(gate)
    assert ray.wait([slow, *three], num_returns=3) == (three, [slow])


def test_those_that_are_ready_come_first(three, gate):
    slow = late.remote(gate)
    ready, rest = ray.wait([slow, three[0]], num_returns=1)
    assert (ready, rest) == ([three[0]], [slow])


def test_a_timeout(three, gate):
    slow = late.remote(gate)
    assert ray.wait([slow, *three], num_returns=4, timeout=0.1) == (three, [slow])


def test_a_timeout_of_zero_only_looks(gate):
    slow = late.remote(gate)
    assert ray.wait([slow], timeout=0) == ([], [slow])
    gate.open()
    assert ray.wait([slow], timeout=PATIENCE) == ([slow], [])


def test_nothing():
    assert ray.wait([]) == ([], [])


def test_what_failed_is_ready():
    def fail():
        raise ValueError

    ref = ray.remote(fail).remote()
    assert ray.wait([ref], timeout=PATIENCE) == ([ref], [])


def test_what_was_cancelled_is_ready(gate):
    ref = late.remote(gate)
    gate.await_()
    ray.cancel(ref)
    assert ray.wait([ref], timeout=PATIENCE) == ([ref], [])


def test_again_and_again_until_all_are_done():
    rest = [ray.remote(lambda number: number).remote(number) for number in range(6)]
    found = []
    while rest:
        ready, rest = ray.wait(rest, num_returns=min(2, len(rest)))
        found += get(ready)
    assert sorted(found) == list(range(6))


def test_inside_a_task(gate):
    @ray.remote
    def inner(refs):
        ready, rest = ray.wait(refs, num_returns=1, timeout=20)
        return [refs.index(each) for each in ready], [refs.index(each) for each in rest]

    slow = late.remote(gate)
    assert get(inner.remote([slow, ray.put(1)])) == ([1], [0])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        pytest.param(ray.wait, TypeError, id="a ref alone"),
        pytest.param(lambda ref: ray.wait((ref,)), TypeError, id="a tuple"),
        pytest.param(lambda ref: ray.wait([1]), TypeError, id="what is no ref"),
        pytest.param(lambda ref: ray.wait([ref, ref]), ValueError, id="a ref twice"),
        pytest.param(lambda ref: ray.wait([ref], num_returns=0), ValueError, id="none of them"),
        pytest.param(lambda ref: ray.wait([ref], num_returns=-1), ValueError, id="minus one"),
        pytest.param(lambda ref: ray.wait([ref], num_returns=2), ValueError, id="more than given"),
        pytest.param(lambda ref: ray.wait([ref], timeout=-1), ValueError, id="a negative timeout"),
    ],
)
def test_wait_refuses(wrong, error):
    with pytest.raises(error):
        wrong(ray.put(1))


@differs("misuse-is-a-type-error")
def test_get_with_a_negative_timeout():
    ref = ray.put(1)
    if here(ray="waits", gpunb="refuses") == "waits":
        assert ray.get(ref, timeout=-1) == 1
    else:
        with pytest.raises(ValueError, match="timeout"):
            ray.get(ref, timeout=-1)
