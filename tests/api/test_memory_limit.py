"""The limit on the memory of objects, and the disk behind it."""

from __future__ import annotations

import gc
import os
import random

import numpy as np
import pytest

import gpunb
from gpunb.data.arenas import FEW
from gpunb.engine import object_budget, object_memory
from gpunb.exceptions import OutOfMemoryError, TaskCancelledError, TaskError
from tests.sessions import assert_idle, descriptors, memory_files, script
from tests.waiting import PATIENCE, eventually

MIB = 1 << 20
COUNT = MIB // 8
"""Items of an array of one MiB."""


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


def figures():
    facts = gpunb.status()["object_memory"]
    assert set(facts) == {"used", "limit", "spilled"}
    return facts


def assert_empty():
    """All is let go of: in the books, in the store and in the session."""
    gc.collect()
    eventually(lambda: figures()["used"] == figures()["spilled"] == 0, "memory is booked")
    assert_idle()


@gpunb.remote
def ones(mib):
    return np.ones(mib * COUNT)


ITEMS = 6250
"""Items of an array of 50,000 bytes, which shares its file with others if there are many."""


@gpunb.remote
def small(number):
    return np.full(ITEMS, float(number))


@gpunb.remote
def total(*arrays):
    return sum(float(array.sum()) for array in arrays)


@pytest.fixture
def limited(start):
    """A session with 10 MiB for objects, and no disk."""
    yield start(object_memory="10MiB")
    assert_empty()


@pytest.fixture
def folder(tmp_path):
    """A folder on a disk, in which nothing is left."""
    try:
        object_memory.parse_spill(tmp_path)
    except ValueError as error:
        pytest.skip(str(error))
    yield tmp_path
    assert os.listdir(tmp_path) == []


@pytest.fixture
def spilling(start, folder):
    """A session with 10 MiB for objects, and a disk."""
    yield start(object_memory=10 * MIB, spill=folder)
    assert_empty()
    assert os.listdir(folder) == []


# ---------------------------------------------------------------------------------- without a disk


def test_put_beyond_the_limit_is_refused(limited):
    refs = [gpunb.put(np.zeros(4 * COUNT)) for _ in range(2)]
    with pytest.raises(OutOfMemoryError) as info:
        gpunb.put(np.zeros(4 * COUNT))
    text = str(info.value)
    for part in ("the value of put (4 MiB)", "8 MiB of the 10 MiB", "object_memory=", "spill="):
        assert part in text
    assert isinstance(info.value, MemoryError)
    assert not isinstance(info.value, TaskError)
    assert 8 * MIB <= figures()["used"] < 8 * MIB + 100_000
    assert gpunb.status()["objects"]["objects"] == 2
    assert [get(ref).sum() for ref in refs] == [0, 0]
    gpunb.put("what is small always fits")


def test_a_result_beyond_the_limit_is_an_error(limited):
    kept = gpunb.put(np.zeros(4 * COUNT))
    large, small = ones.remote(8), ones.remote(1)
    with pytest.raises(OutOfMemoryError) as info:
        get(large)
    text = str(info.value)
    for part in (f"ones (#{large.task_id}) (8 MiB)", "of the 10 MiB", "object_memory=", "spill="):
        assert part in text
    assert get(small).sum() == COUNT
    with pytest.raises(OutOfMemoryError):  # whoever takes it fails alike
        get(total.remote(large))
    assert get(kept).sum() == 0


def test_results_beyond_the_limit_fail_together(limited):
    several = gpunb.remote(num_returns=3)(lambda: [np.ones(4 * COUNT) for _ in range(3)])
    refs = several.remote()
    for each in refs:
        with pytest.raises(OutOfMemoryError, match=r"\(12 MiB\)"):
            get(each)
    assert figures()["used"] < 100_000


