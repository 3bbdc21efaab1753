"""%%gpu in a plain InteractiveShell in this process, without a kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.getipython import get_ipython
from IPython.utils.capture import capture_output

import gpunb
from gpunb.data import serialize
from gpunb.exceptions import OutOfMemoryError
from gpunb.notebook import cell as notebook_cell
from gpunb.notebook import foreground
from gpunb.notebook import shell as notebook_shell
from gpunb.notebook.capture import CellRequest
from gpunb.notebook.shipment import Shipment
from gpunb.processes.outbox import Outbox
from gpunb.protocol import backend
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import Outcome
from gpunb.scheduler.options import Options
from tests.notebook.kernels import plain
from tests.sessions import assert_idle, session
from tests.shells import gpunb_shell, run
from tests.waiting import eventually


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    with session(num_gpus=1, preload=None), gpunb_shell() as made:
        yield made
        assert_idle()


def test_a_cell_changes_names_and_shows_its_output_and_value(shell: Any) -> None:
    shell.user_ns["a"] = [1]
    result, text = run(shell, "%%gpu\na.append(2)\nb = len(a)\nprint('printed')\na")
    assert result.success
    assert (shell.user_ns["a"], shell.user_ns["b"]) == ([1, 2], 2)
    assert "printed" in text
    assert "[1, 2]" in text
    assert shell.user_ns["_"] == [1, 2]


def test_an_error_is_raised_after_the_names_are_bound(shell: Any) -> None:
    result, text = run(shell, "%%gpu\nx = 5\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert shell.user_ns["x"] == 5
    assert "line 3" in text
    assert "gpunb/" not in text


def test_new_workers_rehearse_a_cell_while_cells_run(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    send = Outbox.send

    def note(outbox: Outbox, message: Any, *more: Any) -> None:
        told.extend([1] * isinstance(message, msg.Rehearse))
        send(outbox, message, *more)

    monkeypatch.setattr(Outbox, "send", note)
    for _ in range(2):
        assert gpunb.get(gpunb.remote(num_gpus=1)(get_ipython).remote()) is None
        told.clear()
        run(shell, "%%gpu\npass")
        eventually(lambda: told)


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ("", "its share of GPU 0 is free again"),
        ("--session crashing", "the next cell with --session crashing starts it anew"),
    ],
)
def test_a_segmentation_fault_names_the_line(shell: Any, options: str, rest: str) -> None:
    code = "import ctypes, sys\nprint('first', file=sys.stderr)\ndef f(): ctypes.string_at(0)\nf()"
    number = shell.execution_count
    result, _ = run(shell, f"%%gpu {options}\n{code}")
    (text,) = notebook_cell.lines_of(result.error_in_exec)
    error, _, last = text.partition("\nThe last lines of its standard error were:\n")
    assert error.endswith(f"was killed by SIGSEGV; {rest}")
    first, fatal, *stack = last.splitlines()
    assert (first, fatal) == ("first", "Fatal Python error: Segmentation fault")
    assert stack[-2:] == [
        f"  Cell In[{number}], line 4 in f",
        f"  Cell In[{number}], line 5 in <module>",
    ]


@pytest.mark.parametrize("made", ["f", "Actor.remote().f"])
def test_a_segmentation_fault_of_a_function_names_file_and_line(shell: Any, made: str) -> None:
    """The file is the one of the notebook's cell, by its name on this machine."""
    run(
        shell,
        "import ctypes, gpunb\n@gpunb.remote(max_retries=0)\ndef f(): ctypes.string_at(0)\n"
        "@gpunb.remote\nclass Actor:\n    def f(self): ctypes.string_at(0)\n"
        f"try: gpunb.get({made}.remote())\n"
        "except gpunb.exceptions.GpunbError as error: text = str(error)",
    )
    line, file = 6 if "Actor" in made else 3, shell.user_ns["f"].__wrapped__.__code__.co_filename
    assert shell.user_ns["text"].endswith(f'\n  File "{file}", line {line} in f')


def test_a_syntax_error_names_its_line(shell: Any) -> None:
    result, text = run(shell, "%%gpu\nx = = 5")
    assert not result.success
    assert "line 2" in text


