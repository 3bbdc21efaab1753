"""Head processes, and kernels that are attached to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpunb
from gpunb import cli
from gpunb.data.arenas import FEW
from gpunb.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    GpunbError,
    InfeasibleRequestError,
    ObjectLostError,
    PendingCallsLimitExceeded,
    TaskCancelledError,
    WorkerCrashedError,
)
from gpunb.head import backend as client_side
from gpunb.head import discovery
from gpunb.protocol import backend, verbs
from gpunb.system import runtime_dir, unix_socket
from tests.head.heads import MACHINE, end, ended, start
from tests.notebook.kernels import Kernel, kernel
from tests.sessions import ROOT, alive, running
from tests.waiting import PATIENCE, Gate, eventually, until_main_sleeps

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture
def attached(head: dict[str, Any]) -> Iterator[Any]:
    """This process, attached to it."""
    yield gpunb.init("lab")
    gpunb.shutdown()


@pytest.fixture
def empty(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in which no head process runs, nor after a test that fails."""
    path = tmp_path / "run"
    monkeypatch.setenv(runtime_dir.VARIABLE, str(path))
    yield path
    for each in discovery.running():
        os.kill(each.pid, signal.SIGKILL)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.open()


def get(refs: Any) -> Any:
    return gpunb.get(refs, timeout=PATIENCE)


@contextlib.contextmanager
def other(text: str, **more: Any) -> Iterator[Any]:
    """Another process, which is attached and says so."""
    program = f"import gpunb, os, sys\ngpunb.init('lab')\n{text}"
    with running(program, **more) as process:
        yield process


def output_of(process: Any) -> str:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return str(line).strip()


@gpunb.remote
def double(x: Any) -> Any:
    return 2 * x


@gpunb.remote(num_gpus=0.5)
def on_gpu() -> tuple[Any, int]:
    return gpunb.get_gpu_ids(), os.getpid()


def waiting(gate: Gate, **options: Any) -> Any:
    """A remote function that waits at the gate."""

    def waits(name: str = "task") -> str:
        gate.enter(f"{name}-{os.getpid()}")
        return name

    return gpunb.remote(**options)(waits) if options else gpunb.remote(waits)


@gpunb.remote
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def wait(self, gate: Gate) -> None:
        gate.enter("actor")


# ------------------------------------------------------------------------------- start and stop


def test_it_starts_says_how_to_attach_and_stops(empty, capsys):
    assert cli.main(["start", "--head", *MACHINE]) == 0
    out = capsys.readouterr().out
    (found,) = discovery.running()
    assert found.name == "head"
    for text in (f"process {found.pid}", "2 x A100", 'gpunb.init("auto")', "gpunb stop head"):
        assert text in out
    assert alive(found.pid)
    assert os.getsid(found.pid) != os.getsid(0)
    assert stat_of(discovery.path_of("head")) == 0o600

    def listed() -> bool:
        assert cli.main(["status"]) == 0
        return f"head process 'head' pid {found.pid}" in capsys.readouterr().out

    eventually(listed, "it is listed")  # at once, unless the machine is very busy

    assert cli.main(["start", "--head"]) == 1
    assert f"runs already, as process {found.pid}" in capsys.readouterr().err

    assert cli.main(["stop"]) == 0
    assert "has ended" in capsys.readouterr().out
    assert not alive(found.pid)
    assert not discovery.running()
    assert not discovery.path_of("head").exists()


def stat_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("what", ["the socket", "all"])
def test_a_head_process_whose_files_were_removed_is_found_again(empty, what):
    facts = start()
    gpunb.init("lab")
    try:
        if what == "all":
            shutil.rmtree(discovery.path_of("lab").parent.parent)
        else:
            discovery.path_of("lab").unlink()
        found = eventually(discovery.running, "it can be found")
        assert [each.pid for each in found] == [facts["pid"]]
        assert stat_of(discovery.path_of("lab")) == 0o600
        assert gpunb.get(gpunb.remote(len).remote("four"), timeout=PATIENCE) == 4
        gpunb.shutdown()
        gpunb.init("lab")
        assert gpunb.get(gpunb.remote(num_gpus=1)(len).remote("four"), timeout=PATIENCE) == 4
        assert cli.main(["start", "--head", "--name", "lab"]) == 1
    finally:
        gpunb.shutdown()
        end(facts)


