"""Refs in coroutines and as futures."""

from __future__ import annotations

import asyncio
import concurrent.futures

import pytest

from tests.conformance.api.backends import errors, get, ray
from tests.waiting import PATIENCE


@ray.remote
def same(value):
    return value


@ray.remote
def fail():
    raise KeyError("gone")


@ray.remote
def hold(gate):
    gate.enter()
    return "held"


@ray.remote
class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count


def test_await():
    async def main():
        return await same.remote(1)

    assert asyncio.run(main()) == 1


def test_await_of_what_was_put():
    async def main():
        return await ray.put("put")

    assert asyncio.run(main()) == "put"


def test_await_twice():
    async def main():
        ref = same.remote(1)
        return await ref, await ref

    assert asyncio.run(main()) == (1, 1)


def test_await_of_a_call_of_an_actor():
    counter = Counter.remote()

    async def main():
        return await counter.add.remote(), await counter.add.remote()

    assert asyncio.run(main()) == (1, 2)


def test_await_raises_the_error():
    async def main():
        await fail.remote()

    for kind in (KeyError, errors.Task):
        with pytest.raises(kind):
            asyncio.run(main())


def test_gather_keeps_the_order():
    async def main():
        return await asyncio.gather(*[same.remote(number) for number in range(10)])

    assert asyncio.run(main()) == list(range(10))


def test_gather_with_errors_as_values():
    async def main():
        return await asyncio.gather(same.remote(1), fail.remote(), return_exceptions=True)

    one, error = asyncio.run(main())
    assert one == 1
    assert isinstance(error, KeyError)


def test_asyncio_wait(gate):
    async def main():
        tasks = [asyncio.ensure_future(_await(ref)) for ref in (same.remote(1), hold.remote(gate))]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        gate.open()
        await asyncio.wait(pending)
        return [task.result() for task in done], [task.result() for task in pending]

    assert asyncio.run(main()) == ([1], ["held"])


async def _await(ref):
    return await ref


def test_as_completed():
    async def main():
        tasks = [_await(same.remote(number)) for number in range(4)]
        return sorted([await each for each in asyncio.as_completed(tasks)])

    assert asyncio.run(main()) == [0, 1, 2, 3]


def test_a_time_limit_does_not_cancel_the_task(gate):
    ref = hold.remote(gate)

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_await(ref), 0.2)

    asyncio.run(main())
    gate.open()
    assert get(ref) == "held"


def test_other_coroutines_run_while_one_awaits(gate):
    ref = hold.remote(gate)

    async def opens():
        await asyncio.to_thread(gate.await_)
        gate.open()

    async def main():
        return (await asyncio.gather(_await(ref), opens()))[0]

    assert asyncio.run(main()) == "held"


def test_a_future():
    future = same.remote(1).future()
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(PATIENCE) == 1


def test_a_future_of_a_failure():
    future = fail.remote().future()
    assert isinstance(future.exception(PATIENCE), KeyError)
    with pytest.raises(KeyError):
        future.result(PATIENCE)


def test_futures_as_they_are_completed(gate):
    late, soon = hold.remote(gate), same.remote("soon")
    futures = {late.future(): "late", soon.future(): "soon"}
    found = []
    for future in concurrent.futures.as_completed(futures, PATIENCE):
        found.append(futures[future])
        gate.open()
    assert found == ["soon", "late"]


def test_a_callback_of_a_future():
    found = concurrent.futures.Future()
    same.remote(3).future().add_done_callback(lambda each: found.set_result(each.result()))
    assert found.result(PATIENCE) == 3


def test_a_wrapped_future():
    async def main():
        return await asyncio.wrap_future(same.remote(3).future())

    assert asyncio.run(main()) == 3


def test_as_they_are_ready_by_hand():
    rest = [same.remote(number) for number in range(5)]
    found = []
    while rest:
        (ready,), rest = ray.wait(rest)
        found.append(get(ready))
    assert sorted(found) == list(range(5))
