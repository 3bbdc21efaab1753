"""Actors: calls at once, in threads and as coroutines."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

import gpunb
from gpunb.exceptions import PendingCallsLimitExceeded, TaskCancelledError, TaskError
from tests.api.actors.counter import Counter, get, same
from tests.sessions import both
from tests.waiting import PATIENCE, eventually

echo = print  # what the code in workers does

BESIDE = {"beside": 1}
"""A concurrency group for a call that comes after the others, and does not wait for their end."""


class Several:
    def __init__(self):
        self.main = threading.get_ident()
        self.inside = 0
        self.most = 0
        self.lock = threading.Lock()

    def hold(self, gate, name):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        gate.enter(name)
        with self.lock:
            self.inside -= 1
        context = gpunb.get_runtime_context()
        return context.get_task_id(), context.get_actor_id(), threading.get_ident() != self.main

    def peak(self):
        return self.most

    def fail(self, n):
        raise ValueError(n)

    def nested(self, n):
        return gpunb.get([same.remote(n + each) for each in range(3)])

    def threads(self):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda i: gpunb.get(same.remote(i)), range(12)))

    def until_cancelled(self, gate):
        gate.note("begun")
        deadline = time.monotonic() + PATIENCE
        while not gpunb.get_runtime_context().is_canceled():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return "stopped"


def test_threads_really_run_at_once(four, gate):
    several = gpunb.remote(max_concurrency=4, concurrency_groups=BESIDE)(Several).remote()
    refs = [several.hold.remote(gate, i) for i in range(6)]
    for i in range(4):
        gate.await_(i)
    # It goes the same way behind the other two, and does not wait for the four.
    assert get(several.peak.options(concurrency_group="beside").remote()) == 4
    assert not gate.came(4)
    gate.open()
    found = get(refs)
    assert [task for task, _, _ in found] == [ref.task_id for ref in refs]
    assert {actor for _, actor, _ in found} == {several._actor_id}
    assert all(other for _, _, other in found)
    assert get(several.peak.remote()) == 4


@both
def test_calls_in_threads_fail_and_nest_separately(four):
    several = gpunb.remote(max_concurrency=8)(Several).remote()
    failing = [several.fail.remote(n) for n in range(5)]
    nested = [several.nested.remote(n) for n in range(30)]
    threads = [several.threads.remote() for _ in range(4)]
    for n, ref in enumerate(failing):
        with pytest.raises(ValueError, match=f"ValueError: {n}$"):
            get(ref)
    assert get(nested) == [[n, n + 1, n + 2] for n in range(30)]
    assert get(threads) == [list(range(12))] * 4


def test_a_thread_can_ask_whether_it_was_cancelled(four, gate):
    several = gpunb.remote(max_concurrency=2)(Several).remote()
    ref = several.until_cancelled.remote(gate)
    gate.await_("begun")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert get(several.nested.remote(1)) == [1, 2, 3]


class Async:
    def __init__(self):
        self.inside = 0
        self.all = asyncio.Event()
        self.log = []
        self.loop = asyncio.get_running_loop()

    async def hold(self, gate, name):
        await gate.enter_async(name)
        return gpunb.get_runtime_context().get_task_id()

    async def meet(self, number):
        self.inside += 1
        if self.inside == number:
            self.all.set()
        await self.all.wait()
        return self.inside

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

    def plain(self, x):
        assert asyncio.get_running_loop() is self.loop
        return x, gpunb.get_runtime_context().get_task_id()

    async def fail(self, n):
        await asyncio.sleep(0)
        raise ValueError(n)

    def stop_iteration(self):
        raise StopIteration

    async def refs(self, refs):
        first = await refs[0]
        return [first, *await asyncio.gather(*refs[1:])]

    async def blocking(self, n):
        return gpunb.get([same.remote(n), same.remote(n + 1)])

    async def in_executor(self, n):
        return await asyncio.to_thread(lambda: gpunb.get(same.remote(n)))

    async def until_cancelled(self, gate):
        try:
            await gate.enter_async("begun")
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def deaf(self, gate):
        try:
            await gate.enter_async("begun")
        except asyncio.CancelledError:
            return "went on"

    async def forget(self, gate, text):
        async def later():
            await gate.enter_async("later")
            self.log.append(text)
            echo(text, flush=True)

        self.task = asyncio.create_task(later())

    async def count(self, n):
        for each in range(n):
            await asyncio.sleep(0)
            yield each

    async def own_cancel(self):
        raise asyncio.CancelledError("of my own")

    async def logged(self):
        return self.log

    async def pid(self):
        return os.getpid()


AsyncActor = gpunb.remote(Async)


def test_coroutines_run_at_once(four, gate):
    actor = AsyncActor.remote()
    refs = [actor.hold.remote(gate, n) for n in range(20)]
    for n in range(20):
        gate.await_(n)
    plain = actor.plain.remote(5)
    assert get(plain) == (5, plain.task_id)
    gate.open()
    assert get(refs) == [ref.task_id for ref in refs]


def test_a_thousand_coroutines_run_at_once(four):
    actor = AsyncActor.remote()
    assert get([actor.meet.remote(1000) for _ in range(1000)]) == [1000] * 1000


def test_coroutines_keep_max_concurrency(four, gate):
    actor = gpunb.remote(max_concurrency=3, concurrency_groups=BESIDE)(Async).remote()
    refs = [actor.hold.remote(gate, n) for n in range(12)]
    for n in range(3):
        gate.await_(n)
    get(actor.pid.options(concurrency_group="beside").remote())
    assert gate.count() == 3
    gate.open()
    assert get(refs) == [ref.task_id for ref in refs]


def test_coroutines_fail_separately(four):
    actor = AsyncActor.remote()
    refs = [actor.fail.remote(n) for n in range(5)]
    for n, ref in enumerate(refs):
        with pytest.raises(ValueError, match=f"{n}$") as caught:
            get(ref)
        assert "gpunb/worker" not in str(caught.value)
    with pytest.raises(StopIteration):
        get(actor.stop_iteration.remote())
    with pytest.raises(BaseException, match="of my own") as caught:
        get(actor.own_cancel.remote())
    assert isinstance(caught.value, (TaskError, asyncio.CancelledError))


def test_coroutines_wait_for_refs(four):
    actor = AsyncActor.remote()
    refs = [same.remote(n) for n in range(10)]
    assert get([actor.refs.remote(refs) for _ in range(5)]) == [list(range(10))] * 5
    assert get(actor.refs.remote([gpunb.put(1), AsyncActor.remote().blocking.remote(1)]))[0] == 1
    with pytest.raises(ZeroDivisionError):
        get(actor.refs.remote([gpunb.remote(lambda: 1 / 0).remote()]))


@both
def test_coroutines_may_block(four):
    actor = AsyncActor.remote()
    refs = [actor.blocking.remote(n) for n in range(20)]
    more = [actor.in_executor.remote(n) for n in range(20)]
    more_refs = [actor.refs.remote([same.remote(n)]) for n in range(20)]
    assert get(refs) == [[n, n + 1] for n in range(20)]
    assert get(more) == list(range(20))
    assert get(more_refs) == [[n] for n in range(20)]


@both
def test_cancel_a_coroutine(four, gate):
    actor = AsyncActor.options(max_concurrency=1).remote()
    running, queued = actor.until_cancelled.remote(gate), actor.plain.remote(1)
    gate.await_("begun")
    gpunb.cancel(queued)
    gpunb.cancel(running)
    for ref in (running, queued):
        with pytest.raises(TaskCancelledError):
            get(ref)
    assert get(actor.logged.remote()) == ["cancelled"]
    gate.open()
    for ref in (actor.deaf.remote(gate), running, actor.logged.remote()):
        with pytest.raises(ValueError, match="force"):
            gpunb.cancel(ref, force=True)
        gpunb.wait([ref])
        with pytest.raises(ValueError, match=r"force.*gpunb\.kill"):
            gpunb.cancel(ref, force=True)


def test_a_coroutine_can_ignore_its_cancellation(four, gate):
    actor = AsyncActor.remote()
    ref = actor.deaf.remote(gate)
    gate.await_("begun")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert get(actor.logged.remote()) == []


def test_cancel_a_coroutine_at_every_moment(four):
    actor = AsyncActor.remote()
    get(actor.logged.remote())
    for step in range(40):
        ref = actor.sleep.remote(PATIENCE * 3)
        time.sleep(step * 0.00005)
        gpunb.cancel(ref)
        with pytest.raises(TaskCancelledError):
            get(ref)


@pytest.mark.parametrize("threads", [False, True])
def test_cancel_a_method_at_every_moment(four, threads):
    class Waits:
        def wait(self, values):
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and not gpunb.get_runtime_context().is_canceled():
                time.sleep(0.001)
            assert time.monotonic() < deadline
            raise KeyboardInterrupt

        def alive(self, value):
            return value

    options = {"max_concurrency": 2} if threads else {}
    actor = gpunb.remote(Waits).options(**options).remote()
    value = gpunb.put([1])
    assert get(actor.alive.remote(1)) == 1
    for step in range(40):
        ref = actor.wait.remote([value])
        time.sleep(step * 0.0001)
        gpunb.cancel(ref)
        with pytest.raises((TaskCancelledError, KeyboardInterrupt)):
            get(ref)
        assert get(actor.alive.remote(step)) == step
    assert get(value) == [1]


def test_a_coroutine_left_in_the_background_runs_on_and_prints(four, gate, console):
    actor = AsyncActor.remote()
    get(actor.forget.remote(gate, "from the background"))
    gate.await_("later")
    assert get(actor.logged.remote()) == []
    gate.open()
    eventually(lambda: get(actor.logged.remote()) == ["from the background"])
    pid = get(actor.pid.remote())
    eventually(lambda: "from the background" in "".join(console))
    assert "".join(console) == f"(Async pid={pid}) from the background\n"


@both
def test_an_actor_can_have_async_generators(four):
    actor = AsyncActor.remote()
    assert [get(ref) for ref in actor.count.remote(5)] == list(range(5))
    two = [actor.count.remote(100) for _ in range(2)]
    assert [[get(ref) for ref in each] for each in two] == [list(range(100))] * 2


def test_calls_beyond_max_pending_calls_are_refused(four, gate):
    counter = Counter.options(max_pending_calls=3).remote()
    refs = [counter.hold.remote(gate)]
    gate.await_("held")
    refs += [counter.add.remote() for _ in range(2)]
    with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=3"):
        counter.add.remote()
    cancelled = refs.pop()
    gpunb.cancel(cancelled)
    with pytest.raises(TaskCancelledError):
        get(cancelled)
    refs.append(counter.add.remote())
    gate.open()
    assert get(refs) == [0, 1, 2]
    assert get([counter.add.remote() for _ in range(3)]) == [3, 4, 5]


@pytest.mark.parametrize("kind", ["sync", "threads", "async"])
def test_a_forked_child_that_returns_from_its_call_ends(four, console, kind):
    """A child that returns as if it were the actor is none; others may do as they like."""

    class Sync:
        def returns(self):
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
            return pid > 0

        def prints(self):
            pid = os.fork()
            if not pid:
                echo("from the child", flush=True)
                os._exit(0)
            os.waitpid(pid, 0)

        def pool(self):
            import multiprocessing

            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(abs, [-1, -2])

        def pid(self):
            return os.getpid()

    class Async:
        async def returns(self):
            pid = os.fork()
            await asyncio.sleep(0)
            if pid:
                os.waitpid(pid, 0)  # noqa: ASYNC222 - it is over soon
            return pid > 0

        prints, pool, pid = Sync.prints, Sync.pool, Sync.pid

    cls = gpunb.remote(Async if kind == "async" else Sync)
    actor = cls.options(max_concurrency=1 if kind == "sync" else 3).remote()
    pid = get(actor.pid.remote())
    for _ in range(3):
        assert get(actor.returns.remote())
    get(actor.prints.remote())
    assert get(actor.pool.remote()) == [1, 2]
    assert {get(actor.pid.remote()) for _ in range(10)} == {pid}
    eventually(lambda: "from the child" in "".join(console))


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("when", ["beside the next call", "between the calls"])
def test_threads_that_a_call_started_run_on_after_it(four, gate, console, concurrency, when):
    class Leaves:
        def leave(self, gate):
            def work():
                gate.enter("thread")
                self.late = gpunb.get(same.remote(5))
                echo("late", self.late)

            self.thread = threading.Thread(target=work)
            self.thread.start()

        def join(self, gate):
            gate.open()
            self.thread.join(PATIENCE)
            return self.late

    actor = gpunb.remote(Leaves).options(max_concurrency=concurrency).remote()
    get(actor.leave.remote(gate))
    gate.await_("thread")
    if when == "between the calls":
        gate.open()
        eventually(lambda: "late 5\n" in "".join(console))
    assert get(actor.join.remote(gate)) == 5
    eventually(lambda: "".join(console).count("late 5\n") == 1)