def test_a_head_process_leaves_the_name_to_another_that_has_taken_it(empty):
    """The files of both were removed while the first one was stopped."""
    first = start()
    os.kill(first["pid"], signal.SIGSTOP)
    try:
        shutil.rmtree(discovery.path_of("lab").parent)
        second = start()
    finally:
        os.kill(first["pid"], signal.SIGCONT)
    try:
        assert [each.pid for each in discovery.running()] == [second["pid"]]
        os.kill(first["pid"], signal.SIGTERM)
        ended(first)
        assert [each.pid for each in discovery.running()] == [second["pid"]]
    finally:
        end(first)
        end(second)


def test_stopping_ends_the_workers_and_tells_the_kernel(empty, gate):
    facts = start()
    gpunb.init("auto")
    try:
        ref = waiting(gate, num_gpus=1).remote()
        eventually(gate.count, "the task has begun")
        assert cli.main(["stop", "lab", "--json"]) == 0
        with pytest.raises(GpunbError, match=r"the head process 'lab' .* is gone"):
            get(ref)
    finally:
        gpunb.shutdown()
    ended(facts)


def test_what_is_said_of_memory_and_processes_holds_for_it(empty):
    facts = start("lab", "--simulate", "1", "--object-memory", "1GiB", "--start-method", "spawn")
    with gpunb.init("auto"):
        assert gpunb.status()["object_memory"]["limit"] == 2**30
        assert gpunb.status()["preload"] is None
    end(facts)


def test_what_cannot_start_says_why(empty, capsys):
    for options, text in (
        ([], "gpunb start --head"),
        (["--head", "--address", "10.0.0.1:6379"], 'gpunb.init("ray")'),
        (["--head", "--name", "auto"], "no name for a head process"),
        (["--head", "--name", "a/b"], "no name for a head process"),
        (["--head", "--num-gpus", "-1"], "num_gpus=-1"),
        (["--head", "--simulate", "2xA100:much"], "much"),
        (["--head", "--resources", "a"], "NAME=NUMBER"),
        (["--head", "--object-memory", "much"], "object_memory='much' is not a size"),
        (["--head", "--spill", "nosuch"], f"spill='{os.getcwd()}/nosuch'"),
    ):
        assert cli.main(["start", *options]) == 1, options
        assert text in capsys.readouterr().err
    assert not discovery.running()
    assert cli.main(["stop"]) == 1
    assert capsys.readouterr().err == (
        "gpunb stop: no head process runs: there is nothing to stop. A kernel's own session ends "
        "with gpunb.shutdown()\n"
    )
    assert cli.main(["stop", "lab"]) == 1
    assert "no head process runs, and so none 'lab'" in capsys.readouterr().err


def test_a_name_is_had_by_one_even_if_both_start_at_once(empty):
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gpunb", "start", "--head", "--json", *MACHINE]
    both = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [each.communicate(timeout=60) for each in both]
    try:
        assert len(discovery.running()) == 1
        assert sorted(each.returncode for each in both) == [0, 1]
        (error,) = (
            err.decode() for (_, err), each in zip(outputs, both, strict=True) if each.returncode
        )
        assert "'head'" in error
    finally:
        assert cli.main(["stop"]) == 0


def test_one_that_was_killed_is_in_nobodys_way(empty):
    end(start())
    assert not discovery.running()
    second = start()
    assert discovery.pid_of("lab") == second["pid"]
    end(second)


# ------------------------------------------------------------------------------------- attaching


def test_without_a_head_process_it_says_how_to_start_one(empty):
    with pytest.raises(GpunbError, match="gpunb start --head"):
        gpunb.init("auto")
    with pytest.raises(ValueError, match=r"address='nowhere'.*none runs.*--name nowhere"):
        gpunb.init("nowhere")
    assert not gpunb.is_initialized()


def test_other_machines_are_rays():
    with pytest.raises(ValueError, match=r"this machine.*Ray"):
        gpunb.init("10.0.0.1:6379")


def test_the_environment_names_it(head, monkeypatch):
    monkeypatch.setenv("GPUNB_ADDRESS", "lab")
    assert get(double.remote(4)) == 8
    try:
        assert gpunb.status()["session"]["head"] == "lab"
    finally:
        gpunb.shutdown()


