"""Sweeps of functions, with real processes."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time

import pytest

import gpunb
from gpunb.exceptions import GetTimeoutError, GpunbError, InfeasibleRequestError
from gpunb.sweeps import MedianStoppingRule
from tests import sessions
from tests.waiting import PATIENCE, Gate, eventually

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module", autouse=True)
def started(by_value):
    with sessions.session(num_cpus=2, num_gpus=2):
        yield
        sessions.assert_idle()


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.open()


def train(rate, width=1):
    sys.stdout.write(f"rate {rate}\n")
    if rate < 0:
        raise ValueError(f"a bad rate\nof {rate}")
    return {"loss": rate / width, "gpus": str(gpunb.get_gpu_ids())}


def test_all_combinations_run_and_one_that_fails_fails_alone():
    sweep = gpunb.sweep(train, {"rate": [0.1, -1], "width": [1, 2]}, num_gpus=0.25)
    assert len(sweep) == 4
    ended = list(sweep)
    assert {each.number for each in ended} == {0, 1, 2, 3}
    assert sweep.done
    assert sweep.counts() == {"done": 2, "failed": 2}
    assert [each.params for each in sweep.failed] == [
        {"rate": -1, "width": 1},
        {"rate": -1, "width": 2},
    ]
    assert sweep.failed[0].reason == "ValueError: a bad rate"
    assert isinstance(sweep.failed[0].error, ValueError)
    best = sweep.best("loss")
    assert (best.number, best.params, best.metrics["loss"]) == (1, {"rate": 0.1, "width": 2}, 0.05)
    assert best.value == {"loss": 0.05, "gpus": best.metrics["gpus"]}
    assert best.devices in ("GPU 0", "GPU 1")
    assert best.seconds > 0
    assert best.logs() == "rate 0.1\n"
    text = repr(sweep)
    assert "<Sweep train of 4 trials: 2 done, 2 failed>" in text
    assert "<Trial 2 rate=-1, width=1: failed, ValueError: a bad rate>" in text


def test_the_table_has_a_row_for_each_trial(monkeypatch):
    sweep = gpunb.sweep(train, [{"rate": 0.5}, {"rate": -1}]).wait(PATIENCE)
    frame = sweep.table()
    assert frame.loss.tolist()[0] == 0.5
    assert frame.state.tolist() == ["done", "failed"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = sweep.table()
    assert list(rows[0])[:3] == ["trial", "rate", "loss"]
    assert rows[1]["error"] == "ValueError: a bad rate"


def test_trials_come_in_the_order_of_completion(gate):
    def wait(number):
        if number == 0:
            gate.enter()
        return number

    sweep = gpunb.sweep(wait, {"number": [0, 1]}, num_cpus=0)
    trials = iter(sweep)
    assert next(trials).number == 1
    with pytest.raises(GetTimeoutError, match="goes on"):
        sweep.wait(0.01)
    gate.open()
    assert next(trials).value == 0
    assert [each.number for each in sweep] == [1, 0], "a second loop begins with the first trial"


def test_a_remote_function_gives_its_options():
    remote = gpunb.remote(num_gpus=0.5)(train)
    (trial,) = gpunb.sweep(remote, {"rate": [0.1]})
    assert trial.devices == "GPU 0"


@pytest.mark.parametrize(
    ("function", "params", "options", "kind", "text"),
    [
        (3, {"rate": [1]}, {}, TypeError, "takes a function, not 3"),
        (Gate, {"folder": [1]}, {}, TypeError, "takes a function"),
        (train, {"rate": [1], "speed": [1]}, {}, TypeError, "speed"),
        (train, {"rate": [1]}, {"num_gpu": 1}, ValueError, "num_gpu"),
        (train, {"rate": [1]}, {"num_gpus": 3}, InfeasibleRequestError, "3"),
        (train, {"rate": [1]}, {"num_returns": 2}, ValueError, "one result"),
        (train, {"rate": [1]}, {"ranks": 2}, ValueError, "one process"),
        (train, {"rate": [1]}, {"stop": "loss"}, TypeError, "stop='loss'"),
        (train, {"rate": [1]}, {"fresh": True}, ValueError, "no name="),
        (train, {"rate": [1]}, {"max_concurrent_trials": 0}, ValueError, "=0 must be"),
        (train, {"rate": [threading.Lock()]}, {}, TypeError, "argument 'rate' of train"),
        (train, None, {}, TypeError, "params="),
        (train, {"rate": [1]}, {"trials": 3}, TypeError, "study="),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(function, params, options, kind, text):
    with pytest.raises(kind, match=text):
        gpunb.sweep(function, params, **options)
    eventually(lambda: not gpunb.status()["running"] and not gpunb.status()["queued"])


def test_an_async_function_is_refused():
    async def train(rate):
        return rate

    with pytest.raises(TypeError, match="is async"):
        gpunb.sweep(train, {"rate": [1]})


def test_at_most_so_many_trials_are_under_way(gate):
    def wait(number):
        gate.enter(number)

    sweep = gpunb.sweep(wait, {"number": range(4)}, num_cpus=0, max_concurrent_trials=2)
    gate.await_(0)
    gate.await_(1)
    status = gpunb.status()
    assert len(status["running"]) + status["queued"] == 2
    gate.open()
    assert sweep.wait(PATIENCE).counts() == {"done": 4}


def test_cancel_stops_what_runs_and_keeps_results(gate):
    def wait(number):
        if number:
            gate.enter(number)
        return number

    sweep = gpunb.sweep(wait, {"number": range(4)}, num_gpus=1, max_concurrent_trials=2)
    gate.await_(1)
    gate.await_(2)
    sweep.cancel()
    sweep.wait(PATIENCE)
    assert [each.state for each in sweep.trials] == ["done", "cancelled", "cancelled", "cancelled"]
    assert sweep.best().value == 0
    assert not sweep.failed
    eventually(lambda: gpunb.available_resources().get("GPU") == 2)


# ---------------------------------------------------------------------------- intermediate values


def test_a_generator_and_report_stream_intermediate_values():
    def steps(rate):
        for step in range(3):
            yield {"loss": rate * step, "model": [1]}

    def reports(rate):
        for step in range(3):
            gpunb.report(loss=rate * step)
        return {"accuracy": 0.9}

    (trial,) = gpunb.sweep(steps, {"rate": [2]})
    assert trial.reports == [{"loss": 0}, {"loss": 2}, {"loss": 4}]
    assert trial.value == {"loss": 4, "model": [1]}
    (trial,) = gpunb.sweep(reports, {"rate": [2]})
    assert trial.reports == [{"loss": 0}, {"loss": 2}, {"loss": 4}]
    assert trial.metrics == {"loss": 4, "accuracy": 0.9}


def test_report_outside_of_a_trial_does_nothing_but_check():
    gpunb.report(loss=1)
    with pytest.raises(TypeError, match="loss is of type list"):
        gpunb.report(loss=[1])
    with pytest.raises(TypeError, match="by name"):
        gpunb.report()

    def train():
        gpunb.report(loss=1)
        return 2

    assert gpunb.get(gpunb.remote(train).remote()) == 2


def test_a_rule_stops_a_trial_and_its_device_is_free(gate):
    def train(level):
        for _ in range(5):
            gpunb.report(loss=level)
        if level == 9:
            gate.enter("bad")  # never opened for it: only a stop ends the trial
        return level

    rule = MedianStoppingRule("loss", grace_period=5, min_samples_required=2)
    sweep = gpunb.sweep(train, {"level": [1, 2, 9]}, num_gpus=1, stop=rule, max_concurrent_trials=1)
    sweep.wait(PATIENCE)
    assert [each.state for each in sweep.trials] == ["done", "done", "stopped"]
    assert sweep.trials[2].metrics == {"loss": 9}
    assert not sweep.failed
    eventually(lambda: gpunb.available_resources().get("GPU") == 2)


def test_a_rule_that_raises_is_left_out():
    def rule(trial, trials):
        raise LookupError("no such metric")

    def train(rate):
        gpunb.report(loss=rate)
        return rate

    sweep = gpunb.sweep(train, {"rate": [1, 2]}, stop=rule).wait(PATIENCE)
    assert sweep.counts() == {"done": 2}
    assert "LookupError('no such metric')" in "".join(sweep.notes)


# ----------------------------------------------------------------------------------------- resume


def test_a_named_sweep_runs_only_what_is_missing_or_has_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "ran"

    def train(rate):
        with ran.open("a") as file:
            file.write(f"{rate}\n")
        if rate == 2 and not (tmp_path / "mended").exists():
            raise ValueError("not yet")
        return {"loss": rate}

    gpunb.sweep(train, {"rate": [1, 2]}, name="digits").wait(PATIENCE)
    (tmp_path / "mended").touch()
    sweep = gpunb.sweep(train, {"rate": [1, 2, 3]}, name="digits").wait(PATIENCE)
    assert sorted(ran.read_text().split()) == ["1", "2", "2", "3"]
    assert [each.resumed for each in sweep.trials] == [True, False, False]
    assert sweep.best("loss", "max").number == 2
    assert (tmp_path / ".gpunb" / "digits.sqlite").exists()

    def train(rate):  # another function of that name
        return {"loss": -rate}

    changed = gpunb.sweep(train, {"rate": [1]}, name="digits").wait(PATIENCE)
    assert changed.best("loss").metrics == {"loss": -1}
    assert "3 results of other versions" in changed.notes[0]
    assert "gpunb: the function has changed: 3 results" in capsys.readouterr().err
    again = gpunb.sweep(train, {"rate": [1]}, name="digits", fresh=True).wait(PATIENCE)
    assert not again.trials[0].resumed


def test_a_second_sweep_with_the_name_is_refused_while_the_first_runs(tmp_path, gate):
    def wait(number):
        gate.enter()

    first = gpunb.sweep(wait, {"number": [1]}, storage=tmp_path / "a.sqlite")
    with pytest.raises(GpunbError, match=f"in use by process {os.getpid()} "):
        gpunb.sweep(wait, {"number": [1]}, storage=tmp_path / "a.sqlite")
    gate.open()
    first.wait(PATIENCE)
    second = gpunb.sweep(wait, {"number": [1]}, storage=tmp_path / "a.sqlite").wait(PATIENCE)
    assert second.trials[0].resumed


def test_a_disk_that_is_full_is_an_error_at_the_end_and_save_writes_later(tmp_path, monkeypatch):
    from gpunb.sweeps import storage

    def no_room(self):
        self.problem = self._said(storage.sqlite3.OperationalError("database or disk is full"))

    with monkeypatch.context() as full:
        full.setattr(storage.Storage, "_write", no_room)
        sweep = gpunb.sweep(train, {"rate": [1, 2]}, storage=tmp_path / "a.sqlite")
        with pytest.raises(GpunbError, match=r"2 results are only in memory.*disk is full"):
            sweep.wait(PATIENCE)
        with pytest.raises(GpunbError, match="only in memory"):
            list(sweep)
    assert sweep.best("loss").metrics["loss"] == 1
    sweep.save()
    assert sweep.wait().notes == []
    again = gpunb.sweep(train, {"rate": [1, 2]}, storage=tmp_path / "a.sqlite").wait(PATIENCE)
    assert [each.resumed for each in again.trials] == [True, True]


PROGRAM = """
import os, sys, time, gpunb
def train(rate):
    if rate == 3 and "SWEEP_HANGS" in os.environ:
        time.sleep(60)
    return {{"loss": rate}}
