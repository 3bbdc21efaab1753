"""Sweeps of an Optuna study: asked, told and pruned through Optuna."""

from __future__ import annotations

import warnings

import pytest

import gpunb
from gpunb.api.executor import room
from tests import sessions
from tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module")
def optuna():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@pytest.fixture(scope="module", autouse=True)
def started(by_value, optuna):
    with sessions.session(num_cpus=2, num_gpus=1):
        yield
        sessions.assert_idle()


def objective(trial):
    rate = trial.suggest_float("rate", 0.1, 1.0, log=True)
    depth = trial.suggest_int("depth", 1, 3)
    kind = trial.suggest_categorical("kind", ["adam", None])
    trial.set_user_attr("number", trial.number)
    assert trial.params == {"rate": rate, "depth": depth, "kind": kind}
    return rate * depth


def test_the_study_chooses_the_parameters_and_is_told_the_values(optuna):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    sweep = gpunb.sweep(objective, study=study, trials=5, num_gpus=0.5).wait(PATIENCE)
    assert sweep.counts() == {"done": 5}
    assert [each.params for each in study.trials] == [each.params for each in sweep.trials]
    assert [each.value for each in study.trials] == [each.value for each in sweep.trials]
    assert [each.user_attrs for each in study.trials] == [{"number": n} for n in range(5)]
    assert sweep.best().value == study.best_value


def test_no_more_trials_are_asked_for_than_fit(optuna):
    study = optuna.create_study()
    most = []

    class Counting(optuna.samplers.RandomSampler):
        def before_trial(self, study, trial):
            running = optuna.trial.TrialState.RUNNING
            most.append(len(study.get_trials(states=[running], deepcopy=False)))

    study.sampler = Counting()
    gpunb.sweep(objective, study=study, trials=5, num_gpus=0.5).wait(PATIENCE)
    assert max(most) == 2


def test_a_pruned_trial_is_stopped_and_one_that_fails_or_has_no_value_is_told(optuna):
    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step == 1

    def objective(trial):
        kind = trial.suggest_categorical("kind", ["pruned", "failed", "text", "good"])
        if kind == "failed":
            raise ValueError("no")
        for step in range(3 if kind == "pruned" else 1):
            trial.report(10 - step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return "text" if kind == "text" else 3.0

    study = optuna.create_study(pruner=Pruner())
    for kind in ("pruned", "failed", "text", "good"):
        study.enqueue_trial({"kind": kind})
    sweep = gpunb.sweep(objective, study=study, trials=4, max_concurrent_trials=1).wait(PATIENCE)
    states = [each.state.name for each in study.trials]
    assert states == ["PRUNED", "FAIL", "FAIL", "COMPLETE"]
    assert [each.state for each in sweep.trials] == ["stopped", "failed", "failed", "done"]
    assert sweep.trials[0].reports == [{"value": 10}, {"value": 9}]
    assert study.trials[0].intermediate_values == {0: 10.0, 1: 9.0}
    assert sweep.trials[2].reason.startswith("ValueError: the objective returned 'text'")


def test_an_error_of_optuna_is_an_error_of_the_trial_that_asks(optuna):
    def objective(trial):
        return trial.suggest_float("rate", 1.0, 0.0)

    study = optuna.create_study()
    (trial,) = gpunb.sweep(objective, study=study, trials=1)
    assert trial.state == "failed"
    assert "low" in trial.reason
    assert study.trials[0].state.name == "FAIL"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({}, ValueError, "trials=None"),
        ({"trials": 0}, ValueError, "trials=0"),
        ({"trials": 1, "name": "digits"}, ValueError, "keeps results"),
        ({"trials": 1, "params": {"rate": [1]}}, ValueError, "do not go with study="),
        ({"trials": 1, "study": 3}, TypeError, "study=3 must be an Optuna study"),
    ],
)
def test_bad_input_is_refused(optuna, options, kind, text):
    with pytest.raises(kind, match=text):
        gpunb.sweep(objective, **{"study": optuna.create_study(), **options})


def test_with_a_share_that_sizes_itself_one_trial_for_each_device_is_under_way():
    assert room({"num_gpus": "auto"}) == 1
    assert room({"num_gpus": 0.25}) == 4
