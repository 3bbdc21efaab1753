"""NVIDIA's MPS for a session, with a stand-in for its control program."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunb.accelerators import mps
from gpunb.exceptions import GpunbError
from gpunb.scheduler.resources import Device
from tests.sessions import ROOT, alive
from tests.waiting import eventually

CARD = Device("GPU-1", 0, "NVIDIA A100", "A100", 40 * 2**30, "nvidia", capability="8.0")
SLICE = Device("MIG-1", "MIG-1", "slice", vendor="nvidia", part_of="GPU-1")
OLD = Device("GPU-2", 1, "NVIDIA P100", vendor="nvidia", capability="6.0")

CONTROL = """
    import os, signal, sys, time
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
    mark = os.path.join(folder, "control.pid")
    if sys.argv[1:] == ["-f"]:
        if os.environ.get("MPS_FAILS"):
            sys.exit("no device can be used")
        with open(os.environ["MPS_LOG"], "a") as log:
            names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_LOG_DIRECTORY")
            log.write(f"{os.getpid()} {[os.environ.get(name) for name in names]}\\n")
        server = os.fork()
        if not server:
            time.sleep(600)
        with open(mark + ".new", "w") as file:
            file.write(f"{os.getpid()} {server}")
        os.rename(mark + ".new", mark)
        time.sleep(600)
    command = sys.stdin.read()
    if not os.path.exists(mark):
        sys.exit("Cannot find MPS control daemon process")
    if command.startswith("quit") and not os.environ.get("MPS_STUBBORN"):
        for pid in open(mark).read().split():
            os.kill(int(pid), signal.SIGKILL)
"""


class Machine:
    """Where the control program is a stand-in, which writes down how it was started."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        program = folder / "bin" / mps.PROGRAM
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(CONTROL)}")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "MPS_LOG": self.log}

    def started(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, str(value))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "MPS_FAILS", "MPS_STUBBORN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mps, "_DEFAULT", str(tmp_path / "default"))
    return made


@pytest.fixture
def server(machine: Machine) -> Iterator[Any]:
    made = mps.start([CARD], release="6.8.0")
    yield made
    made.stop()


def pids(server: mps.Mps) -> list[int]:
    return [int(each) for each in (Path(server._folder) / "control.pid").read_text().split()]


def test_mps_runs_until_it_is_stopped(server):
    running = pids(server)
    assert all(map(alive, running))
    folder = Path(server._folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.stop()
    assert not any(map(alive, running))
    assert not folder.exists()
    server.stop()


def test_a_fork_of_this_process_does_not_keep_mps_running(server):
    running = pids(server)
    again = os.dup(server._guard.stdin.fileno())
    try:
        server.stop()
        assert not any(map(alive, running))
    finally:
        os.close(again)


def test_mps_sees_all_devices_in_the_order_of_the_bus(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    made = mps.start([CARD], release="6.8.0")
    made.stop()
    (printed,) = machine.started()
    assert "[None, 'PCI_BUS_ID', '" in printed


def test_a_control_program_that_does_not_quit_is_killed(machine, monkeypatch):
    monkeypatch.setenv("MPS_STUBBORN", "1")
    monkeypatch.setattr(mps, "_STOP", 60.0)
    made = mps.start([CARD], release="6.8.0")
    running = pids(made)
    made.stop()
    eventually(lambda: not any(map(alive, running)), "all of them are gone")


def test_mps_ends_with_a_killed_session(machine):
    text = f"""
        import sys
        from gpunb.accelerators import mps
        from gpunb.scheduler.resources import Device
        made = mps.start([{CARD!r}], release="6.8.0")
        print(made._folder, flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        running = [int(each) for each in (folder / "control.pid").read_text().split()]
        process.send_signal(signal.SIGKILL)
    eventually(lambda: not any(map(alive, running)), "all of them are gone")
    eventually(lambda: not folder.exists(), "the folder is gone")


def test_a_client_is_limited_to_its_share(server):
    variables = server.environment(CARD, 2500)
    assert variables == {
        "CUDA_MPS_PIPE_DIRECTORY": server._folder,
        "CUDA_MPS_LOG_DIRECTORY": server._folder,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=10240M",
    }
    assert server.environment(CARD, 1)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "1"
    assert server.environment(Device("x", 0, "other"), 2500) == {}


def test_the_reason_of_a_failed_start_is_in_the_error(machine, monkeypatch):
    monkeypatch.setenv("MPS_FAILS", "1")
    with pytest.raises(GpunbError, match="it ended with status 1: no device can be used"):
        mps.start([CARD], release="6.8.0")


@pytest.mark.parametrize(
    ("devices", "release", "message"),
    [
        ([], "6.8.0", "this session has no NVIDIA GPU"),
        ([CARD, SLICE], "6.8.0", "GPU MIG-1 is a MIG slice"),
        ([OLD], "6.8.0", "has compute capability 6.0, and limits for each process need 7.0"),
        ([CARD], "5.15.0-microsoft-standard-WSL2", "WSL does not have it"),
    ],
    ids=["none", "mig", "old", "wsl"],
)
def test_mps_is_refused_where_it_cannot_work(machine, devices, release, message):
    with pytest.raises(GpunbError, match=message):
        mps.start(devices, release=release)
    assert not machine.started()


def test_mps_is_refused_without_its_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpunbError, match="nvidia-cuda-mps-control is not on PATH"):
        mps.start([CARD], release="6.8.0")


def test_mps_is_refused_beside_another_server(server, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", server._folder)
    with pytest.raises(GpunbError, match="an MPS server runs already"):
        mps.start([CARD], release="6.8.0")