def test_freed_memory_can_be_used_again(limited):
    for _ in range(5):
        refs = [gpunb.put(np.ones(4 * COUNT)), ones.remote(4)]
        assert get(total.remote(*refs)) == 8 * COUNT
        del refs
        eventually(lambda: figures()["used"] == 0)


def test_a_running_task_that_is_cancelled_takes_no_room(limited, gate):
    @gpunb.remote
    def held(gate):
        array = np.ones(4 * COUNT)
        gate.enter()
        return array

    ref = held.remote(gate)
    gate.await_()
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert figures()["used"] == 0


def test_a_queued_task_that_is_cancelled_takes_no_room(limited, gate):
    holds = gpunb.remote(num_cpus=limited.resources["CPU"])(lambda gate: gate.enter()).remote(gate)
    gate.await_()
    ref = ones.remote(4)
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert figures()["used"] < 100_000
    gate.open()
    get(holds)


def test_a_result_that_was_there_before_the_cancel_stays(limited):
    ref = ones.remote(4)
    gpunb.wait([ref], timeout=PATIENCE)
    gpunb.cancel(ref)
    assert get(ref).sum() == 4 * COUNT
    assert figures()["used"] >= 4 * MIB


def test_a_cancel_at_any_moment_leaves_no_memory_booked(limited):
    for _ in range(5):
        refs = [ones.remote(4) for _ in range(2)]  # both fit, so only a cancel can end one
        for each in refs:
            gpunb.cancel(each)
        for each in refs:
            try:
                assert get(each).sum() == 4 * COUNT, "the task ended before the cancel"
            except TaskCancelledError:
                pass
        del refs, each
        gc.collect()
        eventually(lambda: figures()["used"] == 0)


def test_a_put_in_a_task_beyond_the_limit_is_refused(limited):
    @gpunb.remote(max_retries=0)
    def puts():
        kept = [gpunb.put(np.ones(4 * COUNT)) for _ in range(2)]
        try:
            gpunb.put(np.ones(4 * COUNT))
        except OutOfMemoryError as error:
            return len(kept), str(error)
        return None

    kept, text = get(puts.remote())
    assert kept == 2
    assert "(4 MiB)" in text
    assert "of the 10 MiB" in text


def test_large_errors_arrive_whatever_the_limit(start):
    start(object_memory="100kB")

    @gpunb.remote(max_retries=0)
    def fails():
        raise ValueError("x" * 300_000)

    ref = fails.remote()
    with pytest.raises(ValueError, match="xxx"):
        get(ref)
    assert figures()["used"] > figures()["limit"]
    assert get(ones.remote(0)).sum() == 0  # what is small needs no room
    del ref
    assert_empty()


def test_the_default_limit_is_half_of_the_memory(start):
    start()
    assert figures()["limit"] == object_budget.total_memory() // 2
    refs = [gpunb.put(np.zeros(COUNT)), ones.remote(1)]
    get(refs)
    assert figures()["spilled"] == 0
    assert figures()["used"] >= 2 * MIB


def test_objects_that_are_freed_in_any_order_give_their_memory_back(start):
    start(object_memory="16MiB")
    refs = {number: gpunb.put(small.__wrapped__(number)) for number in range(300)}
    numbers = list(refs)
    random.Random(1).shuffle(numbers)
    for number in numbers[60:]:
        del refs[number]
    refs |= {number: small.remote(number) for number in range(300, 320)}
    assert [each[-1] for each in get(list(refs.values()))] == list(refs)
    size = 80 * 51_000
    eventually(lambda: figures()["used"] < size)
    eventually(lambda: memory_files()[0] < size * 1.5 + (4 << 20), "space is given back")
    assert [each[0] for each in get(list(refs.values()))] == list(refs)
    refs.clear()
    assert_empty()
    eventually(lambda: memory_files() == (0, 0), "memory files are gone")


# ------------------------------------------------------------------------------------- with a disk


