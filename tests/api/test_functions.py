"""Functions in worker processes, on both ways of starting them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpunb
from gpunb.exceptions import (
    GetTimeoutError,
    GpunbError,
    InfeasibleRequestError,
    TaskCancelledError,
    TaskError,
)
from tests.sessions import assert_idle, session
from tests.waiting import PATIENCE, Gate, eventually


@pytest.fixture(scope="module", params=["fork", "spawn"])
def started(request: pytest.FixtureRequest, by_value: None) -> Iterator[None]:
    """Four simulated devices, two of them A100s; on processes from either source."""
    devices = "2xA100:40GiB,2xV100:16GiB"
    with session(
        simulate=devices, num_cpus=2, resources={"licence": 1}, start_method=request.param
    ):
        yield


@pytest.fixture
def four(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free."""
    yield
    assert_idle()


def get(refs, timeout=PATIENCE):
    return gpunb.get(refs, timeout=timeout)


@gpunb.remote
def same(value):
    return value


def in_processes():
    """What functions do with multiprocessing, which knows nothing of how a worker was started."""
    import multiprocessing

    echo = multiprocessing.SimpleQueue()
    child = multiprocessing.Process(target=echo.put, args=("from a child",))
    child.start()
    received = echo.get()
    child.join()
    with multiprocessing.Pool(2) as pool:
        squares = pool.map(abs, [-1, -2])
    own = multiprocessing.current_process()
    about = own.name, multiprocessing.parent_process(), multiprocessing.get_start_method()
    return about, received, child.name, child.exitcode, squares


@gpunb.remote
def add(a, b=10):
    return a + b


@gpunb.remote(num_gpus=1)
def on_gpu():
    return gpunb.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()


@gpunb.remote(num_gpus=0.25)
def hold(gate, name):
    gate.enter(name)
    return gpunb.get_gpu_ids()


@gpunb.remote
def pid():
    return os.getpid()


# ------------------------------------------------------------------------------- get, put, wait


def test_arguments_by_place_and_name(four):
    assert get([add.remote(1), add.remote(1, 2), add.remote(1, b=3), add.remote(a=2)]) == [
        11,
        3,
        4,
        12,
    ]


def test_get_keeps_the_order_and_accepts_an_empty_list(four):
    assert get([same.remote(i) for i in range(20)]) == list(range(20))
    assert gpunb.get([]) == []


def test_get_with_a_timeout(four, gate):
    ref = hold.remote(gate, 1)
    with pytest.raises(GetTimeoutError, match="1 of 1 results"):
        gpunb.get(ref, timeout=0)
    with pytest.raises(TimeoutError):
        gpunb.get([same.remote(1), ref], timeout=0.01)
    gate.open()
    assert gpunb.get(ref, timeout=math.inf) == [0]
    assert gpunb.get(ref, timeout=0) == [0]


@pytest.mark.parametrize("timeout", [-1, math.nan])
def test_a_timeout_below_zero_is_refused(four, timeout):
    ref = gpunb.put(1)
    for wait in (lambda: gpunb.get(ref, timeout=timeout), lambda: ref.result(timeout)):
        with pytest.raises(ValueError, match="timeout"):
            wait()
    with pytest.raises(ValueError, match="timeout"):
        gpunb.wait([ref], timeout=timeout)


@pytest.mark.parametrize("refs", [(), 3, "ref", [3], (1,)], ids=repr)
def test_get_takes_refs_only(four, refs):
    with pytest.raises(TypeError, match="ObjectRef"):
        gpunb.get(refs)


def test_get_raises_as_soon_as_one_failed(four, gate):
    @gpunb.remote
    def fail():
        raise KeyError("gone")

    slow = hold.remote(gate, 1)
    with pytest.raises(KeyError) as caught:
        get([slow, fail.remote()])
    assert isinstance(caught.value, TaskError)
    assert "fail" in str(caught.value)
    assert isinstance(caught.value.cause, KeyError)


def test_get_does_not_wait_when_one_has_failed_before(four, gate):
    @gpunb.remote
    def fail():
        raise KeyError("gone")

    failed, slow = fail.remote(), hold.remote(gate, 1)
    gpunb.wait([failed])
    with pytest.raises(KeyError):
        get([slow, failed])


