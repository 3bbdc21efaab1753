"""Libraries that take an executor: the examples of docs/executors.md."""

from __future__ import annotations

import os
import warnings

import pytest

import gpunb
from tests import sessions

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module", autouse=True)
def started(by_value):
    with sessions.session(num_cpus=2, simulate="2xA100:40GiB"):
        yield


def test_dask_runs_its_tasks_on_an_executor():
    import dask

    @dask.delayed
    def load(part):
        return list(range(part * 10, part * 10 + 10))

    @dask.delayed
    def where(rows):
        return sum(rows), gpunb.get_gpu_ids(), os.getpid()

    @dask.delayed
    def total(parts):
        return sum(each for each, *_ in parts), parts

    with gpunb.Executor(num_gpus=0.5, max_calls=0) as executor, dask.config.set(scheduler=executor):
        (result, parts), *_ = dask.compute(total([where(load(i)) for i in range(6)]))
    assert result == sum(range(60))
    assert all(len(ids) == 1 and pid != os.getpid() for _, ids, pid in parts)
    sessions.assert_idle()


def test_dask_raises_the_errors_of_its_tasks():
    import dask

    @dask.delayed
    def fail():
        raise LookupError("none")

    with gpunb.Executor(num_gpus=0.5) as executor, pytest.raises(LookupError, match="none"):
        dask.compute(fail(), scheduler=executor)
    sessions.assert_idle()


def test_optuna_runs_trials_on_devices():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        import optuna

    def objective(x, y):
        return (x - 2) ** 2 + y, gpunb.get_gpu_ids()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    seen = set()
    with gpunb.Executor(num_gpus=0.25) as executor:
        for _ in range(3):
            trials = [study.ask() for _ in range(4)]
            futures = [
                executor.submit(
                    objective,
                    trial.suggest_float("x", -10, 10),
                    trial.suggest_categorical("y", [0, 1]),
                )
                for trial in trials
            ]
            for trial, future in zip(trials, futures, strict=True):
                value, ids = future.result()
                seen.update(ids)
                study.tell(trial, value)
    assert len(study.trials) == 12
    assert study.best_value == min(each.value for each in study.trials)
    assert seen <= {0, 1}
    sessions.assert_idle()
