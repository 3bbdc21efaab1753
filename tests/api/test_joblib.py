"""joblib's backend, with joblib itself and with scikit-learn."""

from __future__ import annotations

import multiprocessing
import os
import threading

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_config

import gpunb
import gpunb.joblib
from gpunb.exceptions import WorkerCrashedError
from tests import sessions
from tests.waiting import Gate, eventually

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module", autouse=True)
def started(by_value):
    with sessions.session(num_cpus=2, simulate="2xA100:40GiB"):
        yield


def square(x):
    return x * x


def where(x):
    return gpunb.get_gpu_ids(), os.getpid()


def fail(x):
    if x == 3:
        raise LookupError("three")
    return x


def test_results_in_order():
    with parallel_config("gpunb"):
        assert Parallel()(delayed(square)(i) for i in range(40)) == [i * i for i in range(40)]


def test_as_an_argument_of_parallel():
    assert Parallel(2, backend="gpunb")(delayed(square)(i) for i in range(5)) == [0, 1, 4, 9, 16]


def greet(text):
    os.environ["GREETING"] = text


def greeting():
    return os.environ.get("GREETING")


def test_initializer_runs_first_in_each_process():
    with parallel_config("gpunb", n_jobs=2, initializer=greet, initargs=("hello",)):
        assert set(Parallel()(delayed(greeting)() for _ in range(8))) == {"hello"}
    parallel = Parallel(2, backend="gpunb", initializer=greet, initargs=("good day",))
    assert set(parallel(delayed(greeting)() for _ in range(8))) == {"good day"}


def test_on_shares_of_devices():
    with parallel_config("gpunb", num_gpus=0.25):
        found = Parallel(batch_size=1)(delayed(where)(i) for i in range(16))
        assert joblib.effective_n_jobs(-1) == 8
    assert all(len(ids) == 1 for ids, _ in found)
    assert {ids[0] for ids, _ in found} <= {0, 1}
    assert os.getpid() not in {pid for _, pid in found}
    assert len({pid for _, pid in found}) <= 8
    sessions.assert_idle()


def test_a_batch_is_shown_as_joblibs_and_is_not_run_again(tmp_path):
    def crash(x):
        (tmp_path / "made").open("a").write("once ")
        os._exit(3)

    crashes = pytest.raises(WorkerCrashedError, match=r"^joblib \(#\d+\): its worker")
    with parallel_config("gpunb", num_gpus=0.25, n_jobs=2), crashes:
        Parallel()(delayed(crash)(i) for i in range(1))
    assert (tmp_path / "made").read_text() == "once "


def test_max_calls_1_gives_each_batch_a_fresh_process():
    with parallel_config("gpunb", num_gpus=0.5, max_calls=1):
        found = Parallel(batch_size=1)(delayed(where)(i) for i in range(4))
    assert len({pid for _, pid in found}) == 4


def test_one_job_with_a_device_runs_in_a_worker():
    with parallel_config("gpunb", num_gpus=1, n_jobs=1):
        found = Parallel()(delayed(where)(i) for i in range(2))
    assert all(len(ids) == 1 for ids, _ in found)


def test_one_job_without_a_device_runs_in_this_process():
    with parallel_config("gpunb", n_jobs=1):
        assert Parallel()(delayed(where)(0) for _ in range(2)) == [([], os.getpid())] * 2


def test_an_exception_of_a_call_is_raised_by_parallel():
    with parallel_config("gpunb"), pytest.raises(LookupError, match="three"):
        Parallel()(delayed(fail)(i) for i in range(20))
    with parallel_config("gpunb"):
        assert Parallel()(delayed(square)(i) for i in range(3)) == [0, 1, 4]
    sessions.assert_idle()


def test_results_can_be_taken_as_they_come():
    with parallel_config("gpunb"):
        results = Parallel(return_as="generator")(delayed(square)(i) for i in range(10))
        assert next(results) == 0
        assert list(results) == [i * i for i in range(1, 10)]


def test_a_call_of_parallel_can_time_out(tmp_path):
    gate = Gate(tmp_path)
    with parallel_config("gpunb"), pytest.raises(multiprocessing.TimeoutError):
        Parallel(timeout=0.3)(delayed(gate.enter)(i) for i in range(2))
    gate.open()
    sessions.assert_idle()


def test_calls_within_calls():
    def rows(n):
        return Parallel(2)(delayed(square)(i) for i in range(n))

    with parallel_config("gpunb"):
        assert Parallel()(delayed(rows)(n) for n in range(4)) == [
            [i * i for i in range(n)] for n in range(4)
        ]


