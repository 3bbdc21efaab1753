"""Tasks that wait for tasks: all of them end, in few worker processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

import gpunb
from tests.sessions import assert_idle, session
from tests.waiting import PATIENCE, eventually

CPUS = 2


@pytest.fixture(scope="module")
def started(by_value: None) -> Iterator[None]:
    with session(num_cpus=CPUS):
        yield


@pytest.fixture
def two(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free."""
    yield
    assert_idle()


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


@gpunb.remote
def level(n):
    """The processes of this task, of the task that it waits for, and so on."""
    below = gpunb.get(level.remote(n - 1)) if n > 1 else []
    return [os.getpid(), *below]


@gpunb.remote
def leaf():
    return [os.getpid()]


@gpunb.remote
def leaves(n):
    for _ in range(n):
        yield [os.getpid()]


@pytest.mark.parametrize("levels", [2, 3])
def test_tasks_that_each_wait_for_one_task_need_few_processes(two, levels):
    found = get([level.remote(levels) for _ in range(60)])
    assert all(len(each) == levels for each in found)
    assert len({pid for pids in found for pid in pids}) <= CPUS * (levels + 1)
    left = eventually(lambda: gpunb.status()["workers"] <= CPUS and gpunb.status()["workers"])
    assert left <= CPUS, "more idle workers are left than there are CPUs"


def _with_get(n):
    return gpunb.get([leaf.remote() for _ in range(n)])


def _with_timeout(n):
    return gpunb.get([leaf.remote() for _ in range(n)], timeout=PATIENCE)


def _with_wait(n):
    refs, found = [leaf.remote() for _ in range(n)], []
    while refs:
        ready, refs = gpunb.wait(refs, num_returns=min(3, len(refs)))
        found += gpunb.get(ready)
    return found


def _with_generator(n):
    return [gpunb.get(ref) for ref in leaves.remote(n)]


def _with_await(n):
    async def gather():
        return await asyncio.gather(*[leaf.remote() for _ in range(n)])

    return asyncio.run(gather())


@pytest.mark.parametrize(
    "wait", [_with_get, _with_timeout, _with_wait, _with_generator, _with_await]
)
def test_tasks_that_wait_for_many_tasks_need_few_processes(two, wait):
    parent = gpunb.remote(lambda: [[os.getpid()], *wait(10)])
    found = [pids for family in get([parent.remote() for _ in range(12)]) for pids in family]
    assert len(found) == 12 * 11
    assert len({pid for pids in found for pid in pids}) <= CPUS * 3


def test_tasks_that_wait_for_an_actor_need_few_processes(two):
    @gpunb.remote
    class Counter:
        def __init__(self):
            self.count = 0

        def add(self):
            self.count += 1
            return self.count

    counter = Counter.remote()
    caller = gpunb.remote(lambda counter: (os.getpid(), gpunb.get(counter.add.remote())))
    found = get([caller.remote(counter) for _ in range(60)])
    assert sorted(count for _, count in found) == list(range(1, 61))
    assert len({pid for pid, _ in found}) <= CPUS * 2


@pytest.mark.parametrize("kind", ["async", "threads", "plain"])
def test_actors_that_wait_for_tasks_need_few_processes(two, kind):
    class Plain:
        def run(self):
            return gpunb.get(level.remote(2))

    class Async:
        async def run(self):
            return await level.remote(2)

    made = gpunb.remote(Async if kind == "async" else Plain)
    actor = made.options(max_concurrency=8 if kind == "threads" else None, num_cpus=1).remote()
    found = get([actor.run.remote() for _ in range(24)])
    assert len({pid for pids in found for pid in pids}) <= CPUS * 3


def test_a_signal_comes_though_all_cpus_are_lent_to_tasks_that_wait_for_it(two):
    """No ref tells of which task the signal will come."""

    @gpunb.remote
    class Signal:
        def __init__(self):
            self.event = asyncio.Event()

        async def send(self):
            self.event.set()

        async def wait(self):
            await self.event.wait()

    signal = Signal.remote()
    waiter = gpunb.remote(lambda signal: gpunb.get(signal.wait.remote()))
    waiting = [waiter.remote(signal) for _ in range(20)]
    sender = gpunb.remote(lambda signal: gpunb.get(signal.send.remote()))
    get(sender.remote(signal))
    assert get(waiting) == [None] * 20


def test_tasks_that_meet_at_an_actor_all_start(two):
    """Each of them goes on only after the last has come."""

    @gpunb.remote
    class Barrier:
        def __init__(self, count):
            self.left, self.event = count, asyncio.Event()

        async def meet(self):
            self.left -= 1
            if not self.left:
                self.event.set()
            await self.event.wait()

    barrier = Barrier.remote(4)
    task = gpunb.remote(lambda barrier: gpunb.get(barrier.meet.remote()))
    assert get([task.remote(barrier) for _ in range(4)]) == [None] * 4
