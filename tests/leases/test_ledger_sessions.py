"""Sessions of several kernels that share the devices of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest

import gpunb
from gpunb import accelerators
from gpunb.control import client
from gpunb.exceptions import GpunbError, InfeasibleRequestError
from gpunb.leases import leases
from gpunb.leases.records import LEDGER_FILE
from gpunb.leases.report import read_entries
from gpunb.protocol import backend
from gpunb.scheduler.resources import Device
from gpunb.scheduler.usage_types import Seen
from gpunb.system import runtime_dir as folder
from tests import sessions
from tests.waiting import PATIENCE, Gate, eventually

ONE = "1xA100:40GiB"
TWO = "2xA100:40GiB"

OTHER = """
    import json, sys, time
    import gpunb

    settings = json.loads(input())
    gpunb.init(**settings)
    names = {}

    def gate(folder):
        from pathlib import Path
        from tests.waiting import Gate
        Gate(Path(folder)).enter()

    @gpunb.remote
    class Model:
        def ready(self):
            return True

    @gpunb.remote(num_gpus=1)
    def now():
        import time
        return time.monotonic()

    def alone(path, folder):
        import fcntl, os
        from pathlib import Path
        from tests.waiting import Gate
        with open(path, "w") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            Gate(Path(folder)).enter(os.getpid())
            return True

    @gpunb.remote(num_gpus=1)
    def nest(folder):
        gate(folder)
        return gpunb.get(now.remote())

    names.update(globals())
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            names["_"] = eval(line, names)
        except SyntaxError:
            exec(line, names)
            names["_"] = None
        print(json.dumps(names["_"], default=repr), flush=True)
"""


class Kernel:
    """Another process with a session, which runs the code that it is sent."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    def do(self, text):
        """Return the value of an expression in that kernel as JSON; None for a statement."""
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
        text = self._process.stdout.readline()
        assert text, self._process.stderr.read()
        return json.loads(text)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(autouse=True)
def never_looks_by_itself(monkeypatch):
    """Turn periodic looks off, so that a test fails if no event wakes a session."""
    monkeypatch.setattr(leases, "SIGN", 1000)


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    folder = tmp_path / "ledger"
    folder.mkdir()
    monkeypatch.setenv("GPUNB_LEDGER_DIR", str(folder))
    return folder


