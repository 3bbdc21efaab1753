"""Many objects of medium size: they share files, so the number of descriptors does not grow."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import gpunb
from gpunb.data.arenas import FEW
from tests.sessions import assert_idle, descriptors, memory_files, script, session
from tests.waiting import PATIENCE, eventually

COUNT = 300
ITEMS = 6250
"""Items of an array of 50,000 bytes, which is too large for a message and too small to be alone."""

MOST = FEW + 12
"""Descriptors that the kernel may have more than without objects; a worker may come meanwhile."""


def array(number):
    return np.full(ITEMS, float(number))


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


def check(arrays, numbers=range(COUNT)):
    for number, each in zip(numbers, arrays, strict=True):
        assert (each == number).all()
        assert each.ctypes.data % 64 == 0
        each[:] = -1  # seen by nobody else


@gpunb.remote
def made(number):
    return array(number)


@gpunb.remote
def total(refs):
    arrays = gpunb.get(refs)
    return float(sum(each.sum() for each in arrays)), len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def started(by_value):
    with session():
        get([made.remote(0) for _ in range(4)])
        yield


@pytest.fixture
def before(started):
    """The descriptors of the shared session, which each test leaves without objects."""
    yield descriptors()
    assert_idle()
    eventually(lambda: memory_files() == (0, 0), "memory files are gone")


def test_values_that_were_put_share_files(before):
    refs = [gpunb.put(array(number)) for number in range(COUNT)]
    assert descriptors() <= before + MOST
    for _ in range(2):
        check(get(refs))
    assert get(total.remote(refs[:200]))[0] == ITEMS * sum(range(200))


def test_results_of_tasks_share_files(before):
    refs = [made.remote(number) for number in range(COUNT)]
    check(get(refs))
    assert descriptors() <= before + MOST


def test_results_of_one_task_share_files(before):
    many = gpunb.remote(num_returns=COUNT)(lambda: [array(number) for number in range(COUNT)])
    refs = many.remote()
    check(get(refs))
    assert descriptors() <= before + MOST
    assert gpunb.status()["object_memory"]["used"] >= COUNT * ITEMS * 8


def test_values_of_a_generator_share_files(before):
    @gpunb.remote
    def yields():
        for number in range(COUNT):
            yield array(number)

    refs = list(yields.remote())
    check(get(refs))
    assert descriptors() <= before + MOST


def test_values_that_tasks_put_share_files(before):
    @gpunb.remote
    def puts():
        return [gpunb.put(array(number)) for number in range(COUNT)], len(
            os.listdir("/proc/self/fd")
        )

    refs, there = get(puts.remote())
    assert there < 40
    assert descriptors() <= before + MOST
    check(get(refs))


def test_arguments_of_calls_that_wait_share_files(before, gate):
    @gpunb.remote
    def first(values, gate=None):
        if gate is not None:
            gate.enter()
        return values[0]

    holds = [first.remote([0], gate) for _ in range(2)]
    gate.await_()
    refs = [first.remote(array(number)) for number in range(COUNT)]
    assert descriptors() <= before + MOST
    gate.open()
    assert get(refs) == list(range(COUNT))
    assert get(holds) == [0, 0]


def test_a_task_that_reads_many_objects_keeps_few_descriptors(before):
    @gpunb.remote
    def most(refs):
        from gpunb.protocol import backend

        outcomes = backend.current().fetch([each.id for each in refs], None)
        return len(outcomes), len(os.listdir("/proc/self/fd"))

    refs = [gpunb.put(array(number)) for number in range(COUNT)]
    count, there = get(most.remote(refs))
    assert count == COUNT
    assert there < 40 + FEW


def test_a_worker_that_is_killed_leaves_no_memory(before):
    @gpunb.remote(max_retries=0)
    def killed(refs):
        kept = [gpunb.put(array(number)) for number in range(COUNT // 3)]
        gpunb.get(refs)
        os.kill(os.getpid(), signal.SIGKILL)
        return kept

    refs = [gpunb.put(array(number)) for number in range(COUNT // 3)]
    with pytest.raises(gpunb.exceptions.WorkerCrashedError):
        get(killed.remote(refs))
    check(get(refs), range(COUNT // 3))
    eventually(lambda: gpunb.status()["objects"]["objects"] == COUNT // 3)


def test_the_user_can_open_files_beside_many_objects():
    done = script(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        import numpy as np
        import gpunb
        gpunb.init(num_cpus=1, num_gpus=0, preload=())
        refs = [gpunb.put(np.full({ITEMS}, number)) for number in range({COUNT})]
        refs += gpunb.get(
            gpunb.remote(lambda: [gpunb.put(np.full({ITEMS}, n)) for n in range({COUNT})]).remote()
        )
        with open("/dev/null"):
            assert [each[0] for each in gpunb.get(refs)] == [*range({COUNT})] * 2
        print("done")
        """
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
