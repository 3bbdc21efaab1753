"""Tasks that yield: refs as they come."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest

from tests.conformance.api.backends import errors, free, get, here, ray
from tests.conformance.api.differences import differs
from tests.waiting import PATIENCE, eventually


@ray.remote
def count(number):
    for each in range(number):  # noqa: UP028 - Ray cannot delegate to what is no generator
        yield each


@ray.remote
def count_then_fail(number):
    for each in range(number):  # noqa: UP028
        yield each
    raise KeyError("after all")


@ray.remote
class Counts:
    def count(self, number):
        for each in range(number):  # noqa: UP028
            yield each

    async def count_async(self, number):
        for each in range(number):
            await asyncio.sleep(0)
            yield each

    def fail(self):
        yield 0
        raise KeyError("after all")

    def say(self):
        return "done"


# -------------------------------------------------------------------------------------- streaming


def test_a_loop_gives_refs():
    refs = list(count.remote(3))
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert get(refs) == [0, 1, 2]


def test_it_is_an_object_ref_generator():
    assert isinstance(count.remote(1), ray.ObjectRefGenerator)


def test_get_gives_it_back():
    stream = count.remote(2)
    assert ray.get(stream) is stream
    assert get(list(stream)) == [0, 1]


def test_next_gives_one_after_the_other_and_stops():
    stream = count.remote(2)
    assert [get(next(stream)), get(next(stream))] == [0, 1]
    with pytest.raises(StopIteration):
        next(stream)


def test_it_stays_at_its_end():
    stream = count.remote(1)
    list(stream)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)


def test_nothing_yielded():
    assert list(count.remote(0)) == []


def test_an_item_is_there_before_the_task_is_done(gate):
    @ray.remote
    def slow(gate):
        yield "first"
        gate.enter()
        yield "second"

    stream = slow.remote(gate)
    assert get(next(stream)) == "first"
    gate.open()
    assert get(next(stream)) == "second"


@pytest.mark.parametrize("where", ["decorator", "options"])
def test_streaming_is_asked_for_by_the(where):
    def two():
        yield 1
        yield 2

    if where == "decorator":
        task = ray.remote(num_returns="streaming")(two)
    else:
        task = ray.remote(two).options(num_returns="streaming")
    assert get(list(task.remote())) == [1, 2]


def test_streaming_of_a_function_that_does_not_yield_is_refused():
    with pytest.raises(ValueError, match="generator"):
        ray.remote(num_returns="streaming")(lambda: 1)


@differs("yield-from-iterators")
def test_a_generator_that_delegates_to_an_iterator():
    @ray.remote
    def delegates():
        yield from range(3)

    if here(ray="fails", gpunb="works") == "works":
        assert get(list(delegates.remote())) == [0, 1, 2]
    else:
        with pytest.raises(AttributeError):
            get(list(delegates.remote()))


def test_an_error_comes_in_its_place():
    refs = list(count_then_fail.remote(2))
    assert get(refs[:2]) == [0, 1]
    with pytest.raises(KeyError):
        get(refs[2])
    assert len(refs) == 3


def test_an_error_before_the_first_item():
    refs = list(count_then_fail.remote(0))
    assert len(refs) == 1
    with pytest.raises(errors.Task):
        get(refs[0])


def test_items_go_to_other_tasks():
    double = ray.remote(lambda value: 2 * value)
    assert get([double.remote(ref) for ref in count.remote(4)]) == [0, 2, 4, 6]


def test_large_items():
    @ray.remote
    def arrays():
        for number in range(3):
            yield np.full(200_000, number)

    assert [int(get(ref)[-1]) for ref in arrays.remote()] == [0, 1, 2]


def test_items_outlive_the_stream():
    stream = count.remote(3)
    refs = list(stream)
    del stream
    assert get(refs) == [0, 1, 2]


def test_arguments_are_refs():
    assert get(list(count.remote(ray.put(2)))) == [0, 1]


def test_an_argument_that_failed():
    def fail():
        raise KeyError("gone")

    refs = list(count.remote(ray.remote(fail).remote()))
    with pytest.raises(KeyError):
        get(refs[-1])


def test_a_stream_in_a_task():
    @ray.remote
    def total(number):
        return sum(ray.get(ref) for ref in count.remote(number))

    assert get(total.remote(5)) == 10


def test_wait_on_a_stream(gate):
    @ray.remote
    def slow(gate):
        gate.enter()
        yield "item"

    stream = slow.remote(gate)
    assert ray.wait([stream], timeout=0.1) == ([], [stream])
    gate.open()
    assert ray.wait([stream], timeout=PATIENCE) == ([stream], [])
    assert get(next(stream)) == "item"


def test_wait_on_streams_and_refs(gate):
    @ray.remote
    def slow(gate):
        gate.enter()
        yield "item"

    stream, ref = slow.remote(gate), ray.put(1)
    assert ray.wait([stream, ref], num_returns=1, timeout=PATIENCE) == ([ref], [stream])


def test_a_gpu_is_held_until_the_end(idle, gate):
    @ray.remote(num_gpus=1)
    def on_gpu(gate):
        yield ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]
        gate.enter()

    stream = on_gpu.remote(gate)
    assert get(next(stream)) == ([0], "0")
    gate.await_()
    eventually(lambda: free().get("GPU") == 1)
    gate.open()
    eventually(lambda: free().get("GPU") == 2)


def test_cancel(gate):
    @ray.remote
    def endless():
        number = 0
        while True:
            yield number
            number += 1
            time.sleep(0.01)

    stream = endless.remote()
    get(next(stream))
    ray.cancel(stream)
    assert ends_with(stream, errors.Cancelled)


def ends_with(stream, error):
    for ref in stream:
        try:
            get(ref)
        except error:
            return True
    return False


def test_a_crash_is_the_last_item(gate):
    @ray.remote(max_retries=0)
    def crash(gate):
        yield 1
        gate.enter()
        os._exit(1)

    stream = crash.remote(gate)
    assert get(next(stream)) == 1
    gate.open()
    refs = list(stream)
    with pytest.raises(errors.Crashed):
        get(refs[-1])


def test_async_for():
    async def collect():
        return [await ref async for ref in count.remote(3)]

    assert asyncio.run(collect()) == [0, 1, 2]


def test_async_for_with_an_error():
    async def collect():
        found = []
        async for ref in count_then_fail.remote(1):
            try:
                found.append(await ref)
            except KeyError:
                found.append("error")
        return found

    assert asyncio.run(collect()) == [0, "error"]


def test_anext():
    async def first():
        stream = count.remote(2)
        return await (await anext(stream))

    assert asyncio.run(first()) == 0


# ------------------------------------------------------------------------------- other numbers


def test_a_number_of_results_of_a_function_that_yields():
    refs = count.options(num_returns=3).remote(3)
    assert get(refs) == [0, 1, 2]


@differs("too-many-results")
def test_a_function_that_yields_more_than_the_number_of_results():
    refs = count.options(num_returns=2).remote(3)
    if here(ray="leaves out", gpunb="raises") == "raises":
        with pytest.raises(ValueError, match="3"):
            get(refs)
    else:
        assert get(refs) == [0, 1]


def test_a_function_that_yields_less_than_the_number_of_results():
    refs = count.options(num_returns=3).remote(2)
    with pytest.raises(ValueError, match="3"):
        get(refs[-1])


def test_the_results_before_an_error_are_kept():
    first, second, third = count_then_fail.options(num_returns=3).remote(1)
    assert get(first) == 0
    for ref in (second, third):
        with pytest.raises(KeyError):
            get(ref)


@differs("too-many-results")
def test_an_error_after_the_last_result():
    refs = count_then_fail.options(num_returns=2).remote(2)
    if here(ray="is logged", gpunb="raises") == "raises":
        for ref in refs:
            with pytest.raises(KeyError):
                get(ref)
    else:
        assert get(refs) == [0, 1]


def test_the_last_of_dynamic_refs_has_the_error():
    refs = list(get(count_then_fail.options(num_returns="dynamic").remote(2)))
    assert get(refs[:2]) == [0, 1]
    with pytest.raises(KeyError):
        get(refs[2])
    assert len(refs) == 3


def test_dynamic_is_one_ref_to_refs():
    ref = count.options(num_returns="dynamic").remote(3)
    assert isinstance(ref, ray.ObjectRef)
    assert [get(each) for each in get(ref)] == [0, 1, 2]


def test_completed_is_ready_when_the_task_has_ended(gate):
    @ray.remote
    def steps():
        yield 0
        gate.enter("step")
        yield 1

    stream = steps.remote()
    gate.await_("step")
    assert ray.wait([stream.completed()], timeout=0) == ([], [stream.completed()])
    gate.open()
    assert ray.wait([stream.completed()], timeout=PATIENCE) == ([stream.completed()], [])
    assert get(stream.completed()) is None
    assert stream.next_ready()
    assert get(list(stream)) == [0, 1]
    assert not stream.next_ready()
    assert stream.is_finished()


def test_completed_of_a_function_that_raised():
    stream = count_then_fail.remote(1)
    assert get(stream.completed()) is None
    assert len(list(stream)) == 2


def test_completed_of_a_process_that_ended():
    @ray.remote(max_retries=0)
    def crash():
        yield 0
        os._exit(3)

    stream = crash.remote()
    with pytest.raises(errors.Crashed):
        get(stream.completed())


# -------------------------------------------------------------------------------------- actors


@pytest.mark.parametrize("method", ["count", "count_async"])
def test_a_method_that_yields(method):
    counts = Counts.remote()
    stream = getattr(counts, method).remote(3)
    assert get(list(stream)) == [0, 1, 2]
    assert get(counts.say.remote()) == "done"


def test_streaming_as_an_option_of_the_method():
    counts = Counts.remote()
    assert get(list(counts.count.options(num_returns="streaming").remote(2))) == [0, 1]


def test_a_method_that_yields_and_fails():
    counts = Counts.remote()
    refs = list(counts.fail.remote())
    assert get(refs[0]) == 0
    with pytest.raises(KeyError):
        get(refs[1])
    assert get(counts.say.remote()) == "done"


def test_streams_of_an_async_actor_run_side_by_side():
    @ray.remote
    class Pairs:
        def __init__(self):
            self.came = 0
            self.both = asyncio.Event()

        async def meet(self):
            self.came += 1
            yield "came"
            if self.came == 2:
                self.both.set()
            await asyncio.wait_for(self.both.wait(), 20)
            yield "met"

    pairs = Pairs.remote()
    one, other = pairs.meet.remote(), pairs.meet.remote()
    assert get([next(one), next(other)]) == ["came", "came"]
    assert get([next(one), next(other)]) == ["met", "met"]


def test_a_stream_of_a_killed_actor_ends_with_its_error(gate):
    @ray.remote
    class Slow:
        def items(self, gate):
            yield 1
            gate.enter()
            yield 2

    slow = Slow.remote()
    stream = slow.items.remote(gate)
    assert get(next(stream)) == 1
    gate.await_()
    ray.kill(slow)
    assert ends_with(stream, errors.Actor)


def test_a_stream_as_an_argument_is_refused():
    stream = count.remote(1)
    with pytest.raises(TypeError):
        ray.remote(lambda value: value).remote(stream)
