"""Sweeps of functions and cells on a cluster of several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.sweeps import MedianStoppingRule
from tests.shells import run
from tests.waiting import Gate

pytestmark = [pytest.mark.needs_ray, pytest.mark.usefixtures("by_value", "nothing_left")]
WITHIN = 120


def test_trials_stream_reports_and_a_rule_stops_one(tmp_path: Path) -> None:
    gate = Gate(tmp_path)  # never opened: only a stop ends the last trial

    def train(level: int) -> int:
        print("level", level)  # noqa: T201
        for _ in range(5):
            gpunb.report(loss=level)
        if level == 9:
            gate.enter()
        return level

    rule = MedianStoppingRule("loss", grace_period=5, min_samples_required=2)
    params = {"level": [1, 2, 9]}
    sweep = gpunb.sweep(train, params, num_gpus=1, stop=rule, max_concurrent_trials=1)
    sweep.wait(WITHIN)
    assert [each.state for each in sweep.trials] == ["done", "done", "stopped"]
    assert sweep.trials[0].reports == [{"loss": 1}] * 5
    assert sweep.trials[1].logs() == "level 2\n"


def test_a_cell_runs_once_for_each_combination_and_resumes(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = "%%gpu 0.5 --sweep rate=0,1,2 --out loss --name digits"
    for resumed in ([False, False, False], [False, True, True]):
        result, _ = run(shell, f"{line}\nloss = 6 / rate")
        assert result.success
        sweep = shell.user_ns["sweep"]
        assert sweep.counts() == {"failed": 1, "done": 2}
        assert sweep.trials[0].reason == "ZeroDivisionError: division by zero"
        assert [each.value for each in sweep.trials[1:]] == [{"loss": 6.0}, {"loss": 3.0}]
        assert [each.resumed for each in sweep.trials] == resumed