for trial in gpunb.sweep(train, {{"rate": [1, 2, 3]}}, storage={path!r}):
    sys.stdout.write(f"{{trial.number}} {{trial.resumed}}\\n")
    sys.stdout.flush()
"""


def test_a_kernel_that_is_killed_loses_no_result_that_was_seen(tmp_path, capsys):
    program = PROGRAM.format(path=str(tmp_path / "a.sqlite"))
    init = "import gpunb; gpunb.init(num_cpus=2, num_gpus=0, preload=())"
    with sessions.running(init + program, env={"SWEEP_HANGS": "1"}) as process:
        seen = {process.stdout.readline() for _ in range(2)}
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    assert seen == {"0 False\n", "1 False\n"}
    exec(program, {"__name__": "__main__"})
    assert capsys.readouterr().out == "0 True\n1 True\n2 False\n"


SHARED = """
from pathlib import Path
import gpunb
from tests.waiting import Gate
def train(rate):
    if rate == 2:
        Gate(Path({folder!r})).enter()
    return {{"loss": rate}}
sweep = gpunb.sweep(train, {{"rate": [1, 2]}}, storage={folder!r} + "/a.sqlite").wait()
"""


def test_a_second_process_is_told_who_has_the_file_and_loses_nothing_of_it(tmp_path, gate):
    program, notebook = SHARED.format(folder=str(tmp_path)), tmp_path / "train.ipynb"
    notebook.touch()
    init = "import gpunb; gpunb.init(num_cpus=2, num_gpus=0, preload=())"
    with sessions.running(init + program, env={"JPY_SESSION_NAME": str(notebook)}) as process:
        gate.await_()
        with pytest.raises(GpunbError) as refused:
            exec(program, {"__name__": "__main__"})
        holder = f"process {process.pid} on {socket.gethostname()} ({notebook}) since "
        assert holder in str(refused.value)
        gate.open()
        assert process.wait(PATIENCE) == 0, process.stderr.read()
    namespace = {"__name__": "__main__"}
    exec(program, namespace)
    assert [(each.resumed, each.value) for each in namespace["sweep"].trials] == [
        (True, {"loss": 1}),
        (True, {"loss": 2}),
    ]


# ---------------------------------------------------------------------------------------- watching


def test_a_view_is_told_of_the_start_and_end_of_trials_and_not_often(gate):
    def wait(number):
        gate.enter(number)

    seen = []
    sweep = gpunb.sweep(wait, {"number": [1, 2]}, num_gpus=0.5)
    sweep.watch(lambda: seen.append((time.monotonic(), sweep.counts())))
    eventually(lambda: seen and seen[-1][1] == {"running": 2}, "the view shows running trials")
    assert sweep.trials[0].devices == "GPU 0"
    gate.open()
    sweep.wait(PATIENCE)
    eventually(lambda: seen[-1][1] == {"done": 2})
    times = [at for at, _ in seen[:-1]]
    assert all(after - before > 0.45 for before, after in itertools.pairwise(times))


def test_a_sweep_within_a_task_runs():
    def nested(numbers):
        return sum(each.value for each in gpunb.sweep(square, {"number": numbers}))

    def square(number):
        return number**2

    assert gpunb.get(gpunb.remote(nested).remote([1, 2, 3]), timeout=PATIENCE) == 14
