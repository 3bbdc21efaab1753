"""The words of %gpu, expressions, %gpu on, completion, and loading; in a real kernel."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

import gpunb
from gpunb.notebook.subcommands import SETTINGS
from tests.notebook.kernels import Kernel, plain
from tests.waiting import eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def notebook(cell: Kernel) -> Kernel:
    """A kernel before which a user sits."""
    cell.stdin = True
    cell.ok("import os, time\nhome = os.getpid()\ndef fail(x):\n    return x / 0")
    return cell


@pytest.fixture(autouse=True)
def idle_afterwards(notebook: Kernel) -> Iterator[None]:
    yield
    notebook.ok("%gpu off")
    notebook.ok("%gpu cancel all\n%gpu wait")
    busy = "gpunb.status()['available'] != gpunb.status()['total']"
    eventually(lambda: not notebook.value(busy), "all is free")


def submitted(notebook: Kernel, code: str) -> int:
    """The id of the job that the cell hands in."""
    notebook.ok(code)
    return int(notebook.value("_.id"))  # in `Out` its value may be by now


@pytest.mark.parametrize(
    ("line", "expected_message"),
    [
        (
            "bogus",
            "a word (ps, top, wait, job, cancel, logs, why, stop, park, on, off, init)",
        ),
        ("0.5", "or a share and an expression"),
        ("half 1 + 1", "or a share and an expression"),
        ("{nowhere} 1 + 1", "'{nowhere}' is not a share"),
        ("ps now", "takes nothing more, not 'now'"),
        ("top now", "takes nothing more, not 'now'"),
        ("off now", "takes nothing more, not 'now'"),
        ("wait x", "'x' is not the number of a job"),
        ("wait 9999", "#9999 is no background cell of this notebook"),
        ("cancel", "name the jobs"),
        ("cancel 9999", "there is no job #9999"),
        ("cancel one", "'one' is not the number of a job"),
        ("logs", "name one job"),
        ("logs 9999", "nothing is kept of a job #9999"),
        ("logs 'open", "No closing quotation"),
        ("why", "name one job"),
        ("why 9999", "there is no job #9999"),
        ("stop", "name one session of cells (there are none)"),
        ("park", "name one session of cells or actor"),
        ("park nobody", "no actor and no session of cells has the name 'nobody'"),
        ("stop nobody", "no session of cells has the name 'nobody': there is none"),
        ("on half", "'half' is not a share"),
        ("on --wrong", "unrecognized arguments: --wrong"),
        ("init num_gpus=x", "num_gpus=x must be a whole number"),
        ("init gpus=1", "'gpus' is no setting (known are address, caps, "),
        ("init gpus", "'gpus' must be of the form KEY=VALUE"),
        ("init num_gpus=2", "gpunb is initialised already"),
        ("init max_gpus=all", "max_gpus=all must be a number, such as 1.5"),
        ("init resources=licence", "resources 'licence' must be of the form NAME=AMOUNT"),
        ("init ignore_reinit_error=x", "ignore_reinit_error=x must be true or false"),
        ("1.5 1 + 1", "1.5"),
        ("0.5 x = 3", "'x = 3' is not an expression"),
        ("0.5 1 +", "'1 +' is not an expression"),
        ("0.5 (i for i in [1])", "the value cannot come home: it is a generator"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    notebook: Kernel, line: str, expected_message: str
) -> None:
    result = notebook(f"%gpu {line}")
    assert result.status == "error"
    assert result.stderr.startswith("UsageError: ")
    assert expected_message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.traceback


def test_ps_shows_the_status(notebook: Kernel) -> None:
    for line in ("%gpu", "%gpu ps"):
        result = notebook.ok(line)
        assert (result.value or "").startswith("GPU  type")
        assert "<table" in (result.result or {})["text/html"]
    (live,) = notebook.ok("%gpu top").displayed
    assert live["text/plain"].startswith("GPU  type")
    assert "<table" in live["text/html"]


def test_wait_and_cancel_take_numbers(notebook: Kernel) -> None:
    assert notebook.ok("%gpu wait").stdout == "no background cells run\n"
    made = notebook.ok("%%gpu 2 --bg --name long\nprint('ready')\ntime.sleep(60)")
    notebook.shows(made, "ready")
    first = int(notebook.value(f"Out[{made.count}].id"))
    second = submitted(notebook, "%%gpu --bg\npass")
    why = notebook.ok(f"%gpu why {second}").stdout
    assert why.startswith(f"#{second} In[")
    assert f"held by #{first}" in why
    assert notebook.ok(f"%gpu why #{first}").stdout == f"#{first} long: running\n"
    waiting = (notebook.ok("%gpu").value or "").split("waiting")[1].splitlines()
    assert waiting[1].split()[0] == f"#{second}"
    assert "CPU" not in waiting[1]
    notebook.ok(f"%gpu cancel {first}")
    assert notebook.ok(f"%gpu wait {first},{second}").stdout == "1 cancelled, 1 done\n"
    over = notebook.ok(f"%gpu cancel {first}").stdout
    assert over == f"#{first} long is over already: cancelled\n"
    assert notebook.ok(f"%gpu wait #{first}").stdout == "1 cancelled\n"


def test_cancel_all_stops_tasks_and_keeps_sessions(notebook: Kernel) -> None:
    notebook.ok(
        "@gpunb.remote(num_gpus=1, max_retries=0)\ndef sleep():\n    time.sleep(60)\n"
        "refs = [sleep.remote() for _ in range(50)]"
    )
    notebook.ok("%%gpu --session s 0\nhere = 1")
    jobs = [submitted(notebook, "%%gpu --bg\ntime.sleep(60)") for _ in range(3)]
    notebook.ok("%gpu cancel all")
    notebook.ok("%gpu wait " + ",".join(map(str, jobs)))
    ended = "{each['state'] for each in gpunb.status()['finished'][:50]}"
    eventually(lambda: not notebook.value("gpunb.status()['queued']"), "nothing waits")
    assert notebook.value(ended) == {"cancelled"}
    assert notebook.ok("%%gpu --session s\nhere").value == "1"
    notebook.ok("%gpu stop s\ndel refs")


def test_logs_show_or_write_the_output_of_a_job(notebook: Kernel) -> None:
    job = submitted(
        notebook,
        "%%gpu --bg\nimport sys\nprint('out')\ndisplay(5)\nprint('err', file=sys.stderr)\n7",
    )
    notebook.ok("%gpu wait")
    again = notebook.ok(f"%gpu logs {job}")
    assert (again.stdout, again.stderr) == ("out\n", "err\n")
    assert [each["text/plain"] for each in again.displayed] == ["5", "7"]
    assert again.value is None
    notebook.ok(f"%gpu logs {job} 'a file.txt'")
    assert notebook.value("open('a file.txt').read()") == "out\nerr\n"
    assert "No such file" in notebook(f"%gpu logs {job} /nowhere/x").stderr


def test_logs_show_the_output_of_functions_and_failed_cells(notebook: Kernel) -> None:
    notebook.ok(
        "@gpunb.remote(num_gpus=0)\ndef speak():\n    print('from a function')\n"
        "gpunb.get(speak.remote())"
    )
    notebook("%%gpu --name failing\nprint('from a cell')\nfail(1)")
    finished = "{j['name']: j['id'] for j in reversed(gpunb.status()['finished'])}"
    ids = notebook.value(finished)
    assert notebook.ok(f"%gpu logs {ids['speak']}").stdout == "from a function\n"
    again = notebook.ok(f"%gpu logs {ids['failing']}")
    assert again.stdout == "from a cell\n"
    assert "ZeroDivisionError" in again.stderr
    assert "fail(x)" in plain(again.stderr)
    assert "return x / 0" in plain(again.stderr)


def test_init_starts_gpunb_with_settings(notebook: Kernel) -> None:
    notebook.ok("gpunb.shutdown()")
    for line in ("wait", "cancel all"):
        notebook.ok(f"%gpu {line}")
    assert "there is no job #1" in notebook("%gpu cancel 1").stderr
    notebook.ok("%gpu init num_cpus=2 num_gpus=2 max_gpus=1.5 resources=licence=2,scratch=0.5")
    total = {"CPU": 2, "GPU": 1.5, "licence": 2, "scratch": 0.5}
    assert notebook.value("gpunb.cluster_resources()") == total
    notebook.ok("gpunb.shutdown()")
    shown = notebook.ok("%gpu init num_cpus=2 num_gpus=2 preload=numpy,IPython")
    assert "gpunb session" in (shown.value or "")
    again = notebook.ok("%gpu init num_gpus=2 ignore_reinit_error=True")
    assert again.value == shown.value


def test_init_has_each_argument_of_the_function() -> None:
    parameters = inspect.signature(gpunb.init).parameters.values()
    own = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    assert list(SETTINGS) == own  # those of Ray are for its programs


# ------------------------------------------------------------------------------------ expressions


def test_an_expression_gives_its_value(notebook: Kernel) -> None:
    notebook.ok("seven = 7")
    assert notebook.ok("r = %gpu 0.5 seven * 6\nr").value == "42"
    assert notebook.ok("%gpu 0.5 (seven, os.getpid() == home)").value == "(7, False)"
    assert notebook.value("_") == (7, False)
    assert notebook.ok("%gpu 0 seven + 1  # more").value == "8"
    assert notebook.ok("%gpu 0 None").value is None
    loop = "for i in range(2):\n    v = %gpu 0 i * seven\n    print(v)"
    assert notebook.ok(loop).stdout == "0\n7\n"
    assert notebook.ok("import asyncio\nr = %gpu 0 await asyncio.sleep(0, 5)\nr").value == "5"
    assert notebook.ok("r = %gpu 0 print('shown') or [seven]\nr").stdout == "shown\n"
    notebook.ok("%config GpuMagics.share = '0.25'")
    assert notebook.ok("%%gpu\ngpunb.status()['running'][0]['gpus']").value == "[[0, 0.25]]"
    for bad, expected_message in (
        ("half", "'half' is not a share"),
        ("1.5", "above 1 and not whole"),
    ):
        assert expected_message in notebook(f"%config GpuMagics.share = {bad!r}").stderr
    assert notebook.value("get_ipython().magics_manager.registry['GpuMagics'].share") == "0.25"
    notebook.ok("%config GpuMagics.share = '1'")


def test_the_error_of_an_expression_is_at_its_line(notebook: Kernel) -> None:
    result = notebook("seven = 7\nif seven:\n    r = %gpu 0 fail(seven)")
    assert result.ename == "ZeroDivisionError"
    assert f"Cell In[{result.count}], line 3" in result.traceback
    assert "----> 3 fail(seven)" in result.traceback
    assert "gpunb" not in result.traceback


# --------------------------------------------------------------------------------------- on and off


def test_on_runs_every_cell_on_a_gpu(notebook: Kernel) -> None:
    notebook.ok("%gpu on 0.5")
    assert notebook.ok(
        "where = os.getpid(), gpunb.get_gpu_ids()\nwhere[0] != home, where[1]"
    ).value == ("(True, [0])")
    assert notebook.ok("'''\none\n  two'''").value == r"'\none\n  two'"
    assert notebook.ok("    indented = 5\n    print(indented)").stdout == "5\n"
    assert (
        notebook.ok("import asyncio\nawait asyncio.sleep(0, os.getpid() != home)").value == "True"
    )
    for empty in ("", "\n\n", "# a comment\n"):
        assert notebook.ok(empty)
    failed = notebook("print(1)\n\n1 / 0")
    assert f"Cell In[{failed.count}], line 3" in failed.traceback
    assert "----> 3 1 / 0" in failed.traceback
    assert notebook("x = = 1").ename == "SyntaxError"
    # These are left alone.
    here = "os.getpid() == home"
    assert notebook.ok(f"%%time\nprint({here})").stdout.startswith("True\n")
    assert notebook.ok(f"%time print({here})").stdout.startswith("True\n")
    assert notebook.ok(f"%%capture got\nprint({here})")
    assert notebook.ok("!echo shell").stdout.strip() == "shell"
    assert notebook.ok("fail?")
    assert notebook.ok(f"%%gpu 0.25\n{here}, gpunb.status()['running'][0]['gpus']").value == (
        "(False, [[0, 0.25]])"
    )
    assert notebook.ok("# switch it off\n%gpu off")
    assert notebook.ok(f"got.stdout, {here}").value == r"('True\n', True)"


def test_on_refuses_a_share_that_the_machine_cannot_give(notebook: Kernel) -> None:
    for line in ("3", "--type H9000", "3 --session s"):
        refused = notebook(f"%gpu on {line}")
        assert refused.ename == "InfeasibleRequestError"
        assert "can never be met on this machine" in refused.evalue
        assert "gpunb/" not in refused.traceback
    assert notebook.ok("os.getpid() == home").value == "True"


def test_on_takes_the_options_of_a_cell(notebook: Kernel) -> None:
    notebook.ok("%gpu on 0.5 --session s")
    notebook.ok("in_session = 1\npid = os.getpid()")
    assert notebook.ok("in_session, pid == os.getpid()").value == "(1, True)"
    notebook.ok("%gpu on 0")
    assert notebook.ok("gpunb.get_gpu_ids(), pid == os.getpid()").value == "([], False)"
    notebook.ok("%gpu off")
    notebook.ok("%gpu off")
    notebook.ok("%gpu stop s")


def test_a_parked_session_goes_on_with_its_names_on_its_device(notebook: Kernel) -> None:
    notebook.ok("%%gpu 1 --session parks -o none\nx = 41")
    before = float(notebook.value("gpunb.available_resources().get('GPU', 0)"))
    notebook.ok("%gpu park parks")
    assert float(notebook.value("gpunb.available_resources()['GPU']")) == before + 1
    assert "parked" in str(notebook.ok("%gpu ps").value)
    assert notebook.ok("%%gpu --session parks -o none\nx + 1").value == "42"
    notebook.ok("%gpu stop parks")


# ------------------------------------------------------------------------------------ help and Tab


def test_the_manual_lists_options_and_subcommands(notebook: Kernel) -> None:
    manual = notebook.value("get_ipython().magics_manager.magics['line']['gpu'].__doc__")
    assert "@@" not in manual
    lines = manual.splitlines()
    words = [line for line in lines if line.lstrip().startswith("%gpu ") and "  " in line.strip()]
    assert len(words) == 14
    assert {line.index("%") for line in words} == {4}
    starts = {len(line) - len(line.strip().split("  ")[-1].strip()) for line in words}
    assert len(starts) == 1
    assert max(map(len, lines)) <= 100
    assert "--session NAME" in manual


def complete(notebook: Kernel, code: str) -> list[str]:
    ident = notebook.client.complete(code, len(code))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        message: dict[str, Any] = notebook.client.get_shell_msg(timeout=10)
        if message["parent_header"].get("msg_id") == ident:
            return list(message["content"]["matches"])
    raise AssertionError("no answer")


def test_words_options_sessions_and_jobs_are_completed(notebook: Kernel) -> None:
    assert complete(notebook, "%gpu ") == sorted(
        "ps top wait job cancel logs why stop park on off init".split()
    )
    assert complete(notebook, "%gpu w") == ["wait", "why"]
    assert {"--bg", "--session", "--type", "--out"} <= set(complete(notebook, "%%gpu 0.5 --"))
    assert complete(notebook, "%%gpu 0.5 --se") == ["--session"]
    assert "path" in complete(notebook, "%%gpu\nos.pa")
    assert "path" in complete(notebook, "r = %gpu 0.5 os.pa")
    notebook.ok("%%gpu 0 --session training\npass")
    assert complete(notebook, "%gpu stop ") == ["training"]
    assert complete(notebook, "%%gpu -s tr") == ["training"]
    assert complete(notebook, "%gpu on 0.5 --ses") == ["--session"]
    job = submitted(notebook, "%%gpu --bg\ntime.sleep(60)")
    for word in ("wait", "job", "cancel", "logs", "why"):
        assert str(job) in complete(notebook, f"%gpu {word} ")
    assert "all" in complete(notebook, "%gpu cancel ")
    notebook.ok(f"%gpu cancel {job}\n%gpu stop training")


def test_settings_and_types_are_completed(notebook: Kernel) -> None:
    assert complete(notebook, "%gpu init ") == sorted(f"{name}=" for name in SETTINGS)
    assert complete(notebook, "%gpu init num_gpus=2 num_") == ["num_cpus="]
    notebook.ok("gpunb.shutdown()\nos.environ['GPUNB_SIMULATE'] = '1xA100:40GiB,2xV100:16GiB'")
    for _ in ("without a session", "with one"):
        assert complete(notebook, "%%gpu 0.5 --type ") == ["A100", "V100"]
        assert complete(notebook, "%gpu on --bg -t V") == ["V100"]
        assert complete(notebook, "%%gpu --type V100,") == ["A100"]
        assert notebook.value("gpunb.is_initialized()") is (_ == "with one")
        notebook.ok("%gpu init num_cpus=2 ignore_reinit_error=true")
    notebook.ok("gpunb.shutdown()\ndel os.environ['GPUNB_SIMULATE']")
    notebook.ok("%gpu init num_cpus=2 num_gpus=2")


def test_job_returns_the_handle(notebook: Kernel) -> None:
    job = submitted(notebook, "%%gpu 0 --bg --name one\n7")
    notebook.ok(f"handle = %gpu job {job}\nhandle.wait(); None")
    assert notebook.value("(handle.id, handle.name, handle.result)") == (job, "one", 7)
    assert "name one job" in notebook("%gpu job").stderr
    assert "is no background cell of this notebook" in notebook("%gpu job 9999").stderr


def test_a_reload_registers_everything_once(notebook: Kernel) -> None:
    registered = (
        "(lambda ip: [[len(e) for _, e in sorted(ip.events.callbacks.items())], "
        "len(ip.input_transformers_cleanup), len(ip.Completer.custom_matchers), "
        "len(ip.configurables), 'gpu' in ip.magics_manager.magics['line']])(get_ipython())"
    )
    before = notebook.value(registered)
    notebook.ok("%load_ext gpunb")
    for _ in range(2):
        notebook.ok("%reload_ext gpunb")
    assert notebook.value(registered) == before
    notebook.ok("%gpu on 0")
    notebook.ok("%unload_ext gpunb")
    events, transformers, matchers, configurables, magic = notebook.value(registered)
    assert (transformers, matchers, magic) == (before[1], before[2] - 1, False)
    assert configurables == before[3] - 1
    assert sum(events) == sum(before[0]) - 3
    assert notebook.ok("os.getpid() == home").value == "True"
    notebook.ok("%load_ext gpunb")
    assert notebook.value(registered) == before


def test_the_tests_leave_no_files_in_the_folder(notebook: Kernel) -> None:
    assert not [each for each in notebook.value("os.listdir('.')") if each.startswith("gpunb")]
    assert os.getpid() != notebook.value("home")


def test_the_line_may_use_names_of_the_notebook(cell: Kernel) -> None:
    cell.ok("line, rest, words, cell = 0.5, 0.25, 1, 'x'")
    assert cell.ok("%%gpu {line}\ngpunb.get_gpu_ids()").value == "[0]"
    assert cell.ok(
        "%%gpu $rest --name {cell}\ngpunb.get_runtime_context().get_task_name()"
    ).value == ("'x'")
    job = cell.ok("%%gpu 0\ngpunb.get_runtime_context().get_task_id()").value
    cell.ok(f"ident = {job}")
    assert "#" in cell.ok("%gpu why {ident}").stdout
    share = "gpunb.get_runtime_context().get_assigned_resources()['GPU']"
    assert cell.ok(f"%gpu {{line}} {share}").value == "0.5"
    assert cell.ok(f"%gpu {{line / 2}} {share}").value == "0.25"
    assert cell.ok("%gpu $rest {'a': line}").value == "{'a': 0.5}"
    asking = f"def ask(own):\n    r = %gpu {{own}} {share}\n    return r\nask(0.75)"
    assert cell.ok(asking).value == "0.75"