def test_put(four):
    ref = gpunb.put({"a": [1, 2]})
    assert get(ref) == {"a": [1, 2]}
    assert get(ref) is not get(ref)
    assert get(same.remote(ref)) == {"a": [1, 2]}
    assert "put" in repr(ref)
    with pytest.raises(TypeError, match="ref already"):
        gpunb.put(ref)


def test_wait(four, gate):
    late = hold.remote(gate, 1)
    soon = [same.remote(i) for i in range(3)]
    ready, rest = gpunb.wait([late, *soon], num_returns=3)
    assert (ready, rest) == (soon, [late])
    assert gpunb.wait([late, *soon], num_returns=4, timeout=0.01) == (soon, [late])
    assert gpunb.wait([late], timeout=0) == ([], [late])
    assert gpunb.wait([late, *soon], num_returns=2) == (soon[:2], [late, soon[2]])
    assert gpunb.wait([]) == ([], [])
    gate.open()
    assert gpunb.wait([late], timeout=PATIENCE) == ([late], [])


def test_a_failed_ref_is_ready(four):
    ref = gpunb.remote(lambda: 1 / 0).remote()
    assert gpunb.wait([ref]) == ([ref], [])


def test_wait_refuses_bad_arguments(four):
    ref = gpunb.put(1)
    with pytest.raises(TypeError, match="list"):
        gpunb.wait(ref)
    with pytest.raises(TypeError, match="ObjectRef"):
        gpunb.wait([1])
    with pytest.raises(ValueError, match="twice"):
        gpunb.wait([ref, ref])
    for number in (0, 2, -1):
        with pytest.raises(ValueError, match="num_returns"):
            gpunb.wait([ref], num_returns=number)


def test_waiting_again_and_again_leaves_nothing_behind(four, gate):
    ref = hold.remote(gate, 1)
    for _ in range(50):
        gpunb.wait([ref], timeout=0)
        with pytest.raises(GetTimeoutError):
            gpunb.get(ref, timeout=0.0001)
        gpunb.wait([ref, gpunb.put(1)], num_returns=2, timeout=0.0001)
    entry = gpunb.protocol.backend.existing().store.entry(ref.id)
    assert not entry


# ------------------------------------------------------------------------------ refs as arguments


def test_refs_at_the_top_level_arrive_as_values(four):
    one, two = gpunb.put(1), same.remote(2)
    assert get(add.remote(one, b=two)) == 3


def test_nested_refs_stay_refs(four):
    @gpunb.remote
    def look(refs, by_name):
        assert all(isinstance(each, gpunb.ObjectRef) for each in refs)
        return [*gpunb.get(refs), gpunb.get(by_name["x"])]

    refs = [gpunb.put(1), same.remote(2)]
    assert get(look.remote(refs, by_name={"x": gpunb.put(3)})) == [1, 2, 3]


def test_an_argument_whose_ref_is_dropped_at_once(four):
    assert get(add.remote(same.remote(add.remote(1)), same.remote(2))) == 13
    assert get(same.remote([gpunb.put(5)]))[0].result(PATIENCE) == 5


def test_many_refs_as_arguments(four):
    @gpunb.remote
    def total(*values, **more):
        return sum(values) + sum(more.values())

    refs = [gpunb.put(i) for i in range(250)]
    more = {f"k{i}": gpunb.put(i) for i in range(50)}
    assert get(total.remote(*refs, **more)) == sum(range(250)) + sum(range(50))


def test_a_task_with_a_failed_argument_fails_with_its_error(four):
    @gpunb.remote
    def fail():
        raise KeyError("the first")

    first = fail.remote()
    for ref in (add.remote(first), same.remote(add.remote(1, first))):
        with pytest.raises(KeyError, match="the first"):
            get(ref)
    with pytest.raises(KeyError, match="the first"):
        get(add.remote(first))


# ----------------------------------------------------------------------------------- nested tasks


def test_nested_deeper_than_there_are_cpus(four):
    @gpunb.remote
    def depth(n):
        return 0 if n == 0 else 1 + gpunb.get(depth.remote(n - 1))

    assert get(depth.remote(6)) == 6


def test_objects_made_in_a_worker_outlive_it(four):
    @gpunb.remote(num_gpus=1)
    def make():
        return gpunb.put([1, 2]), same.remote("three"), os.getpid()

    put, made, process = get(make.remote())
    eventually(lambda: not os.path.exists(f"/proc/{process}"), "the worker is gone")
    assert get(put) == [1, 2]
    assert get(made) == "three"


