"""The command for a machine with a GPU, with a stand-in for the GPU and without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hardware
from tests import needs
from tests.sessions import ROOT

METADATA = "Metadata-Version: 2.1\nName: carried\nVersion: 1\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with the wheel of a package that no index has."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "carried-1-py3-none-any.whl", "w") as wheel:
        info = {"METADATA": METADATA, "WHEEL": WHEEL, "RECORD": ""}
        for name, text in info.items():
            wheel.writestr(f"carried-1.dist-info/{name}", text)
        wheel.writestr("carried.py", "here = True\n")
    return folder


def isolated() -> list[str]:
    """The beginning of a command that has no network, where the system allows that."""
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*command, "true"], check=False, capture_output=True)
    return command if tried.returncode == 0 else []


def test_the_command_makes_an_environment_and_a_report(tmp_path: Path, wheels: Path) -> None:
    needs.pytorch()
    folders = {"out": tmp_path / "out", "env": tmp_path / "env", "wheels": wheels}
    given = [word for name, path in folders.items() for word in (f"--{name}", str(path))]
    command = [sys.executable, "-m", "benchmarks.hardware", "--rehearse", *given]
    done = subprocess.run(
        [*isolated(), *command, "--only", "figures"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    log = (tmp_path / "out" / "log.txt").read_text()
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{log}"
    python = tmp_path / "env" / "bin" / "python"
    assert subprocess.run([python, "-c", "import carried, torch"], check=False).returncode == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["machine"]["devices"].startswith("NVIDIA H200")
    parts = {each["name"]: each for each in report["parts"]}
    assert {each["outcome"] for each in parts["figures"]["tests"]} == {"passed"}
    assert len(parts["figures"]["tests"]) == 2
    assert parts["memory back"]["state"] == "not run"
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.startswith("# gpunb on NVIDIA H200")
    assert "Tests: 2 passed, 0 failed, 0 skipped." in text
    assert "| memory in use: gpunb, nvidia-smi | 1424, 1424 MiB | passed |" in text


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Any) -> hardware.Run:
    """A run of two parts, the first of which sleeps too long."""
    parts = {"slow": ("slow.py", 0.3), "next": ("slow.py", 60)}
    monkeypatch.setattr(hardware, "PARTS", parts)
    monkeypatch.setattr(hardware, "LEAST", 0.2)
    monkeypatch.setattr(hardware, "machine", lambda: {"nvidia-smi": "none"})
    run = hardware.Run(tmp_path, time.monotonic() + 0.4)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    command = run.command
    monkeypatch.setattr(run, "command", lambda _, *given: command(sleep, *given))
    return run


def test_a_part_that_takes_too_long_is_cut_and_the_rest_is_not_run(
    tmp_path: Path, run: hardware.Run
) -> None:
    assert not run.all(["slow", "next"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["state"] for each in report["parts"]] == ["cut", "not run"]
    assert report["parts"][1]["note"] == "no time was left"


def test_the_report_of_a_run_that_is_ended_has_the_tests_before_the_end(
    tmp_path: Path, run: hardware.Run, monkeypatch: Any
) -> None:
    fast = {"test": "t.py::fast", "outcome": "passed", "figures": {"time [s]": 0.5}, "says": ""}
    wrong = {"test": "t.py::wrong", "outcome": "failed", "figures": {}, "says": "E   no device"}

    def ends(_: Any, limit: float, more: Any, meanwhile: Any) -> None:
        lines = json.dumps(fast) + "\n" + json.dumps(wrong) + "\n" + json.dumps(fast)[:9]
        (tmp_path / "tests.jsonl").write_text(lines)
        meanwhile()
        sys.exit(143)  # as the handler of SIGTERM does

    monkeypatch.setattr(run, "command", ends)
    with pytest.raises(SystemExit):
        run.all(["slow", "next"])
    text = (tmp_path / "report.md").read_text()
    assert "Parts: 1 cut, 1 not run. Tests: 1 passed, 1 failed, 0 skipped." in text
    assert "- **slow** cut: the run ended in this part\n- `t.py::wrong`: no device" in text
    assert "| time | 0.5 s | passed |" in text


def test_a_part_that_does_not_exist_is_named(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["hardware", "--only", "memory back,nothing"])
    with pytest.raises(SystemExit):
        hardware.main()
    assert "no part is 'nothing': one device, memory back" in capsys.readouterr().err
