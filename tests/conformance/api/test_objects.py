"""Values and the refs to them."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from tests.conformance.api.backends import alive, errors, get, here, ray
from tests.conformance.api.differences import differs
from tests.waiting import eventually

SMALL, LARGE = 100, 1_000_000


@ray.remote
def same(value):
    return value


def is_lost(refs):
    try:
        return not get(refs)
    except errors.ObjectLost:
        return True


class Unlike:
    def __eq__(self, other):
        return isinstance(other, Unlike)

    __hash__ = None


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="None"),
        pytest.param(3.5, id="a float"),
        pytest.param("text", id="a text"),
        pytest.param(b"x" * 1_000_000, id="many bytes"),
        pytest.param({"a": [1, (2, {3})]}, id="a nest of containers"),
        pytest.param(Unlike(), id="an object of the module's own class"),
        pytest.param(ValueError("a value"), id="an exception"),
    ],
)
def test_what_is_put_comes_back(value):
    back = get([ray.put(value), same.remote(value)])
    if isinstance(value, Exception):
        assert [(type(each), each.args) for each in back] == [(ValueError, ("a value",))] * 2
    else:
        assert back == [value, value]


def test_a_function_is_put():
    assert get(ray.put(lambda x: x + 1))(1) == 2


def test_get_of_a_list_keeps_the_order():
    refs = [same.remote(number) for number in range(20)]
    assert get(refs[::-1]) == list(range(20))[::-1]


def test_get_of_an_empty_list():
    assert ray.get([]) == []


def test_get_of_the_same_ref_twice():
    ref = ray.put(1)
    assert get([ref, ref]) == [1, 1]
    assert get(ref) == 1


def test_put_takes_a_snapshot():
    mine = [1]
    ref = ray.put(mine)
    mine.append(2)
    assert get(ref) == [1]


def test_put_of_a_ref_is_refused():
    with pytest.raises(TypeError):
        ray.put(ray.put(1))


def test_put_of_a_list_of_refs():
    assert get(get(ray.put([ray.put(1)]))) == [1]


@pytest.mark.parametrize(
    "value", [pytest.param(3, id="a number"), pytest.param("ref", id="a text")]
)
def test_get_refuses(value):
    with pytest.raises((TypeError, ValueError)):
        ray.get(value)


@pytest.mark.parametrize("value", [pytest.param([3], id="a list with a number in it")])
def test_get_refuses_inside(value):
    with pytest.raises((TypeError, ValueError)):
        ray.get(value)


@differs("misuse-is-a-type-error")
def test_get_refuses_a_tuple():
    with pytest.raises(here(ray=ValueError, gpunb=TypeError)):
        ray.get((ray.put(1),))


def test_get_gives_up_in_time(gate):
    ref = ray.remote(gate.enter.__func__).remote(gate)
    with pytest.raises(errors.Timeout):
        ray.get(ref, timeout=0.1)
    with pytest.raises(TimeoutError):
        ray.get([ray.put(1), ref], timeout=0.1)


def test_a_timeout_of_zero_only_looks(gate):
    ref = ray.remote(gate.enter.__func__).remote(gate)
    with pytest.raises(errors.Timeout):
        ray.get(ref, timeout=0)
    gate.open()
    ray.wait([ref])
    assert ray.get(ref, timeout=0) is None


def test_a_timeout_leaves_the_task_alone(gate):
    @ray.remote
    def wait(gate):
        gate.enter()
        return "done"

    ref = wait.remote(gate)
    with pytest.raises(errors.Timeout):
        ray.get(ref, timeout=0.05)
    gate.open()
    assert get(ref) == "done"


# ------------------------------------------------------------------------------------------ refs


def test_refs_are_equal_when_they_mean_the_same():
    ref, other = ray.put(1), ray.put(1)
    back = get(same.remote([ref]))[0]
    assert back == ref
    assert hash(back) == hash(ref)
    assert ref != other
    assert len({ref, back, other}) == 2


def test_a_ref_has_an_identity_as_text():
    ref = ray.put(1)
    assert isinstance(ref.hex(), str)
    assert ref.hex() != ray.put(1).hex()


def test_a_ref_in_a_task_is_of_the_same_type():
    @ray.remote
    def kind(refs):
        return isinstance(refs[0], ray.ObjectRef)

    assert get(kind.remote([ray.put(1)])) is True


def test_nested_refs_come_home():
    @ray.remote
    def make():
        return [ray.put("put"), same.remote("made")]

    assert get(get(make.remote())) == ["put", "made"]


def test_a_ref_to_a_ref():
    @ray.remote
    def make():
        return ray.put("inner")

    assert get(get(make.remote())) == "inner"


def test_objects_made_in_a_process_outlive_it(idle):
    @ray.remote(max_calls=1, num_gpus=1)
    def make():
        return [ray.put("put"), same.remote("made")], os.getpid()

    refs, process = get(make.remote())
    assert get(refs) == ["put", "made"]
    del process


@differs("objects-outlive-their-maker")
def test_an_object_of_a_process_that_was_killed(idle):
    @ray.remote(max_restarts=0)
    class Maker:
        def make(self):
            return [ray.put(bytes(1_000_000))], os.getpid()

    maker = Maker.remote()
    refs, process = get(maker.make.remote())
    ray.kill(maker)
    eventually(lambda: not alive(process))
    if here(ray="lost", gpunb="kept") == "kept":
        with pytest.raises(errors.Actor):  # all that ends with the process has ended
            get(maker.make.remote())
        assert get(refs) == [bytes(1_000_000)]
    else:
        eventually(lambda: is_lost(refs))


def test_a_ref_survives_while_it_is_nested_in_an_object():
    outer = ray.put([ray.put("inner")])
    assert get(get(outer)[0]) == "inner"


def test_the_values_of_one_ref_go_to_many_tasks():
    ref = ray.put(np.ones(LARGE))
    sums = [ray.remote(lambda array: float(array.sum())).remote(ref) for _ in range(5)]
    assert get(sums) == [LARGE] * 5


# ---------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    "count", [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large")]
)
def test_an_array_comes_back(count):
    array = np.arange(count)
    assert (get(ray.put(array)) == array).all()
    assert (get(same.remote(array)) == array).all()


@differs("writable-arrays")
def test_an_array_from_get():
    array = get(ray.put(np.zeros(LARGE)))
    assert array.flags.writeable is here(ray=False, gpunb=True)


@differs("writable-arrays")
def test_an_array_as_an_argument():
    @ray.remote
    def write(array):
        if not array.flags.writeable:
            return "read-only"
        array += 1
        return float(array[0])

    mine = np.zeros(LARGE)
    ref = ray.put(mine)
    for sent in (mine, ref):
        assert get(write.remote(sent)) == here(ray="read-only", gpunb=1.0)
    assert not mine.any()
    assert not get(ref).any()


def test_a_snapshot_of_an_array():
    mine = np.zeros(LARGE)
    ref = ray.put(mine)
    mine += 1
    assert not get(ref).any()


def test_a_view_of_an_array():
    assert (get(same.remote(np.arange(LARGE)[::2])) == np.arange(0, LARGE, 2)).all()


def test_an_array_of_another_order():
    array = np.asfortranarray(np.arange(600).reshape(20, 30))
    assert (get(same.remote(array)) == array).all()


def test_a_structured_array():
    array = np.array([(1, 2.5)], dtype=[("a", int), ("b", float)])
    assert get(same.remote(array))["b"][0] == 2.5


def test_a_value_with_a_way_of_pickling_of_its_own():
    class Odd:
        def __reduce__(self):
            return str, ("rebuilt",)

    assert pickle.loads(pickle.dumps("rebuilt")) == get(same.remote(Odd()))