def test_processes_of_a_task(four):
    usual = multiprocessing.get_start_method()
    about = "MainProcess", None, usual
    assert get(gpunb.remote(in_processes).remote()) == (
        about,
        "from a child",
        "Process-1",
        0,
        [1, 2],
    )


def test_a_task_can_use_the_whole_api(four, gate):
    @gpunb.remote(num_cpus=0)
    def use(gate):
        late = hold.remote(gate, "inner")
        soon = same.remote(1)
        ready, rest = gpunb.wait([late, soon], num_returns=1)
        assert (ready, rest) == ([soon], [late])
        with pytest.raises(GetTimeoutError):
            gpunb.get(late, timeout=0.01)
        with pytest.raises(InfeasibleRequestError):
            on_gpu.options(num_gpus=9).remote()
        with pytest.raises(GpunbError, match="kernel"):
            gpunb.shutdown()
        with pytest.raises(RuntimeError, match="task"):
            gpunb.init()
        assert gpunb.init(ignore_reinit_error=True).resources["CPU"] == 2
        gpunb.cancel(late)
        with pytest.raises(TaskCancelledError):
            gpunb.get(late)
        context = gpunb.get_runtime_context()
        assert (context.get_task_name(), context.attempt) == ("use", 1)
        assert gpunb.status()["running"][0]["name"] == "use"
        assert "done" in repr(soon)
        future = soon.future()
        assert future.result(PATIENCE) == 1
        return asyncio.run(_twice(soon)), context.get_task_id()

    ref = use.remote(gate)
    assert get(ref) == (2, ref.task_id)


async def _twice(ref):
    return await ref + await ref


def test_threads_of_a_task_may_wait_at_once(four):
    @gpunb.remote
    def use():
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8) as threads:
            return sum(threads.map(lambda i: gpunb.get(same.remote(i)), range(24)))

    assert get(use.remote()) == sum(range(24))


def test_a_thread_that_still_waits_does_not_take_the_next_task(four, gate):
    @gpunb.remote
    def leave_a_thread(refs):
        thread = threading.Thread(target=gpunb.get, args=(refs[0],), daemon=True)
        thread.start()
        return os.getpid()

    late = hold.remote(gate, 1)
    process = get(leave_a_thread.remote([late]))
    for _ in range(20):
        assert get(pid.remote()) == process
    gate.open()
    assert get(late) == [0]
    assert get(pid.remote()) == process


def test_a_ref_dropped_late_by_a_thread_is_freed(four, gate):
    """Also if it drops it when its process, which has nothing to do, has looked in vain."""

    @gpunb.remote
    def leave_a_thread(refs):
        looks = itertools.count(1)

        def note(phase, info):
            if phase == "start" and info["generation"] == 2:
                gate.note(f"look {next(looks)}")

        def keep(ref):
            gpunb.get(ref)
            gc.callbacks.append(note)
            gate.enter("thread")
            gc.callbacks.remove(note)

        threading.Thread(target=keep, args=(refs[0],), daemon=True).start()
        gate.await_("thread")

    get(leave_a_thread.remote([gpunb.put("kept")]))
    gate.await_("look 2")
    assert gpunb.status()["objects"]["objects"] == 1
    gate.open()


def test_a_task_that_waits_lends_its_cpus_and_not_its_gpus(four, gate):
    @gpunb.remote(num_gpus=4)
    def outer(gate):
        inner = on_gpu.remote()
        gate.note("submitted")
        try:
            return gpunb.get(inner, timeout=0.2)
        except GetTimeoutError:
            gpunb.cancel(inner)
            return "waited"

    assert get(outer.remote(gate)) == "waited"


# -------------------------------------------------------------------------------------- ObjectRef


def test_await(four):
    async def main():
        ref = add.remote(1)
        values = await asyncio.gather(ref, ref, same.remote("x"))
        with pytest.raises(ZeroDivisionError):
            await gpunb.remote(lambda: 1 / 0).remote()
        return values

    assert asyncio.run(main()) == [11, 11, "x"]


def test_giving_up_on_an_await_does_not_cancel(four, gate):
    ref = hold.remote(gate, 1)

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ref, 0.05)

    asyncio.run(main())
    gate.open()
    assert get(ref) == [0]


def test_result_and_future(four):
    ref = add.remote(1)
    assert ref.result(PATIENCE) == 11
    future = ref.future()
    assert future.result(PATIENCE) == 11
    with pytest.raises(ZeroDivisionError):
        gpunb.remote(lambda: 1 / 0).remote().future().result(PATIENCE)