def test_its_devices_are_settled(head):
    with pytest.raises(ValueError, match=r"num_gpus=2, .*mps=True cannot be said") as raised:
        gpunb.init("lab", num_gpus=2, share="kill", caps=False, mps=True, preload=["a", "b"])
    *_, command = str(raised.value).split("`")[:-1]
    assert command == "gpunb start --head --num-gpus 2 --preload a,b --share kill --no-caps --mps"
    with gpunb.init("auto") as session:
        assert [each.type for each in session.devices] == ["A100", "A100"]
        assert f"head process 'lab' (pid {head['pid']})" in repr(session)
        assert gpunb.cluster_resources()["GPU"] == 2


def test_several_head_processes_are_told_apart(head, own_folder):
    second = start("second")
    try:
        with pytest.raises(GpunbError, match="'lab', 'second'"):
            gpunb.init("auto")
        with gpunb.init("second"):
            assert gpunb.status()["session"]["pid"] == second["pid"]
    finally:
        end(second)


def test_other_versions_are_refused_by_name(head, monkeypatch):
    ours = discovery.versions()
    monkeypatch.setattr(discovery, "versions", lambda: {**ours, "python": "2.7"})
    text = f"runs gpunb {ours['gpunb']} on Python {ours['python']}, and this .* on Python 2.7"
    with pytest.raises(GpunbError, match=text):
        gpunb.init("lab")


def test_nobody_else_is_let_in(monkeypatch):
    with gpunb.init(num_cpus=1, num_gpus=0, preload=()):
        from gpunb.head import server as serving

        session = backend.existing()
        monkeypatch.setattr(unix_socket, "peer", lambda sock: (1, os.getuid() + 1))
        served = serving.serve(session, "private")
        try:
            with pytest.raises(GpunbError, match="another user"):
                discovery.connect("private")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(PATIENCE)
            sock.connect(str(discovery.path_of("private")))
            with sock:
                assert sock.recv(1000) == b""
        finally:
            gpunb.shutdown()
            served.close()


def test_a_signal_that_does_not_wake_it_ends_it():
    def interrupt() -> None:
        until_main_sleeps()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with gpunb.init(num_cpus=1, num_gpus=0, preload=()):
        session = backend.existing()
        otherwise = threading.Timer(PATIENCE, session.shutdown)
        thread = threading.Thread(target=interrupt)
        otherwise.start()
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            session.join()
        otherwise.cancel()
        thread.join()
        assert gpunb.get(gpunb.remote(len).remote("four"), timeout=PATIENCE) == 4  # it goes on


def test_nonsense_is_sent_away(head):
    sock, _ = discovery.connect("lab")
    with sock:
        sock.send(b"\x00what")
        assert "gpunb ?" in json.loads(sock.recv(10_000))["error"]
        assert sock.recv(1000) == b""


# ------------------------------------------------------------------------------------ what works


def test_tasks_run_there(attached, head):
    assert get([double.remote(each) for each in range(150)]) == [2 * each for each in range(150)]
    (ids, pid), (other_ids, _) = get([on_gpu.remote(), on_gpu.remote()])
    assert ids == other_ids == [0]
    assert pid != os.getpid()


def test_arrays_travel_in_segments_and_can_be_written(attached):
    data = np.arange(300_000.0)
    ref = gpunb.put(data)
    result = get(double.remote(ref))
    result += 1
    assert np.array_equal(result, 2 * data + 1)
    assert np.array_equal(get(ref), data)


def test_many_objects_of_an_attached_kernel_share_files(attached, head):
    def opened(pid: Any) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def array(number: int) -> Any:
        return np.full(6250, float(number))

    get([double.remote(1) for _ in range(4)])
    before = opened("self"), opened(head["pid"])
    refs = [gpunb.put(array(number)) for number in range(150)]
    refs += [double.remote(array(number)) for number in range(150)]
    values = get(refs)
    assert [each[-1] for each in values] == [*range(150), *range(0, 300, 2)]
    assert opened("self") <= before[0] + FEW + 12
    assert opened(head["pid"]) <= before[1] + FEW + 12
    assert all(each.ctypes.data % 64 == 0 for each in values)


def test_the_same_ref_twice(attached):
    @gpunb.remote
    def inside(refs: list[Any]) -> Any:
        return gpunb.get(refs * 2)

    ref = double.remote(2)
    assert get([ref, ref]) == [4, 4]
    assert get(inside.remote([double.remote(1)])) == [2, 2]