def test_functions_of_a_cell_see_the_notebooks_names(shell: Any) -> None:
    run(shell, "%%gpu\ndef f(): return later")
    shell.user_ns["later"] = 7
    assert shell.user_ns["f"]() == 7
    assert shell.user_ns["f"].__globals__ is shell.user_ns


def test_the_bare_magic_shows_the_devices(shell: Any) -> None:
    result, text = run(shell, "%gpu")
    assert "GPU" in text
    assert result.result.facts["devices"]


def test_a_wrong_option_is_a_usage_error_and_help_lists_options(shell: Any) -> None:
    result, _ = run(shell, "%%gpu --wrong\npass")
    assert type(result.error_in_exec).__name__ == "UsageError"
    with capture_output() as captured:
        shell.run_cell("%gpu?")
    assert "--timeout" in captured.stdout + str(captured.outputs)


def test_a_cell_can_run_from_another_thread(shell: Any) -> None:
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
    stops = foreground.stops

    @contextlib.contextmanager
    def stopped(sink: Any) -> Iterator[Any]:
        with stops(sink) as user:
            timer.start()
            yield user

    monkeypatch.setattr(foreground, "stops", stopped)
    monkeypatch.setattr(foreground, "GRACE", 30.0)
    result, _ = run(shell, "%%gpu\nwhile True: pass")
    timer.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert not gpunb.status()["running"]


def stop(what: str, **more: Any) -> threading.Thread:
    """Have the control server of the session stop the cell that comes, once it is there."""

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


def test_a_stop_is_not_reported_as_a_timeout(shell: Any) -> None:
    thread = stop("interrupt")
    result, _ = run(shell, f"%%gpu --timeout 600\n{ENDLESS}")
    thread.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    result, _ = run(shell, f"%%gpu --timeout 0.1\n{ENDLESS}")
    assert isinstance(result.error_in_exec, TimeoutError)


def test_an_out_of_memory_error_names_the_share_that_is_free_again(shell: Any) -> None:
    """With the system's signal for it, as the runtime reports it."""
    error = OutOfMemoryError("its worker was killed by SIGKILL\nThe machine was short of memory.")
    outcome = Outcome(serialize.dumps(error), failed=True)
    request = CellRequest("pass", "", Options())
    for line, share in (("0.5", "; its share of GPU 0 is free again"), ("0", "")):
        run(shell, f"%%gpu {line} --name ran\npass")
        ended = gpunb.status()["finished"]
        ran = next(job["id"] for job in ended if job["name"] == "ran"), 0
        handed = notebook_cell.HandedIn(
            notebook_shell.of(shell), request, backend.current(), ran, "x", 1, Shipment({})
        )
        home, raised = notebook_cell.conclude(handed, outcome)
        assert home is None
        assert type(raised) is OutOfMemoryError
        first, last = "its worker was killed by SIGKILL", "The machine was short of memory."
        assert notebook_cell.lines_of(raised) == [f"OutOfMemoryError: {first}{share}\n{last}"]


def test_in_a_terminal_output_is_shown_at_the_next_prompt(shell: Any, tmp_path: Path) -> None:
    def shown(code: str) -> Any:
        with capture_output() as captured:
            result = shell.run_cell(code, store_history=True)
        return result, captured

    made, nothing = shown(
        "%%gpu --bg --name mine\nprint('printed')\ndisplay(5)\nhere = 3\nhere + 1"
    )
    assert not nothing.stdout
    handle = made.result
    eventually(handle.done)
    _, seen = shown("print('own')")
    assert seen.stdout == "printed\nown\n"
    assert [each.data["text/plain"] for each in seen.outputs] == ["5", "4"]
    assert "mine done after" in seen.stderr
    assert shell.user_ns["here"] == 3
    failing = shown("%%gpu --bg\n1 / 0")[0].result
    eventually(failing.done)
    _, seen = shown("print('own')")
    assert plain(seen.stderr).count("ZeroDivisionError: division by zero") == 1
    assert failing.state == "failed"
    gate = tmp_path / "open"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.005)"
    waiting = shown(f"%%gpu --bg\n{waits}\nthere = 4")[0].result
    shown("%reload_ext gpunb")
    assert not waiting.done()
    gate.touch()
    shown("%gpu wait")
    assert shell.user_ns["there"] == 4
    assert waiting.done()
