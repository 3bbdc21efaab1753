"""Every form of wait: wait, as_completed, await, and waits in tasks of tasks."""

from __future__ import annotations

import asyncio
import threading

import pytest

import gpunb
from gpunb.exceptions import GetTimeoutError
from tests.api.control.tasks import AsyncWorker, get, hold, same
from tests.sessions import both
from tests.waiting import PATIENCE


@both
@pytest.mark.parametrize("inside", [False, True])
def test_every_form_of_wait_returns_when_a_task_ends(two, gate, inside):
    def look(gate):
        late = hold.options(num_cpus=0).remote(gate)
        soon = [same.remote(n) for n in range(3)]
        failed = gpunb.remote(lambda: 1 / 0).remote()
        every = [late, *soon, failed]
        ready, rest = gpunb.wait(every, num_returns=4)
        assert (ready, rest) == ([*soon, failed], [late])
        assert gpunb.wait(every, num_returns=2) == (soon[:2], [late, soon[2], failed])
        assert gpunb.wait(every, num_returns=5, timeout=0.05) == ([*soon, failed], [late])
        assert gpunb.wait([late], timeout=0) == ([], [late])
        assert gpunb.wait([]) == ([], [])
        assert gpunb.wait([gpunb.put(1), late])[1] == [late]
        for wrong, error in (
            (lambda: gpunb.wait(late), TypeError),
            (lambda: gpunb.wait((late,)), TypeError),
            (lambda: gpunb.wait([late, 1]), TypeError),
            (lambda: gpunb.wait([late, late]), ValueError),
            (lambda: gpunb.wait([late], num_returns=2), ValueError),
            (lambda: gpunb.wait([late], num_returns=0), ValueError),
            (lambda: gpunb.wait([late], timeout=-1), ValueError),
        ):
            try:
                wrong()
            except error:
                continue
            raise AssertionError("it was taken")
        gate.open()
        assert gpunb.wait([late]) == ([late], [])
        return "done"

    assert (get(gpunb.remote(look).remote(gate)) if inside else look(gate)) == "done"


def test_wait_for_many_again_and_again(two):
    refs = [same.remote(n) for n in range(300)]
    values = []
    while refs:
        ready, refs = gpunb.wait(refs, num_returns=min(10, len(refs)))
        values += get(ready)
    assert sorted(values) == list(range(300))


def test_as_completed_yields_in_the_order_of_ends(two, gate):
    late, soon = hold.remote(gate), [same.remote(n) for n in range(3)]
    completed = gpunb.as_completed([late, *soon, late])
    assert len(completed) == 4
    found_ = [next(completed) for _ in range(3)]
    assert set(found_) == set(soon)
    gate.open()
    assert list(completed) == [late]
    assert list(gpunb.as_completed([])) == []
    failed = gpunb.remote(lambda: 1 / 0).remote()
    assert list(gpunb.as_completed(iter([failed]))) == [failed]
    with pytest.raises(TypeError, match="ObjectRef"):
        gpunb.as_completed([1])
    with pytest.raises(ValueError, match="timeout"):
        gpunb.as_completed([failed], timeout=-1)


def test_as_completed_raises_after_its_timeout(two, gate):
    late, soon = hold.remote(gate), same.remote(1)
    completed = gpunb.as_completed([late, soon], timeout=0.3)
    assert next(completed) == soon
    with pytest.raises(GetTimeoutError, match="1 results"):
        next(completed)
    with pytest.raises(GetTimeoutError):
        list(gpunb.as_completed([late], timeout=0))
    gate.open()
    get(late)
    assert next(completed) == late


def test_as_completed_works_in_coroutines_and_tasks(two):
    async def main():
        return [await ref async for ref in gpunb.as_completed([same.remote(n) for n in range(5)])]

    @gpunb.remote
    def inside():
        values = [gpunb.get(r) for r in gpunb.as_completed([same.remote(n) for n in range(5)])]
        return sorted(values), sorted(asyncio.run(main()))

    assert sorted(asyncio.run(main())) == list(range(5))
    assert get(inside.remote()) == (list(range(5)), list(range(5)))