def test_waiting_in_all_ways(attached, gate):
    held, quick = waiting(gate).remote(), double.remote(1)
    assert gpunb.wait([held, quick], timeout=PATIENCE) == ([quick], [held])
    with pytest.raises(GetTimeoutError, match=r"0\.01"):
        gpunb.get(held, timeout=0.01)
    with pytest.raises(GetTimeoutError):
        gpunb.get([held] * 150, timeout=0.01)
    assert [get(each) for each in gpunb.as_completed([held, quick][1:])] == [2]
    future = held.future()
    seen = []
    future.add_done_callback(lambda each: seen.append((each.result(), get(quick))))
    gate.open()
    assert future.result(PATIENCE) == "task"
    eventually(lambda: seen == [("task", 2)], "the callback could ask as well")

    async def both() -> list[Any]:
        return list(await asyncio.gather(held, double.remote(4)))

    assert asyncio.run(both()) == ["task", 8]


def test_a_failure_among_many_ends_the_wait(attached, gate):
    @gpunb.remote(num_cpus=0)
    def fails() -> None:
        raise ZeroDivisionError("of one's own")

    refs = [waiting(gate).remote() for _ in range(120)]
    with pytest.raises(ZeroDivisionError):
        get([*refs, fails.remote()])
    for ref in refs:
        gpunb.cancel(ref, force=True)


def test_generators_stream(attached):
    @gpunb.remote
    def counts(n: int) -> Iterator[int]:
        yield from range(n)

    assert [get(each) for each in counts.remote(5)] == [0, 1, 2, 3, 4]


def test_cancel_and_crash(attached, gate):
    ref = waiting(gate).remote()
    eventually(gate.count, "it runs")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)

    @gpunb.remote
    def crashes() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerCrashedError):
        get(crashes.remote())


def test_actors(attached):
    counter = Counter.remote()
    assert get([counter.add.remote() for _ in range(3)]) == [1, 2, 3]
    gpunb.kill(counter)
    with pytest.raises(ActorDiedError):
        get(counter.add.remote())


def test_what_is_refused_in_a_kernel_is_refused_here(attached, gate):
    with pytest.raises(InfeasibleRequestError, match="request for 3 GPU"):
        double.options(num_gpus=3).remote(1)
    first = Counter.options(name="taken").remote()
    with pytest.raises(ValueError, match="'taken' is taken"):
        Counter.options(name="taken").remote()
    same = Counter.options(name="taken", get_if_exists=True).remote()
    assert same == first
    with pytest.raises(ValueError, match="no actor has the name 'nobody'"):
        gpunb.get_actor("nobody")
    limited = Counter.options(max_pending_calls=1).remote()
    ref = limited.wait.remote(gate)
    with pytest.raises(PendingCallsLimitExceeded):
        limited.add.remote()
    with pytest.raises(ValueError, match="force=True"):
        gpunb.cancel(ref, force=True)
    gate.open()
    get(ref)


def test_calls_that_follow_each_other_fast_need_no_answer(attached, gate, monkeypatch):
    monkeypatch.setattr(client_side, "FAST", 1e9)
    counter, limited = Counter.remote(), Counter.options(max_pending_calls=3).remote()
    refs = [counter.add.remote() for _ in range(300)]
    assert get(refs) == list(range(1, 301))
    asked: list[Any] = []
    connection: Any = backend.current().connection
    request = connection.request

    def ask(verb: Any, *rest: Any) -> Any:
        asked.append(verb)
        return request(verb, *rest)

    connection.request = ask
    get([counter.add.remote() for _ in range(50)])
    assert not any(isinstance(verb, verbs.SubmitNumbered) for verb in asked)
    limited.wait.remote(gate)
    for _ in range(2):
        limited.add.remote()
    with pytest.raises(PendingCallsLimitExceeded):
        limited.add.remote()
    late = [counter.add.remote(ref) for ref in [gpunb.put(1)] * 3]
    gpunb.kill(counter)
    dead = [counter.add.remote() for _ in range(20)]
    for ref in dead:
        with pytest.raises(ActorDiedError):
            get(ref)
    gpunb.wait(late, num_returns=3, timeout=PATIENCE)


