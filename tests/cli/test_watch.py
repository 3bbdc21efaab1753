"""``gpunb status --watch``: the lanes it draws, and that it follows the sessions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpunb
from benchmarks.pictures import GIB, picture
from gpunb.cli.lanes import joined, lane, lines
from gpunb.cli.machine import gather
from gpunb.cli.watch import Sessions, watch
from tests.waiting import PATIENCE, Gate, eventually


def device(held: list[list[Any]], others: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {**picture(1, 0)["devices"][0], "held": held, "others": others or []}


def test_a_lane_is_drawn_to_scale() -> None:
    facts = picture(1, 5)
    kernel = {"pid": 9, "user": "eve", "notebook": "/a/b.ipynb", "share": 0.25}
    drawn = lane(device([[1, 0.5]], [kernel]), facts, 42)
    assert joined(drawn) == "|[#1 train_with_rate…[b.ipynb …          |"
    assert [len(text) for text, _ in drawn] == [1, 20, 10, 10, 1]
    assert [style for _, style in drawn] == ["", "job1", "soft", "", ""]


@pytest.mark.parametrize("width", [0, 5, 40, 200])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_a_lane_has_its_width_whatever_it_shows(width: int, count: int) -> None:
    drawn = lane(device([[at, 1 / count] for at in range(count)]), picture(1, 5), width)
    assert sum(len(text) for text, _ in drawn) == max(12, width)


def test_what_is_said_of_a_session() -> None:
    facts = picture(2, 60)
    said = [joined(each) for each in lines(facts, 100, passed=10)]
    assert said[0].startswith("sweep over learning rates.ipynb pid 4711: 24 running, 12 waiting")
    assert said[1] == "GPU 0  H200, 20 GiB of 141 GiB, 37 % in use, 61 °C, 0.04 free"
    assert said[3] == f"  also here: process 99 (grace), {3 * GIB >> 30} GiB"
    assert "  ▶ #1 train_with_rate_0 In[0]  GPU 0 (0.08)  22 s  0 B now  9 GiB at most" in said
    assert "  and 16 more running" in said
    assert "  and 4 more waiting" in said
    assert any("needs 0.5 of one GPU" in each for each in said)
    assert any(each.startswith("  ✗ #20") for each in said)
    assert any("used 3 of 10 GiB: 0.2 would do" in each for each in said)
    assert said[-1].startswith("  ! #7 train")
    assert max(map(len, said)) <= 100


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def test_once(folder: Path, start: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(once=True) == 0
    assert capsys.readouterr().out.strip() == "no session of gpunb runs"
    start(simulate="1xA100:40GiB")
    eventually(lambda: watch(once=True) == 0 and "GPU 0  A100" in capsys.readouterr().out)


def test_it_follows_the_sessions(folder: Path, start: Callable[..., Any]) -> None:
    gate = Gate(folder)

    def enter() -> None:
        gate.enter()

    command = [sys.executable, "-m", "gpunb", "status", "--watch"]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        said: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: said.extend(process.stdout or ()))
        reader.start()
        try:
            eventually(lambda: "no session of gpunb runs\n" in said)
            start(simulate="1xA100:40GiB")
            ref = gpunb.remote(num_gpus=0.5)(enter).remote()
            eventually(lambda: any("▶ #" in each and "enter" in each for each in said))
            gate.open()
            gpunb.get(ref, timeout=PATIENCE)
            eventually(lambda: any("✓ #" in each and "enter" in each for each in said))
            gpunb.shutdown()
            eventually(lambda: said[-2:].count("no session of gpunb runs\n"))
        finally:
            process.terminate()
            reader.join(PATIENCE)


def test_for_programs_each_change_is_a_line(folder: Path, start: Callable[..., Any]) -> None:
    command = [sys.executable, "-m", "gpunb", "status", "--watch", "--json"]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        said: list[dict[str, Any]] = []

        def read() -> None:
            said.extend(json.loads(line) for line in process.stdout or ())

        reader = threading.Thread(target=read)
        reader.start()

        def runs(facts: dict[str, Any]) -> bool:
            return any(each.get("pid") == os.getpid() for each in facts["kernels"])

        try:
            eventually(lambda: said and not runs(said[-1]))
            assert said[-1].keys() == gather().keys()
            start(simulate="1xA100:40GiB")
            eventually(lambda: runs(said[-1]))
            gpunb.shutdown()
            eventually(lambda: not runs(said[-1]))
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
        finally:
            process.terminate()
            reader.join(PATIENCE)


def test_what_has_not_changed_is_not_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = {"pid": 1, "running": [{"id": 7, "seconds": 1.0}]}
    later = {"pid": 1, "running": [{"id": 7, "seconds": 2.0}]}
    other = {"pid": 1, "running": []}
    looks = iter([[kernel], [later], [other], [other], [kernel]])

    def look() -> dict[str, Any]:
        try:
            return {"devices": [], "kernels": next(looks), "notes": []}
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("gpunb.cli.watch.gather", look)
    monkeypatch.setattr("gpunb.cli.watch.Sessions.look", lambda _: None)
    monkeypatch.setattr("gpunb.cli.watch.LOOK", 0)
    assert watch(as_json=True) == 0
    said = [json.loads(line)["kernels"] for line in capsys.readouterr().out.splitlines()]
    assert said == [[kernel], [other], [kernel]]


def test_a_session_that_ends_is_forgotten(folder: Path, start: Callable[..., Any]) -> None:
    start(simulate="1xA100:40GiB")
    sessions = Sessions()
    eventually(lambda: sessions.look() or (sessions.take(0.1) and sessions.snapshots))
    gpunb.shutdown()
    eventually(lambda: sessions.take(0.1) and not sessions.snapshots)
