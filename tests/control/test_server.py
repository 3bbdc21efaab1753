"""The control socket of a session, and its answers to other processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.control import client
from gpunb.engine import publisher
from gpunb.exceptions import ActorDiedError, GpunbError, TaskCancelledError
from tests.sessions import alive, script
from tests.waiting import PATIENCE, Gate, eventually

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder for one test."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def ask(what: str, **more: Any) -> Any:
    return client.ask(os.getpid(), {"do": what, **more}, timeout=PATIENCE)


def hold(gate: Gate, name: object = "task") -> Any:
    """A remote function that waits at the gate."""

    def waits() -> None:
        gate.enter(name)

    return gpunb.remote(num_gpus=0.5)(waits)


def test_a_session_is_found_while_it_runs(start: Start, folder: Path) -> None:
    assert client.sessions() == []
    start(simulate="1xA100:40GiB")
    (found,) = eventually(client.sessions)
    assert found == client.RunningSession(os.getpid(), folder / "kernels" / f"{os.getpid()}.sock")
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o600
    assert ask("status")["session"]["pid"] == os.getpid()
    gpunb.shutdown()
    assert not found.path.exists()
    assert client.sessions() == []
    with pytest.raises(GpunbError, match=f"process {os.getpid()} has no session"):
        ask("status")


def test_very_long_runtime_path_can_be_used(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / ("long" * 40)))
    start(simulate="1xA100:40GiB")
    eventually(client.sessions)
    assert ask("status")["counts"]["running"] == 0


def test_socket_of_a_dead_session_is_removed(folder: Path) -> None:
    path = client.path_of(1)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    assert client.sessions() == []
    assert not path.exists()


def test_socket_of_a_killed_kernel_is_removed(folder: Path) -> None:
    ended = script(
        "import gpunb, os, signal\n"
        "gpunb.init(simulate='1xA100:40GiB')\n"
        "gpunb.get(gpunb.remote(len).remote('a'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        env={"GPUNB_RUNTIME_DIR": str(folder)},
    )
    assert ended.returncode == -9
    (left,) = (folder / "kernels").iterdir()
    assert client.sessions() == []
    assert not left.exists()


def test_session_without_a_control_socket_runs_with_a_warning(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / "file"))
    start(num_gpus=1)
    assert gpunb.get(gpunb.remote(len).remote("four"), timeout=PATIENCE) == 4
    assert any("cannot look at this session" in each for each in gpunb.status()["warnings"])


def test_cancel_and_interrupt_requests_stop_jobs(start: Start, gate: Gate) -> None:
    start(simulate="1xA100:40GiB")
    first, second = (hold(gate, name).remote() for name in "ab")
    third = hold(gate, "c").remote()
    gate.await_("a")
    gate.await_("b")
    jobs = {job["id"]: job for job in (*ask("status")["running"], *ask("status")["waiting"])}
    a, b, c = sorted(jobs)
    assert ask("cancel", job=c) is None
    assert ask("cancel", job=b, force=True) is None
    assert ask("interrupt", job=a) is None
    for ref in (first, second, third):
        with pytest.raises(TaskCancelledError):
            gpunb.get(ref, timeout=PATIENCE)
    with pytest.raises(GpunbError, match=f"there is no job #{a} that is not over"):
        ask("interrupt", job=a)


def test_kill_request_ends_an_actor(start: Start) -> None:
    start(simulate="1xA100:40GiB")

    @gpunb.remote(num_gpus=0.5)
    class Counter:
        def pid(self) -> int:
            return os.getpid()

    counter = Counter.remote()
    pid = gpunb.get(counter.pid.remote(), timeout=PATIENCE)
    (actor,) = ask("status")["actors"]
    assert (actor["kind"], actor["gpus"]) == ("actor", [[0, 0.5]])
    assert ask("kill", actor=actor["id"]) is None
    eventually(lambda: not alive(pid), "the process is gone")
    with pytest.raises(ActorDiedError):
        gpunb.get(counter.pid.remote(), timeout=PATIENCE)
    eventually(lambda: not ask("status")["actors"])
    with pytest.raises(GpunbError, match="no actor or session of cells"):
        ask("kill", actor=actor["id"])


def test_stop_request_ends_a_sweep_and_starts_no_more_trials(start: Start, gate: Gate) -> None:
    start(simulate="1xA100:40GiB")

    def trial(at: int) -> None:
        gate.enter(at)

    sweep = gpunb.sweep(trial, {"at": range(9)}, num_gpus=0.5, max_concurrent_trials=3)
    for at in range(2):
        gate.await_(at)
    (group,) = ask("status")["groups"]
    assert ask("stop", sweep=group["id"]) is None
    sweep.wait(PATIENCE)
    assert sweep.counts() == {"cancelled": 9}
    assert gate.count() == 2
    with pytest.raises(GpunbError, match=f"there is no sweep '{group['id']}' that is not over"):
        ask("stop", sweep=group["id"])


def test_release_request_ends_idle_workers(start: Start) -> None:
    start(simulate="1xA100:40GiB")
    kept = gpunb.remote(num_gpus=1, max_calls=0)(os.getpid)
    pid = gpunb.get(kept.remote(), timeout=PATIENCE)
    assert len(ask("release")["released"]) == 1
    eventually(lambda: not alive(pid), "the worker is gone")
    assert ask("release") == {"released": []}
    assert gpunb.get(kept.remote(), timeout=PATIENCE) != pid


def test_release_all_request_ends_the_session(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUNB_SIMULATE", "1xV100:16GiB")
    start(simulate="1xA100:40GiB")
    eventually(client.sessions)
    ask("release", all=True)
    eventually(lambda: not gpunb.is_initialized(), "the session has ended")
    eventually(lambda: not client.sessions())
    try:
        for count in (1, 0):  # and another may begin, which says so
            assert gpunb.get(gpunb.remote(len).remote("four"), timeout=PATIENCE) == 4
            reported = capsys.readouterr().err
            assert reported.count("was ended by `gpunb release --all`") == count
            gpunb.shutdown()
    finally:
        gpunb.shutdown()


REFUSED: list[tuple[Any, str]] = [
    ({"do": "dance"}, "'dance' cannot be asked for: known are watch"),
    ({}, "None cannot be asked for"),
    ([1], "must be a JSON object"),
    ({"do": "cancel"}, "job=None must be a number"),
    ({"do": "cancel", "job": True}, "job=True must be a number"),
    ({"do": "kill", "actor": "7"}, "actor='7' must be a number"),
    ({"do": "stop", "sweep": 7}, "there is no sweep '7' that is not over"),
    ({"do": "logs", "job": 10**9}, "nothing is kept"),
    ({"do": "watch", "interval": "often"}, "must be a number of seconds"),
]


def test_invalid_requests_are_refused_with_the_reason(start: Start) -> None:
    start(num_gpus=1)
    eventually(client.sessions)
    for request, message in REFUSED:
        with pytest.raises(GpunbError, match=message):
            client.ask(os.getpid(), request, timeout=PATIENCE)


@contextlib.contextmanager
def connected() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(client.path_of(os.getpid())))
        yield sock


def test_invalid_bytes_do_no_harm(start: Start) -> None:
    start(num_gpus=1)
    eventually(client.sessions)
    gone = (BrokenPipeError, ConnectionResetError)
    for garbage in (b"not json\n", b"\xff\xfe\n", b"x" * 200_000, b""):
        with connected() as sock, contextlib.suppress(*gone):
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    assert ask("status")["counts"]["running"] == 0


def test_watcher_gets_a_snapshot_only_after_a_change(start: Start, gate: Gate) -> None:
    start(simulate="1xA100:40GiB")
    reported: list[tuple[float, dict[str, Any]]] = []

    def look() -> None:
        reported.extend((time.monotonic(), each) for each in client.watch(os.getpid()))

    watcher = threading.Thread(target=look)
    eventually(client.sessions)
    begin = time.monotonic()
    watcher.start()
    eventually(lambda: reported)
    ref = hold(gate).remote()
    asked = time.monotonic()
    eventually(lambda: reported[-1][1]["counts"]["running"] == 1, "the job is seen")
    seen = next(when for when, each in reported if each["counts"]["running"])
    assert seen - asked < 0.4 + PATIENCE / 10  # a loaded machine may be late
    many = [gpunb.remote(len).remote("x") for _ in range(200)]
    gpunb.get(many, timeout=PATIENCE)
    gate.open()
    gpunb.get(ref, timeout=PATIENCE)
    eventually(lambda: reported[-1][1]["counts"]["finished"] == 201)
    assert len(reported) <= 1 + (reported[-1][0] - begin) / publisher.INTERVAL
    eventually(lambda: time.monotonic() > reported[-1][0] + 1.5, "no news for longer than a pulse")
    gpunb.shutdown()
    watcher.join(PATIENCE)
    assert not watcher.is_alive()


def test_no_snapshot_is_made_without_a_watcher(start: Start) -> None:
    start(num_gpus=1)
    from gpunb.protocol import backend

    current: Any = backend.current()
    asked: list[str] = []
    get = current.engine.facts.get
    current.engine.facts.get = lambda what, *more: asked.append(what) or get(what, *more)
    gpunb.get(gpunb.remote(len).remote("four"), timeout=PATIENCE)
    assert asked == []
    watch = current.watch(lambda snapshot: True)
    eventually(lambda: asked)
    watch.stop()
    eventually(lambda: not current.engine.publisher.watched, "it is forgotten")


def test_a_watcher_that_reads_slowly_gets_the_latest(start: Start) -> None:
    start(simulate="2xA100:40GiB")
    eventually(client.sessions)
    with connected() as sock:
        sock.sendall(json.dumps({"do": "watch"}).encode() + b"\n")
        for _ in range(20):
            gpunb.get([gpunb.remote(len).remote("x") for _ in range(50)], timeout=PATIENCE)
        assert ask("status")["counts"]["finished"] == 1000
        printed = b""
        while b'"finished": 1000' not in printed:
            printed = (printed + sock.recv(1 << 20))[-(1 << 22) :]


@pytest.mark.parametrize("what", ["the socket", "all"])
def test_a_session_whose_socket_was_removed_can_be_asked_again(
    start: Start, folder: Path, what: str
) -> None:
    start(simulate="1xA100:40GiB")
    (found,) = eventually(client.sessions)
    if what == "all":
        shutil.rmtree(folder)
    else:
        found.path.unlink()
    assert eventually(client.sessions) == [found]
    assert ask("status")["session"]["pid"] == os.getpid()
    gpunb.shutdown()
    assert not found.path.exists()
