"""The trackers of multiprocessing and loky, which start when there is something to track."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from loky.backend import resource_tracker as lokys

from gpunb.processes import trackers
from tests.sessions import descriptors, script
from tests.waiting import eventually

BEGIN = """
    import os, signal, subprocess, sys, threading, time, warnings
    from multiprocessing import shared_memory
    from pathlib import Path
    import gpunb

    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of forks

    def trackers():
        "This process's children that are trackers: the module of each."
        found = {}
        for each in Path("/proc/self/task").iterdir():
            for pid in map(int, text(each / "children").split()):
                for word in text(Path(f"/proc/{pid}/cmdline")).split():
                    if word in (OWN, LOKY):
                        found[pid] = word
        return found

    def text(file):
        "What a file of /proc says, or nothing where its thread or process has ended."
        try:
            return file.read_text()
        except OSError:
            return ""

    def appears(module):
        "The pid of the only tracker of a module, in a session of its own, once there is one."
        until = time.monotonic() + 30
        while module not in trackers().values() and time.monotonic() < until:
            time.sleep(0.01)
        (pid,) = [pid for pid, each in trackers().items() if each == module]
        assert os.getsid(pid) == pid
        return pid

    OWN, LOKY = "multiprocessing.resource_tracker", "loky.backend.resource_tracker"

    @gpunb.remote(num_gpus=1)
    def leave():
        "Memory that nobody removes."
        made = shared_memory.SharedMemory(create=True, size=10)
        made.buf[:3] = b"abc"
        return made.name