def test_a_dropped_as_completed_keeps_no_ref(two, gate):
    refs = [hold.remote(gate), *(same.remote(n) for n in range(3))]
    completed = gpunb.as_completed(refs)
    next(completed)
    del completed, refs


def test_cancelling_an_await_does_not_cancel_the_task(two, gate):
    ref, actor_ref = hold.remote(gate), AsyncWorker.remote().hold.remote(gate, "actor")

    async def main():
        waits = [asyncio.ensure_future(_wait_for(each)) for each in (ref, actor_ref)]
        for name in ("held", "actor"):  # it also lets the waits begin
            await asyncio.to_thread(gate.await_, name)
        for each in waits:
            each.cancel()
        return await asyncio.gather(*waits, return_exceptions=True)

    assert all(isinstance(each, asyncio.CancelledError) for each in asyncio.run(main()))
    gate.open()
    assert get([ref, actor_ref]) == ["held", "actor"]


async def _wait_for(ref):
    return await ref


def test_many_awaits_can_run_at_once(two):
    async def main():
        return await asyncio.gather(*[same.remote(n) for n in range(300)])

    assert asyncio.run(main()) == list(range(300))


def test_several_event_loops_can_await(two):
    refs = [same.remote(n) for n in range(8)]
    found_ = []

    def loop(n):
        async def main():
            return await asyncio.gather(*refs[n:])

        found_.append(asyncio.run(main()))

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    assert sorted(map(len, found_)) == [5, 6, 7, 8]


def test_a_loop_can_be_closed_while_it_waits(two, gate):
    ref = hold.remote(gate)

    async def main():
        asyncio.ensure_future(_wait_for(ref))  # noqa: RUF006 - it is left on purpose
        await asyncio.to_thread(gate.await_, "held")  # it also lets the wait begin

    asyncio.run(main())
    gate.open()
    assert get(ref) == "held"


@both
def test_nested_deeper_than_there_are_cpus(two):
    @gpunb.remote
    def depth(n, step=1):
        return 0 if n == 0 else step + gpunb.get(depth.remote(n - 1))

    @gpunb.remote(num_cpus=1)
    class Deep:
        def depth(self, n, step=1):
            if n == 0:
                return 0
            self.child = Deep.remote()
            return step + gpunb.get(self.child.depth.remote(n - 1))

    assert get(depth.remote(6)) == 6
    assert get(Deep.remote().depth.remote(5)) == 5


def test_nested_wait_await_and_generators_lend_cpus_too(two):
    @gpunb.remote
    def count(n):
        yield from range(n)

    @gpunb.remote(num_cpus=2)
    def outer():
        (ready,), _ = gpunb.wait([same.options(num_cpus=2).remote(1)])
        values = [gpunb.get(ready)]
        values += [gpunb.get(ref) for ref in count.options(num_cpus=2).remote(2)]
        values.append(asyncio.run(_wait_for(same.options(num_cpus=2).remote(3))))
        values += [gpunb.get(r) for r in gpunb.as_completed([same.options(num_cpus=2).remote(4)])]
        return values

    assert get(outer.remote()) == [1, 0, 1, 3, 4]


def test_threads_of_a_task_wait_separately(two):
    @gpunb.remote(num_cpus=2)
    def outer():
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(6) as threads:
            return sum(threads.map(lambda n: gpunb.get(same.remote(n)), range(30)))

    assert get(outer.remote()) == sum(range(30))


def test_actors_can_call_each_other(two):
    @gpunb.remote(max_concurrency=2)
    class Ping:
        def meet(self, other):
            self.other = other[0]

        def play(self, n):
            return 0 if n == 0 else 1 + gpunb.get(self.other.play.remote(n - 1))

    one, two_ = Ping.remote(), Ping.remote()
    get([one.meet.remote([two_]), two_.meet.remote([one])])
    assert get(one.play.remote(3)) == 3
    gpunb.kill(one)  # they hold one another
    gpunb.kill(two_)