def test_output_comes_before_the_result(attached, capsys):
    @gpunb.remote
    def prints() -> None:
        for number in range(50):
            print(f"line {number}")  # noqa: T201

        @gpunb.remote
        def inner() -> None:
            print("from inside")  # noqa: T201

        get(inner.remote())

    get(prints.remote())
    out = capsys.readouterr().out
    positions = [
        out.index(f"(prints pid={out.split('pid=')[1].split(')')[0]}) line {n}\n")
        for n in range(50)
    ]
    assert positions == sorted(positions)
    assert "(inner pid=" in out


def test_workers_share_the_surroundings_of_their_kernel(attached, tmp_path, monkeypatch):
    @gpunb.remote
    def around() -> tuple[Any, ...]:
        return os.getcwd(), os.environ.get("OF_THE_KERNEL"), list(sys.argv), list(sys.path)

    assert get(around.remote()) == (os.getcwd(), None, sys.argv, sys.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_KERNEL", "yes")
    monkeypatch.setattr(sys, "argv", ["other"])
    assert get(around.remote())[:3] == (str(tmp_path), "yes", ["other"])


def test_an_interrupted_wait_loses_nothing(attached, gate):
    ref = waiting(gate).remote()
    eventually(gate.count, "it runs")
    main = threading.main_thread().ident
    assert main is not None

    def interrupted() -> None:
        threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGINT)).start()
        gpunb.get(ref, timeout=PATIENCE)

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    gate.open()
    assert get(ref) == "task"


def test_many_threads_ask_at_once(attached):
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = get([double.remote(number * 100 + each) for each in range(20)])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
    assert found == {n: [2 * (n * 100 + each) for each in range(20)] for n in range(6)}


def test_what_is_let_go_is_let_go_there(attached):
    refs = [gpunb.put(bytes(100_000)), double.remote(1)]
    get(refs)
    assert gpunb.status()["objects"]["objects"] == 2
    del refs
    eventually(no_objects, "nothing is kept")


def no_objects() -> bool:
    gc.collect()
    return bool(gpunb.status()["objects"]["objects"] == 0)


def test_the_monitors_way_in(attached, gate):
    current: Any = backend.current()
    seen: list[Any] = []
    watch = current.watch(lambda snapshot: seen.append(snapshot) or True)
    ref = waiting(gate).remote()
    eventually(lambda: seen and seen[-1]["running"], "the task is seen to run")
    watch.stop()
    answers: list[Any] = []
    current.request({"do": "cancel", "job": ref.task_id}, answers.append)
    current.request({"do": "dance"}, answers.append)
    eventually(lambda: len(answers) == 2, "both are answered")
    assert answers[0] == {"ok": True, "value": None}
    assert "'dance' cannot be asked for" in answers[1]["error"]
    with pytest.raises(TaskCancelledError):
        get(ref)
    done = threading.Event()
    current.later(0.01, done.set)
    assert done.wait(PATIENCE)


# ------------------------------------------------------------------------------- several kernels

HOLDS = """
@gpunb.remote(num_gpus=1)
class Model:
    def where(self):
        return gpunb.get_gpu_ids()
model = Model.options(name="model", lifetime={lifetime!r}).remote()
print(gpunb.get(model.where.remote()), flush=True)
sys.stdin.readline()
"""


def test_kernels_share_devices_queue_and_named_actors(attached, gate):
    with other(HOLDS.format(lifetime=None)) as kernel:
        assert output_of(kernel) == "[0]"
        assert get(on_gpu.remote())[0] == [1]
        model = gpunb.get_actor("model")
        assert get(model.where.remote()) == [0]
        both = double.options(num_gpus=2).remote(1)
        (job,) = gpunb.status()["waiting"]
        assert job["name"] == "double"
        kernel.communicate("go\n", timeout=PATIENCE)
        assert get(model.where.remote()) == [0]  # this handle keeps it
        del model
        assert get(both) == 2


def test_a_detached_actor_outlives_its_kernel(attached):
    with other(HOLDS.format(lifetime="detached")) as kernel:
        assert output_of(kernel) == "[0]"
        kernel.kill()
        kernel.wait()
    model = gpunb.get_actor("model")
    assert get(model.where.remote()) == [0]
    gpunb.kill(model)


