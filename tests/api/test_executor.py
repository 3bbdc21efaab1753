"""`gpunb.Executor` is an executor of the standard library."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import threading

import pytest

import gpunb
from gpunb.exceptions import InfeasibleRequestError, WorkerCrashedError
from tests import sessions
from tests.waiting import PATIENCE, Gate, eventually

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module", autouse=True)
def started(by_value):
    with sessions.session(num_cpus=2, num_gpus=2):
        yield


@pytest.fixture
def executor():
    with gpunb.Executor() as executor:
        yield executor


def add(a, b=1):
    return a + b


def fail(text):
    raise LookupError(text)


def through(gate, value=None):
    gate.enter(value)
    return value


def test_submit(executor):
    assert executor.submit(add, 1, b=2).result(PATIENCE) == 3
    assert executor.submit(pow, 2, 5).result(PATIENCE) == 32


def test_names_of_parameters_do_not_collide(executor):
    def fn(self, fn, args, initializer):
        return self, fn, args, initializer

    assert executor.submit(fn, self=1, fn=2, args=3, initializer=4).result(PATIENCE) == (1, 2, 3, 4)


def test_a_call_runs_in_another_process(executor):
    assert executor.submit(os.getpid).result(PATIENCE) != os.getpid()


def test_an_exception_of_a_call_is_that_of_its_future(executor):
    future = executor.submit(fail, "gone")
    with pytest.raises(LookupError, match="gone"):
        future.result(PATIENCE)
    assert isinstance(future.exception(), LookupError)


def test_what_cannot_be_pickled_fails_alone(executor):
    future = executor.submit(add, threading.Lock())
    with pytest.raises(TypeError, match="lock"):
        future.result(PATIENCE)
    assert executor.submit(add, 1).result(PATIENCE) == 2


def test_a_crash_fails_alone(executor):
    future = executor.submit(os._exit, 3)
    with pytest.raises(WorkerCrashedError):
        future.result(PATIENCE)
    assert executor.submit(add, 1).result(PATIENCE) == 2


@pytest.mark.parametrize(("options", "times"), [({}, 1), ({"max_retries": 2}, 3)])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_call_that_crashes_is_not_repeated_without_max_retries(tmp_path, options, times, kept):
    def crash():
        with (tmp_path / "made").open("a") as file:
            file.write("once\n")
        os._exit(3)

    with gpunb.Executor(num_gpus=1, max_calls=kept, **options) as executor:
        future = executor.submit(crash)
    assert isinstance(future.exception(), WorkerCrashedError)
    assert (tmp_path / "made").read_text() == "once\n" * times


def test_map(executor):
    assert list(executor.map(add, range(5), range(5))) == [0, 2, 4, 6, 8]
    assert list(executor.map(add, range(50), chunksize=8)) == list(range(1, 51))
    assert list(executor.map(add, [])) == []
    with pytest.raises(LookupError):
        list(executor.map(fail, ["a", "b"]))
    with pytest.raises(ValueError, match="chunksize=0"):
        executor.map(add, [1], chunksize=0)


def test_map_begins_at_once_and_gives_up_in_time(executor, tmp_path):
    gate = Gate(tmp_path)
    results = executor.map(through, [gate], [1], timeout=0.05)
    with pytest.raises(TimeoutError):
        next(results)
    gate.open()


def test_wait_and_as_completed(executor, tmp_path):
    gate = Gate(tmp_path)
    slow, fast = executor.submit(through, gate), executor.submit(add, 1)
    done, rest = concurrent.futures.wait([slow, fast], PATIENCE, concurrent.futures.FIRST_COMPLETED)
    assert (done, rest) == ({fast}, {slow})
    gate.open()
    assert list(concurrent.futures.as_completed([slow], PATIENCE)) == [slow]


def test_a_waiting_call_can_be_cancelled_and_a_running_one_cannot(tmp_path):
    gate = Gate(tmp_path)
    with gpunb.Executor(num_gpus=2) as executor:
        first, second = (executor.submit(through, gate, each) for each in (1, 2))
        eventually(first.running)
        assert not second.running()
        assert not first.cancel()
        assert second.cancel()
        assert second.cancelled()
        assert second.cancel()
        assert concurrent.futures.wait([second], PATIENCE).done == {second}
        assert list(concurrent.futures.as_completed([second], PATIENCE)) == [second]
        with pytest.raises(concurrent.futures.CancelledError):
            second.result()
        gate.open()
        assert first.result(PATIENCE) == 1
        assert not first.cancel()
        assert first.done()
        assert not first.running()
    sessions.assert_idle()


def test_callbacks_may_submit(executor):
    chained = []

    def more(future):
        if future.result() < 5:
            executor.submit(add, future.result()).add_done_callback(more)
        else:
            chained.append(future.result())

    executor.submit(add, 0).add_done_callback(more)
    eventually(lambda: chained == [5])


def test_a_callback_may_exit_and_nothing_ends(executor, caplog):
    seen = []
    future = executor.submit(add, 1)
    future.add_done_callback(lambda _: sys.exit())
    future.add_done_callback(seen.append)
    assert future.result(PATIENCE) == 2
    assert executor.submit(add, 2).result(PATIENCE) == 3
    eventually(lambda: seen == [future], "the other callback was called")
    assert "exception calling callback" in caplog.text


def test_callbacks_may_wait_for_others(executor):
    seen = []
    future = executor.submit(add, 1)
    future.add_done_callback(lambda _: seen.append(gpunb.get(gpunb.put(7))))
    eventually(lambda: seen == [7])


def test_max_workers_limits_the_calls_at_once(tmp_path):
    gate = Gate(tmp_path)
    with gpunb.Executor(max_workers=1) as executor:
        futures = [executor.submit(through, gate, each) for each in range(4)]
        eventually(futures[0].running)
        assert len(gpunb.status()["running"]) + gpunb.status()["queued"] == 1
        assert futures[3].cancel()
        gate.open()
        assert [each.result(PATIENCE) for each in futures[:3]] == [0, 1, 2]


def test_each_call_has_its_devices_and_a_fresh_process():
    def where():
        return gpunb.get_gpu_ids(), os.getpid()

    with gpunb.Executor(num_gpus=1) as executor:
        found = [executor.submit(where).result(PATIENCE) for _ in range(3)]
    assert all(len(ids) == 1 for ids, _ in found)
    assert len({pid for _, pid in found}) == 3
    with gpunb.Executor(num_gpus=1, max_calls=0) as executor:
        assert len({executor.submit(os.getpid).result(PATIENCE) for _ in range(3)}) == 1


def test_an_initializer_is_called_once_a_process():
    def begin(value):
        import builtins

        builtins.begun = [*getattr(builtins, "begun", []), value]

    def seen():
        import builtins

        return os.getpid(), builtins.begun

    with gpunb.Executor(initializer=begin, initargs=(7,)) as executor:
        found = [each.result(PATIENCE) for each in [executor.submit(seen) for _ in range(8)]]
    assert all(values == [7] for _, values in found)


def test_a_call_after_shutdown_is_refused(executor):
    future = executor.submit(add, 1)
    executor.shutdown()
    assert future.done()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(add, 1)
    executor.shutdown()


def test_shutdown_can_cancel_waiting_calls(tmp_path):
    gate = Gate(tmp_path)
    executor = gpunb.Executor(num_gpus=2)
    futures = [executor.submit(through, gate, each) for each in range(5)]
    eventually(futures[0].running)
    executor.shutdown(wait=False, cancel_futures=True)
    assert [each.cancelled() for each in futures] == [False, True, True, True, True]
    gate.open()
    executor.shutdown()
    assert futures[0].result(0) == 0


def test_a_call_that_can_never_run_is_refused_at_once():
    with gpunb.Executor(num_gpus=3) as executor, pytest.raises(InfeasibleRequestError, match="3"):
        executor.submit(add, 1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_workers": 0}, ValueError, "max_workers=0"),
        ({"max_workers": 1.5}, TypeError, "max_workers"),
        ({"num_gpus": 1.5}, ValueError, "1.5"),
        ({"initializer": 3}, TypeError, "initializer"),
        ({"num_returns": 2}, ValueError, "num_returns"),
        ({"colour": 1}, ValueError, "colour"),
    ],
)
def test_bad_options(settings, error, message):
    with pytest.raises(error, match=message):
        gpunb.Executor(**settings)


class Calls:
    def __call__(self):
        return 1


def running():
    return [job["name"] for job in gpunb.status()["running"]]


def waiting():
    return [job["name"] for job in gpunb.status()["waiting"]]


def test_calls_have_the_names_of_their_functions(tmp_path):
    gate = Gate(tmp_path)
    with gpunb.Executor(num_gpus=1) as executor:
        executor.submit(through, gate)
        eventually(lambda: running() == ["through"])
        executor.submit(functools.partial(through, gate))
        eventually(lambda: running() == ["through"] * 2)
        executor.map(through, [gate] * 2, chunksize=2)
        executor.submit(Calls())
        eventually(lambda: waiting() == ["through", "Calls"])
        gate.open()


def test_nothing_is_left_of_a_forgotten_executor():
    before = threading.active_count()
    for _ in range(3):
        gpunb.Executor().submit(add, 1).result(PATIENCE)
    eventually(lambda: threading.active_count() <= before)
    sessions.assert_idle()


def test_submitted_calls_are_done_before_the_interpreter_ends(tmp_path):
    """They are held until the interpreter calls its exit functions."""
    text = """
        import atexit, pathlib, gpunb
        from tests.waiting import Gate

        folder = pathlib.Path(FOLDER)
        gate = Gate(folder)

        def work(n):
            gate.enter(n)
            with (folder / "done").open("a") as file:
                file.write(f"{n} ")

        if __name__ == "__main__":
            gpunb.init(num_cpus=1, num_gpus=0, preload=())
            executor = gpunb.Executor()
            for n in range(20):
                executor.submit(work, n)
            atexit.register(gate.open)  # the last, so it is called first
    """
    ended = sessions.script(text.replace("FOLDER", repr(str(tmp_path))))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "done").read_text().split() == [str(n) for n in range(20)]


class RaisesWhilePickled:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def test_an_argument_that_cannot_be_pickled_leaves_nothing_queued():
    with gpunb.Executor() as executor:
        failed = executor.submit(abs, RaisesWhilePickled(SystemExit(3)))
        with pytest.raises(TypeError, match=r"RaisesWhilePickled.* raised SystemExit: 3"):
            failed.result(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            executor.submit(abs, RaisesWhilePickled(KeyboardInterrupt()))
        assert executor.submit(abs, -1).result(PATIENCE) == 1