def test_a_callback_may_submit_but_not_wait(four, gate):
    received = []

    def callback(future):
        refs.append(add.remote(future.result()[0]))
        try:
            gpunb.get(blocked)
        except GpunbError as error:
            received.append(str(error))

    refs = []
    ref, blocked = hold.remote(gate, 1), hold.remote(Gate(gate.folder / "x"), 2)
    gpunb.cancel(blocked)
    later = add.remote(hold.remote(gate, 3), [1])
    ref.future().add_done_callback(callback)
    blocked = later
    gate.open()
    eventually(lambda: refs)
    assert get(refs[0]) == 10
    get(later)


def test_equality_hash_and_pickling(four):
    ref = gpunb.put(1)
    assert ref == pickle.loads(pickle.dumps(ref))
    assert {ref: 1}[pickle.loads(pickle.dumps(ref))] == 1
    assert ref != gpunb.put(1)
    assert ref != 1
    assert len(ref.hex()) == 24


def test_the_repr_of_a_ref_shows_its_state(four, gate):
    holder = hold.options(num_gpus=4, name="holder").remote(gate, "holder")
    gate.await_("holder")
    queued = on_gpu.remote()
    assert repr(holder).startswith(f"<ObjectRef holder #{holder.task_id} running on GPU 0, 1, 2, 3")
    assert "queued" in repr(queued)
    gate.open()
    get([holder, queued])
    assert "done" in repr(holder)
    assert "\n" not in repr(holder)
    bad = gpunb.remote(lambda: 1 / 0).remote()
    gpunb.wait([bad])
    assert "failed" in repr(bad)


def test_references_are_counted(four):
    refs = [gpunb.put(i) for i in range(5)] + [same.remote([gpunb.put("inner")])]
    inner = get(refs[-1])[0]
    del refs
    eventually(lambda: gpunb.status()["objects"]["objects"] == 1)
    assert get(inner) == "inner"


# ---------------------------------------------------------------------------------------- options


def test_options_change_a_copy(four):
    other = on_gpu.options(num_gpus=2, name="two")
    assert get(on_gpu.remote())[:2] == ([0], "0")
    assert_idle()
    assert get(other.remote())[:2] == ([0, 1], "0,1")
    assert "2 GPU" in repr(other)
    with pytest.raises(ValueError, match="max_calls"):
        on_gpu.options(max_calls=1)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_num_returns(four, number):
    @gpunb.remote(num_returns=number)
    def make():
        return [10, 11, 12][:number] if number != 1 else [10]

    refs = make.remote()
    if number == 0:
        assert refs is None
        eventually(lambda: not gpunb.status()["running"] and not gpunb.status()["queued"])
    elif number == 1:
        assert get(refs) == [10]
    else:
        assert get(refs) == [10, 11, 12]
        assert refs[1].task_id == refs[0].task_id


def test_a_wrong_number_of_results_is_an_error(four):
    refs = gpunb.remote(num_returns=2)(lambda: (1, 2, 3)).remote()
    for ref in refs:
        with pytest.raises(ValueError, match="num_returns=2, but returned 3"):
            get(ref)


def test_the_name_option_is_shown_in_the_status(four):
    @gpunb.remote(name="chosen")
    def fail():
        raise ValueError

    with pytest.raises(ValueError, match=r"chosen \(#\d+\) failed"):
        get(fail.remote())
    with pytest.raises(ValueError, match="other"):
        get(fail.options(name="other").remote())


def test_max_retries_after_a_crash(four, tmp_path):
    @gpunb.remote(max_retries=2)
    def crash_twice(folder):
        tries = len(list(folder.iterdir()))
        (folder / str(tries)).touch()
        if tries < 2:
            os._exit(3)
        return gpunb.get_runtime_context().attempt

    assert get(crash_twice.remote(tmp_path)) == 3


def test_error_of_a_crash_has_the_output_of_the_last_attempt_only(four):
    @gpunb.remote(max_retries=1)
    def crash():
        os.write(2, f"attempt {gpunb.get_runtime_context().attempt}".encode())
        os._exit(3)

    with pytest.raises(gpunb.exceptions.WorkerCrashedError, match=r"attempt 2$") as caught:
        get(crash.remote())
    assert "attempt 1" not in str(caught.value)