def test_a_killed_kernel_leaves_nothing(attached, gate):
    text = f"""
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.waiting import Gate
gate = Gate(Path({str(gate.folder)!r}))

@gpunb.remote(num_gpus=1)
def waits():
    try:
        gate.enter("task")
    except KeyboardInterrupt:
        gate.enter("stubborn")

@gpunb.remote(num_gpus=0.5)
class Host:
    def wait(self):
        gate.enter("actor")

host = Host.remote()
refs = [host.wait.remote()]
gate.await_("actor")
refs += [waits.remote() for _ in range(4)]
gate.await_("task")
data = gpunb.put(bytes(1_000_000))
print(len(gpunb.status()["running"]), flush=True)
sys.stdin.readline()
"""
    with other(text) as kernel:
        output_of(kernel)
        workers = {each["pid"] for each in (*gpunb.status()["running"], *gpunb.status()["actors"])}
        assert workers
        kernel.kill()
        kernel.wait()
        eventually(lambda: gpunb.available_resources() == gpunb.cluster_resources(), "all is free")
    eventually(lambda: not any(map(alive, workers)), "its workers are gone")
    assert not gpunb.status()["waiting"]
    assert not gpunb.status()["actors"]
    eventually(no_objects, "its objects are gone")


def test_workers_of_one_kernel_and_its_modules_are_not_anothers(attached, tmp_path, monkeypatch):
    @gpunb.remote
    def which() -> tuple[str, int]:
        import surely_mine

        return str(surely_mine.NAME), os.getpid()

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "surely_mine.py").write_text(f"NAME = {name!r}")
    monkeypatch.syspath_prepend(tmp_path / "first")
    names, mine = zip(*get([which.remote() for _ in range(4)]), strict=True)
    assert set(names) == {"first"}
    text = f"""
sys.path.insert(0, {str(tmp_path / "second")!r})
@gpunb.remote
def which():
    import surely_mine
    return surely_mine.NAME, os.getpid()
print(gpunb.get([which.remote() for _ in range(4)]), flush=True)
"""
    with other(text) as kernel:
        names, theirs = zip(*eval(output_of(kernel)), strict=True)
    assert set(names) == {"second"}
    assert not set(mine) & set(theirs)


def test_shutdown_leaves_the_head_process(head, gate):
    gpunb.init("lab")
    ref = waiting(gate, num_gpus=1).remote()
    eventually(gate.count, "it runs")
    gpunb.shutdown()
    del ref
    gpunb.shutdown()
    assert not gpunb.is_initialized()
    with gpunb.init("auto"):
        assert gpunb.status()["session"]["pid"] == head["pid"]
        eventually(lambda: gpunb.available_resources().get("GPU") == 2, "the task has ended")


def test_a_ref_of_an_earlier_session_means_nothing_here(head):
    with gpunb.init("lab"):
        mine = double.remote(1)
        get(mine)
    with gpunb.init(num_cpus=1, num_gpus=0, preload=()):
        own = double.remote(5)
        assert own.id > mine.id
        with pytest.raises(ObjectLostError):
            get(mine)
        assert get(own) == 10
    for each in (mine, own):
        with gpunb.init("lab"), pytest.raises(ObjectLostError):
            get(each)


def refused(ref: Any) -> None:
    for ask in (
        lambda: get(ref),
        lambda: gpunb.wait([ref], timeout=0),
        lambda: get(double.remote(ref)),
        lambda: get([double.remote([ref]) for _ in range(3)]),
    ):
        with pytest.raises(ObjectLostError):
            ask()


def test_nobody_can_name_what_is_anothers(attached):
    text = "ref = gpunb.put('theirs'); print(repr(ref.id), flush=True); sys.stdin.readline()\n"
    with other(f"{text}print(gpunb.get(ref), flush=True)") as kernel:
        refused(gpunb.ObjectRef(eval(output_of(kernel)), held=True))
        gc.collect()
        get(double.remote(1))  # by then it is told that it was let go
        kernel.stdin.write("go\n")
        kernel.stdin.flush()
        assert output_of(kernel) == "theirs"


def test_a_fork_of_the_kernel_is_not_attached(attached):
    child = os.fork()
    if not child:
        try:
            double.remote(1)
        except GpunbError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert get(double.remote(1)) == 2


# ------------------------------------------------------------------------- the head process dies


