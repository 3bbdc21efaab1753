"""Questions of GPU cells: the test is the front end that asks its user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import Kernel, Result
from tests.waiting import PATIENCE, Gate, eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def idle_afterwards(cell: Kernel) -> Iterator[None]:
    """Whatever a test did, the kernel goes on and nothing runs."""
    yield
    look = "[s['running'], s['waiting']] if (s := gpunb.status())['running'] else []"
    eventually(lambda: not any(cell.value(look)), "the session is idle")


def start(cell: Kernel, code: str) -> Result:
    """Send a cell as a front end does whose user can be asked."""
    ident = cell.client.execute(code, allow_stdin=True, stop_on_error=False)
    return cell.results.setdefault(ident, Result(ident, code))


def asked(cell: Kernel) -> dict[str, Any]:
    """The next question."""
    message = cell.client.get_stdin_msg(timeout=PATIENCE)
    assert message["msg_type"] == "input_request"
    content: dict[str, Any] = message["content"]
    return content


def test_input_and_getpass_ask_the_user(cell: Kernel) -> None:
    running = start(
        cell,
        "%%gpu 0.5\nfrom getpass import getpass\nprint('before')\nname = input('name? ')\n"
        "word = getpass('word? ')\nprint('after', flush=True)\nnothing = input()",
    )
    assert asked(cell) == {"prompt": "name? ", "password": False}
    cell.shows(running, "before\n")
    cell.client.input("Ann")
    assert asked(cell) == {"prompt": "word? ", "password": True}
    cell.client.input("secret")
    assert asked(cell) == {"prompt": "", "password": False}
    cell.client.input("")
    assert cell.finish(running), running.traceback
    assert cell.value("(name, word, nothing)") == ("Ann", "secret", "")


def test_a_cell_of_a_session_asks_the_user(cell: Kernel) -> None:
    try:
        for answer in ("1", "2"):
            running = start(cell, "%%gpu 0.5 --session asks\nprint(input('? '))")
            asked(cell)
            cell.client.input(answer)
            assert cell.finish(running).stdout == f"{answer}\n"
    finally:
        cell.ok("%gpu stop asks")


def test_the_end_of_the_input_is_an_error_of_the_cell(cell: Kernel) -> None:
    running = start(cell, "%%gpu 0.5\ninput('? ')")
    asked(cell)
    cell.client.input("\x04")
    cell.finish(running)
    assert running.ename == "EOFError"
    assert "----> 2 input('? ')" in running.traceback
    assert "gpunb/" not in running.traceback


SLOW_USER = """
def slow_user():
    # Each answer takes an hour of the clock of the kernel's main thread.
    import time, types
    from gpunb.notebook import foreground

    hours, ask, grace = [], foreground._User.ask, foreground.GRACE

    def slowly(*arguments, **named):
        ask(*arguments, **named)
        hours.append(1)

    def undo():
        foreground.time, foreground._User.ask, foreground.GRACE = time, ask, grace

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * len(hours))
    foreground.time, foreground._User.ask, foreground.GRACE = clock, slowly, 600
    return undo
