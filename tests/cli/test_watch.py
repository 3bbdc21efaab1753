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
from gpunb.cli.machine import gather
from gpunb.cli.watch import WatchedSessions, watch
from gpunb.live.text import joined, lane, lines
from gpunb.scheduler.markup import control
from tests.waiting import PATIENCE, Gate, eventually


def device(held: list[list[Any]], others: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {**picture(1, 0)["devices"][0], "held": held, "others": others or []}


def test_a_lane_is_drawn_to_scale() -> None:
    facts = picture(1, 5)
    kernel = {"pid": 9, "user": "eve", "notebook": "/a/b.ipynb", "share": 0.25}
    drawn = lane(device([[1, 0.5]], [kernel]), facts, 42)
    assert joined(drawn) == "|[#1 train_with_rate…[b.ipynb …          |"
    assert [len(text) for text, _ in drawn] == [1, 20, 10, 10, 1]
    assert [style for _, style in drawn] == ["", "rest1", "soft", "", ""]


@pytest.mark.parametrize(
    ("now", "drawn"),
    [
        (None, [("job1", 20)]),
        (5 * GIB, [("job1", 10), ("rest1", 10)]),
        (99 * GIB, [("job1", 20)]),
    ],
)
def test_a_share_shows_the_memory_that_its_job_uses(now: int | None, drawn: Any) -> None:
    facts = picture(1, 5)
    facts["running"][0]["memory"] = {"now": now, "peak": now, "share": 10 * GIB}
    shown = lane(device([[1, 0.5]]), facts, 42)
    assert [(style, len(text)) for text, style in shown if style] == drawn


def test_a_job_in_several_ranks_is_one_line() -> None:
    facts = picture(1, 5)
    rank = {"state": "running", "seconds": 1.0, "devices": []}
    facts["running"] = facts["running"][:1]
    facts["running"][0].update(name="train", ranks=[{**rank, "rank": each} for each in range(4)])
    (line,) = (text for each in lines(facts, 100) if "▶" in (text := joined(each)))
    assert "#1 train in 4 ranks" in line


def test_control_characters_in_names_are_escaped() -> None:
    facts = picture(1, 5)
    facts["session"]["notebook"] = "/a/\x1b[2J.ipynb"
    facts["running"][0]["name"] = facts["finished"][0]["name"] = "\x1b]0;title\x07\nx"
    facts["warnings"] = ["\x9b31m"]
    kernel = {"pid": 9, "user": "\x1beve", "notebook": "b", "share": 0.25}
    facts["devices"] = [{**device([[1, 0.5]], [kernel]), "type": "\x1b[1m"}]
    shown = [piece for line in lines(facts, 100) for piece, _ in line]
    assert [control(each) for each in shown] == [None] * len(shown)
    assert r"\x1b[2J.ipynb " in shown
    assert any(r"[b (\x1beve)" in each for each in shown)
    assert len(joined(lane(facts["devices"][0], facts, 42))) == 42


@pytest.mark.parametrize("width", [0, 5, 40, 200])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_a_lane_has_its_width_whatever_it_shows(width: int, count: int) -> None:
    drawn = lane(device([[at, 1 / count] for at in range(count)]), picture(1, 5), width)
    assert sum(len(text) for text, _ in drawn) == max(12, width)


def test_the_lines_of_a_session_show_devices_jobs_and_reasons() -> None:
    facts = picture(2, 60)
    printed = [joined(each) for each in lines(facts, 100, passed=10)]
    assert printed[0].startswith("sweep over learning rates.ipynb pid 4711: 24 running, 12 waiting")
    assert printed[1] == (
        "GPU 0  H200, 20 GiB of 141 GiB, 37 % in use, 61 °C, 412 W, 0.04 free  ▄▄▄▄▄▄▄▄▄▄▅▅"
    )
    assert printed[3] == f"  also here: process 99 (grace), {3 * GIB >> 30} GiB"
    assert "  ▶ #1 train_with_rate_0 In[0]  GPU 0 (0.08)  22 s  0 B now  9 GiB at most" in printed
    assert "  and 16 more running" in printed
    assert "  and 4 more waiting" in printed
    assert any("needs 0.5 of one GPU" in each for each in printed)
    assert any(each.startswith("  ✗ #20") for each in printed)
    assert any("used 3 of 10 GiB: 0.2 would do" in each for each in printed)
    assert printed[-1].startswith("  ! #7 train")
    assert max(map(len, printed)) <= 100


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def test_watch_once_prints_the_sessions_and_ends(
    folder: Path, start: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
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
        printed: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()))
        reader.start()
        try:
            eventually(lambda: "no session of gpunb runs\n" in printed)
            start(simulate="1xA100:40GiB")
            ref = gpunb.remote(num_gpus=0.5)(enter).remote()
            eventually(lambda: any("▶ #" in each and "enter" in each for each in printed))
            gate.open()
            gpunb.get(ref, timeout=PATIENCE)
            eventually(lambda: any("✓ #" in each and "enter" in each for each in printed))
            gpunb.shutdown()
            eventually(lambda: printed[-2:].count("no session of gpunb runs\n"))
        finally:
            process.terminate()
            reader.join(PATIENCE)


def test_with_json_each_change_is_a_line(folder: Path, start: Callable[..., Any]) -> None:
    command = [sys.executable, "-m", "gpunb", "status", "--watch", "--json"]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        printed: list[dict[str, Any]] = []

        def read() -> None:
            printed.extend(json.loads(line) for line in process.stdout or ())

        reader = threading.Thread(target=read)
        reader.start()

        def runs(facts: dict[str, Any]) -> bool:
            return any(each.get("pid") == os.getpid() for each in facts["kernels"])

        try:
            eventually(lambda: printed and not runs(printed[-1]))
            assert printed[-1].keys() == gather().keys()
            start(simulate="1xA100:40GiB")
            eventually(lambda: runs(printed[-1]))
            gpunb.shutdown()
            eventually(lambda: not runs(printed[-1]))
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
        finally:
            process.terminate()
            reader.join(PATIENCE)


def test_an_unchanged_machine_is_not_printed_again(
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
    monkeypatch.setattr("gpunb.cli.watch.WatchedSessions.look", lambda _: None)
    monkeypatch.setattr("gpunb.cli.watch.LOOK", 0)
    assert watch(as_json=True) == 0
    printed = [json.loads(line)["kernels"] for line in capsys.readouterr().out.splitlines()]
    assert printed == [[kernel], [other], [kernel]]


def test_a_session_that_ends_is_forgotten(folder: Path, start: Callable[..., Any]) -> None:
    start(simulate="1xA100:40GiB")
    sessions = WatchedSessions()
    eventually(lambda: sessions.look() or (sessions.take(0.1) and sessions.snapshots))
    gpunb.shutdown()
    eventually(lambda: sessions.take(0.1) and not sessions.snapshots)