def test_a_killed_head_process_is_told_at_once(empty, gate):
    facts = start()
    gpunb.init("lab")
    try:
        ref = waiting(gate, num_gpus=1).remote()
        eventually(gate.count, "it runs")
        failures: list[Any] = []

        def wait() -> None:
            try:
                ref.result()
            except GpunbError as error:
                failures.append(error)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for each in threads:
            each.start()
        future = ref.future()
        os.kill(facts["pid"], signal.SIGKILL)
        for each in threads:
            each.join(PATIENCE)
        assert len(failures) == 3
        for error in (*failures, future.exception(PATIENCE)):
            assert isinstance(error, GpunbError)
            assert "gpunb.init()" in str(error)
        for call in (lambda: double.remote(1), gpunb.status, lambda: get(ref)):
            with pytest.raises(GpunbError, match=f"'lab' .pid {facts['pid']}. is gone"):
                call()
    finally:
        gpunb.shutdown()
    ended(facts)
    with gpunb.init(num_cpus=1, num_gpus=0, preload=()):
        assert get(double.remote(2)) == 4


def test_a_sweep_is_stopped_at_the_head_process(attached, gate):
    def trial(at):
        gate.enter(at)

    sweep = gpunb.sweep(trial, {"at": range(9)}, num_gpus=0.5, max_concurrent_trials=2)
    gate.await_(0)
    group = next(each for each in gpunb.status()["groups"] if each["kind"] == "sweep")
    replies = queue.SimpleQueue()
    backend.current().request({"do": "stop", "sweep": group["id"]}, replies.put)
    assert replies.get(timeout=PATIENCE)["ok"]
    sweep.wait(PATIENCE)
    assert sweep.counts() == {"cancelled": 9}


# -------------------------------------------------------------------------------------- notebook


