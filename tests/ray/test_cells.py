"""%%gpu on a cluster of several nodes, in a plain InteractiveShell."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import gpunb
from gpunb import exceptions
from tests.waiting import Gate, eventually

pytestmark = pytest.mark.needs_ray
WITHIN = 120


@pytest.fixture(scope="module")
def shell(nodes: Any) -> Iterator[Any]:
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(config=config)
    made.colors = "nocolor"
    made.run_line_magic("load_ext", "gpunb")
    yield made
    made.run_line_magic("unload_ext", "gpunb")
    InteractiveShell.clear_instance()


def run(shell: Any, code: str) -> tuple[Any, str]:
    """The result of a cell, and what it wrote to standard output."""
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    return result, captured.stdout


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
    assert shell.user_ns["x"] == 5
    assert "line 3" in text
    assert "gpunb/" not in text


def test_output_is_live(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cell prints is there while it runs."""
    gate = shell.user_ns["gate"] = Gate(tmp_path)
    from gpunb.notebook import running

    relay = running.relay

    def seen(shell: Any, kind: str, what: str, content: Any) -> None:
        if "before the gate" in content.get("text", ""):
            gate.open()
        relay(shell, kind, what, content)

    monkeypatch.setattr(running, "relay", seen)
    result, text = run(shell, "%%gpu 0.5\nprint('before the gate')\ngate.enter()\nprint('after')")
    assert result.success
    assert text.split() == ["before", "the", "gate", "after"]


def test_a_session_keeps_names(shell: Any) -> None:
    run(shell, "%%gpu 0.5 --session s\nimport os\npid = os.getpid(); kept = object()\nnumber = 1")
    first = shell.user_ns["pid"]
    result, _ = run(shell, "%%gpu --session s\nassert kept\npid = os.getpid()\nnumber += 1")
    assert result.success
    assert shell.user_ns["pid"] == first
    assert shell.user_ns["number"] == 2
    run(shell, "%gpu stop s")
    eventually(lambda: not gpunb.status()["actors"], within=WITHIN)


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
def test_stop(shell: Any, tmp_path: Path, session: str) -> None:
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


def test_status(shell: Any) -> None:
    _, text = run(shell, "%gpu")
    assert "A100" in text
    assert "V100" in text


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
