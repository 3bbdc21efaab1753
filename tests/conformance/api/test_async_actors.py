"""Actors with async methods."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from tests.conformance.api.backends import errors, get, ray
from tests.waiting import PATIENCE, eventually


@ray.remote
class Meets:
    def __init__(self):
        self.came = 0
        self.all = asyncio.Event()

    async def meet(self, number):
        self.came += 1
        if self.came == number:
            self.all.set()
        await asyncio.wait_for(self.all.wait(), 20)
        return self.came

    def count(self):
        return self.came

    async def thread(self):
        await asyncio.sleep(0)
        return threading.get_ident()

    def sync_thread(self):
        return threading.get_ident()

    async def fail(self):
        await asyncio.sleep(0)
        raise KeyError("gone")


def test_calls_meet_in_an_async_actor():
    actor = Meets.remote()
    assert get([actor.meet.remote(10) for _ in range(10)]) == [10] * 10


def test_many_calls_are_open_at_once():
    actor = Meets.remote()
    assert get([actor.meet.remote(200) for _ in range(200)]) == [200] * 200


def test_all_run_in_one_thread():
    actor = Meets.remote()
    assert len(set(get([actor.thread.remote() for _ in range(5)]))) == 1


def test_a_sync_method_of_an_async_actor():
    actor = Meets.remote()
    get(actor.meet.remote(1))
    assert get(actor.count.remote()) == 1


def test_a_sync_method_runs_in_the_thread_of_the_loop():
    actor = Meets.remote()
    threads = get([actor.thread.remote(), actor.sync_thread.remote()])
    assert len(set(threads)) == 1


def test_a_slow_call_does_not_hold_up_the_others(gate):
    @ray.remote
    class Waits:
        async def slow(self, gate):
            gate.note("slow")
            await asyncio.to_thread(gate.enter, "waits")
            return "slow"

        async def quick(self):
            return "quick"

    waits = Waits.remote()
    slow = waits.slow.remote(gate)
    gate.await_("slow")
    assert get(waits.quick.remote()) == "quick"
    gate.open()
    assert get(slow) == "slow"


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_calls_at_once_than_max_concurrency(gate, limit):
    @ray.remote
    class Counts:
        def __init__(self):
            self.now = self.most = 0

        async def call(self, gate, name):
            self.now += 1
            self.most = max(self.most, self.now)
            await gate.enter_async(name)
            self.now -= 1
            return self.most

    counts = Counts.options(max_concurrency=limit).remote()
    refs = [counts.call.remote(gate, name) for name in range(6)]
    eventually(lambda: gate.count() == limit)
    get(Meets.remote().count.remote())  # a later call, of another actor, went all the way
    assert gate.count() == limit
    gate.open()
    assert max(get(refs)) == limit


def test_an_error_is_of_both_types():
    actor = Meets.remote()
    for kind in (KeyError, errors.Task):
        with pytest.raises(kind):
            get(actor.fail.remote())
    assert get(actor.count.remote()) == 0


def test_awaiting_a_ref_inside():
    @ray.remote
    class Awaits:
        async def double(self, refs):
            return 2 * await refs[0]

    awaits = Awaits.remote()
    assert get(awaits.double.remote([ray.put(4)])) == 8


def test_gathering_refs_inside():
    @ray.remote
    class Gathers:
        async def total(self, number):
            task = ray.remote(lambda value: value)
            return sum(await asyncio.gather(*[task.remote(value) for value in range(number)]))

    gathers = Gathers.remote()
    assert get(gathers.total.remote(5)) == 10


def test_gathering_calls_of_another_actor():
    other = Meets.remote()

    @ray.remote
    class Asks:
        async def ask(self, other):
            return await asyncio.gather(*[other.meet.remote(3) for _ in range(3)])

    asks = Asks.remote()
    assert get(asks.ask.remote(other)) == [3, 3, 3]


def test_awaiting_a_ref_that_fails_inside():
    def fail():
        raise KeyError("gone")

    task = ray.remote(fail)

    @ray.remote
    class Awaits:
        async def catch(self):
            try:
                await task.remote()
            except KeyError:
                return "caught"

    awaits = Awaits.remote()
    assert get(awaits.catch.remote()) == "caught"


def test_the_loop_runs_in_the_constructor():
    @ray.remote
    class Starts:
        def __init__(self):
            self.lock = asyncio.Lock()

        async def locked(self):
            async with self.lock:
                return "locked"

    starts = Starts.remote()
    assert get([starts.locked.remote() for _ in range(3)]) == ["locked"] * 3


def test_background_work_goes_on_between_calls():
    @ray.remote
    class Ticks:
        def __init__(self):
            self.ticks = 0

        async def start(self):
            self.task = asyncio.create_task(self.run())

        async def run(self):
            while True:
                self.ticks += 1
                await asyncio.sleep(0.01)

        async def count(self):
            return self.ticks

    ticks = Ticks.remote()
    get(ticks.start.remote())
    eventually(lambda: get(ticks.count.remote()) > 3)


def test_ids_in_an_async_method(idle):
    @ray.remote(num_gpus=1)
    class Sees:
        async def ids(self):
            return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    actor = Sees.remote()
    assert get(actor.ids.remote(), PATIENCE) == ([0], "0")


def test_a_crash_fails_all_open_calls():
    @ray.remote
    class Crashes:
        async def wait(self):
            await asyncio.sleep(60)

        async def crash(self):
            os._exit(1)

    crashes = Crashes.remote()
    refs = [crashes.wait.remote(), crashes.wait.remote(), crashes.crash.remote()]
    for ref in refs:
        with pytest.raises(errors.Actor):
            get(ref)
