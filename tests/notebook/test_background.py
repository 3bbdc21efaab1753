"""Cells in the background: where their output goes, when their names are bound, and handles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunb.engine import job_log as logs
from tests.notebook.kernels import Kernel, Result, kernel, leaving_nothing
from tests.sessions import ROOT
from tests.waiting import PATIENCE, Gate, eventually

pytestmark = pytest.mark.kernel

GATES = """
import asyncio, os, time

def gate(name):
    if not os.path.exists(name):
        os.mkfifo(name)
    return name

def wait(name):  # until somebody opens it
    with open(gate(name)) as file:
        return file.read()

def open_gate(name, text=''):
    with open(gate(name), 'w') as file:
        file.write(text)

for each in 'abc':
    gate(each)

def handle(number):  # of the background cell with that number
    from gpunb.notebook import background, shell
    made = shell.of(get_ipython()).part(background.Jobs)._handles.values()
    return [each for each in made if each.number == number][-1]
"""


@pytest.fixture(scope="module")
def notebook(cell: Kernel) -> Kernel:
    """A kernel before which a user sits."""
    cell.stdin = True
    cell.ok(GATES)
    return cell


@pytest.fixture(autouse=True)
def idle_afterwards(notebook: Kernel) -> Iterator[None]:
    """Whatever a test did, nothing runs and all is free; no failure is left to be told of."""
    yield
    notebook.ok("%gpu cancel all\n%gpu wait")
    busy = "gpunb.status()['available'] != gpunb.status()['total']"
    eventually(lambda: not notebook.value(busy), "the session is idle")


def card(result: Result) -> str:
    """What the card under a cell says in the end; all cards of a cell are one."""
    shown = [
        (content["data"]["text/plain"], content["transient"]["display_id"])
        for kind, content in result.messages
        if kind in ("display_data", "update_display_data")
        and content["data"]["text/plain"].startswith("<Job ")
    ]
    assert len({ident for _, ident in shown}) == 1
    return shown[-1][0]


def ended(result: Result) -> bool:
    return " after " in card(result)


def job(result: Result) -> str:
    """The handle, in Python."""
    return f"handle({result.count})"


# ------------------------------------------------------------------------------ output and errors


def test_all_output_is_under_its_own_cell(notebook: Kernel, tmp_path: Path) -> None:
    first = notebook.ok(
        "%%gpu 0.5 --bg --name train\nimport sys\nprint('begun')\nwait('a')\nprint('middle')\n"
        "display(5)\nprint('said', file=sys.stderr)\nwait('b')\nprint('end')\n41 + 1"
    )
    notebook.shows(first, "begun")
    assert notebook.value(f"repr({job(first)})").startswith("<Job #")
    assert " train running on GPU 0, " in notebook.value(f"repr({job(first)})")
    gate = Gate(tmp_path)
    other = notebook.start(
        "from pathlib import Path\nfrom tests.waiting import Gate\n"
        f"open_gate('a')\nGate(Path({str(tmp_path)!r})).enter()\nprint('own')"
    )
    notebook.shows(first, "said", "stderr")  # while the other cell runs
    gate.await_()
    gate.open()
    assert notebook.finish(other)
    notebook.ok("open_gate('b')")
    notebook.late(lambda: ended(first))
    assert first.stdout == "begun\nmiddle\nend\n"
    assert first.stderr == "said\n"
    assert {"text/plain": "5"} in first.displayed
    (last,) = first.of("execute_result")
    assert (last["execution_count"], last["data"]) == (first.count, {"text/plain": "42"})
    assert other.stdout == "own\n"
    assert not other.stderr
    assert not other.displayed
    assert " train done after " in card(first)
    assert " on GPU 0, peak " in card(first)


def test_figures_and_updated_displays_are_under_their_cell(notebook: Kernel) -> None:
    result = notebook.ok(
        "%%gpu --bg\nimport matplotlib.pyplot as plt\nh = display('one', display_id=True)\n"
        "h.update('two')\nplt.plot([1, 2]);"
    )
    notebook.late(lambda: ended(result))
    assert any("image/png" in each for each in result.displayed)
    updated = [each["data"]["text/plain"] for each in result.of("update_display_data")]
    assert "'two'" in updated


@pytest.mark.parametrize("wait", [True, False])
def test_the_card_stays_when_a_cell_clears_its_output(notebook: Kernel, wait: bool) -> None:
    result = notebook.ok(
        "%%gpu --bg\nfrom IPython.display import clear_output\nfor i in range(3):\n"
        f"    clear_output(wait={wait})\n    print('frame', i)"
    )
    notebook.late(lambda: ended(result))
    cleared = [at for at, (kind, _) in enumerate(result.messages) if kind == "clear_output"]
    assert len(cleared) == 3
    after = [kind for kind, _ in result.messages[cleared[-1] + 1 :]]
    assert after[0] == "display_data"
    assert result.stdout.endswith("frame 2\n")


def test_a_failure_is_shown_at_once_and_reported_once(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu --bg\nbefore_error = 1\nprint('out')\n1 / 0")
    notebook.late(lambda: result.ename)
    assert result.ename == "ZeroDivisionError"
    assert f"Cell In[{result.count}], line 4" in result.traceback
    assert "gpunb" not in result.traceback.replace("%%gpu", "")
    notebook.late(lambda: ended(result))
    assert " failed after " in card(result)
    reported = notebook.ok("print('next')")
    assert reported.stdout == "next\n"
    assert "has failed: ZeroDivisionError: division by zero" in reported.stderr
    assert not notebook.ok("print('after')").stderr
    assert notebook.value(f"({job(result)}.state, before_error)") == ("failed", 1)
    raised = notebook(f"{job(result)}.result")
    assert raised.ename == "ZeroDivisionError"
    assert f"Cell In[{result.count}], line 4" in raised.traceback


def test_a_failure_is_visible_while_another_cell_runs(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu --bg\n1 / 0")
    code = f"job = {job(result)}\nwhile not job.done(): time.sleep(0.01)\njob.state"
    assert notebook.ok(code).value == "'failed'"


def test_a_failure_is_not_reported_after_its_result_was_requested(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu --bg\nwait('a')\n1 / 0")
    raised = notebook(f"open_gate('a')\n{job(result)}.result")
    assert raised.ename == "ZeroDivisionError"
    assert not notebook.ok("print('after')").stderr


def test_wait_reports_a_failure(notebook: Kernel) -> None:
    first = notebook.ok("%%gpu --bg\nwait('a')\n1 / 0")
    second = notebook.ok("%%gpu --bg\nwait('b')")
    reported = notebook.ok("open_gate('a'); open_gate('b')\n%gpu wait")
    assert reported.stdout == "1 done, 1 failed\n"
    assert reported.stderr.count("has failed: ZeroDivisionError") == 1
    assert not notebook.ok("print('after')").stderr
    assert notebook.value(f"({job(first)}.done(), {job(second)}.done())") == (True, True)


@pytest.mark.parametrize(
    ("line", "body", "ename", "message"),
    [
        ("", "import os\nos._exit(3)", "WorkerCrashedError", "exited with status 3"),
        ("--timeout 0.2", "time.sleep(60)", "TimeoutError", "timeout of 0.2 s"),
    ],
)
def test_crashes_and_timeouts_are_errors_of_the_cell(
    notebook: Kernel, line: str, body: str, ename: str, message: str
) -> None:
    result = notebook.ok(f"%%gpu --bg {line}\n{body}")
    notebook.late(lambda: ended(result))
    assert (result.ename, notebook.value(f"{job(result)}.state")) == (ename, "failed")
    assert message in result.evalue
    notebook.ok("%gpu wait")


def test_a_cell_that_cannot_be_submitted_fails_at_once(notebook: Kernel) -> None:
    assert "half" in notebook("%%gpu half --bg\npass").stderr
    assert notebook("%%gpu --bg\nx = = 1").ename == "SyntaxError"
    assert notebook("%%gpu 3 --bg\npass").ename == "InfeasibleRequestError"


# ------------------------------------------------------------------------------------------ names


def test_names_are_bound_between_cells(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu --bg\nwait('a')\nlate_name = [1]\ndef f(): return len(late_name)")
    during = notebook.ok(
        f"open_gate('a')\nwhile not {job(result)}.done(): time.sleep(0.01)\n"
        "print('late_name' in globals())"
    )
    assert during.stdout == "False\n"
    assert notebook.value("(late_name, f(), f.__globals__ is globals())") == ([1], 1, True)
    assert card(result).endswith("; bound f, late_name>")


def test_a_name_that_the_notebook_changed_meanwhile_stays(notebook: Kernel) -> None:
    notebook.ok("rebound, deleted, inplace, kept, twin = 1.5, 2, [1], [5], None\ntwin = kept")
    result = notebook.ok(
        "%%gpu --bg\nwait('a')\nrebound = 2.5; deleted = 3; inplace.append(2); kept.append(6)\n"
        "brand_new = 4"
    )
    # Twice, so that the second may have the identity of the first.
    notebook.ok("rebound = 7.5\nrebound = 8.5\ndel deleted\ninplace.append(99)")
    notebook.ok("open_gate('a')")
    notebook.late(lambda: ended(result))
    names = "(rebound, 'deleted' in globals(), inplace, kept, twin is kept, brand_new)"
    assert notebook.value(names) == (8.5, False, [1, 99], [5, 6], True, 4)
    left = "left alone: deleted, inplace, rebound (Out["
    assert left in card(result)
    assert f"Out[{result.count}].names" in card(result)
    there = notebook.value(f"{job(result)}.names")
    assert there == {
        "rebound": 2.5,
        "deleted": 3,
        "inplace": [1, 2],
        "kept": [5, 6],
        "brand_new": 4,
    }


def test_cells_that_bind_the_same_name_bind_it_in_their_order(notebook: Kernel) -> None:
    notebook.ok("same = 0")
    first = notebook.ok("%%gpu 0.5 --bg\nwait('a')\nimport json\nsame = 1")
    second = notebook.ok("%%gpu 0.5 --bg\nwait('b')\nimport json\nsame = 2")
    third = notebook.ok("%%gpu 0.5 --bg\nwait('c')\nimport json\nsame = 3")
    for gate, result in (("a", first), ("c", third), ("b", second)):
        notebook.ok(f"open_gate('{gate}')")
        notebook.late(lambda result=result: ended(result))
    assert notebook.value("same") == 3
    assert "left alone" not in card(first) + card(third)
    assert "left alone: same" in card(second)


def test_values_that_stay_in_the_worker_are_named_under_the_cell(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu --bg\nwait('a')\ngen = (i for i in range(3))\nfine = 1")
    other = notebook.ok(f"open_gate('a'); {job(result)}.wait(); print(fine)")
    assert other.stdout == "1\n"
    assert not other.stderr
    notebook.late(lambda: ended(result))
    assert "gpunb: 'gen' stays in the worker" in result.stderr


def test_a_handle_keeps_no_object_alive(notebook: Kernel) -> None:
    notebook.ok("import numpy as np, weakref, gc\ngiven = np.ones(10)\nseen = weakref.ref(given)")
    result = notebook.ok("%%gpu --bg\nmade = given * 2")
    notebook.late(lambda: ended(result))
    notebook.ok("made_ref = weakref.ref(made)\ndel made, given\nn = gc.collect()")
    assert notebook.value("(seen() is None, made_ref() is None)") == (True, True)
    assert notebook.value(f"{job(result)}.names") == {}


def test_many_cells_share_few_devices(notebook: Kernel) -> None:
    results = [notebook.ok(f"%%gpu --bg\nprint('cell', {i})\nmany_{i} = {i}") for i in range(20)]
    notebook.ok("%gpu wait")
    for i, result in enumerate(results):
        notebook.late(lambda result=result: ended(result))
        assert result.stdout == f"cell {i}\n"
    assert notebook.value("[globals()[f'many_{i}'] for i in range(20)]") == list(range(20))


# --------------------------------------------------------------------------------------- handles


def test_a_handle_has_state_names_result_and_logs(notebook: Kernel) -> None:
    holding = notebook.ok(
        "%%gpu 2 --bg --name holds\nprint('ready')\nwait('a')\nvalue = 6\nvalue + 1"
    )
    notebook.shows(holding, "ready")
    queued = notebook.ok("%%gpu --bg --name second\nprint('ran')")
    assert " queued, " in notebook.value(f"repr({job(queued)})")
    assert ": needs 1 whole GPU" in card(queued)
    late = notebook(f"{job(holding)}.wait(timeout=0.05)")
    assert late.ename == "GetTimeoutError"
    assert "it goes on" in late.evalue
    assert notebook(f"{job(holding)}.wait(timeout=-1)").ename == "ValueError"
    notebook.ok("open_gate('a')")
    code = f"job = {job(holding)}\njob.wait() is job, job.result, job.names, job.state, job.done()"
    assert notebook.ok(code).value == "(True, 7, {'value': 6}, 'done', True)"
    notebook.ok(f"{job(queued)}.wait()")
    assert notebook.value(f"{job(queued)}.logs()") == "ran\n"
    assert notebook.value(f"{job(holding)}.peak") > 1 << 20
    html = notebook.ok(job(holding)).result["text/html"]
    assert "holds done on GPU 0, 1" in html


def test_handles_can_be_awaited(notebook: Kernel) -> None:
    made = [notebook.ok(f"%%gpu 0.5 --bg\n{i} * 10") for i in range(3)]
    assert notebook.ok(f"await {job(made[0])}").value == "0"
    together = f"await asyncio.gather({', '.join(map(job, made))})"
    assert notebook.ok(together).value == "[0, 10, 20]"
    failing = notebook.ok("%%gpu --bg\n{}['k']")
    assert notebook(f"await {job(failing)}").ename == "KeyError"


@pytest.mark.parametrize("wait", ["%gpu wait", "job.wait()", "await job", "job.result"])
def test_stop_ends_the_wait_and_not_the_job(notebook: Kernel, wait: str) -> None:
    result = notebook.ok("%%gpu --bg\nwait('a')\nwaited = 5")
    notebook.ok(f"job = {job(result)}")
    waiting = notebook.waits(wait)
    notebook.interrupt()
    notebook.finish(waiting)
    assert waiting.ename in ("KeyboardInterrupt", "CancelledError")
    assert notebook.value("job.state") == "running"
    notebook.ok("open_gate('a'); job.wait()")
    assert notebook.value("(job.names, waited)") == ({"waited": 5}, 5)


def test_stop_of_another_cell_does_not_stop_it(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu 0.5 --bg\nwait('a')\nuntouched = 1")
    other = notebook.start("%%gpu 0.5\nprint('ready')\ntime.sleep(60)")
    notebook.shows(other, "ready")
    notebook.interrupt()
    assert notebook.finish(other).ename == "KeyboardInterrupt"
    notebook.ok(f"open_gate('a'); {job(result)}.wait()")
    assert notebook.value("untouched") == 1


def test_a_job_can_be_cancelled(notebook: Kernel) -> None:
    running = notebook.ok("%%gpu 2 --bg\nkept_before = 1\nprint('ready')\ntime.sleep(60)")
    queued = notebook.ok("%%gpu --bg\nprint('never')")
    stubborn = "while True:\n    try:\n        print('ready')\n        time.sleep(60)\n"
    notebook.shows(running, "ready")
    notebook.ok(f"{job(queued)}.cancel()")
    notebook.late(lambda: ended(queued))
    notebook.ok(f"{job(running)}.cancel()")
    notebook.late(lambda: ended(running))
    assert " cancelled after " in card(running)
    states = f"({job(running)}.state, {job(queued)}.state)"
    assert notebook.value(states) == ("cancelled", "cancelled")
    assert not queued.stdout
    assert not running.ename
    assert notebook(f"{job(queued)}.result").ename == "TaskCancelledError"
    assert not notebook.ok("pass").stderr
    forced = notebook.ok(f"%%gpu --bg\n{stubborn}    except KeyboardInterrupt: print('no')")
    notebook.shows(forced, "ready")
    notebook.ok(f"{job(forced)}.cancel(force=True)")
    notebook.late(lambda: ended(forced))
    assert notebook.value(f"{job(forced)}.state") == "cancelled"


def test_jobs_outlive_a_reload(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu --bg\nwait('a')\nprint('printed')\nreloaded = 1")
    notebook.ok("%reload_ext gpunb")
    notebook.ok("open_gate('a')")
    notebook.late(lambda: ended(result))
    assert result.stdout == "printed\n"
    assert notebook.value(f"(reloaded, {job(result)}.state)") == (1, "done")
    shown = notebook.value(f"{job(result)}.id")
    assert notebook.ok(f"%gpu logs {shown}").stdout == "printed\n"


def test_shutdown_ends_background_cells(notebook: Kernel) -> None:
    done = notebook.ok("%%gpu --bg\nin_time = 3")
    running = notebook.ok("%%gpu 2 --bg\nprint('ready')\ntime.sleep(60)")
    notebook.shows(running, "ready")
    queued = notebook.ok("%%gpu --bg\npass")
    code = f"{job(done)}.wait()\ngpunb.shutdown()\ns = gpunb.init(num_cpus=2, num_gpus=2)"
    notebook.ok(code)
    states = ", ".join(f"{job(each)}.state" for each in (done, running, queued))
    assert notebook.value(f"({states}, in_time)") == ("done", "failed", "failed", 3)
    raised = notebook(f"{job(running)}.result")
    assert raised.ename == "GpunbError"
    assert "shut down" in raised.evalue
    notebook.ok("%gpu wait")


def test_the_kernel_answers_while_much_is_printed(notebook: Kernel) -> None:
    """`benchmarks` has the time that it takes."""
    code = "%%gpu 0.5 --bg\nwhile True:\n    print('x' * 60)\n    time.sleep(0.001)"
    printing = [notebook.ok(code) for _ in range(4)]
    for each in printing:
        notebook.shows(each, "x")
    for _ in range(10):
        assert notebook.ok("1 + 1").value == "2"
    for each in printing:
        more = len(each.stdout) + 1
        notebook.late(lambda each=each, more=more: len(each.stdout) >= more)


def test_a_killed_kernel_leaves_nothing(tmp_path: Path) -> None:
    with kernel(tmp_path) as killed:
        killed.stdin = True
        body = "import subprocess\nprint('ready')\nsubprocess.run(['sleep', '600'])"
        for line in ("--bg", "--bg --session s"):
            killed.shows(killed.ok(f"%%gpu {line}\n{body}"), "ready")


# ---------------------------------------------------------------------------- without a front end


NOTE = "runs to its end first"


def test_without_a_user_a_background_cell_runs_to_its_end_first(notebook: Kernel) -> None:
    notebook.stdin = False
    try:
        result = notebook.ok("%%gpu --bg\nprint('printed')\nheadless = 2\nheadless + 1")
        assert NOTE in result.stdout.splitlines()[0]
        assert result.stdout.endswith("printed\n")
        assert result.value == "3"
        code = f"job = {job(result)}\njob.wait() is job, job.state, job.result, job.names, headless"
        assert notebook.ok(code).value == "(True, 'done', 3, {'headless': 2}, 2)"
        failing = notebook("%%gpu --bg\n1 / 0")
        assert failing.ename == "ZeroDivisionError"
        assert not notebook.ok("print('after')").stderr
        notebook.ok("%config GpuMagics.headless = False")
        late = notebook.ok("%%gpu --bg\nwait('a')\nprint('late')")
        assert NOTE not in late.stdout
        notebook.ok("open_gate('a')")
        notebook.late(lambda: ended(late))
        assert late.stdout == "late\n"
        notebook.stdin = True
        notebook.ok("%config GpuMagics.headless = True")
        assert NOTE in notebook.ok("%%gpu --bg\npass").stdout
    finally:
        notebook.stdin = True
        notebook.ok("%config GpuMagics.headless = None")


LASTING = """
%%gpu 0.5 --bg
import time
time.sleep(0.3)  # by the clock: a notebook that does not wait for this cell goes on meanwhile
x = 20
print('printed')
x + 1
"""


def test_notebooks_that_are_executed_lose_nothing(tmp_path: Path) -> None:
    import nbformat

    cells = [
        "%load_ext gpunb\nimport gpunb\n_ = gpunb.init(num_gpus=1, num_cpus=1)",
        LASTING.strip(),
        "print(x * 2)",
        "%gpu wait",
    ]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}

    def run(*command: str) -> None:
        command = (sys.executable, "-m", *command)
        with leaving_nothing() as mark:
            subprocess.run(command, env=env | mark, check=True, capture_output=True, timeout=60)

    run("jupyter", "execute", str(path), f"--output={tmp_path / 'out'}")
    done = nbformat.read(tmp_path / "out.ipynb", 4)
    *texts, last = done.cells[1].outputs
    text = "".join(each.text for each in texts)
    assert NOTE in text
    assert text.endswith("printed\n")
    assert last.data["text/plain"] == "21"
    assert done.cells[2].outputs[0].text == "40\n"
    nbval = ("pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider")
    run(*nbval, f"--rootdir={tmp_path}", str(tmp_path / "out.ipynb"))


# ------------------------------------------------------------------------------------------- logs


def test_all_logs_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_shelf", logs._Shelf())
    monkeypatch.setattr(logs, "FILES", 3)
    monkeypatch.setattr(logs, "MOST", 1 << 20)
    monkeypatch.setattr(logs, "IN_MEMORY", 1000)
    monkeypatch.setattr(logs, "ALL_IN_MEMORY", 10_000)
    small = [logs.Log() for _ in range(50)]
    for each in small:
        each.add(("text", "stdout", {"text": "s" * 700}))
    assert sum(each.in_memory for each in small) <= 12_000
    large = logs.Log()
    for _ in range(30):
        large.add(("text", "stdout", {"text": "x" * 50_000}))
    assert large.on_disk
    assert not large.in_memory
    text = large.text()
    assert 1 << 20 > len(text) > 900_000
    assert "the rest is not kept" in text
    assert sum(each.on_disk for each in [*small, large]) <= 4
    assert any("no longer kept" in each.text() for each in small)
    show = ("show", "display_data", {"data": {}})
    small[-1].add(show)
    assert list(small[-1])[-1] == show


def test_a_job_that_prints_very_much_is_cut_short(notebook: Kernel) -> None:
    result = notebook.ok("%%gpu --bg\nfor i in range(400_000): print('line', i)")
    notebook.ok("%gpu wait")
    notebook.late(lambda: ended(result), 3 * PATIENCE)
    assert result.stdout.startswith("line 0\n")
    assert result.stdout.endswith("line 399999\n")
    ident = notebook.value(f"{job(result)}.id")
    again = notebook.ok(f"%gpu logs {ident}").stdout
    assert again.startswith("line 0\n")
    assert again.endswith("line 399999\n")
    assert "left out" in again
    assert len(again) < 2 << 20
    notebook.ok(f"%gpu logs {ident} whole.txt")
    code = "__import__('json').dumps([len(open('whole.txt').readlines())])"
    assert json.loads(notebook.value(code)) == [400_000]
