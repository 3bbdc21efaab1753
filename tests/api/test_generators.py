"""Generators: results that come one by one."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Iterator

import pytest

import gpunb
from gpunb.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from tests.sessions import assert_idle, both, script, session
from tests.waiting import PATIENCE, eventually


@pytest.fixture(scope="module", params=["fork"])
def started(request: pytest.FixtureRequest, by_value: None) -> Iterator[None]:
    """Four simulated devices."""
    with session(simulate="4xA100:40GiB", num_cpus=2, start_method=request.param):
        yield


@pytest.fixture
def four(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free."""
    yield
    assert_idle()


def get(refs, timeout=PATIENCE):
    return gpunb.get(refs, timeout=timeout)


def taken(generator):
    return [get(ref) for ref in generator]


@gpunb.remote
def count(n):
    yield from range(n)


@gpunb.remote(num_gpus=0.5)
def stepped(gate, n, name="step"):
    """Yields two values, waits at the gate, and yields the rest."""
    yield 0
    yield 1
    gate.enter(name)
    yield from range(2, n)


@gpunb.remote
class Stepped:
    def count(self, n):
        yield from range(n)

    def stepped(self, gate, n):
        yield 0
        gate.enter("step")
        yield from range(1, n)

    @gpunb.method(num_returns=2)
    def two(self):
        yield 1
        yield 2

    def crash(self):
        yield 1
        os._exit(3)

    def pid(self):
        return os.getpid()


class Async:
    async def count(self, n):
        for each in range(n):
            await asyncio.sleep(0)
            yield each

    async def stepped(self, gate, n):
        yield 0
        await gate.enter_async("step")
        for each in range(1, n):
            yield each

    def plain(self, n):
        yield from range(n)

    async def fail(self):
        yield 1
        raise KeyError("gone")

    async def two(self):
        yield 1
        yield 2

    async def never_stops(self, gate):
        try:
            yield 1
            await gate.enter_async("begun")
        finally:
            gate.note("cleaned up")


AsyncActor = gpunb.remote(Async)


# ------------------------------------------------------------------------------------- the basics


@both
def test_results_come_one_by_one(four, gate):
    generator = stepped.remote(gate, 5)
    assert isinstance(generator, gpunb.ObjectRefGenerator)
    assert iter(generator) is generator
    first, second = next(generator), next(generator)
    assert get([first, second]) == [0, 1]
    assert f"stepped #{generator.task_id} running on GPU 0" in repr(generator)
    assert "2 taken" in repr(generator)
    gate.open()
    assert taken(generator) == [2, 3, 4]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(generator)
    assert get(first) == 0
    assert first.task_id == generator.task_id


@both
def test_methods_of_actors_can_be_generators(four):
    for actor in (Stepped.remote(), AsyncActor.remote()):
        assert taken(actor.count.remote(10)) == list(range(10))
    assert get(Stepped.remote().two.remote()) == [1, 2]
    asynchronous = AsyncActor.remote()
    assert taken(asynchronous.plain.remote(5)) == list(range(5))
    assert get(asynchronous.two.options(num_returns=2).remote()) == [1, 2]
    assert [get(ref) for ref in get(asynchronous.two.options(num_returns="dynamic").remote())] == [
        1,
        2,
    ]
    with pytest.raises(KeyError):
        taken(asynchronous.fail.remote())


def test_a_generator_without_results_ends_at_once(four):
    assert taken(count.remote(0)) == []


def test_a_generator_is_no_ref_and_cannot_be_pickled(four):
    generator = count.remote(1)
    assert gpunb.get(generator) is generator, "as in Ray"
    with pytest.raises(TypeError, match="ObjectRefGenerator"):
        gpunb.get([generator])
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        pickle.dumps(generator)
    with pytest.raises(TypeError, match="cannot be sent"):
        gpunb.remote(len).remote([generator])
    assert taken(generator) == [0]


def test_a_timeout_of_the_task_ends_its_generator(four):
    @gpunb.remote(timeout=0.2)
    def slow():
        yield 1
        threading.Event().wait(PATIENCE)

    generator = slow.remote()
    assert get(next(generator)) == 1
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        get(next(generator))
    with pytest.raises(StopIteration):
        next(generator)


