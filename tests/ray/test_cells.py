"""%%gpu on a cluster of several nodes, in a plain InteractiveShell."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb import exceptions
from gpunb.live.compact import compact
from tests.engine.test_status import check
from tests.shells import run
from tests.waiting import Gate, eventually

pytestmark = pytest.mark.needs_ray
WITHIN = 120


def tidy(shell: Any, *, session: str = "") -> None:
    """Let nothing of a test hold a device in the next."""
    if session:
        run(shell, f"%gpu stop {session}")
    eventually(lambda: gpunb.available_resources()["GPU"] == 3, within=WITHIN)


def test_only_a_users_objects_are_looked_through_for_garbage(shell: Any) -> None:
    """Else a process takes long to end: the next waits for its processor."""
    code = (
        "%%gpu 1\n"
        "import gc\n"
        "class Node: pass\n"
        "node = Node()\n"
        "node.itself = node\n"
        "del node\n"
        "tracked, frozen = len(gc.get_objects()), gc.get_freeze_count()\n"
        "garbage = gc.collect()"
    )
    result, _ = run(shell, code)
    assert result.success
    names = shell.user_ns
    assert names["garbage"] > 0
    assert names["frozen"] > 10 * names["tracked"]
    result, _ = run(shell, "%%gpu 0\nimport gc\nfrozen = gc.get_freeze_count()")
    assert result.success
    assert names["frozen"] == 0  # its process lives on


def test_names_output_and_result(shell: Any) -> None:
    shell.user_ns["a"] = [1]
    code = (
        "%%gpu 0.5 --type V100\n"
        "import gpunb, os\n"
        "a.append(2)\n"
        "ids = gpunb.get_gpu_ids()\n"
        "print('printed')\n"
        "os.system('echo by a child')\n"
        "a"
    )
    result, text = run(shell, code)
    assert result.success
    assert (shell.user_ns["a"], shell.user_ns["ids"]) == ([1, 2], [0])
    assert text.index("printed") < text.index("by a child") < text.index("[1, 2]")
    assert shell.user_ns["_"] == [1, 2]


def test_error(shell: Any) -> None:
    result, text = run(shell, "%%gpu 0.5\nx = 5\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert gpunb.status()["finished"][0]["state"] == "failed"
    assert shell.user_ns["x"] == 5
    assert "line 3" in text
    assert "gpunb/" not in text


def test_output_is_live(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cell prints is there while it runs."""
    gate = shell.user_ns["gate"] = Gate(tmp_path)
    from gpunb.notebook import foreground

    relay = foreground.relay

    def seen(shell: Any, kind: str, what: str, content: Any) -> None:
        if "before the gate" in content.get("text", ""):
            gate.open()
        relay(shell, kind, what, content)

    monkeypatch.setattr(foreground, "relay", seen)
    result, text = run(shell, "%%gpu 0.5\nprint('before the gate')\ngate.enter()\nprint('after')")
    assert result.success
    assert text.split() == ["before", "the", "gate", "after"]


def test_the_two_streams_keep_their_order(shell: Any) -> None:
    lines: list[str] = []

    class Kept(io.StringIO):
        def write(self, text: str) -> int:
            lines.extend(text.split())
            return len(text)

    code = "import sys\nfor i in range(20):\n    print(i, file=(sys.stdout, sys.stderr)[i % 2])"
    with contextlib.redirect_stdout(Kept()), contextlib.redirect_stderr(Kept()):
        assert shell.run_cell(f"%%gpu 0\n{code}").success
    assert lines == [str(number) for number in range(20)]


def test_a_session_keeps_names(shell: Any) -> None:
    run(shell, "%%gpu 0.5 --session s\nimport os\npid = os.getpid(); kept = object()\nnumber = 1")
    first = shell.user_ns["pid"]
    result, _ = run(shell, "%%gpu --session s\nassert kept\npid = os.getpid()\nnumber += 1")
    assert result.success
    assert shell.user_ns["pid"] == first
    assert shell.user_ns["number"] == 2
    assert "session" not in {each["kind"] for each in gpunb.status()["finished"]}
    (session,) = gpunb.status()["actors"]
    run(shell, "%gpu stop s")
    eventually(lambda: not gpunb.status()["actors"], within=WITHIN)
    over = {each["id"]: each for each in gpunb.status()["finished"]}
    ended = over[session["id"]]
    assert [ended[name] for name in ("kind", "name", "state")] == [
        "session",
        "session s",
        "cancelled",
    ]
    assert ended["devices"] == session["devices"]
    assert ended["gpu_seconds"] > 0
    assert {each["gpu_seconds"] for each in over.values() if each["actor"]} == {0}, "it has them"


def test_background(shell: Any, tmp_path: Path) -> None:
    gate = shell.user_ns["gate"] = Gate(tmp_path)
    _, _ = run(shell, "job = None\n")
    run(shell, "%%gpu 0.5 --bg --name later\ngate.enter()\nprint('from afar')\nvalue = 7")
    eventually(gate.came, within=WITHIN)
    assert "value" not in shell.user_ns
    gate.open()
    run(shell, "%gpu wait")
    assert shell.user_ns["value"] == 7