def test_calls_within_calls_may_use_the_backend_by_its_name():
    def squares(n):
        from joblib import Parallel, delayed

        return Parallel(2, backend="gpunb")(delayed(pow)(i, 2) for i in range(n))

    with parallel_config("gpunb", max_calls=1):
        assert Parallel(2)(delayed(squares)(n) for n in range(2, 4)) == [[0, 1], [0, 1, 4]]


def test_threads_within_a_call():
    def limit():
        return os.environ.get("OMP_NUM_THREADS")

    with parallel_config("gpunb", inner_max_num_threads=3):
        assert set(Parallel()(delayed(limit)() for _ in range(4))) == {"3"}


def test_arrays_travel_in_shared_memory():
    data = np.ones((1000, 500))

    def total(array, i):
        array[0, 0] += 1  # its own copy of that page
        return float(array.sum()) + i

    with parallel_config("gpunb"):
        results = Parallel(batch_size=1)(delayed(total)(data, i) for i in range(6))
    assert results == [500_001.0 + i for i in range(6)]
    assert data[0, 0] == 1


def test_a_grid_search():
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    X, y = load_iris(return_X_y=True)  # noqa: N806 - its usual name
    # What earlier versions ask of the usual solver, SciPy calls deprecated.
    model = LogisticRegression(solver="newton-cg", max_iter=500)
    search = GridSearchCV(model, {"C": [0.1, 1.0, 10.0]}, cv=3)
    here = search.fit(X, y).cv_results_["mean_test_score"]
    with parallel_config("gpunb", num_gpus=0.25):
        there = search.fit(X, y).cv_results_["mean_test_score"]
    assert np.array_equal(here, there)
    sessions.assert_idle()


@pytest.mark.parametrize(
    ("options", "expected_message"), [({"colour": 1}, "colour"), ({"num_gpus": 1.5}, "1.5")]
)
def test_bad_options(options, expected_message):
    with parallel_config("gpunb", **options), pytest.raises(ValueError, match=expected_message):
        Parallel()(delayed(square)(i) for i in range(3))


def test_an_interrupt_stops_running_batches(tmp_path):
    gate = Gate(tmp_path)
    stopped = threading.Event()

    def stop():
        eventually(lambda: gate.count() == 2)
        stopped.set()
        import _thread

        _thread.interrupt_main()

    thread = threading.Thread(target=stop)
    thread.start()
    with parallel_config("gpunb"), pytest.raises(KeyboardInterrupt):
        Parallel(batch_size=1)(delayed(gate.enter)(i) for i in range(6))
    thread.join()
    assert stopped.is_set()
    sessions.assert_idle()
    assert gate.count() == 2
    assert not gate.is_open(), "the two would not have ended by themselves"


def stop(x):
    raise KeyboardInterrupt(x)


def test_an_interrupt_raised_in_a_call_is_raised_by_parallel():
    with parallel_config("gpunb"), pytest.raises(KeyboardInterrupt):
        Parallel(2)(delayed(stop)(i) for i in range(3))
    sessions.assert_idle()


def test_fresh_script_needs_no_other_import():
    text = """
    import gpunb.joblib
    from joblib import Parallel, delayed, effective_n_jobs, parallel_config

    if __name__ == "__main__":
        with parallel_config("gpunb"):
            print(effective_n_jobs(-1), Parallel()(delayed(abs)(-i) for i in range(3)))
    """
    done = sessions.script(text, env={"GPUNB_NUM_CPUS": "2", "GPUNB_NUM_GPUS": "0"})
    assert done.stdout == "2 [0, 1, 2]\n", done.stderr


def test_worker_of_multiprocessing_does_the_work_itself_or_says_what_to_do():
    text = """
    import multiprocessing, os, warnings
    from joblib import Parallel, delayed, parallel_config

    def work(options):
        import gpunb, gpunb.joblib
        with warnings.catch_warnings(record=True) as noted, parallel_config("gpunb", **options):
            warnings.simplefilter("always")
            try:
                own = set(Parallel(2)(delayed(os.getpid)() for _ in range(3))) == {os.getpid()}
            except gpunb.exceptions.GpunbError as error:
                return str(error)
        return own, [str(each.message).partition(":")[0] for each in noted]

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for options in {}, {"num_gpus": 1}:
                print(pool.apply(work, (options,)))
    """
    done = sessions.script(text, env={"GPUNB_NUM_CPUS": "2", "GPUNB_NUM_GPUS": "1"})
    plain, with_device = done.stdout.splitlines()
    expected_message = "a worker process of multiprocessing cannot have processes of its own"
    assert plain == str((True, [expected_message])), done.stderr
    assert with_device.startswith("gpunb cannot start in a worker process of multiprocessing")