def test_exceptions_are_retried_only_if_asked(four, tmp_path):
    def fail(path, kind):
        with open(path, "a") as file:
            file.write("x")
        raise kind("again")

    for number, (retry, kind, tries) in enumerate(
        [
            (False, ValueError, 1),
            (True, ValueError, 3),
            ([ValueError, OSError], ValueError, 3),
            ([OSError], ValueError, 1),
            ([OSError], FileNotFoundError, 3),
            (True, SystemExit, 1),
        ]
    ):
        path = tmp_path / str(number)
        function = gpunb.remote(max_retries=2, retry_exceptions=retry)(fail)
        with pytest.raises(TaskError):
            get(function.remote(path, kind))
        assert len(path.read_text()) == tries, (retry, kind)


def test_a_timeout_stops_the_task(four, gate):
    ref = hold.options(timeout=0.2).remote(gate, 1)
    with pytest.raises(TimeoutError, match=r"timeout of 0\.2 s"):
        get(ref)
    assert get(hold.options(timeout=30 * 86400).remote(_Open(), 1)) == [0]


class _Open:
    def enter(self, name):
        pass


# --------------------------------------------------------------------------------------- max_calls


def test_each_gpu_task_has_a_process_of_its_own(four):
    used = {get(pid.remote()) for _ in range(4)}
    from_options = pid.options(num_gpus=1)
    pids = [get(on_gpu.remote())[2] for _ in range(4)]
    pids += [get(from_options.remote()) for _ in range(3)]
    assert len(set(pids)) == 7
    assert used.isdisjoint(pids)


def test_max_calls(four):
    @gpunb.remote(num_gpus=0.5, max_calls=0)
    def reused():
        return os.getpid(), gpunb.get_gpu_ids()

    @gpunb.remote(num_gpus=0.5, max_calls=0)
    def other():
        return os.getpid(), gpunb.get_gpu_ids()

    assert len({str(get(reused.remote())) for _ in range(4)}) == 1
    assert get(other.remote())[0] != get(reused.remote())[0]

    @gpunb.remote(max_calls=2)
    def twice():
        return os.getpid()

    pids = [get(twice.remote()) for _ in range(6)]
    assert len(set(pids)) >= 3
    assert max(map(pids.count, pids)) <= 2


def test_a_cpu_worker_is_reused(four):
    assert len({get(pid.remote()) for _ in range(10)}) == 1


# ------------------------------------------------------------------------------------------ cancel


def test_cancel_removes_a_queued_task(four, gate):
    holder = hold.options(num_gpus=4).remote(gate, "holder")
    gate.await_("holder")
    queued = on_gpu.remote()
    gpunb.cancel(queued)
    with pytest.raises(TaskCancelledError, match="on_gpu"):
        get(queued)
    gate.open()
    assert get(holder) == [0, 1, 2, 3]


def test_cancel_lets_finally_run(four, gate):
    @gpunb.remote(num_gpus=1)
    def careful(gate):
        try:
            gate.enter("begun")
        finally:
            gate.note("cleaned up")

    ref = careful.remote(gate)
    gate.await_("begun")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert gate.came("cleaned up")


def test_cancel_at_every_moment(four):
    """An interrupt that comes before the task has begun is not lost."""

    @gpunb.remote(num_gpus=0.25)
    def forever():
        threading.Event().wait(PATIENCE * 3)

    for step in range(24):
        ref = forever.remote()
        time.sleep(step * 0.0003)
        gpunb.cancel(ref)
        with pytest.raises(TaskCancelledError):
            get(ref)


def test_cancel_by_force(four, gate):
    @gpunb.remote(num_gpus=1)
    def stubborn(gate):
        while True:
            try:
                gate.enter("begun")
            except KeyboardInterrupt:
                gate.note("ignored")

    ref = stubborn.remote(gate)
    gate.await_("begun")
    gpunb.cancel(ref)
    gate.await_("ignored")
    gpunb.cancel(ref, force=True)
    with pytest.raises(TaskCancelledError):
        get(ref)


