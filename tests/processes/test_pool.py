"""Worker processes: how they start, what they hold, and what happens when one is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import gpunb
from gpunb.exceptions import WorkerCrashedError
from tests.sessions import alive, assert_idle, begun, descriptors, session, zombies
from tests.waiting import PATIENCE, eventually


@pytest.fixture(scope="module", params=["fork", "spawn"])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def started(method: str, by_value: None) -> Iterator[None]:
    with session(num_gpus=2, num_cpus=2, start_method=method):
        yield


@pytest.fixture
def two(started: None) -> Iterator[None]:
    yield
    assert_idle()


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


def pool():
    return gpunb.protocol.backend.existing().engine.pool


@gpunb.remote
def pid():
    return os.getpid()


@gpunb.remote(num_gpus=1)
def gpu_pid():
    return os.getpid()


@gpunb.remote(num_gpus=1)
def hold(path):
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not path.with_suffix(".open").exists():
        time.sleep(0.005)
    return gpunb.get_runtime_context().attempt


# ------------------------------------------------------------------------------ what a worker holds


def test_new_worker_has_loaded_no_large_modules(two):
    @gpunb.remote(num_gpus=1)
    def loaded():
        return sorted(
            set(sys.modules) & {"IPython", "numpy", "ipykernel", "torch", "pynvml", "pandas"}
        )

    assert get(loaded.remote()) == []


def test_a_worker_has_only_its_own_descriptors(two):
    @gpunb.remote(num_gpus=1)
    def sockets():
        links = []
        for each in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{each}"))
            except OSError:
                continue
        return [link for link in links if link.startswith("socket")]

    assert len(get(sockets.remote())) == 1


def test_a_worker_leads_a_session_of_its_own(two):
    @gpunb.remote
    def ids():
        return os.getpid(), os.getsid(0), os.getpgid(0)

    process, leader, group = get(ids.remote())
    assert process == leader == group


def test_each_task_has_a_standby_of_its_own(two):
    pids = [get(gpu_pid.remote()) for _ in range(6)] + [get(pid.remote())]
    assert len(set(pids)) == 7


# -------------------------------------------------------------------------------- many, and leaks


def test_three_hundred_tasks_leave_no_processes_or_descriptors(two, method):
    count = 300 if method == "fork" else 30
    get([gpu_pid.remote() for _ in range(4)])
    assert_idle()
    before = descriptors()
    pids = get([gpu_pid.remote() for _ in range(count)])
    assert len(set(pids)) == count
    assert_idle()
    assert not zombies()
    eventually(lambda: descriptors() <= before + 8, "descriptors are left")
    assert not any(map(alive, pids))


# ---------------------------------------------------------------------------------------- output


def test_output_of_a_worker_and_its_children_is_in_order(two, capsys):
    @gpunb.remote(num_gpus=1)
    def talk():
        for number in range(200):
            sys.stdout.write(f"python {number}\n")
            if number % 50 == 0:
                os.system(f"echo shell {number}")
                os.write(1, b"descriptor\n")
                subprocess.run([sys.executable, "-Sc", "print('child')"], check=True)
        sys.stderr.write("to stderr\n")
        sys.stdout.write("no end of line")

    get(talk.remote())
    out, err = capsys.readouterr()
    lines = [line.partition(") ")[2] for line in out.splitlines()]
    expected = []
    for number in range(200):
        expected.append(f"python {number}")
        if number % 50 == 0:
            expected += [f"shell {number}", "descriptor", "child"]
    assert lines == [*expected, "no end of line"]
    assert out.startswith("(talk pid=")
    assert err.partition(") ")[2] == "to stderr\n"


def test_output_before_a_crash_is_shown_and_part_of_the_error(two, capsys):
    @gpunb.remote(max_retries=0)
    def crash():
        sys.stdout.write("before\n")
        sys.stderr.write("why\n")
        os.abort()

    with pytest.raises(WorkerCrashedError, match=r"SIGABRT(.|\n)*why"):
        get(crash.remote())
    out, err = capsys.readouterr()
    assert "before" in out
    assert "why" in err


def test_output_that_is_not_utf8_is_shown(two, capsys):
    @gpunb.remote
    def write():
        os.write(1, b"\xff\xfe half of \xc3")
        os.write(1, b"\xa9\n")

    get(write.remote())
    assert "half of é" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- killings


def test_killed_idle_worker_is_replaced(two):
    process = get(pid.remote())
    os.kill(process, signal.SIGKILL)
    eventually(lambda: process not in [each.pid for each in pool().processes()])
    assert get(pid.remote()) != process


def standbys():
    """The processes that wait for work."""
    return [each for each in pool().processes() if each.ready and each.worker is None]


def test_killed_standby_is_replaced(two):
    ready = eventually(standbys)
    os.kill(ready[0].pid, signal.SIGKILL)
    eventually(lambda: ready[0].gone)
    assert get(gpu_pid.remote()) != ready[0].pid
    eventually(
        lambda: (
            len([each for each in pool().processes() if each.ready and each.worker is None]) == 2
        )
    )


def test_task_of_a_killed_worker_is_tried_again(two, tmp_path):
    path = tmp_path / "pids"
    ref = hold.remote(path)
    os.kill(begun(path)[0], signal.SIGKILL)
    begun(path, 2)
    path.with_suffix(".open").touch()
    assert get(ref) == 2


def test_cancelled_task_that_no_interrupt_can_reach_is_killed(two, tmp_path):
    @gpunb.remote(max_retries=0)
    def deaf(started):
        for each in range(3, 64):
            with contextlib.suppress(OSError):
                reads = fcntl.fcntl(each, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                if reads and os.readlink(f"/proc/self/fd/{each}").startswith("pipe"):
                    os.close(each)
        started.touch()
        time.sleep(600)

    started = tmp_path / "started"
    ref = deaf.remote(started)
    eventually(started.exists)
    gpunb.cancel(ref)
    with pytest.raises(gpunb.exceptions.TaskCancelledError):
        get(ref)
