"""``gpunb logs``: what a job has shown, in a terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpunb import cli
from gpunb.control import client
from gpunb.engine import job_log as logs
from gpunb.exceptions import GpunbError
from gpunb.head import discovery
from tests.notebook.kernels import Kernel, kernel
from tests.sessions import ROOT
from tests.waiting import PATIENCE, Gate

CELL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.waiting import Gate
print("first", flush=True)
Gate(Path.cwd()).enter()
print("second")
6 * 7
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("logs")
    prepare = "import gpunb\n%load_ext gpunb\ngpunb.init(simulate='1xA100:40GiB')"
    with (
        pytest.MonkeyPatch.context() as patch,
        kernel(folder, f"{prepare}\n%config GpuMagics.headless = False") as running,
    ):
        patch.chdir(folder)
        yield running


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["logs", *arguments]) == 1
    out, err = capsys.readouterr()
    assert not out
    return err


@pytest.mark.kernel
def test_logs_follow_prints_a_job_to_its_end(
    notebook: Kernel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gate = Gate(Path.cwd())
    notebook.ok(f"%%gpu 0.5 --bg -n train\n{CELL}")
    job = str(notebook.value("_.id"))
    gate.await_()
    assert cli.main(["logs", f"#{job}"]) == 0
    assert capsys.readouterr().out == "first\n"
    command = [sys.executable, "-m", "gpunb", "logs", job, "--follow"]
    with (
        (tmp_path / "err").open("w+") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"  # before the rest is there
        gate.open()
        assert process.stdout.read() == "second\n42\n"
        assert process.wait(PATIENCE) == 0
        err.seek(0)
        assert err.read() == f"#{job} train done\n"
    assert cli.main(["logs", job, "--follow"]) == 0
    assert capsys.readouterr() == ("first\nsecond\n42\n", f"#{job} train done\n")


@pytest.mark.kernel
def test_a_job_without_output_is_named(
    notebook: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.ok("%%gpu 0.5 -n quiet\nx = 1")
    job = notebook.value("gpunb.status()['finished'][0]['id']")
    assert cli.main(["logs", str(job)]) == 0
    assert capsys.readouterr() == ("", f"#{job} quiet is done and has shown nothing\n")


@pytest.mark.kernel
def test_unknown_jobs_and_sessions_are_refused(
    notebook: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing is kept of what job #999 has shown" in failure(capsys, "999")
    assert "process 1 has no session of gpunb" in failure(capsys, "1", "--of", "1")
    assert "no head process 'x' runs: name a kernel by its pid" in failure(capsys, "1", "--of", "x")
    assert "leave out --follow" in failure(capsys, "1", "--follow", "--json")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["logs", "train"])
    assert "'train' is no number of a job, such as 7" in capsys.readouterr().err
    pid = notebook.value("__import__('os').getpid()")
    with pytest.raises(GpunbError, match="position=-1 must be a whole number, 0 or more"):
        client.ask(pid, {"do": "logs", "job": 1, "position": -1})


def test_logs_without_sessions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / "none"))
    assert "none of your kernels has a session now" in failure(capsys, "7")


def test_a_job_number_of_several_sessions_needs_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job of each is #1."""
    printed = {"name": "train", "state": "done", "text": "ran\n", "truncated": True, "position": 9}

    def ask(pid: int, request: Mapping[str, Any]) -> Any:
        if request["do"] == "status":
            return {"session": {"notebook": "/home/ada/sweep.ipynb"}}
        if pid == 3:
            raise GpunbError("nothing is kept of what job #1 has shown")
        return printed

    running = [client.RunningSession(pid, Path()) for pid in (1, 2, 3)]
    monkeypatch.setattr(client, "sessions", lambda: running)
    monkeypatch.setattr(client, "ask", ask)
    monkeypatch.setattr(discovery, "running", lambda: [discovery.RunningHead("lab", 2)])
    read_from = failure(capsys, "1")
    assert "name one with --of: pid 1 (sweep.ipynb), head process 'lab' (pid 2)" in read_from
    monkeypatch.setattr(discovery, "pid_of", {"lab": 2}.get)
    assert cli.main(["logs", "1", "--of", "lab"]) == 0
    out, err = capsys.readouterr()
    assert out == "ran\n"
    assert "the beginning of what #1 train has shown is left out" in err


def test_only_the_end_of_a_long_log_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LONGEST", 10)
    log = logs.Log()
    assert log.read_from() == {"text": "", "truncated": False, "position": 0}
    for number in range(8):
        log.add(("text", "stdout", {"text": f"line{number}\n"}))
    first = log.read_from()
    assert (first["text"], first["truncated"]) == ("ne6\nline7\n", True)
    log.add(("show", "clear_output", {"wait": False}))
    log.add(("show", "execute_result", {"data": {"text/plain": "42", "text/html": "<b>42</b>"}}))
    more = log.read_from(first["position"])
    assert (more["text"], more["truncated"]) == ("42\n", False)
    assert log.read_from(more["position"]) == {**more, "text": ""}