@pytest.mark.parametrize("recursive", [True, False])
def test_cancel_reaches_submitted_tasks(four, gate, recursive):
    @gpunb.remote(num_gpus=1)
    def parent(gate, box):
        box.append(hold.remote(gate, "child"))
        Path(gate.folder / "new").write_bytes(pickle.dumps(box[0].id))
        Path(gate.folder / "new").rename(gate.folder / "ref")
        gpunb.get(box[0])

    ref = parent.remote(gate, [])
    gate.await_("child")
    eventually((gate.folder / "ref").exists, "the ref of the child")
    child = gpunb.ObjectRef(pickle.loads((gate.folder / "ref").read_bytes()))
    gpunb.cancel(ref, recursive=recursive)
    with pytest.raises(TaskCancelledError):
        get(ref)
    if recursive:
        with pytest.raises(TaskCancelledError):
            get(child)
    else:
        gate.open()
        assert get(child) == [1]


def test_cancel_of_a_finished_task_or_a_put_value_changes_nothing(four):
    ref = same.remote(1)
    assert get(ref) == 1
    gpunb.cancel(ref)
    put = gpunb.put(2)
    gpunb.cancel(put)
    assert get([ref, put]) == [1, 2]
    with pytest.raises(TypeError, match="ObjectRef"):
        gpunb.cancel(1)


def test_tasks_that_need_a_cancelled_task_fail(four, gate):
    ref = hold.remote(gate, 1)
    after = same.remote(ref)
    gate.await_(1)
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(after)


def test_an_interrupt_spares_the_next_task(four, gate):
    for _ in range(20):
        refs = [same.remote(i) for i in range(50)]
        for ref in refs[::2]:
            gpunb.cancel(ref)
        assert [get(ref) for ref in refs[1::2]] == list(range(1, 50, 2))
        for ref in refs[::2]:
            try:
                get(ref)
            except TaskCancelledError:
                pass


# ----------------------------------------------------------------------------- devices of a worker


class Reads:
    """Is unpickled as what the variable says at that moment."""

    def __reduce__(self):
        return os.getenv, ("CUDA_VISIBLE_DEVICES",)


def test_the_variables_are_set_before_anything_is_unpickled(four):
    @gpunb.remote(num_gpus=2)
    def look(seen):
        return seen, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]

    assert get(look.remote(Reads())) == ("0,1", "0,1", "PCI_BUS_ID")