undo = slow_user()
"""


@contextmanager
def slow_user(cell: Kernel) -> Iterator[None]:
    """After Stop a cell has ten minutes to end by itself, and each answer takes an hour."""
    cell.ok(SLOW_USER)
    try:
        yield
    finally:
        cell.ok("undo()")


def test_stop_ends_a_question(cell: Kernel) -> None:
    """It ends by itself, long before its process would be killed."""
    with slow_user(cell):
        running = start(cell, "%%gpu 0.5\ninput('? ')")
        asked(cell)
        cell.interrupt()
        cell.finish(running)
    assert running.ename == "KeyboardInterrupt"
    assert "----> 2 input('? ')" in running.traceback
    assert "gpunb/" not in running.traceback


def test_a_cell_may_ask_again_after_stop(cell: Kernel) -> None:
    code = "try: input('? ')\nexcept KeyboardInterrupt: answer = input('really? ')"
    running = start(cell, f"%%gpu 0.5\n{code}")
    asked(cell)
    cell.interrupt()
    assert asked(cell)["prompt"] == "really? "
    cell.client.input("yes")
    cell.finish(running)
    assert cell.value("answer") == "yes"


def test_a_second_question_after_stop_has_no_time_limit(cell: Kernel, tmp_path: Path) -> None:
    """Longer than a cell has to end after Stop."""
    gate = Gate(tmp_path)
    code = (
        "from pathlib import Path\nfrom tests.waiting import Gate\n"
        "try: input('? ')\nexcept KeyboardInterrupt: answer = input('really? ')\n"
        f"print('goes on', flush=True)\nGate(Path({str(tmp_path)!r})).enter()\nafterwards = answer"
    )
    with slow_user(cell):
        running = start(cell, f"%%gpu 0.5\n{code}")
        asked(cell)
        cell.interrupt()
        asked(cell)
        cell.client.input("yes")
        cell.shows(running, "goes on")  # the kernel has looked at its clock since the answer
        gate.open()
        cell.finish(running)
    assert cell.value("afterwards") == "yes"


def test_a_question_ends_with_its_worker(cell: Kernel, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    code = (
        "import os, threading\nfrom pathlib import Path\nfrom tests.waiting import Gate\n"
        f"def end():\n    Gate(Path({str(tmp_path)!r})).enter()\n    os._exit(7)\n"
        "threading.Thread(target=end).start()\ninput('? ')"
    )
    running = start(cell, f"%%gpu 0.5\n{code}")
    asked(cell)
    gate.open()
    cell.finish(running)
    assert running.status == "error"
    assert "exit" in running.traceback


def test_a_timeout_ends_a_question(cell: Kernel) -> None:
    running = start(cell, "%%gpu 0.5 --timeout 0.5\ninput('? ')")
    asked(cell)
    cell.finish(running)
    assert running.ename == "TimeoutError"


@pytest.mark.parametrize("question", ["input('? ')", "__import__('getpass').getpass()"])
def test_without_a_user_a_question_raises_the_kernels_error(cell: Kernel, question: str) -> None:
    result = cell(f"%%gpu 0.5\n{question}")
    assert result.ename == "StdinNotImplementedError"
    assert "this frontend does not support input requests" in result.evalue
    assert "gpunb/" not in result.traceback


@pytest.mark.parametrize("question", ["input('? ')", "breakpoint()"])
def test_a_cell_in_the_background_cannot_ask(cell: Kernel, question: str) -> None:
    running = start(cell, f"%%gpu 0.5 --bg\n{question}")
    cell.until(lambda: running.ename, running)
    cell.finish(running)
    assert running.ename == "StdinNotImplementedError"
    assert "only a cell in the foreground can ask its user" in running.evalue
    assert "gpunb/" not in running.traceback


def test_a_breakpoint_works_where_commands_can_be_given(cell: Kernel) -> None:
    running = start(
        cell,
        "%%gpu 0.5\ndef twice(x):\n    y = 2 * x\n    breakpoint()\n    return y\n"
        "result = twice(4)",
    )
    printed = []
    for command in ("p y", "!y = 30", "c"):
        printed.append(asked(cell)["prompt"])
        cell.client.input(command)
    assert cell.finish(running), running.traceback
    assert printed == ["ipdb> "] * 3
    assert "\n8\n" in running.stdout
    assert "gpunb/" not in running.stdout
    assert cell.value("result") in (8, 30)  # whether a local can be set depends on Python


def test_a_breakpoint_without_a_user_is_one_error(cell: Kernel) -> None:
    result = cell("%%gpu 0.5\nbreakpoint()")
    assert result.ename == "StdinNotImplementedError"
    assert "breakpoint() needs answers" in result.evalue
    assert "gpunb/" not in result.traceback


def test_debug_after_a_workers_error_names_the_ways_to_debug(cell: Kernel) -> None:
    cell("%%gpu 0.5\n1 / 0")
    result = cell("%debug")
    assert result.stderr.startswith("UsageError: %debug: the error was raised in a worker")
    try:
        cell("%%gpu 0.5 --session looks\nnumber = 42\n1 / (number - 42)")
        running = start(cell, "%%gpu --session looks\n%debug")
        asked(cell)
        cell.client.input("p number + 1")
        asked(cell)
        cell.client.input("q")
        assert cell.finish(running), running.traceback
        assert "43" in running.stdout
        # Stop still reaches the session.
        busy = cell.start("%%gpu --session looks\nprint('ready', flush=True)\nwhile True: pass")
        cell.shows(busy, "ready")
        cell.interrupt()
        assert cell.finish(busy).ename == "KeyboardInterrupt"
        assert cell.ok("%%gpu --session looks\nnumber").value == "42"
    finally:
        cell.ok("%gpu stop looks")