def test_spilled_objects_are_read_back(spilling, folder):
    arrays = [np.arange(3 * COUNT) + number for number in range(8)]
    refs = [gpunb.put(array) for array in arrays[:4]]
    refs += [gpunb.remote(lambda array: array).remote(array) for array in arrays[4:]]
    gpunb.wait(refs, num_returns=8, timeout=PATIENCE)
    facts = figures()
    assert facts["used"] <= facts["limit"] == 10 * MIB
    assert facts["used"] + facts["spilled"] >= 8 * 3 * MIB
    assert facts["spilled"] >= 5 * 3 * MIB
    assert os.listdir(folder) == []  # the files have no names
    for _ in range(2):
        for array, back in zip(arrays, get(refs), strict=True):
            assert (back == array).all()
            assert back.flags.writeable
            back[:] = 0  # seen by nobody else
    expected = float(sum(array.sum() for array in arrays))
    assert get(total.remote(*refs)) == expected
    assert get(gpunb.remote(lambda refs: total.__wrapped__(*gpunb.get(refs))).remote(refs)) == (
        expected
    )


def test_many_spilled_objects_share_files(start, folder):
    start(object_memory="4MiB", spill=folder)
    get(small.remote(0))
    before = descriptors()
    refs = [gpunb.put(small.__wrapped__(number)) for number in range(150)]
    refs += [small.remote(number) for number in range(150, 300)]
    assert [each[-1] for each in get(refs)] == list(range(300))
    facts = figures()
    assert facts["used"] <= facts["limit"]
    assert facts["spilled"] >= 10_000_000
    assert descriptors() <= before + 2 * FEW + 12
    assert get(total.remote(*refs)) == ITEMS * sum(range(300))
    del refs
    assert_empty()
    assert os.listdir(folder) == []


def test_the_least_recently_used_object_is_spilled(spilling):
    first, second = gpunb.put(np.full(4 * COUNT, 1.0)), gpunb.put(np.full(4 * COUNT, 2.0))
    get(first)
    third = gpunb.put(np.full(4 * COUNT, 3.0))
    del first
    gc.collect()
    eventually(lambda: figures()["used"] < 5 * MIB)  # the first was in memory still
    assert 4 * MIB <= figures()["spilled"] < 5 * MIB
    assert get(second)[0] + get(third)[-1] == 5


def test_an_object_larger_than_the_limit_is_spilled(spilling):
    small = gpunb.put(np.ones(COUNT))
    refs = [gpunb.put(np.ones(12 * COUNT)), ones.remote(12)]
    assert [get(ref).sum() for ref in refs] == [12 * COUNT] * 2
    facts = figures()
    assert facts["spilled"] >= 24 * MIB
    assert facts["used"] < 2 * MIB
    assert get(small).sum() == COUNT


def test_values_put_in_tasks_are_spilled_too(spilling):
    @gpunb.remote
    def puts():
        return [gpunb.put(np.full(4 * COUNT, number)) for number in range(4)]

    refs = get(puts.remote())
    assert [get(ref)[-1] for ref in refs] == [0, 1, 2, 3]
    assert figures()["spilled"] >= 8 * MIB


def test_refs_within_a_result_that_waits_for_room(spilling):
    """What a result refers to must not be let go before the result is there."""

    @gpunb.remote
    def makes():
        return np.ones(6 * COUNT), gpunb.put(np.full(6 * COUNT, 2.0))

    refs = [makes.remote() for _ in range(4)]
    for ref in refs:
        array, inner = get(ref)
        assert array.sum() == 6 * COUNT
        assert get(inner).sum() == 12 * COUNT


def test_a_task_that_is_killed_while_its_result_moves(spilling):
    for _ in range(3):
        refs = [ones.remote(6) for _ in range(4)]
        gpunb.wait(refs, timeout=PATIENCE)
        for each in refs:
            gpunb.cancel(each, force=True)
        for each in refs:
            try:
                assert get(each).sum() == 6 * COUNT
            except gpunb.exceptions.TaskCancelledError:
                pass
        del refs, each
        gc.collect()
        eventually(lambda: figures()["used"] == figures()["spilled"] == 0)