def test_the_variables_are_set_before_anything_is_imported(four, tmp_path, monkeypatch):
    (tmp_path / "reads_at_import.py").write_text(
        "import os\nseen = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    @gpunb.remote(num_gpus=0.5)
    def look():
        import reads_at_import

        return reads_at_import.seen

    assert get(look.remote()) == "0"


def test_a_task_without_a_device_sees_none(four, monkeypatch):
    @gpunb.remote
    def look():
        return gpunb.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")

    assert get(look.remote()) == ([], "")
    assert gpunb.get_gpu_ids() == []


def test_ids_are_whole_numbers_ascending(four):
    ids = get(on_gpu.options(num_gpus=4).remote())[0]
    assert ids == [0, 1, 2, 3]
    assert all(type(each) is int for each in ids)


def test_four_quarters_run_at_once(four, gate):
    refs = [hold.remote(gate, i) for i in range(4)]
    for i in range(4):
        gate.await_(i)
    assert [job["gpus"] for job in gpunb.status()["running"]] == [[[0, 0.25]]] * 4
    gate.open()
    assert get(refs) == [[0]] * 4


def test_two_halves_share_a_device(four, gate):
    refs = [hold.options(num_gpus=0.5).remote(gate, i) for i in range(3)]
    for i in range(3):
        gate.await_(i)
    gate.open()
    assert get(refs) == [[0], [0], [1]]


def test_accelerator_types_choose_the_device(four):
    typed = {kind: on_gpu.options(accelerator_type=kind) for kind in ("V100", "A100")}
    assert get(typed["V100"].remote())[0] == [2]
    assert get(typed["A100"].remote())[0] == [0]
    # The one before may not be gone yet.
    assert get(on_gpu.options(accelerator_type=["H100", "V100"]).remote())[0] in ([2], [3])
    with pytest.raises(InfeasibleRequestError, match="H100"):
        on_gpu.options(accelerator_type="H100").remote()


def test_gpu_memory_gives_a_share_of_a_device(four):
    need = on_gpu.options(gpu_memory="20GiB")
    assert get(need.remote())[0] == [0]
    with pytest.raises(InfeasibleRequestError, match="GiB"):
        on_gpu.options(gpu_memory="80GiB").remote()


def test_environment_variables_of_a_task(four):
    @gpunb.remote(runtime_env={"env_vars": {"OF_TASK": "yes"}})
    def look():
        return os.environ.get("OF_TASK")

    assert get(look.remote()) == "yes"
    assert get(look.options(runtime_env={"env_vars": {"OF_TASK": "2"}}).remote()) == "2"
    assert get(look.options(runtime_env={}).remote()) is None
    assert "OF_TASK" not in os.environ


@pytest.mark.parametrize("gpus", [0, 1])
def test_later_changes_of_the_kernel_are_seen(four, gpus, tmp_path, monkeypatch):
    @gpunb.remote(num_gpus=gpus)
    def look():
        return os.getcwd(), os.environ.get("SINCE_INIT"), sys.path[0], sys.argv[-1]

    get(look.remote())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SINCE_INIT", "1")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "modules"), *sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "more"])
    assert get(look.remote()) == (str(tmp_path), "1", str(tmp_path / "modules"), "more")
    monkeypatch.undo()
    directory, variable, _, last = get(look.remote())
    assert (directory, variable) == (os.getcwd(), None)
    assert last == sys.argv[-1]
    assert get(gpunb.remote(os.getenv).remote("CUDA_VISIBLE_DEVICES")) == ""


def test_random_numbers_of_workers_differ(four):
    @gpunb.remote(num_gpus=0.25)
    def draw():
        return random.random()

    assert len({get(draw.remote()) for _ in range(5)}) == 5


# ------------------------------------------------------------------------------------------ facts


def test_the_status_says_why_a_task_waits(four, gate):
    holders = [hold.options(num_gpus=0.6).remote(gate, i) for i in range(4)]
    for i in range(4):
        gate.await_(i)
    waiting = hold.options(num_gpus=0.6, name="patient").remote(gate, "late")
    upstream = same.options(name="after").remote(waiting)
    eventually(lambda: gpunb.status()["queued"] == 2)
    facts = gpunb.status()
    assert json.loads(json.dumps(facts)) == facts
    reasons = {job["name"]: job["waits_for"] for job in facts["waiting"]}
    assert "0.6" in reasons["patient"]
    assert "0.4" in reasons["patient"]
    assert f"#{waiting.task_id}" in reasons["after"]
    assert [job["pid"] > 0 for job in facts["running"]] == [True] * 4
    assert gpunb.available_resources()["GPU"] == pytest.approx(1.6)
    gate.open()
    get([*holders, waiting, upstream])
    done = {job["name"]: job["state"] for job in gpunb.status()["finished"][:6]}
    assert done == {"hold": "done", "patient": "done", "after": "done"}


def test_resources(four, gate):
    total = gpunb.cluster_resources()
    assert total["GPU"] == 4
    assert total["CPU"] == 2
    assert total["licence"] == 1
    assert total["accelerator_type:A100"] == 2
    first = hold.options(num_gpus=0, resources={"licence": 1}).remote(gate, 1)
    gate.await_(1)
    second = same.options(resources={"licence": 1}).remote(2)
    eventually(lambda: gpunb.status()["queued"] == 1)
    assert "licence" not in gpunb.available_resources()
    assert "licence" in gpunb.status()["waiting"][0]["waits_for"]
    gate.open()
    assert get([first, second]) == [[], 2]


def helper():
    return 1


def test_a_helper_that_is_redefined_is_seen(four):
    uses = gpunb.remote(lambda: helper() + 0)
    assert get(uses.remote()) == 1
    original = globals()["helper"]
    try:
        globals()["helper"] = lambda: 2
        assert get(uses.remote()) == 2
    finally:
        globals()["helper"] = original
    assert get(uses.remote()) == 1


# ------------------------------------------------------------------------ what a function refers to


def test_a_function_keeps_the_refs_that_it_refers_to(four):
    def made():
        ref = gpunb.put([1, 2, 3])

        @gpunb.remote
        def last():
            return gpunb.get(ref)[-1]

        return last.remote()

    gate = [gpunb.remote(time.sleep).remote(0.2) for _ in range(2)]  # so that it has to wait
    late = made()  # neither the function nor the ref is left here
    assert get(late) == 3
    get(gate)


def test_a_worker_runs_more_functions_than_it_caches(four):
    def times(factor):
        return gpunb.remote(lambda x: x * factor)

    functions = [times(factor) for factor in range(150)]
    for step in (1, 7, 1):
        chosen = functions[::step] + functions[:3]
        got = get([each.remote(2) for each in chosen])
        assert got == [2 * functions.index(each) for each in chosen]