@pytest.fixture(scope="module")
def cell(head: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Runs a cell in a kernel that is attached."""
    prepare = "import gpunb\n%load_ext gpunb\ngpunb.init('lab')"
    with kernel(tmp_path_factory.mktemp("notebook"), prepare) as running:
        yield running


def test_cells(cell):
    result = cell.ok("%%gpu 0.5\nimport os\nx = 41\nprint('hello', gpunb.get_gpu_ids())\nx + 1")
    assert result.stdout == "hello [0]\n"
    assert result.value == "42"
    assert cell.value("x") == 41
    failed = cell("%%gpu 0.5\nprint('before')\n1 / 0")
    assert failed.stdout == "before\n"
    assert failed.ename == "ZeroDivisionError"
    assert "line 3" in failed.traceback


def test_one_that_runs_first_is_over_when_its_cell_is(cell):
    """In whatever order those are told who want to know."""
    cell.ok(
        "import itertools, threading\nfrom gpunb.protocol import backend\n"
        "current = backend.current()\n"
        "notify, count = current.notify, itertools.count(1)\n"
        "def late(obj, callback):\n"
        "    notify(obj, threading.Timer(0.2 / next(count), callback).start)\n"
        "current.notify = late"
    )
    cell.ok("%%gpu 0.5 --bg\ny = 3")
    assert cell.value("(_.state, _.done(), _.names)") == ("done", True, {"y": 3})
    cell.ok("count = itertools.count(1)")
    assert cell("%%gpu 0.5 --bg\n1 / 0").ename == "ZeroDivisionError"
    cell.ok("job = gpunb.get_job(max(job['id'] for job in gpunb.status()['finished']))")
    assert cell.value("(job.state, job.done())") == ("failed", True)
    cell.ok("del current.notify")


def test_an_error_in_a_callback_ends_nothing(attached, gate, capsys):
    ref, reported = waiting(gate).remote(), threading.Event()
    backend.current().notify(ref.id, lambda: 1 / 0)
    backend.current().notify(ref.id, reported.set)
    gate.open()
    assert reported.wait(PATIENCE)  # after the error was printed, on another thread
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert get(ref) == "task"
    assert get(double.remote(2)) == 4


def test_a_stopped_cell(cell):
    result = cell.start("%%gpu 1\nprint('runs', flush=True)\nimport time\ntime.sleep(600)")
    cell.shows(result, "runs")
    cell.interrupt()
    assert cell.finish(result).ename == "KeyboardInterrupt"
    eventually(
        lambda: cell.value("gpunb.available_resources().get('GPU')") == 2, "the worker is gone"
    )


def test_background_cells_their_log_and_sessions(cell):
    result = cell.ok("%%gpu 0.5 --bg -n train\nprint('in the background')\ny = 3")
    cell.ok("%gpu wait")
    cell.late(lambda: "in the background" in result.stdout)
    assert cell.value("y") == 3
    ident = cell.value("max(job['id'] for job in gpunb.status()['finished'])")
    assert "in the background" in cell.ok(f"%gpu logs {ident}").stdout
    cell.ok("%%gpu 0.5 -s keeps\nz = 5")
    assert cell.ok("%%gpu -s keeps\nz + 1").value == "6"
    with gpunb.init("lab"):
        (actor,) = gpunb.status()["actors"]
        assert actor["kind"] == "session"
    cell.ok("%gpu stop keeps")


def test_the_jobs_of_a_notebook_that_detaches(cell):
    cell.ok("%config GpuMagics.headless = False")
    cell.ok("%%gpu 1 --bg\nimport time\ntime.sleep(600)")
    cell.ok("%%gpu 2 --bg\npass")
    for name, state in (("held", "running"), ("queued", "waiting")):
        eventually(lambda s=state: cell.value(f"gpunb.status()[{s!r}]"), state)
        ident = cell.value(f"gpunb.status()[{state!r}][0]['id']")
        cell.ok(f"{name} = %gpu job {ident}")
    cell.ok("gpunb.shutdown()\nsession = gpunb.init('lab')")
    assert cell.value("(held.state, queued.state)") == ("failed", "failed")
    assert "shut down, and" in cell("held.result").evalue
    assert "goes on in the head process" in cell("held.result").evalue
    assert cell.value("[gpunb.get_job(each.id).state for each in (held, queued)]") == [
        "running",
        "queued",
    ]
    cell.ok("for each in (held, queued): gpunb.get_job(each.id).cancel()")
    eventually(lambda: cell.value("gpunb.available_resources().get('GPU')") == 2, "all is free")
    assert cell.ok("%%gpu 1\n1 + 1").value == "2"
    cell.ok("%config GpuMagics.headless = None")


def test_cancel_all_is_of_this_kernel(cell, attached, gate):
    mine = waiting(gate).remote()
    cell.ok(
        "@gpunb.remote\ndef sleeps():\n    import time\n    time.sleep(600)\n"
        "refs = [sleeps.remote() for _ in range(3)]"
    )
    cell.ok("%gpu cancel all")
    assert "cancelled" in cell("gpunb.get(refs[0])").evalue
    cell("del refs")
    gate.open()
    assert get(mine) == "task"


def test_a_cell_asks_its_user(cell):
    cell.stdin = True
    try:
        result = cell.start("%%gpu 0.5\nname = input('who? ')\nprint('hello', name)")
        message = cell.client.get_stdin_msg(timeout=PATIENCE)
        assert message["content"]["prompt"] == "who? "
        cell.client.input("Ada")
        assert "hello Ada" in cell.finish(result).stdout
    finally:
        cell.stdin = False


def test_a_kernel_that_leaves_ends_its_placement_groups_and_no_others(attached: Any) -> None:
    # The last tasks of the test before may still hold GPU 0.
    eventually(lambda: gpunb.available_resources() == gpunb.cluster_resources())
    group = gpunb.util.placement_group([{"GPU": 1}], name="mine")
    assert get(group.ready()) == group
    program = """
theirs = gpunb.util.placement_group([{"GPU": 0.5, "CPU": 1}], name="theirs")
kept = gpunb.util.placement_group([{"GPU": 0.25}], name="kept", lifetime="detached")
theirs.wait(), kept.wait()
print(sorted(each["name"] for each in gpunb.util.placement_group_table().values()), flush=True)
input()
"""
    with other(program) as process:
        assert output_of(process) == "['kept', 'mine', 'theirs']"
    eventually(lambda: gpunb.available_resources()["GPU"] == 0.75)
    kept = gpunb.util.get_placement_group("kept")
    strategy = gpunb.util.scheduling_strategies.PlacementGroupSchedulingStrategy(kept)
    task = gpunb.remote(num_gpus=0.25, scheduling_strategy=strategy)(gpunb.get_gpu_ids)
    assert get(task.remote()) == [1]
    for each in (kept, group):
        gpunb.util.remove_placement_group(each)
    eventually(lambda: gpunb.available_resources() == gpunb.cluster_resources())