@pytest.mark.parametrize("session", ["", "--session t"])
@pytest.mark.parametrize("known", [True, False], ids=["", "whose beginning is not known yet"])
def test_stop(
    shell: Any, tmp_path: Path, session: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr("gpunb.ray.worker_events.WorkerEvents._began", lambda *_: None)
    gate = shell.user_ns["gate"] = Gate(tmp_path)

    def stop() -> None:
        gate.await_()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    code = f"%%gpu 0.5 {session}\nimport time\nstopped = 'no'\ngate.note('task')\ntime.sleep(300)"
    result, _ = run(shell, code)
    thread.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert shell.user_ns["stopped"] == "no"
    if session:
        result, _ = run(shell, f"%%gpu {session}\nstopped += '!'")
        assert result.success
        assert shell.user_ns["stopped"] == "no!"
        run(shell, "%gpu stop t")


def test_cancel_ends_what_a_cell_waits_for(shell: Any, tmp_path: Path) -> None:
    gate = shell.user_ns["gate"] = Gate(tmp_path)
    run(shell, "%%gpu 0.5 --bg --name slow\nimport time\ngate.note('task')\ntime.sleep(300)")
    job = shell.user_ns["_"]
    eventually(gate.came, within=WITHIN)
    run(shell, f"%gpu cancel {job.id}")
    with pytest.raises(exceptions.TaskCancelledError):
        _ = job.wait(WITHIN).result
    assert job.state == gpunb.status()["finished"][0]["state"] == "cancelled"


def test_cancel_ends_what_a_task_waits_for(nodes: Any, tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    @gpunb.remote(num_gpus=0.5)
    def sleep() -> None:
        gate.note("task")
        time.sleep(300)

    ref = sleep.remote()
    eventually(gate.came, within=WITHIN)
    gpunb.cancel(ref)
    with pytest.raises(exceptions.TaskCancelledError):
        gpunb.get(ref, timeout=WITHIN)


def test_a_process_that_exits_has_its_output_shown(shell: Any) -> None:
    code = "import os, sys\nprint('last words')\nprint('why', file=sys.stderr)\nos._exit(3)"
    result, text = run(shell, f"%%gpu 0.5\n{code}")
    assert "last words\n" in text
    error = result.error_in_exec
    assert isinstance(error, exceptions.WorkerCrashedError)
    assert "exited with status 3" in str(error)
    assert "The last lines of its standard error were:\nwhy" in str(error)


def test_an_actor_that_exits_says_so(nodes: Any) -> None:
    @gpunb.remote
    class Leaving:
        def leave(self) -> None:
            os._exit(4)

    leaving = Leaving.remote()
    with pytest.raises(exceptions.ActorDiedError, match="its process exited with status 4"):
        gpunb.get(leaving.leave.remote(), timeout=WITHIN)


def test_a_fatal_error_is_told_with_its_stack(nodes: Any, tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    def crash() -> None:
        import ctypes

        gate.enter()
        ctypes.string_at(0)

    ref = gpunb.remote(num_gpus=0.5, max_retries=0)(crash).remote()
    eventually(lambda: gate.came() and gpunb.status()["running"], within=WITHIN)
    gate.open()
    with pytest.raises(exceptions.WorkerCrashedError, match="Segmentation fault") as raised:
        gpunb.get(ref, timeout=WITHIN)
    assert "in crash" in str(raised.value)
    assert "gpunb/ray" not in str(raised.value)


def test_status(shell: Any) -> None:
    _, text = run(shell, "%gpu")
    assert "A100" in text
    assert "V100" in text


def test_the_snapshot_has_its_form(shell: Any, tmp_path: Path) -> None:
    gate = shell.user_ns["gate"] = Gate(tmp_path)
    tidy(shell)
    keeper = gpunb.remote(num_gpus=0.25, accelerator_type="A100")(threading.Event).remote()
    waits = keeper.wait.remote(300)
    run(shell, "%%gpu 1 --type V100 --session s\npass")
    run(shell, "%%gpu 0.5 --type A100 --bg\ngate.enter()")
    run(shell, "%%gpu 2 --type A100 --bg\npass")
    eventually(
        lambda: gate.came() and len(gpunb.status()["running"]) == 2, "both run", within=WITHIN
    )
    found = gpunb.status()
    check(found)
    assert {each["kind"] for each in found["actors"]} == {"actor", "session"}
    assert {each["kind"] for each in found["running"]} == {"cell", "method"}
    (waiting,) = found["waiting"]
    assert waiting["waits_for"]
    assert {each["state"] for each in found["finished"]} >= {"done", "failed", "cancelled"}
    assert all(each["history"]["share"] for each in compact(found)["devices"])
    gate.open()
    gpunb.kill(keeper)
    del waits, keeper
    run(shell, "%gpu wait")
    tidy(shell, session="s")


def test_a_shutdown_ends_what_is_open(shell: Any, tmp_path: Path) -> None:
    gate = shell.user_ns["gate"] = Gate(tmp_path)
    run(shell, "%%gpu 0.5 --bg\ngate.enter()")
    job = shell.user_ns["_"]
    future = gpunb.remote(num_gpus=0.5)(gate.enter).remote("task").future()
    eventually(gate.came, within=WITHIN)
    try:
        gpunb.shutdown()
        assert job.done()
        assert job.state == "failed"
        with pytest.raises(exceptions.GpunbError, match="was shut down"):
            _ = job.result
        with pytest.raises(exceptions.GpunbError, match="was shut down"):
            future.result(WITHIN)
    finally:
        gate.open()
        gpunb.init("ray")


def test_the_loss_of_the_node_that_a_cell_is_on(shell: Any, nodes: Any, tmp_path: Path) -> None:
    gate = shell.user_ns["gate"] = Gate(tmp_path)
    node = nodes.add(1, "T4")

    def lose() -> None:
        gate.await_()
        nodes.lose(node)

    thread = threading.Thread(target=lose)
    thread.start()
    result, text = run(shell, "%%gpu 1 --type T4\nprint('on it')\ngate.enter()")
    thread.join()
    assert isinstance(result.error_in_exec, exceptions.WorkerCrashedError)
    assert "node" in text
    result, _ = run(shell, "%%gpu 0.5\nfine = 1")
    assert result.success
    assert shell.user_ns["fine"] == 1
    assert os.getpid()