"""


def run(text, code=0):
    done = script(BEGIN + text)
    assert done.returncode == code, done.stderr
    return done.stdout


def gone(name):
    eventually(lambda: not Path("/dev/shm", name.strip()).exists(), f"{name} is left")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_none_starts_while_there_is_nothing_to_track(method):
    text = f"""
    if __name__ == "__main__":
        os.environ["GPUNB_START_METHOD"] = {method!r}
        for _ in range(2):
            gpunb.init(num_gpus=1, num_cpus=2, preload=())
            gpunb.get([gpunb.remote(num_gpus=0.5)(os.getpid).remote() for _ in range(3)])
            assert gpunb.get(gpunb.remote(pow).remote(2, 3)) == 8
            gpunb.shutdown()
            assert threading.enumerate() == [threading.main_thread()]
        assert not trackers(), trackers()
        print("well")
    """
    assert run(text) == "well\n"


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_task_has_left_goes_with_the_kernel(end):
    """And not before: other tasks and the kernel may use it."""
    text = f"""
    if __name__ == "__main__":
        gpunb.init(num_gpus=1, preload=())
        name = gpunb.get(leave.remote())
        appears(OWN)
        assert LOKY not in trackers().values()
        gpunb.shutdown()
        there = shared_memory.SharedMemory(name)
        assert bytes(there.buf[:3]) == b"abc"
        there.close()
        print(name, flush=True)
        {end}
    """
    gone(run(text, code=-9 if end else 0))


@pytest.mark.parametrize("serves", [True, False])
def test_what_the_kernel_leaves_at_its_end_goes_with_it(serves):
    """Also if the thread that starts trackers has no time for it any more."""
    text = f"""
    if __name__ == "__main__":
        from multiprocessing import resource_tracker
        from gpunb.processes import trackers as ours
        if not {serves}:
            ours._serve = lambda waiting: None
        gpunb.init(num_gpus=1, preload=())
        print(leave.__wrapped__())
        gpunb.shutdown()
        assert resource_tracker._resource_tracker._fd is not None
        print(leave.__wrapped__(), flush=True)
    """
    for each in run(text).split():
        gone(each)


def test_a_fork_of_the_kernel_has_the_same_tracker():
    text = """
    if __name__ == "__main__":
        gpunb.init(num_gpus=1, preload=())
        child = os.fork()
        if not child:
            print(leave.__wrapped__(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        appears(OWN)
    """
    gone(run(text))


def test_a_process_that_outlives_the_session_keeps_its_trackers():
    """Also if the kernel has others by then."""
    text = """
    CODE = (
        "import sys; from multiprocessing import resource_tracker, shared_memory;"
        "resource_tracker._resource_tracker._fd = int(sys.argv[1]); input();"
        "print(shared_memory.SharedMemory(create=True, size=10).name, flush=True); input()"
    )

    def left():
        return [each for each in threading.enumerate() if each.name == "gpunb-trackers"]

    if __name__ == "__main__":
        from multiprocessing import resource_tracker
        gpunb.init(num_gpus=1, preload=())
        write = resource_tracker._resource_tracker._fd
        child = subprocess.Popen(
            [sys.executable, "-c", CODE, str(write)], pass_fds=[write], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        gpunb.shutdown()
        assert resource_tracker._resource_tracker._fd is None
        assert len(left()) == 1
        gpunb.init(num_gpus=1, preload=())
        child.stdin.write("\\n")
        print(child.stdout.readline().strip(), flush=True)
        pid = appears(OWN)
        assert resource_tracker._resource_tracker._pid is None
        gpunb.shutdown()
        child.communicate("\\n")
        while left():
            time.sleep(0.01)
    """
    gone(run(text))


def test_lokys_processes_work_beside_a_session():
    text = """
    if __name__ == "__main__":
        import loky
        gpunb.init(num_gpus=1, preload=())
        with loky.get_reusable_executor(max_workers=2) as executor:
            assert list(executor.map(abs, (-1, -2))) == [1, 2]
        appears(LOKY)
        assert gpunb.get(gpunb.remote(num_gpus=1)(abs).remote(-3)) == 3
        print("well")
    """
    assert run(text) == "well\n"


def test_a_tracker_that_runs_is_used():
    text = """
    def tracker():
        (pid,) = trackers()
        return pid

    if __name__ == "__main__":
        from multiprocessing import resource_tracker
        resource_tracker.ensure_running()
        while not trackers():
            time.sleep(0.01)
        first = tracker()
        gpunb.init(num_gpus=1, preload=())
        print(gpunb.get(leave.remote()))
        assert tracker() == first
    """
    gone(run(text))


@pytest.fixture
def fresh(monkeypatch):
    """The trackers of this process as they are in a new one."""
    for each in trackers._trackers().values():
        monkeypatch.setitem(each, "_fd", None)
    monkeypatch.setattr(trackers, "_waiting", {})


def test_without_resources_nothing_is_kept(fresh, monkeypatch):
    before, pipe = descriptors(), os.pipe

    def none_left(made=[]):  # noqa: B006 - counts the calls
        if made:
            raise OSError(errno.EMFILE, "no descriptor")
        made.append(True)
        return pipe()

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", none_left)
        with pytest.raises(OSError, match="no descriptor"), trackers.deferred():
            pass
    with monkeypatch.context() as patched:

        def no_thread(self):
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(BlockingIOError, match="new thread"), trackers.deferred():
            pass
    assert descriptors() == before
    assert not trackers._waiting
    assert all("ensure_running" not in each for each in trackers._trackers().values())


def test_a_tracker_that_cannot_start_is_tried_again(fresh, monkeypatch):
    tried, start = [], subprocess.Popen

    def once_short(*arguments, **more):
        tried.append(arguments)
        if len(tried) == 1:
            raise BlockingIOError(errno.EAGAIN, "no process")
        return start(*arguments, **more)

    monkeypatch.setattr(trackers, "_AGAIN", 0.01)
    monkeypatch.setattr(subprocess, "Popen", once_short)
    with trackers.deferred():
        pass
    assert len(trackers._waiting) == 2
    own = resource_tracker._resource_tracker
    own.ensure_running()  # a message
    eventually(lambda: len(trackers._waiting) == 1)
    assert len(tried) == 2
    own._stop()
    assert own._pid is None
    trackers.withdraw()
    assert not trackers._waiting
    assert vars(lokys._resource_tracker)["_fd"] is None