# ------------------------------------------------------------------------------ number of results


def test_num_returns(four, tmp_path):
    assert get(count.options(num_returns=3).remote(3)) == [0, 1, 2]
    (one,) = [count.options(num_returns=1).remote(1)]
    with pytest.raises(TypeError, match="generator"):
        get(one)
    with pytest.raises(ValueError, match="num_returns=2, but returned 3"):
        get(count.options(num_returns=2).remote(3))
    with pytest.raises(ValueError, match="does not yield"):
        gpunb.remote(num_returns="streaming")(len)
    with pytest.raises(ValueError, match="async"):

        @gpunb.remote
        async def asynchronous():
            yield 1


def test_a_generator_with_no_results_wanted_runs_to_its_end(four, tmp_path):
    @gpunb.remote(num_returns=0)
    def write(path):
        for n in range(3):
            (path / str(n)).touch()
            yield n

    assert write.remote(tmp_path) is None
    eventually((tmp_path / "2").exists)


def test_dynamic(four):
    ref = count.options(num_returns="dynamic").remote(4)
    many = get(ref)
    assert isinstance(many, gpunb.DynamicObjectRefGenerator)
    assert len(many) == 4
    assert get(list(many)) == [0, 1, 2, 3]
    assert get(many[2]) == 2
    assert "4 refs" in repr(many)
    assert get(gpunb.remote(lambda many: gpunb.get(list(many))).remote(ref)) == [0, 1, 2, 3]


@gpunb.remote
def fails_after(n, marks=None):
    if marks is not None:
        (marks / str(len(list(marks.iterdir())))).touch()
    yield from range(n)
    raise KeyError("the end")


@gpunb.remote
class FailsAfter:
    def sync(self, n):
        yield from range(n)
        raise KeyError("the end")


class FailsAfterAsync:
    async def asynchronous(self, n):
        for each in range(n):
            yield each
        raise KeyError("the end")


def failing(kind, n, returns):
    """The refs of a generator that yields n values and fails: of a task, or of an actor's call."""
    if kind == "task":
        return None, fails_after.options(num_returns=returns).remote(n)
    made = {
        "sync": FailsAfter,
        "threads": FailsAfter.options(max_concurrency=2),
        "asynchronous": gpunb.remote(FailsAfterAsync),
    }
    actor = made[kind].remote()
    name = "sync" if kind == "threads" else kind
    return actor, getattr(actor, name).options(num_returns=returns).remote(n)


