"""Sources of worker processes: killed zygotes, bad preloads and kernels that end."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

import gpunb
from gpunb.exceptions import WorkerCrashedError
from gpunb.processes import fork_source
from tests.sessions import alive, assert_idle, begun, marked, named, running, script
from tests.waiting import PATIENCE, eventually


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


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


@pytest.fixture
def forked(start):
    start(num_gpus=2, num_cpus=2, start_method="fork")
    eventually(lambda: gpunb.status()["preload"] is not None)


@pytest.mark.parametrize("generation", ["gpunb-zygote", "gpunb-preload"])
def test_killed_zygote_is_replaced_and_its_tasks_are_retried_or_fail(forked, tmp_path, generation):
    once = hold.options(max_retries=0)
    retried, lost = tmp_path / "retried", tmp_path / "lost"
    refs = [hold.remote(retried), once.remote(lost)]
    before = begun(retried) + begun(lost)
    queued = [gpu_pid.remote() for _ in range(4)]
    # Its children have its name for a moment.
    (zygote,) = eventually(lambda: len(found := named(generation)) == 1 and found)
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(WorkerCrashedError, match="zygote"):
        get(refs[1])
    begun(retried, 2)
    retried.with_suffix(".open").touch()
    assert get(refs[0]) == 2
    assert len(set(get(queued))) == 4
    assert not any(map(alive, before))
    del refs, queued
    assert_idle()
    eventually(lambda: len(named("gpunb-zygote")) == len(named("gpunb-preload")) == 1)


def test_tasks_fail_with_the_reason_after_many_deaths_of_zygotes(forked):
    for _ in range(8):
        zygotes = named("gpunb-zygote")
        if not zygotes:
            break
        os.kill(zygotes[0], signal.SIGKILL)
        eventually(lambda killed=zygotes[0]: not alive(killed))
        eventually(lambda: named("gpunb-zygote") or _gave_up())
    eventually(_gave_up)
    with pytest.raises(WorkerCrashedError, match="no zygote"):
        get(pid.remote())
    source = gpunb.protocol.backend.existing().engine.source
    gpunb.protocol.backend.existing().loop.post((source._restart_first,))  # as half a minute later
    assert get(pid.remote())
    eventually(lambda: len(named("gpunb-zygote")) == len(named("gpunb-preload")) == 1)


def test_new_zygote_is_started_after_a_pause(forked, monkeypatch):
    monkeypatch.setattr(fork_source, "WINDOW", 0.5)
    monkeypatch.setattr(fork_source, "RESTARTS", 0)
    os.kill(named("gpunb-zygote")[0], signal.SIGKILL)
    eventually(_gave_up)
    eventually(lambda: named("gpunb-zygote"), "another one was started")
    assert get(pid.remote())


def _gave_up():
    return any("zygotes died" in note for note in gpunb.status()["notes"])


KERNEL = """
    import gpunb, os, subprocess, sys, time

    @gpunb.remote(num_gpus=1)
    def sleep():
        child = subprocess.Popen(["sleep", "1000"])
        daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        print("begun", flush=True)
        time.sleep(1000)

    if __name__ == "__main__":
        gpunb.init(num_gpus=1, num_cpus=1, start_method={method!r}, preload={preload})
        ref = sleep.remote()
        idle = gpunb.get(gpunb.remote(os.getpid).remote())
        gpunb.get(ref)