@pytest.fixture
def other(ledger):
    """Starts other kernels."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            process = stack.enter_context(sessions.running(OTHER))
            kernel = Kernel(process)
            settings = {"simulate": ONE, "num_cpus": 2, "preload": [], **settings}
            process.stdin.write(json.dumps(settings) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            return kernel

        yield make


def holds(kernel, tmp_path, share, name="hold", **options):
    """Have another kernel run a task that holds a share until the gate opens."""
    folder = tmp_path / f"gate-{name}"
    folder.mkdir()
    text = ", ".join(f"{key}={value!r}" for key, value in {"num_gpus": share, **options}.items())
    kernel.do(f"{name} = gpunb.remote({text})(gate).remote({str(folder)!r})")
    gate = Gate(folder)
    gate.await_()
    return gate


def waits_for():
    """Return the reason why the only waiting task waits."""
    found = []

    def waiting():
        found[:] = gpunb.status()["waiting"]
        return len(found) == 1 and found[0]["waits_for"] != "is next in line"

    eventually(waiting, "a task waits")
    return found[0]["waits_for"]


@gpunb.remote(num_gpus=0.6)
def now():
    return time.monotonic()


@gpunb.remote(num_gpus=1)
class Held:
    def ready(self):
        return True


@gpunb.remote(num_gpus=1)
def whole():
    return time.monotonic()


def test_task_waits_for_a_share_of_another_kernel_until_it_is_free(start, other, tmp_path):
    kernel = other()
    gate = holds(kernel, tmp_path, 0.6)
    start(simulate=ONE)
    assert gpunb.available_resources()["GPU"] == pytest.approx(0.4)
    waiting = now.remote()
    assert f"0.6 of GPU 0 is held by another kernel (pid {kernel.pid}, " in waits_for()
    (device,) = gpunb.status()["devices"]
    (another,) = device["others"]
    assert (another["pid"], another["share"], another["kind"]) == (kernel.pid, 0.6, "kernel")
    assert another["job"] == "gate"
    gate.open()
    assert gpunb.get(waiting, timeout=PATIENCE)
    eventually(lambda: gpunb.available_resources()["GPU"] == 1, "all is free")


def test_freed_share_arrives_each_time(start, other, tmp_path):
    """Without a look of this session by itself; `benchmarks` has the time that it takes."""
    kernel = other()
    start(simulate=ONE)
    gpunb.get(whole.remote())
    for number in range(5):
        gate = holds(kernel, tmp_path, 1, f"hold_{number}")
        waiting = whole.remote()
        assert "GPU 0 is held by another kernel" in waits_for()
        gate.open()
        assert gpunb.get(waiting, timeout=PATIENCE)


def test_whole_device_and_a_part_of_it_are_never_leased_together(start, other, tmp_path):
    kernel = other(simulate=TWO)
    gate = holds(kernel, tmp_path, 0.3)
    start(simulate=TWO)
    where = gpunb.remote(num_gpus=1)(gpunb.get_gpu_ids)
    assert gpunb.get([where.remote(), where.remote()], timeout=PATIENCE) == [[1], [1]]
    both = gpunb.remote(num_gpus=2)(gpunb.get_gpu_ids).remote()
    assert "0.3 of GPU 0 is held by another kernel" in waits_for()
    gate.open()
    assert gpunb.get(both, timeout=PATIENCE) == [0, 1]


def test_lease_of_another_kernels_actor_ends_with_the_actor(start, other):
    kernel = other()
    kernel.do("model = Model.options(num_gpus=0.5).remote()")
    assert kernel.do("gpunb.get(model.ready.remote())")
    start(simulate=ONE)
    waiting = whole.remote()
    assert "0.5 of GPU 0 is held by another kernel" in waits_for()
    kernel.do("gpunb.kill(model)")
    assert gpunb.get(waiting, timeout=PATIENCE)


def test_an_actor_waits_for_another_kernel_too(start, other, tmp_path):
    kernel = other()
    gate = holds(kernel, tmp_path, 0.6)
    start(simulate=ONE)

    @gpunb.remote(num_gpus=0.5)
    class Actor:
        def ids(self):
            return gpunb.get_gpu_ids()

    actor = Actor.remote()
    call = actor.ids.remote()
    eventually(lambda: "held by another kernel" in str(gpunb.status()["waiting"]), "it waits")
    gate.open()
    assert gpunb.get(call, timeout=PATIENCE) == [0]


def test_idle_workers_give_up_what_another_kernel_waits_for(start, other):
    start(simulate=ONE)
    warm = gpunb.remote(num_gpus=1, max_calls=0)(os.getpid)
    pid = gpunb.get(warm.remote())
    assert gpunb.get(warm.remote()) == pid
    kernel = other()
    assert kernel.do("gpunb.get(now.remote())")
    assert gpunb.get(warm.remote(), timeout=PATIENCE) != pid


def test_kernel_with_many_tasks_lets_another_kernel_run(start, other):
    kernel = other()
    kernel.do("small = gpunb.remote(num_gpus=0.5)(time.sleep)")
    kernel.do("refs = [small.remote(0.02) for _ in range(2000)]")
    start(simulate=ONE)
    for _ in range(3):
        assert gpunb.get(whole.remote(), timeout=PATIENCE)
    assert kernel.do("len(gpunb.wait(refs, num_returns=2000, timeout=0)[1])") > 0


def test_a_killed_kernel_leaves_its_devices_to_the_others(start, other, tmp_path):
    kernel = other()
    holds(kernel, tmp_path, 1)
    start(simulate=ONE)
    waiting = whole.remote()
    assert f"held by another kernel (pid {kernel.pid}" in waits_for()
    kernel.kill()
    assert gpunb.get(waiting, timeout=PATIENCE)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_process_of_a_session_keeps_its_leases_alive(start, ledger, method):
    start(simulate=ONE, start_method=method)

    def pipes(process="self"):
        found = set()
        for each in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if stat.S_ISFIFO(os.stat(f"/proc/{process}/fd/{each}").st_mode):
                    found.add(os.readlink(f"/proc/{process}/fd/{each}"))
        return found

    (fifo,) = [str(each) for each in ledger.iterdir() if each.is_fifo()]
    assert fifo in gpunb.get(gpunb.remote(num_gpus=1)(pipes).remote(), timeout=PATIENCE)
    if method == "fork":
        zygotes = sessions.named("gpunb-zygote")
        assert zygotes
        for pid in zygotes:
            assert fifo in pipes(pid)


def test_a_session_leaves_nothing_in_the_ledger(ledger):
    with sessions.session(simulate=ONE):
        gpunb.get(whole.remote())
    assert os.listdir(ledger) == [LEDGER_FILE]


def test_release_request_frees_the_leases_of_idle_workers(start, other):
    kernel = other()
    kernel.do("warm = gpunb.remote(num_gpus=1, max_calls=0)(time.sleep)")
    kernel.do("gpunb.get(warm.remote(0))")
    start(simulate=ONE)
    assert gpunb.available_resources().get("GPU", 0) == 0
    assert len(client.ask(kernel.pid, {"do": "release"}, PATIENCE)["released"]) == 1
    eventually(lambda: gpunb.available_resources().get("GPU") == 1, "it let go")
    kernel.do("gpunb.get(warm.remote(0))")
    client.ask(kernel.pid, {"do": "release", "all": True}, PATIENCE)
    eventually(lambda: gpunb.available_resources().get("GPU") == 1, "it has ended")
    eventually(lambda: kernel.do("gpunb.is_initialized()") is False)


def test_simulated_devices_are_private_unless_a_ledger_is_asked_for(start):
    start(simulate=ONE)
    assert backend.existing().engine.leases.ledger is None


def test_session_without_a_usable_runtime_folder_runs_with_a_warning(start, monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    monkeypatch.delenv("GPUNB_LEDGER_DIR", raising=False)
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path))
    (note,) = start(simulate=ONE).notes
    assert note.startswith(f"other processes cannot look at this session: the folder {tmp_path}")
    assert note in gpunb.status()["warnings"]


# -------------------------------------------------------------------------- leases fail closed


@contextlib.contextmanager
def locked(ledger):
    """The book is locked by a process that was stopped."""
    descriptor = os.open(ledger / LEDGER_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


LOCKED = "held up: a process that was stopped has the ledger of leases locked"


def test_session_outside_the_ledger_runs_only_tasks_without_shared_devices(start, ledger):
    with locked(ledger):
        start(simulate=ONE)
        waiting = whole.remote()
        assert LOCKED in waits_for()
        assert gpunb.available_resources().get("GPU", 0) == 0
        (warning,) = [each for each in gpunb.status()["warnings"] if "ledger" in each]
        assert warning.startswith("no device is given out: a process that was stopped")
        assert gpunb.get(gpunb.remote(os.getpid).remote(), timeout=PATIENCE)
        assert gpunb.wait([waiting], timeout=0.1)[0] == []
    assert gpunb.get(waiting, timeout=PATIENCE)
    assert [each for each in gpunb.status()["warnings"] if "ledger" in each] == []
    assert [each.alive for each in read_entries(ledger)] == [True]


def test_session_that_never_entered_ends_without_files(ledger):
    with locked(ledger), sessions.session(simulate=ONE):
        waiting = whole.remote()
        assert LOCKED in waits_for()
        del waiting
    assert os.listdir(ledger) == [LEDGER_FILE]


def test_private_devices_are_used_while_the_ledger_is_locked(start, monkeypatch, tmp_path):
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "run"))
    (tmp_path / "run" / folder.LEASES).mkdir(parents=True)
    with locked(tmp_path / "run" / folder.LEASES):
        start(simulate=ONE)
        assert gpunb.get(whole.remote(), timeout=PATIENCE)


def test_kernels_started_while_the_ledger_is_locked_share_no_device(other, ledger, tmp_path):
    seats, gate = tmp_path / "seats", Gate(tmp_path)

    def waits(kernel):
        return str(kernel.do("[one['waits_for'] for one in gpunb.status()['waiting']]"))

    with locked(ledger):
        three = [other() for _ in range(3)]
        for each in three:
            each.do("use = gpunb.remote(num_gpus=1)(alone)")
            each.do(f"refs = [use.remote({str(seats)!r}, {str(tmp_path)!r}) for _ in range(6)]")
        for each in three:
            assert LOCKED in waits(each)
    eventually(
        lambda: sum("held by another kernel" in waits(each) for each in three) == 2,
        "two of three kernels wait",
    )
    eventually(gate.count, "the task of the third one runs")
    assert gate.count() == 1
    gate.open()
    done = [each.do(f"gpunb.get(refs, timeout={PATIENCE})") for each in three]
    assert done == [[True] * 6] * 3


def test_lease_of_a_kernel_survives_removal_of_the_ledgers_files(start, other, ledger, tmp_path):
    kernel = other()
    gate = holds(kernel, tmp_path, 1)
    shutil.rmtree(ledger)
    start(simulate=ONE)
    waiting = whole.remote()
    eventually(lambda: f"held by another kernel (pid {kernel.pid}" in waits_for(), "it is seen")
    assert gpunb.wait([waiting], timeout=0.1)[0] == []
    gate.open()
    assert gpunb.get(waiting, timeout=PATIENCE)
    assert len(read_entries(ledger)) == 2


def test_lease_of_a_stopped_kernel_survives_removal_of_the_ledgers_files(
    start, other, ledger, tmp_path
):
    kernel = other()
    gate = holds(kernel, tmp_path, 1)
    os.kill(kernel.pid, signal.SIGSTOP)
    try:
        shutil.rmtree(ledger)
        start(simulate=ONE)
        waiting = whole.remote()
        assert f"process {kernel.pid} has a session whose files in the ledger" in waits_for()
        assert f"no device is given out: process {kernel.pid}" in str(gpunb.status()["warnings"])
        assert gpunb.wait([waiting], timeout=0.1)[0] == []
    finally:
        os.kill(kernel.pid, signal.SIGCONT)
    gate.open()
    assert gpunb.get(waiting, timeout=PATIENCE)


def test_devices_of_a_killed_kernel_with_removed_files_become_free(start, other, ledger, tmp_path):
    kernel = other()
    holds(kernel, tmp_path, 1)
    shutil.rmtree(ledger)
    start(simulate=ONE)
    waiting = whole.remote()
    eventually(lambda: "held by another kernel" in waits_for(), "it is seen")
    kernel.kill()
    assert gpunb.get(waiting, timeout=PATIENCE)


def test_a_ledger_folder_is_made_by_the_first_session(start, monkeypatch, tmp_path):
    path = tmp_path / "missing"
    monkeypatch.setenv("GPUNB_LEDGER_DIR", str(path))
    assert start(simulate=ONE).notes == ()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert gpunb.get(whole.remote(), timeout=PATIENCE)
    assert len(read_entries(path)) == 1


def test_a_ledger_folder_that_can_never_be_used_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUNB_LEDGER_DIR", str(tmp_path / "file" / "shared"))
    with pytest.raises(GpunbError, match=r"GPUNB_LEDGER_DIR='.*' cannot be made.*unset GPUNB_LED"):
        gpunb.init(simulate=ONE)
    assert not gpunb.is_initialized()
    with sessions.session():
        assert gpunb.get(gpunb.remote(os.getpid).remote(), timeout=PATIENCE)


def test_real_devices_are_not_used_without_a_ledger(monkeypatch, tmp_path):
    card = Device("GPU-0", 0, "card", "A100", 40 * 2**30, "nvidia")
    found = accelerators.Detection(devices=(card,), vendors=("nvidia",))
    monkeypatch.setattr(accelerators, "detect", lambda: found)
    monkeypatch.delenv("GPUNB_LEDGER_DIR", raising=False)
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path))
    tmp_path.chmod(0o755)
    with pytest.raises(GpunbError, match=rf"the folder {tmp_path}, .* may be entered by others"):
        gpunb.init()
    assert not gpunb.is_initialized()
    (note,) = gpunb.init(num_gpus=0).notes
    gpunb.shutdown()
    assert note.startswith("other processes cannot look at this session")


def test_a_fork_of_the_kernel_does_not_keep_its_leases(start, other):
    kernel = other()
    kernel.do("model = Model.options(num_gpus=1).remote()")
    assert kernel.do("gpunb.get(model.ready.remote())")
    kernel.do("import os; child = os.fork() or time.sleep(1000)")
    child = kernel.do("child")
    try:
        start(simulate=ONE)
        ref = whole.remote()
        assert gpunb.wait([ref], timeout=0.1)[0] == []
        kernel.kill()
        assert gpunb.get(ref, timeout=PATIENCE)
        assert sessions.alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


# ------------------------------------------------------------------------------------- max_gpus


def test_max_gpus_leaves_devices_to_other_sessions(start):
    start(simulate="4xA100:40GiB", max_gpus=1.5)
    assert gpunb.cluster_resources()["GPU"] == 1.5
    with pytest.raises(InfeasibleRequestError, match=r"1\.5 of the GPUs at once \(max_gpus\)"):
        gpunb.remote(num_gpus=2)(time.monotonic).remote()
    assert gpunb.get([whole.remote(), whole.remote(), now.remote()], timeout=PATIENCE)
    eventually(lambda: gpunb.available_resources()["GPU"] == 1.5, "all is free")


def test_tasks_together_use_no_more_than_max_gpus(start, tmp_path):
    start(simulate="4xA100:40GiB", max_gpus=1)
    gate = Gate(tmp_path)
    half = gpunb.remote(num_gpus=0.5)(Gate.enter)
    refs = [half.remote(gate, name) for name in "abc"]
    gate.await_("a")
    gate.await_("b")
    assert "has 1 of the 1 that it may have at once (max_gpus)" in waits_for()
    gate.open()
    gpunb.get(refs, timeout=PATIENCE)
    assert gate.count() == 3


def test_idle_workers_make_room_below_the_limit(start):
    start(simulate="2xA100:40GiB", max_gpus=1)
    warm = gpunb.remote(num_gpus=1, max_calls=0)
    first, second = warm(os.getpid), warm(time.monotonic)
    gpunb.get(first.remote())
    assert gpunb.get(second.remote(), timeout=PATIENCE)


def test_max_gpus_is_read_from_the_environment(start, monkeypatch):
    monkeypatch.setenv("GPUNB_MAX_GPUS", "0.5")
    start(simulate=ONE)
    assert gpunb.cluster_resources()["GPU"] == 0.5


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (0.00001, ValueError), ("2", TypeError), (True, TypeError)],
)
def test_invalid_max_gpus_is_refused(value, error):
    with pytest.raises(error, match="max_gpus"):
        gpunb.init(max_gpus=value)


# ------------------------------------------------------------------------------------ outsiders


def test_device_with_a_process_outside_gpunb_is_used_last(start, other):
    kernel = other(simulate=TWO)
    start(simulate=TWO)
    local = backend.existing()
    where = gpunb.remote(num_gpus=1)(gpunb.get_gpu_ids)

    def sees(*processes):
        local.on_loop(lambda: local.engine.leases.seen({"sim:0": processes}))

    sees(Seen(1, None, (1,)))
    assert gpunb.get(where.remote(), timeout=PATIENCE) == [1]
    eventually(lambda: gpunb.available_resources().get("GPU") == 2, "all is free")
    # What belongs to a kernel of gpunb has a lease, and needs no more care.
    sees(Seen(7, None, (7, 6, kernel.pid)), Seen(8, None, (8, os.getpid())))
    assert gpunb.get(where.remote(), timeout=PATIENCE) == [0]


def test_real_devices_are_leased_by_default(start, monkeypatch, tmp_path):
    cards = tuple(Device(f"GPU-{at}", at, "card", "A100", 40 * 2**30, "nvidia") for at in range(2))
    found = accelerators.Detection(devices=cards, vendors=("nvidia",))
    monkeypatch.setattr(accelerators, "detect", lambda: found)
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "run"))
    monkeypatch.delenv("GPUNB_LEDGER_DIR", raising=False)
    start(num_gpus=3)  # one of them in the books only
    ledger = backend.existing().engine.leases.ledger
    assert set(ledger._keys.values()) == {"GPU-0", "GPU-1"}

    @gpunb.remote(num_gpus=1)
    def where():
        held = read_entries(Path(os.environ["GPUNB_RUNTIME_DIR"]) / folder.LEASES)[0].record.stakes
        return gpunb.get_gpu_ids(), sum(each.held for each in held.values())

    assert gpunb.get(where.remote(), timeout=PATIENCE) == ([0], 10_000)
    assert gpunb.get(gpunb.remote(num_gpus=3)(gpunb.get_gpu_ids).remote()) == [0, 1, 2]


def says_that_they_wait_for_each_other(kernel):
    """Whether both the waiting task and a warning name the deadlock."""
    waiting, warnings = kernel
    return any("a deadlock" in each["waits_for"] for each in waiting) and any(
        "a deadlock" in each for each in warnings
    )


def here():
    facts = gpunb.status()
    return facts["waiting"], facts["warnings"]


def there(kernel):
    return kernel.do("(lambda facts: (facts['waiting'], facts['warnings']))(gpunb.status())")


def test_deadlock_of_two_kernels_with_actors_is_reported(start, other):
    kernel = other(simulate=TWO)
    kernel.do("model = Model.options(num_gpus=1).remote()")
    assert kernel.do("gpunb.get(model.ready.remote())")
    start(simulate=TWO)
    mine = Held.remote()
    gpunb.get(mine.ready.remote(), timeout=PATIENCE)
    ref = whole.remote()
    kernel.do("later = now.remote()")
    eventually(lambda: says_that_they_wait_for_each_other(here()), "this one is told")
    eventually(lambda: says_that_they_wait_for_each_other(there(kernel)), "the other one is told")
    assert f"pid {kernel.pid}" in here()[1][-1]
    kernel.do("gpunb.kill(model)")
    gpunb.get(ref, timeout=PATIENCE)
    assert kernel.do(f"gpunb.get(later, timeout={PATIENCE}) > 0")


def test_deadlock_of_two_kernels_with_nested_tasks_is_reported(start, other, tmp_path):
    kernel = other(simulate=TWO)
    kernel.do(f"outer = nest.remote({str(tmp_path)!r})")
    gate = Gate(tmp_path)
    gate.await_()
    start(simulate=TWO)
    outer = gpunb.remote(num_gpus=1)(lambda: gpunb.get(whole.remote())).remote()
    eventually(lambda: here()[0], "the inner task waits")
    assert "deadlock" not in str(here())
    gate.open()
    eventually(lambda: says_that_they_wait_for_each_other(here()), "this one is told")
    eventually(lambda: says_that_they_wait_for_each_other(there(kernel)), "the other one is told")
    gpunb.cancel(outer, force=True)
    assert kernel.do(f"gpunb.get(outer, timeout={PATIENCE}) > 0")


def test_a_placement_group_is_one_lease_until_it_is_removed(start, other):
    kernel = other(simulate=TWO)
    kernel.do("from gpunb.util.placement_group import *")
    kernel.do("from gpunb.util.scheduling_strategies import *")
    kernel.do("group = placement_group([{'GPU': 1}, {'GPU': 0.5}])")
    assert kernel.do("group.wait()")
    start(simulate=TWO)
    assert gpunb.available_resources()["GPU"] == pytest.approx(0.5)
    kernel.do("strategy = PlacementGroupSchedulingStrategy(group)")
    assert kernel.do("gpunb.get(now.options(scheduling_strategy=strategy).remote())")
    (device, _) = gpunb.status()["devices"]
    (lease,) = device["others"]
    assert (lease["share"], lease["job"]) == (1.0, "placement group")
    waiting = whole.remote()
    assert "1 of GPU 0 is held by another kernel" in waits_for()
    kernel.do("remove_placement_group(group)")
    assert gpunb.get(waiting, timeout=PATIENCE)
    eventually(lambda: gpunb.available_resources()["GPU"] == 2, "all is free")


def test_a_placement_group_waits_for_what_another_kernel_holds(start, other, tmp_path):
    kernel = other(simulate=TWO)
    gate = holds(kernel, tmp_path, 0.3)
    start(simulate=TWO)
    group = gpunb.util.placement_group([{"GPU": 1}, {"GPU": 1}])
    assert "0.3 of GPU 0 is held by another kernel" in waits_for()
    assert kernel.do("gpunb.get(now.remote())"), "the group holds a part of what it needs"
    gate.open()
    assert group.wait(PATIENCE)