def test_a_full_disk(start, folder):
    done = script(
        f"""
        import errno, os
        import numpy as np
        import gpunb
        gpunb.init(num_cpus=1, num_gpus=0, preload=(), object_memory="10MiB", spill={str(folder)!r})
        ones = gpunb.remote(lambda count: np.ones(count))
        refs = [gpunb.put(np.ones({4 * COUNT})) for _ in range(2)]
        result = ones.remote({COUNT})
        assert gpunb.get(result).sum() == {COUNT}
        memory = gpunb.status()["object_memory"]
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate = full
        for beyond in (
            lambda: gpunb.put(np.ones({4 * COUNT})), lambda: gpunb.get(ones.remote({5 * COUNT}))
        ):
            try:
                beyond()
            except gpunb.exceptions.OutOfMemoryError as error:
                print(str(error).replace("\\n", " "))
        assert gpunb.status()["object_memory"] == memory
        assert [gpunb.get(ref).sum() for ref in refs] == [{4 * COUNT}] * 2
        """
    )
    assert done.returncode == 0, done.stderr
    put, result = done.stdout.splitlines()
    assert "the value of put (4 MiB)" in put
    assert "(5 MiB)" in result
    for line in (put, result):
        assert "No space left on device" in line
        assert str(folder) in line


def test_a_killed_kernel_leaves_no_file(start, folder):
    done = script(
        f"""
        import os
        import numpy as np
        import gpunb
        gpunb.init(num_cpus=1, num_gpus=0, preload=(), object_memory="1MiB", spill={str(folder)!r})
        refs = [gpunb.put(np.ones({COUNT})) for _ in range(4)]
        print(gpunb.status()["object_memory"]["spilled"], flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    assert done.returncode == -9, done.stderr
    assert int(done.stdout) >= 3 * MIB
    assert os.listdir(folder) == []


def test_a_shutdown_while_results_move(start, folder):
    start(object_memory="4MiB", spill=folder)
    refs = [ones.remote(3) for _ in range(6)]
    gpunb.wait(refs, timeout=PATIENCE)
    gpunb.shutdown()
    assert os.listdir(folder) == []


# ------------------------------------------------------------------------------------ the options


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"object_memory": "two"}, ValueError, "object_memory='two' is not a size"),
        ({"object_memory": 0}, ValueError, "object_memory=0 must be at least one byte"),
        ({"object_memory": -5}, ValueError, "object_memory=-5"),
        ({"object_memory": []}, TypeError, "object_memory must be"),
        ({"object_memory": True}, TypeError, "object_memory must be"),
        ({"spill": 3}, TypeError, "spill must be True or a folder, not 3"),
        ({"spill": "/no/such/folder"}, ValueError, "/no/such/folder: No such file"),
        ({"spill": __file__}, ValueError, "Not a directory"),
        ({"spill": "/dev/shm"}, ValueError, "no disk, but memory"),
    ],
)
def test_bad_values(settings, error, text):
    with pytest.raises(error, match=text):
        gpunb.init(num_cpus=1, num_gpus=0, preload=(), **settings)
    assert not gpunb.is_initialized()


def test_results_of_calls_that_wait_for_memory_are_all_there(start, folder):
    """An actor may have begun its next calls when it gets known that a result has to wait."""

    @gpunb.remote
    class Values:
        def value(self, number):
            return np.full(200_000, number) if number % 4 == 0 else number

    start(num_cpus=2, object_memory="8MiB", spill=folder)
    actor = Values.remote()
    for _ in range(3):
        refs = [actor.value.remote(number) for number in [1] * 40 + list(range(60))]
        for number, value in enumerate(gpunb.get(refs, timeout=PATIENCE)[40:]):
            assert (value == number).all() if number % 4 == 0 else value == number
