"""`gpunb doctor --gpu-report`, with a stand-in for the device."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hardware
from gpunb import cli
from gpunb.accelerators.detection import Detection
from gpunb.cli import gpu_report, gpu_trials
from tests import needs
from tests.scheduler.world import machine

QUICK = """
import sys
from gpunb import cli
from gpunb.cli import gpu_trials
gpu_trials.ROUNDS = gpu_trials.STEPS = 1  # PyTorch takes long to import on a busy machine
sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_trials_pass_on_the_stand_in(tmp_path: Path) -> None:
    needs.pytorch()
    (tmp_path / "run").mkdir(mode=0o700)
    path = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, "-c", QUICK, "doctor", "--gpu-report", str(path)],
        env=hardware.variables(rehearse=True, folder=str(tmp_path / "run")),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    text = path.read_text()
    assert text.startswith("# gpunb on NVIDIA H200\n")
    assert "- driver: stand-in" in text
    assert "| figures are those of nvidia-smi | ok |" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["trial"] for each in report["trials"]] == list(gpu_trials.TRIALS)
    assert {each["result"] for each in report["trials"]} == {"ok"}


def fails(_: Any) -> dict[str, str]:
    raise gpu_trials.Failure(f"{getpass.getuser()} has no {Path.home()}/data/x.py here")


def test_a_trial_that_fails_is_in_the_report_without_names(monkeypatch: Any) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ann.lee")
    monkeypatch.setattr(socket, "gethostname", lambda: "lab-7")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann.lee"))
    (device,) = machine([("A100", 40)]).devices
    result = gpu_report.tried(fails, device)
    assert (result["result"], result["says"]) == ("failed", "Failure: ... has no .../x.py here")
    assert (
        gpu_report.nameless("at lab-7:80, 5 1/s, tests/gpu/x.py")
        == "at ...:80, 5 1/s, tests/gpu/x.py"
    )
    result["seconds"] = 0.25
    facts = {"card": "A100", "python": "3.11"}
    trials = [
        {"trial": "it works", **result},
        {"trial": "it is fast", "result": "ok", "seconds": 2},
    ]
    text = "\n".join(gpu_report.text({"machine": facts, "trials": trials}))
    assert "| it works | failed | 0.25 |  |\n| it is fast | ok | 2 |  |" in text
    assert text.endswith("it works:\n\n```\nFailure: ... has no .../x.py here\n```")


@pytest.mark.parametrize("lacks", ["an NVIDIA GPU", "PyTorch for CUDA"])
def test_what_a_report_needs_is_said(
    lacks: str, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    if lacks == "PyTorch for CUDA":
        device = replace(machine([("A100", 40)]).devices[0], vendor="nvidia")
        found = Detection((device,))
        monkeypatch.setattr(gpu_report.accelerators, "detect", lambda: found)
        monkeypatch.setattr(gpu_report.importlib.util, "find_spec", lambda _: None)
    assert cli.main(["doctor", "--gpu-report", str(tmp_path / "report.md")]) == 1
    assert f"gpunb doctor: --gpu-report needs {lacks}" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()
