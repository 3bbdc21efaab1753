"""%%gpu in a plain InteractiveShell in this process, without a kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import gpunb
from gpunb import backend, serialize
from gpunb.backend import Outcome
from gpunb.core.options import Options
from gpunb.exceptions import OutOfMemoryError
from gpunb.notebook import cells, running
from gpunb.notebook.shipping import Shipment
from tests.sessions import assert_idle, session
from tests.waiting import eventually


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    config = Config()
    config.HistoryManager.enabled = False
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(config=config)
    made.colors = "nocolor"
    with session(num_gpus=1, preload=None):
        made.run_line_magic("load_ext", "gpunb")
        yield made
        assert_idle()
        made.run_line_magic("unload_ext", "gpunb")
    InteractiveShell.clear_instance()


def run(shell: Any, code: str) -> tuple[Any, str]:
    """The result of a cell, and what it wrote to standard output."""
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    return result, captured.stdout


def test_names_output_and_result(shell: Any) -> None:
    shell.user_ns["a"] = [1]
    result, text = run(shell, "%%gpu\na.append(2)\nb = len(a)\nprint('printed')\na")
    assert result.success
    assert (shell.user_ns["a"], shell.user_ns["b"]) == ([1, 2], 2)
    assert "printed" in text
    assert "[1, 2]" in text
    assert shell.user_ns["_"] == [1, 2]


def test_error(shell: Any) -> None:
    result, text = run(shell, "%%gpu\nx = 5\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert shell.user_ns["x"] == 5
    assert "line 3" in text
    assert "gpunb/" not in text


def test_syntax_error(shell: Any) -> None:
    result, text = run(shell, "%%gpu\nx = = 5")
    assert not result.success
    assert "line 2" in text


def test_functions_at_home(shell: Any) -> None:
    run(shell, "%%gpu\ndef f(): return later")
    shell.user_ns["later"] = 7
    assert shell.user_ns["f"]() == 7
    assert shell.user_ns["f"].__globals__ is shell.user_ns


def test_status(shell: Any) -> None:
    result, text = run(shell, "%gpu")
    assert "GPU" in text
    assert result.result.facts["devices"]


def test_usage(shell: Any) -> None:
    result, _ = run(shell, "%%gpu --wrong\npass")
    assert type(result.error_in_exec).__name__ == "UsageError"
    with capture_output() as captured:
        shell.run_cell("%gpu?")
    assert "--timeout" in captured.stdout + str(captured.outputs)


def test_from_another_thread(shell: Any) -> None:
    outcome = []

    def work() -> None:
        shell.run_cell_magic("gpu", "0", "from_thread = 3")
        outcome.append(shell.user_ns["from_thread"])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == [3]


@pytest.mark.parametrize("delay", [0.001 * each for each in range(0, 20, 2)])
def test_stop_at_any_moment_leaves_nothing_running(
    shell: Any, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    stops = running._stops

    @contextlib.contextmanager
    def stopped(sink: Any) -> Iterator[Any]:
        with stops(sink) as user:
            timer.start()
            yield user

    monkeypatch.setattr(running, "_stops", stopped)
    monkeypatch.setattr(running, "GRACE", 30.0)
    result, _ = run(shell, "%%gpu\nwhile True: pass")
    timer.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert not gpunb.status()["running"]


def stop(what: str, **more: Any) -> threading.Thread:
    """Have the session's desk stop the cell that comes, once it is there."""

    def ask() -> None:
        def cell() -> Any:
            now = gpunb.status()
            return [each for each in now["running"] + now["waiting"] if each["kind"] == "cell"]

        (job,) = eventually(cell)
        current: Any = backend.current()
        current.request({"do": what, "job": job["id"], **more}, lambda _: None)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


ENDLESS = "import time\nwhile True: time.sleep(0.01)"


@pytest.mark.parametrize("what", ["interrupt", "cancel"])
def test_a_cell_that_is_stopped_from_outside_is_interrupted(shell: Any, what: str) -> None:
    """As if by the notebook's Stop, wherever it is at that moment."""
    thread = stop(what)
    result, _ = run(shell, f"%%gpu\n{ENDLESS}")
    thread.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)


def test_a_cell_that_waits_is_stopped_from_outside(shell: Any) -> None:
    holder = gpunb.remote(num_gpus=1)(_hold).remote()
    thread = stop("interrupt")
    result, text = run(shell, f"%%gpu\n{ENDLESS}")
    thread.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert "was taken out of the queue before it ran" in text
    assert "its worker" not in text
    gpunb.cancel(holder, force=True)


def _hold() -> None:
    threading.Event().wait()


def test_a_session_outlives_a_cell_that_is_stopped_before_it_begins(shell: Any) -> None:
    run(shell, "%%gpu --session kept\nkept = 1")
    thread = stop("interrupt")
    result, _ = run(shell, f"%%gpu --session kept\n{ENDLESS}")
    thread.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    _, text = run(shell, "%%gpu --session kept\nprint('still', kept)")
    assert "still 1" in text
    run(shell, "%gpu stop kept")


def test_a_stop_is_no_timeout(shell: Any) -> None:
    thread = stop("interrupt")
    result, _ = run(shell, f"%%gpu --timeout 600\n{ENDLESS}")
    thread.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    result, _ = run(shell, f"%%gpu --timeout 0.1\n{ENDLESS}")
    assert isinstance(result.error_in_exec, TimeoutError)


def test_the_end_of_a_cell_for_want_of_memory_says_that_its_share_is_free(shell: Any) -> None:
    """With the system's signal for it, as the runtime reports it."""
    error = OutOfMemoryError("its worker was killed by SIGKILL\nThe machine was short of memory.")
    outcome = Outcome(serialize.dumps(error), failed=True)
    request = cells.Request("pass", "", Options())
    for line, share in (("0.5", "; its share of GPU 0 is free again"), ("0", "")):
        run(shell, f"%%gpu {line} --name ran\npass")
        ended = gpunb.status()["finished"]
        ran = next(job["id"] for job in ended if job["name"] == "ran"), 0
        handed = cells.HandedIn(shell, request, backend.current(), ran, "x", 1, Shipment({}))
        home, raised = cells.conclude(handed, outcome)
        assert home is None
        assert type(raised) is OutOfMemoryError
        first, last = "its worker was killed by SIGKILL", "The machine was short of memory."
        assert cells.lines_of(raised) == [f"OutOfMemoryError: {first}{share}\n{last}"]