"""


@pytest.mark.parametrize("preload", [(), ("json",)])
def test_killed_kernel_leaves_no_processes(preload):
    before = set(marked())
    with running(KERNEL.format(method="fork", preload=preload)) as kernel:
        assert "begun" in kernel.stdout.readline()
        left = set(marked()) - before - {kernel.pid}
        assert len(left) >= 6
        kernel.kill()
        eventually(lambda: not any(map(alive, left)), "all are gone")
    assert set(marked()) <= before


def test_kernel_that_exits_with_running_tasks_leaves_no_processes():
    before = set(marked())
    with running(
        KERNEL.format(method="fork", preload=()).replace("gpunb.get(ref)", "sys.stdin.readline()")
    ) as kernel:
        assert "begun" in kernel.stdout.readline()
        kernel.stdin.write("\n")
        kernel.stdin.flush()
        assert kernel.wait(PATIENCE) == 0
        assert kernel.stderr.read() == ""
    eventually(lambda: set(marked()) <= before, "all are gone")


# ---------------------------------------------------------------------------------------- preload


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "noted"),
    [
        ("raise RuntimeError('broken module')", "RuntimeError: broken module"),
        ("import sys; sys.exit(3)", "SystemExit"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
            "1 thread started by an import",
        ),
        ("import os; os._exit(3)", "died twice"),
    ],
    ids=["raises", "exits", "starts a thread", "ends the process"],
)
def test_bad_preload_is_noted_and_tasks_run(start, modules, source, noted):
    (modules / "bad_preload.py").write_text(source)
    start(num_gpus=1, preload=["bad_preload", "json"])
    notes = eventually(lambda: [each for each in gpunb.status()["notes"] if "preload" in each])
    assert noted in notes[0]
    assert notes[0] in gpunb.status()["warnings"]
    assert get([gpu_pid.remote() for _ in range(3)])
    assert_idle()


def test_missing_preload_is_noted_and_tasks_run(start):
    session = start(num_gpus=1, preload=["no_such_module", "json"])
    message = "preload: no_such_module could not be imported: ModuleNotFoundError"
    assert [each.startswith(message) for each in session.notes if "preload" in each] == [True]
    facts = eventually(lambda: gpunb.status()["preload"])
    assert facts["json"] is None
    assert "ModuleNotFoundError" in facts["no_such_module"]
    for field in ("notes", "warnings"):
        assert [
            each.startswith(message) for each in gpunb.status()[field] if "preload" in each
        ] == [1]
    assert get(gpu_pid.remote())


def test_workers_have_the_preloaded_modules(start, modules):
    (modules / "good_preload.py").write_text("import os\npid = os.getpid()\n")
    start(num_gpus=1, preload=["good_preload"])
    eventually(lambda: gpunb.status()["preload"])

    @gpunb.remote(num_gpus=1)
    def look():
        was_there = "good_preload" in sys.modules
        import good_preload

        return was_there, good_preload.pid != os.getpid()

    # The standbys of the first generation may be used up first.
    eventually(lambda: get(look.remote()) == (True, True))


def test_task_does_not_wait_for_a_slow_preload(start, modules):
    (modules / "slow_preload.py").write_text("import time\ntime.sleep(60)\n")
    start(num_gpus=1, preload=["slow_preload"])
    assert get(gpu_pid.remote())
    assert gpunb.status()["preload"] is None


def test_preload_after_which_forked_children_hang_is_not_used():
    done = script(
        """
        import os, time
        from gpunb.worker import preload
        print(preload._unsafe())
        os.register_at_fork(after_in_child=lambda: time.sleep(60))
        preload._TRIAL = 0.1
        print(preload._unsafe())
        """
    )
    assert done.stdout.splitlines() == ["None", "a trial child did not end within 0.1 s"], done


def test_workers_draw_different_random_numbers_with_numpy(start):
    start(num_gpus=1, preload=["numpy"])
    eventually(lambda: gpunb.status()["preload"])

    @gpunb.remote(num_gpus=0.25)
    def draw():
        import numpy

        return float(numpy.random.rand())

    assert len({get(draw.remote()) for _ in range(6)}) == 6


INTERRUPTED = """
    import gpunb, os, signal, sys, time

    @gpunb.remote(num_gpus=1, max_retries=0)
    def work():
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return "done"

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, lambda *_: None)  # to ignore it would be inherited
        gpunb.init(num_gpus=2, num_cpus=1, start_method={method!r}, preload=["json"])
        refs = [work.remote() for _ in range(4)]
        while len(gpunb.wait(refs, num_returns=4, timeout=0.01)[0]) < 4:
            os.killpg(0, signal.SIGINT)
        print(gpunb.get(refs), flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_interrupt_of_the_kernels_group_does_not_reach_workers(method):
    """Neither while they run nor while they start."""
    done = script(INTERRUPTED.format(method=method), start_new_session=True)
    assert done.stdout == "['done', 'done', 'done', 'done']\n", done
    assert done.stderr == ""


def test_the_process_group_of_the_kernel_is_its_own():
    """A Jupyter kernel that ends waits for all processes of its group."""
    text = """
        import os, gpunb

        def group():
            found = []
            for name in filter(str.isdigit, os.listdir("/proc")):
                try:
                    if os.getpgid(int(name)) == os.getpgid(0) and int(name) != os.getpid():
                        found.append(open(f"/proc/{name}/cmdline").read())
                except ProcessLookupError:
                    pass
            return found

        if __name__ == "__main__":
            gpunb.init(num_cpus=1, num_gpus=0, preload=())
            gpunb.get(gpunb.remote(len).remote("four"))
            print(group())
    """
    ended = script(text, start_new_session=True)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