KINDS = ["task", "sync", "threads", "asynchronous"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_results_before_an_error_are_kept(four, kind):
    actor, refs = failing(kind, 1, 3)
    assert get(refs[0]) == 0
    for ref in refs[1:]:
        with pytest.raises(KeyError, match="the end"):
            get(ref)
    del actor


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_ref_of_a_dynamic_generator_has_its_error(four, kind):
    actor, ref = failing(kind, 2, "dynamic")
    many = get(ref)
    assert len(many) == 3
    assert get(list(many)[:2]) == [0, 1]
    with pytest.raises(KeyError, match="the end"):
        get(many[2])
    failed = gpunb.remote(lambda value: value).remote(many[2])
    with pytest.raises(KeyError, match="the end"):
        get(failed)
    del actor


def test_an_error_after_all_results_replaces_them(four):
    """Otherwise nobody would see it."""
    for ref in fails_after.options(num_returns=2).remote(2):
        with pytest.raises(KeyError, match="the end"):
            get(ref)


def test_large_results_before_an_error_are_kept(four):
    @gpunb.remote(num_returns=3)
    def arrays():
        import numpy as np

        yield np.ones(1_000_000)
        yield [gpunb.put(5)]
        raise KeyError("the end")

    first, second, third = arrays.remote()
    assert get(first).sum() == 1_000_000
    assert get(get(second)[0]) == 5
    with pytest.raises(KeyError):
        get(third)


@pytest.mark.parametrize("returns", [3, "dynamic"])
def test_a_failed_generator_is_tried_again_from_its_start(four, returns, tmp_path):
    function = fails_after.options(num_returns=returns, max_retries=1, retry_exceptions=True)
    found = function.remote(1, tmp_path)
    refs = list(get(found)) if returns == "dynamic" else found
    assert get(refs[0]) == 0
    with pytest.raises(KeyError):
        get(refs[1])
    assert len(list(tmp_path.iterdir())) == 2


def test_fewer_results_than_num_returns_end_with_an_error(four):
    refs = count.options(num_returns=3).remote(2)
    assert get(refs[:2]) == [0, 1]
    with pytest.raises(ValueError, match="num_returns=3, but returned 2"):
        get(refs[2])


# ---------------------------------------------------------------------------------------- the end


def test_completed_is_ready_when_the_task_has_ended(four, gate):
    generator = stepped.remote(gate, 3)
    done = generator.completed()
    gate.await_("step")
    assert gpunb.wait([done], timeout=0) == ([], [done])
    assert repr(done).endswith(" completed>")
    gate.open()
    assert get(done) is None
    assert get(
        gpunb.remote(lambda value, ref: (value, gpunb.get(ref[0]))).remote(done, [done])
    ) == (
        None,
        None,
    )
    assert taken(generator) == [0, 1, 2]


def test_completed_outlives_its_generator(four, gate):
    generator = stepped.remote(gate, 3)
    gate.await_("step")
    done = generator.completed()
    del generator
    gate.open()
    assert get(done) is None
    eventually(lambda: gpunb.status()["objects"]["objects"] == 0)


def test_completed_raises_what_ended_the_task(four):
    @gpunb.remote(max_retries=0)
    def crash():
        yield 1
        os._exit(3)

    with pytest.raises(WorkerCrashedError, match="status 3"):
        get(crash.remote().completed())


def test_a_task_can_wait_for_completed(four, gate):
    generator = stepped.remote(gate, 3)
    after = gpunb.remote(lambda done: done is None).remote(generator.completed())
    gate.await_("step")
    gate.open()
    assert get(after)


@gpunb.remote
def steps_and_fails(gate):
    yield 0
    gate.enter("begun")
    raise KeyError("the end")


def test_a_task_can_wait_for_completed_of_a_generator_that_raises(four, gate):
    generator = steps_and_fails.remote(gate)
    after = gpunb.remote(lambda done: done is None).remote(generator.completed())
    gate.await_("begun")
    gate.open()
    assert get(after)


@pytest.mark.parametrize("returns", [3, "dynamic"])
def test_tasks_that_wait_for_results_from_before_an_error_run(four, gate, returns):
    identity = gpunb.remote(lambda *values: values)
    found = steps_and_fails.options(num_returns=returns).remote(gate)
    refs = found if isinstance(found, list) else [found]
    kept, *lost = [identity.remote(ref) for ref in refs]
    both = identity.remote(*refs)
    gate.await_("begun")
    gate.open()
    if returns == "dynamic":
        assert get(get(kept)[0][0]) == 0
        assert len(get(both)[0]) == 2
        return
    assert get(kept) == (0,)
    for ref in (*lost, both):
        with pytest.raises(KeyError, match="the end"):
            get(ref)


def test_completed_in_a_task(four):
    @gpunb.remote
    def inner():
        generator = count.remote(2)
        return gpunb.get(generator.completed()), taken(generator)

    assert get(inner.remote()) == (None, [0, 1])


def test_nothing_is_ready_after_the_end(four):
    generator = count.remote(1)
    get(generator.completed())
    assert generator.next_ready()
    assert not generator.is_finished()
    next(generator)
    assert not generator.next_ready()
    assert generator.is_finished()


# --------------------------------------------------------------------------------------- failures


def test_an_exception_is_the_last_result(four):
    @gpunb.remote
    def fail(n):
        yield from range(n)
        raise KeyError("the end")

    generator = fail.remote(2)
    assert get([next(generator), next(generator)]) == [0, 1]
    failed = next(generator)
    with pytest.raises(KeyError, match="the end") as caught:
        get(failed)
    assert isinstance(caught.value, TaskError)
    with pytest.raises(StopIteration):
        next(generator)
    assert [type(each) for each in fail.remote(0)] == [gpunb.ObjectRef]


def test_a_result_that_cannot_be_pickled_is_an_error_in_its_place(four):
    @gpunb.remote
    def mixed():
        yield 1
        yield threading.Lock()
        yield 3

    generator = mixed.remote()
    assert get(next(generator)) == 1
    with pytest.raises(TypeError, match=r"value 1 of mixed.*lock"):
        get(next(generator))
    with pytest.raises(StopIteration):
        next(generator)


@both
def test_a_crash_in_the_middle_is_the_last_result(four):
    @gpunb.remote(max_retries=0)
    def crash():
        yield 1
        yield 2
        os._exit(3)

    generator = crash.remote()
    assert get([next(generator), next(generator)]) == [1, 2]
    with pytest.raises(WorkerCrashedError, match="status 3"):
        get(next(generator))
    with pytest.raises(StopIteration):
        next(generator)
    generator = Stepped.remote().crash.remote()
    assert get(next(generator)) == 1
    with pytest.raises(ActorDiedError, match="status 3"):
        get(next(generator))
    assert list(generator) == []


def test_a_retry_repeats_no_result(four, tmp_path):
    @gpunb.remote(max_retries=2)
    def flaky(path, n):
        for each in range(n):
            if each == 3 * (1 + len(list(path.iterdir()))) and len(list(path.iterdir())) < 2:
                (path / str(each)).touch()
                os._exit(1)
            yield each, gpunb.get_runtime_context().attempt

    generator = flaky.remote(tmp_path, 10)
    early = get([next(generator), next(generator)])
    found = early + taken(generator)
    assert [each for each, _ in found] == list(range(10))
    assert found[-1][1] == 3
    assert sorted(attempt for _, attempt in found) == [attempt for _, attempt in found]


def test_a_generator_with_a_failed_argument_fails(four):
    failed = gpunb.remote(lambda: 1 / 0).remote()
    with pytest.raises(ZeroDivisionError):
        taken(count.remote(failed))


# -------------------------------------------------------------------------------------- giving up


def test_a_dropped_generator_frees_what_was_not_taken(four, gate):
    np = pytest.importorskip("numpy")

    @gpunb.remote
    def arrays(gate, n):
        for each in range(n):
            if each == 3:
                gate.enter()
            yield np.full(1 << 16, each)

    generator = arrays.remote(gate, 6)
    first = get(next(generator))
    eventually(lambda: gpunb.status()["objects"]["objects"] == 2)
    del generator
    eventually(lambda: gpunb.status()["objects"]["objects"] == 0)
    gate.open()
    assert first[0] == 0
    eventually(lambda: not gpunb.status()["running"])
    assert gpunb.status()["objects"]["bytes"] == 0


def test_what_was_taken_outlives_the_generator(four):
    generator = count.remote(5)
    refs = [next(generator), next(generator)]
    del generator
    assert get(refs) == [0, 1]
    assert_still_gone = gpunb.ObjectRef((refs[0].task_id, 4))
    eventually(lambda: not gpunb.status()["running"])
    with pytest.raises(ObjectLostError):
        get(assert_still_gone)


def test_large_arrays(four):
    np = pytest.importorskip("numpy")

    @gpunb.remote
    def arrays(n):
        for each in range(n):
            yield np.full(1 << 17, each)

    total = 0
    for ref in arrays.remote(30):
        array = get(ref)
        array += 1
        total += array[0]
    assert total == sum(range(1, 31))


@pytest.mark.parametrize("kind", ["function", "actor", "async"])
def test_cancel_what_runs(four, gate, kind):
    if kind == "function":
        generator = stepped.remote(gate, 5)
    else:
        actor = (Stepped if kind == "actor" else AsyncActor).remote()
        generator = actor.stepped.remote(gate, 5)
    assert get(next(generator)) == 0
    gate.await_("step")
    gpunb.cancel(generator)
    rest = list(generator)
    with pytest.raises(TaskCancelledError):
        get(rest[-1])
    assert get(rest[:-1]) == [1] * (kind == "function")
    gpunb.cancel(generator)
    if kind != "function":
        gate.open()
        assert taken(actor.count.remote(2)) == [0, 1]


def test_cancel_an_async_generator_lets_finally_run(four, gate):
    actor = AsyncActor.remote()
    generator = actor.never_stops.remote(gate)
    assert get(next(generator)) == 1
    gate.await_("begun")
    gpunb.cancel(generator)
    with pytest.raises(TaskCancelledError):
        get(next(generator))
    gate.await_("cleaned up")


def test_cancel_by_a_ref_of_it(four, gate):
    generator = stepped.remote(gate, 5)
    ref = next(generator)
    gate.await_("step")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        taken(generator)
    assert get(ref) == 0


def test_cancel_what_is_queued(four, gate):
    holder = stepped.options(num_gpus=4).remote(gate, 2)
    gate.await_("step")
    queued = stepped.remote(gate, 2, "queued")
    eventually(lambda: gpunb.status()["queued"] == 1)
    assert "queued" in repr(queued)
    gpunb.cancel(queued)
    with pytest.raises(TaskCancelledError):
        get(next(queued))
    with pytest.raises(StopIteration):
        next(queued)
    gate.open()
    assert taken(holder) == [0, 1]


def test_cancel_by_force(four, gate):
    generator = stepped.remote(gate, 5)
    gate.await_("step")
    gpunb.cancel(generator, force=True)
    with pytest.raises(TaskCancelledError):
        taken(generator)


# --------------------------------------------------------------------------------- waiting for it


def test_wait(four, gate):
    generator, plain = stepped.remote(gate, 3), count.options(num_returns=1)
    ref = gpunb.put(1)
    assert gpunb.wait([generator], timeout=PATIENCE) == ([generator], [])
    next(generator), next(generator)
    assert gpunb.wait([generator], timeout=0.05) == ([], [generator])
    assert gpunb.wait([generator, ref], timeout=PATIENCE) == ([ref], [generator])
    assert gpunb.wait([generator, ref], num_returns=2, timeout=0.01) == ([ref], [generator])
    with pytest.raises(ValueError, match="twice"):
        gpunb.wait([generator, generator])
    gate.open()
    assert gpunb.wait([generator, ref], num_returns=2, timeout=PATIENCE) == ([generator, ref], [])
    assert get(next(generator)) == 2
    assert gpunb.wait([generator], timeout=PATIENCE) == ([generator], [])  # its end
    assert list(generator) == []
    assert gpunb.wait([generator], timeout=PATIENCE) == ([generator], [])
    assert plain is not None


def test_as_completed_over_what_it_gave(four):
    refs = list(count.remote(5))
    assert sorted(get(ref) for ref in gpunb.as_completed(refs)) == [0, 1, 2, 3, 4]


def test_async_for_beside_other_work(four, gate):
    async def main():
        seen = []
        ticks = 0

        async def consume():
            async for ref in stepped.remote(gate, 5):
                seen.append(await ref)  # noqa: PERF401 - others look at it meanwhile

        async def tick():
            nonlocal ticks
            while len(seen) < 2:  # noqa: ASYNC110 - that is the other work
                await asyncio.sleep(0.001)
            for _ in range(20):
                ticks += 1
                await asyncio.sleep(0)
            gate.open()

        await asyncio.gather(consume(), tick())
        assert [await ref async for ref in count.remote(3)] == [0, 1, 2]
        return seen, ticks

    assert asyncio.run(main()) == ([0, 1, 2, 3, 4], 20)


def test_giving_up_on_an_async_next_does_not_cancel(four, gate):
    generator = stepped.remote(gate, 3)

    async def main():
        first = [await (await anext(generator)) for _ in range(2)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(generator), 0.05)
        gate.open()
        return first + [await ref async for ref in generator]

    assert asyncio.run(main()) == [0, 1, 2]


def test_two_threads_can_share_a_generator(four):
    generator = count.remote(200)
    found, lock = [], threading.Lock()

    def take():
        while True:
            with lock:
                try:
                    ref = next(generator)
                except StopIteration:
                    return
            found.append(get(ref))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    assert sorted(found) == list(range(200))


# ------------------------------------------------------------------------------- among other tasks


def test_what_it_gives_is_passed_on_while_it_runs(four, gate):
    generator = stepped.remote(gate, 4)
    add = gpunb.remote(lambda a, b=100: a + b)
    assert get([add.remote(next(generator)), add.remote(next(generator))]) == [100, 101]
    gate.open()
    assert get([add.remote(ref) for ref in generator]) == [102, 103]


@both
def test_a_task_can_take_results_of_a_generator(four):
    @gpunb.remote
    def total(n):
        generator = count.remote(n)
        first = gpunb.get(next(generator))
        ready, _ = gpunb.wait([generator, gpunb.put(1)], num_returns=2)
        assert len(ready) == 2

        async def rest():
            return [await ref async for ref in generator]

        return first + sum(asyncio.run(rest()))

    @gpunb.remote
    def partly():
        generator = count.remote(50)
        return [next(generator), next(generator)]

    assert get(total.remote(20)) == sum(range(20))
    assert get(get(partly.remote())) == [0, 1]


def test_an_async_actor_can_take_results_of_a_generator(four, gate):
    @gpunb.remote
    class Reader:
        async def read(self, n):
            return [await ref async for ref in count.remote(n)]

        async def of_an_actor(self, actor, n):
            return [await ref async for ref in actor.count.remote(n)]

    reader, counter = Reader.remote(), Stepped.remote()
    assert get([reader.read.remote(10) for _ in range(3)]) == [list(range(10))] * 3
    assert get(reader.of_an_actor.remote(counter, 10)) == list(range(10))


def test_results_may_hold_refs(four):
    @gpunb.remote
    def refs(n):
        for each in range(n):
            yield [gpunb.put(each)]

    assert [get(get(ref)[0]) for ref in refs.remote(5)] == list(range(5))
    boxes = taken(refs.remote(5))
    assert get([box[0] for box in boxes]) == list(range(5))


def test_a_generator_of_generators_work(four):
    @gpunb.remote
    def outer(n):
        for each in range(n):
            yield sum(gpunb.get(ref) for ref in count.remote(each))

    assert taken(outer.remote(5)) == [0, 0, 1, 3, 6]


def test_a_thousand_results_a_second_are_taken(four):
    n = 10_000
    begin = time.perf_counter()
    assert sum(get(ref) for ref in count.remote(n)) == sum(range(n))
    assert n / (time.perf_counter() - begin) > 1000  # on a busy machine; about 10 times that


def test_a_slow_consumer_gets_every_result(four):
    """What is yielded waits in the kernel."""
    generator = count.remote(3000)
    eventually(lambda: not gpunb.status()["running"] and gpunb.status()["finished"])
    assert gpunb.status()["objects"]["objects"] == 3000
    assert len(taken(generator)) == 3000


def test_an_interrupt_ends_a_wait_for_the_next_result(tmp_path):
    text = f"""
        import os, pathlib, signal, threading, gpunb
        from tests.waiting import Gate, until_main_sleeps

        gate = Gate(pathlib.Path({str(tmp_path)!r}))

        @gpunb.remote
        def slow():
            yield 1
            gate.enter()
            yield 2
            yield 3

        def interrupt():
            gate.await_()
            until_main_sleeps()
            os.kill(os.getpid(), signal.SIGINT)

        if __name__ == "__main__":
            gpunb.init(num_cpus=2, num_gpus=0, preload=())
            generator = slow.remote()
            print(gpunb.get(next(generator)))
            try:
                threading.Thread(target=interrupt).start()
                next(generator)
            except KeyboardInterrupt:
                print("stopped")
            gate.open()
            print([gpunb.get(ref) for ref in generator])
            print(gpunb.status()["objects"]["objects"])
    """
    done = script(text)
    assert done.stderr == ""
    assert done.stdout.split("\n")[:4] == ["1", "stopped", "[2, 3]", "0"]


def test_a_timeout_of_get_on_what_it_gives(four, gate):
    ref = gpunb.remote(lambda gate: gate.enter()).remote(gate)
    with pytest.raises(GetTimeoutError):
        get(ref, 0.01)
