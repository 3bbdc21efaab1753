"""What a %%gpu line says, what travels, crashes, and Stop; in a real kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpunb.notebook.headless_output import Late
from gpunb.notebook.shell import NotebookShell
from tests.notebook.kernels import Kernel, kernel, leaving_nothing
from tests.sessions import ROOT, alive
from tests.waiting import eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def idle_afterwards(cell: Kernel) -> Iterator[None]:
    """Whatever a test did, the kernel goes on, nothing runs and all is free."""
    yield
    busy = "(s := gpunb.status())['available'] != s['total'] or bool(s['waiting'])"
    eventually(lambda: not cell.value(busy), "the session is idle")


def status(cell: Kernel) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(cell.value("__import__('json').dumps(gpunb.status())"))
    return facts


# ------------------------------------------------------------------------------- what %%gpu says


@pytest.mark.parametrize(
    ("line", "expected_message"),
    [
        ("1.5", "1.5"),
        ("-1", "-1"),
        ("0.00001", "0.0001"),
        ("half", "'half' is not a share"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("10XB", "'10XB' is not a share"),
        ("1 2", "unrecognized arguments: 2"),
        ("--wrong", "unrecognized arguments: --wrong"),
        ("--timeout soon", "invalid float value: 'soon'"),
        ("--timeout -1", "timeout"),
        ("--retries -3", "max_retries"),
        ("--cpus -1", "num_cpus"),
        ("--name 'open", "No closing quotation"),
        ("--env nothing", "--env 'nothing' must be of the form NAME=VALUE"),
        ("--env CUDA_VISIBLE_DEVICES=2", "'CUDA_VISIBLE_DEVICES': '2', which no task can choose"),
        ("--in a-b", "'a-b' is not a name"),
        ("--in nowhere", "not bound in the notebook: nowhere"),
        ("--out 1x", "'1x' is not a name"),
        ("--type H9000", "H9000"),
        ("3", "a request for 3 GPU can never be met"),
        ("10GiB", "the devices have no known memory"),
    ],
)
def test_a_bad_line_is_refused_at_once_in_one_sentence(
    cell: Kernel, line: str, expected_message: str
) -> None:
    before = status(cell)["finished"][:1]
    result = cell(f"%%gpu {line}\nprint('ran')")
    assert result.status == "error"
    assert not result.stdout
    shown = result.stderr + result.traceback
    assert expected_message in shown
    assert "gpunb/" not in shown
    assert len(shown.strip().splitlines()) <= 2
    assert status(cell)["finished"][:1] == before


def test_too_large_a_share_is_infeasible(cell: Kernel) -> None:
    result = cell("%%gpu 3\npass")
    assert result.ename == "InfeasibleRequestError"


def test_names_in_the_line_are_expanded(cell: Kernel) -> None:
    cell.ok("share = 0.25\nwho = {'name': 'ann'}")
    body = "c = gpunb.get_runtime_context().get_task_name(), gpunb.status()['running'][0]['gpus']"
    assert cell.ok(f"%%gpu $share --name {{who['name']}}\n{body}\nc").value == (
        "('ann', [[0, 0.25]])"
    )


def test_the_cell_sees_its_share(cell: Kernel) -> None:
    look = "import os\n(os.environ['CUDA_VISIBLE_DEVICES'], gpunb.get_gpu_ids())"
    assert cell.ok(f"%%gpu 0\n{look}").value == "('', [])"
    assert cell.ok(f"%%gpu\n{look}").value == "('0', [0])"
    assert cell.ok(f"%%gpu 2\n{look}").value == "('0,1', [0, 1])"
    assert cell.ok(f"%%gpu -c 1 0.5\n{look}").value == "('0', [0])"


def test_env_sets_variables_of_the_worker(cell: Kernel) -> None:
    result = cell.ok("%%gpu --env A=1 --env 'B=x=y z'\nimport os\nos.environ['A'], os.environ['B']")
    assert result.value == "('1', 'x=y z')"
    assert cell.value("'A' in __import__('os').environ") is False


def test_memory_and_types_choose_among_simulated_devices(cell: Kernel) -> None:
    cell.ok("gpunb.shutdown()\ns = gpunb.init(num_cpus=2, simulate='1xV100:16GiB,1xA100:40GiB')")
    try:
        look = "gpunb.status()['running'][0]['gpus']"
        assert cell.ok(f"%%gpu 10GiB --type A100\n{look}").value == "[[1, 0.25]]"
        assert cell.ok(f"%%gpu 10GiB -t V100,A100\n{look}").value == "[[0, 0.625]]"
        assert cell.ok(f"%%gpu 20GiB\n{look}").value == "[[1, 0.5]]"
        assert cell("%%gpu 50GiB\npass").ename == "InfeasibleRequestError"
        assert "A100" in cell.ok("%gpu").value
    finally:
        cell.ok("gpunb.shutdown()\ns = gpunb.init(num_cpus=2, num_gpus=2)")


# ---------------------------------------------------------------------------------- what travels


def test_only_the_names_asked_for_travel(cell: Kernel) -> None:
    cell.ok("a, b = 1, 2")
    assert cell("%%gpu --in a\nb").ename == "NameError"
    cell.ok("%%gpu --in a,b --out c\nc = a + b\nd = 5\na = 9\ndel b")
    assert cell.value("(a, b, c, 'd' in globals())") == (1, 2, 3, False)
    cell.ok("%%gpu --out none\nx_none = 1")
    assert cell.value("'x_none' in globals()") is False


def test_a_name_of_out_must_be_bound_by_the_cell(cell: Kernel) -> None:
    result = cell("%%gpu -o there,absent\nthere = 1")
    assert result.ename == "NameError"
    assert "absent" in result.evalue
    assert cell.value("there") == 1


def test_a_value_that_cannot_be_sent_is_named_before_the_cell_runs(cell: Kernel) -> None:
    cell.ok("import threading\nsome_lock = threading.Lock()\nother = 1")
    before = status(cell)["finished"][:1]
    result = cell("%%gpu\nprint('ran', other)\nsome_lock.acquire()")
    assert result.stderr.startswith("UsageError: ")
    assert "some_lock" in result.stderr
    assert "lock" in result.stderr.replace("some_lock", "")
    assert "--in" in result.stderr
    assert status(cell)["finished"][:1] == before


def test_open_files_are_refused_and_standard_streams_are_the_workers(cell: Kernel) -> None:
    cell.ok("import os, sys\nfile = open(os.__file__)\nheld = {'file': file}")
    for name, where in (("file", "it"), ("held", "['file']")):
        result = cell(f"%%gpu\n{name}")
        assert result.stderr.startswith(
            f"UsageError: %%gpu: {name} cannot be sent to a worker: {where} is an _io.TextIOWrapper"
        )
    cell.ok("out = sys.stdout\ndef log(text, file=sys.stderr):\n    print(text, file=file)")
    result = cell.ok("%%gpu\nprint('out', file=out)\nlog('err')")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert cell.value("(type(file).__name__, out is sys.stdout)") == ("TextIOWrapper", True)
    cell.ok("file.close()")


def test_a_value_that_cannot_come_home_stays_with_a_reason(cell: Kernel) -> None:
    result = cell.ok("%%gpu\ngen = (i for i in range(3))\nfine = [1]\nalso = {'k': 2}")
    assert "gpunb: 'gen' stays in the worker" in result.stderr
    assert "generator" in result.stderr
    assert cell.value("(fine, also, 'gen' in globals())") == ([1], {"k": 2}, False)
    result = cell("%%gpu --out gen\ngen = (i for i in range(3))")
    assert result.ename == "TypeError"
    assert "--out gen" in result.evalue
    assert "gpunb/" not in result.traceback


def test_a_value_that_cannot_come_home_is_shown(cell: Kernel) -> None:
    result = cell.ok("%%gpu\nimport threading\nkept = 3\nthreading.Lock()")
    assert "unlocked" in result.value
    assert not result.stderr
    assert cell.value("kept") == 3


def test_an_import_costs_the_kernel_nothing_until_it_is_used(cell: Kernel) -> None:
    assert cell.value("'mailbox' in __import__('sys').modules") is False
    cell.ok("%%gpu\nimport mailbox\nimport json as j")
    assert cell.value("'mailbox' in __import__('sys').modules") is False
    assert cell.value("j is __import__('json')") is True
    assert cell.value("mailbox.Mailbox.__name__") == "Mailbox"
    assert cell.value("mailbox is __import__('sys').modules['mailbox']") is True


def test_a_module_that_a_cell_imports_is_in_its_package_at_home(cell: Kernel) -> None:
    cell.ok("import sys, xml")
    loaded = "[n for n in ('urllib.robotparser', 'wsgiref.util', 'xml.sax') if n in sys.modules]"
    assert cell.value(loaded) == []
    cell.ok(
        "%%gpu\nimport xml.sax, wsgiref.util\nif True:\n    import urllib.robotparser\n"
        "from wsgiref import headers"
    )
    assert cell.value(loaded) == []
    assert cell.value("xml.sax.make_parser.__name__") == "make_parser"
    assert cell.value("urllib.robotparser.RobotFileParser.__name__") == "RobotFileParser"
    assert cell.value("(wsgiref.util.__name__, wsgiref.headers.Headers.__name__)") == (
        "wsgiref.util",
        "Headers",
    )
    assert cell.value("wsgiref.headers is headers is sys.modules['wsgiref.headers']") is True
    cell.ok("%%gpu --out none\nimport wsgiref.handlers")
    assert cell.value("hasattr(wsgiref, 'handlers')") is False


def test_modules_that_a_package_makes_come_home_and_broken_ones_are_named(cell: Kernel) -> None:
    cell.ok(
        "import os\nos.mkdir('made')\nwith open('made/__init__.py', 'w') as f:\n"
        "    f.write('import sys, types\\nhere = types.ModuleType(\"made.here\")\\n'\n"
        "            'sys.modules[here.__name__] = here\\n')\n"
        "for name in ('sub', 'gone'):\n"
        "    with open(f'made/{name}.py', 'w') as f: f.write('x = 1')"
    )
    result = cell.ok(
        "%%gpu\nimport made.here, made.sub, made.gone\nimport os\nos.remove('made/gone.py')"
    )
    assert result.stderr == (
        "gpunb: 'made.gone' stays in the worker: No module named 'made.gone'\n"
    )
    assert cell.value("(made.here.__name__, made.sub.x)") == ("made.here", 1)


def test_a_module_that_only_the_worker_finds_is_named(cell: Kernel) -> None:
    cell.ok("import os\nos.makedirs('hidden', exist_ok=True)")
    cell.ok("with open('hidden/only_there.py', 'w') as f: f.write('class A: pass')")
    result = cell.ok("%%gpu\nimport sys\nsys.path.append('hidden')\nimport only_there\nv = 2")
    assert "gpunb: 'only_there' stays in the worker" in result.stderr
    assert cell.value("v") == 2
    result = cell.ok(
        "%%gpu\nimport sys\nsys.path.append('hidden')\nfrom only_there import A\na = A()\nv = 3\na"
    )
    assert result.stderr == (
        "gpunb: 'A', 'a' stay in the worker: it cannot be made again in the notebook: "
        "ModuleNotFoundError: No module named 'only_there'\n"
    )
    assert "only_there.A at" in (result.value or "")
    assert cell.value("('A' in globals(), v)") == (False, 3)


def test_errors_keep_their_types_and_causes(cell: Kernel) -> None:
    cell.ok("class Mine(Exception):\n    pass")
    cell.ok(
        "try:\n"
        "    get_ipython().run_cell_magic('gpu', '', "
        "'try:\\n    1 / 0\\nexcept ZeroDivisionError as e:\\n    raise Mine(1, [2]) from e')\n"
        "except Mine as error:\n"
        "    caught = error"
    )
    assert cell.value("(caught.args, type(caught.__cause__).__name__)") == (
        (1, [2]),
        "ZeroDivisionError",
    )


def test_a_chain_of_errors_names_the_lines(cell: Kernel) -> None:
    result = cell("%%gpu\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['k']")
    first, second = result.traceback.split("During handling")
    assert f"Cell In[{result.count}], line 3\n" in first
    assert "----> 3     1 / 0" in first
    assert f"Cell In[{result.count}], line 5\n" in second
    assert "gpunb" not in result.traceback


def test_functions_of_other_cells_are_shown_in_tracebacks(cell: Kernel) -> None:
    here = cell.ok("def divide(n):\n    return n / 0")
    there = cell.ok("%%gpu\n\ndef halve(n):\n    return divide(n)")
    for last in (cell("halve(1)"), cell("%%gpu\nhalve(1)")):
        assert f"Cell In[{here.count}], line 2, in divide(n)" in last.traceback
        assert f"Cell In[{there.count}], line 4, in halve(n)" in last.traceback
        assert "return n / 0" in last.traceback
        assert "return divide(n)" in last.traceback


def test_the_traceback_of_endless_recursion_is_short(cell: Kernel) -> None:
    result = cell("%%gpu\ndef f(): return f()\nf()")
    assert result.ename == "RecursionError"
    assert len(result.traceback) < 5000


def test_raw_output_keeps_its_place(cell: Kernel) -> None:
    result = cell.ok(
        "%%gpu\nimport os, subprocess\nprint('a')\nn = os.write(1, b'raw\\n')\nprint('b')\n"
        "subprocess.run(['echo', 'child'])\ndisplay(1)\nprint('c')"
    )
    kinds = [(kind, text) for kind, text, *_ in result.outputs()]
    assert kinds[:3] == [
        ("stream", "a\nraw\nb\nchild\n"),
        ("display_data", {"text/plain": "1"}),
        ("stream", "c\n"),
    ]


def test_a_figure_is_a_picture(cell: Kernel) -> None:
    result = cell.ok("%%gpu\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert result.displayed[0]["image/png"].startswith("iVBOR")
    assert result.value is None


def test_figures_are_shown_as_the_notebook_has_them(cell: Kernel) -> None:
    def shown(line: str, before: str = "") -> set[str]:
        plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
        (figure,) = cell.ok(f"%%gpu {line}\n{before}{plot}").displayed
        return figure.keys() - {"text/plain"}

    def chooses(formats: str) -> str:
        return f"%config InlineBackend.figure_formats = {formats}\n"

    loaded = "'matplotlib.figure' in __import__('sys').modules"
    before = cell.value(loaded)
    cell.ok(chooses("['svg']"))
    assert shown("-s figures") == {"image/svg+xml"}
    assert shown("-s figures", chooses("['pdf']")) == {"application/pdf"}
    assert shown("-s figures") == {"application/pdf"}
    assert cell.value(loaded) == before
    cell.ok(
        "import matplotlib_inline.backend_inline as inline\ninline.set_matplotlib_formats('jpg')"
    )
    assert shown("") == {"image/jpeg"}
    assert shown("-s figures") == {"image/jpeg"}
    assert shown("", chooses("['pdf']")) == {"application/pdf"}
    assert shown("") == shown("-s figures") == {"application/pdf"}
    cell.ok("inline.set_matplotlib_formats('png')")
    assert shown("-s figures") == {"image/png"}
    cell.ok("%gpu stop figures")


def test_capture_takes_the_output_of_a_gpu_cell(cell: Kernel) -> None:
    cell.ok("'before'")
    result = cell.ok("%%capture got\n%%gpu\nprint('inside')\ndisplay(5)\n7")
    assert not result.messages
    shown = "[each._repr_mimebundle_()[0]['text/plain'] for each in got.outputs]"
    assert cell.value(f"(got.stdout, {shown})") == ("inside\n", ["5", "7"])
    assert cell.value(f"(_, {result.count} in Out)") == ("before", False)
    assert cell.ok("%%capture --no-display\n%%gpu\n8").value == "8"
    assert cell.value("_") == 8


def test_the_last_value_is_kept(cell: Kernel) -> None:
    result = cell.ok("%%gpu\n[1, 2]")
    assert cell.value("_") == [1, 2]
    assert cell.value(f"Out[{result.count}]") == [1, 2]
    reprs = "get_ipython().history_manager.output_hist_reprs"
    assert cell.value(f"{reprs}[{result.count}]") == "[1, 2]"


def test_a_cell_that_ends_its_process_names_the_free_share(cell: Kernel) -> None:
    for line, share in (("2", "; its share of GPU 0, 1 is free again"), ("0", "")):
        result = cell(f"%%gpu {line} --name x\nimport sys\nsys.exit('words')")
        assert (result.ename, result.evalue) == ("SystemExit", "words")
        assert result.traceback.splitlines()[-1] == (
            f"x ended with sys.exit, and its worker with it{share}"
        )
    assert "free again" not in cell("%%gpu 0\nimport os\nos._exit(3)").evalue


def test_exit_in_a_cell_does_not_end_the_kernel(cell: Kernel) -> None:
    cell("%%gpu\nexit()")
    assert cell.ok("1 + 1").value == "2"


# ----------------------------------------------------------------------------------- the magics


def test_the_status_is_shown_as_text_and_html(cell: Kernel) -> None:
    cell.ok("%%gpu --name '<shown>'\npass")
    result = cell.ok("%gpu")
    assert "<shown>" in result.value
    assert "GPU" in result.value
    assert "&lt;shown&gt;" in result.result["text/html"]
    assert "<table" in result.result["text/html"]
    assert "UsageError" in cell("%gpu nonsense").stderr


def test_names_with_control_characters_are_refused_and_escaped(cell: Kernel) -> None:
    cell.ok(r"odd = '\x001\x00<img src=x onerror=alert(1)>'")
    refused = cell("%%gpu --name '{odd}'\npass")
    assert r"UsageError: %%gpu: name='\x001\x00<img" in refused.stderr
    assert r"has the control character '\x00'" in refused.stderr
    cell.ok(
        "def f(): pass\n"
        "f.__qualname__ = odd  # which is a task's name, too\n"
        "gpunb.get(gpunb.remote(f).remote())"
    )
    shown = cell.ok("%gpu")
    assert r"\x001\x00<img src=x" in shown.value
    assert r"<td>\x001\x00&lt;img src=x" in shown.result["text/html"]


def test_the_extension_can_be_loaded_twice_reloaded_and_unloaded(cell: Kernel) -> None:
    assert "already loaded" in cell.ok("%load_ext gpunb").stdout
    cell.ok("%reload_ext gpunb")
    assert cell.ok("%%gpu\n7").value == "7"
    cell.ok("%unload_ext gpunb")
    assert "not found" in cell("%%gpu\n7").stderr
    assert "not found" in cell("%gpu").stderr
    cell.ok("%load_ext gpunb")
    assert cell.ok("%%gpu\n7").value == "7"


TALK = """
import os
for each in ('go', 'gone'):
    os.path.exists(each) or os.mkfifo(each)
@gpunb.remote(num_cpus=0)
def talk():
    print('first')
    open('go').read()
    print('second')
    open('gone', 'w').close()
"""


def test_functions_print_into_the_cell_that_submitted_them(
    cell: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "stdin", True)  # there is a user
    cell.ok(TALK)
    submitting = cell.ok("ref = talk.remote()")
    cell.shows(submitting, "first")
    other = cell.ok("open('go', 'w').close()\nopen('gone').read()\ngpunb.get(ref)\nprint('own')")
    cell.shows(submitting, "second")
    lines = submitting.stdout.splitlines()
    assert [each.rpartition(") ")[2] for each in lines] == ["first", "second"]
    assert all(each.startswith("(talk pid=") for each in lines)
    assert other.stdout == "own\n"


def test_without_a_user_functions_print_into_the_cell_that_runs(cell: Kernel) -> None:
    cell.ok(TALK)
    submitting = cell.ok("ref = talk.remote()")
    folder = Path(cell.value("os.getcwd()"))
    between = cell.ok("")
    (folder / "go").write_text("")
    (folder / "gone").read_text()
    getting = cell.ok("gpunb.get(ref)\nprint('own')")
    cell.settle()
    assert "second" not in submitting.stdout + between.stdout
    assert re.fullmatch(r"(\(talk pid=\d+\) (first|second)\n)+own\n", getting.stdout)
    texts = submitting.stdout + between.stdout + getting.stdout
    assert re.findall("first|second", texts) == ["first", "second"]


def test_late_output_without_a_user_goes_to_the_running_cell(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sent: list[tuple[str, str]] = []

    def message(name: str) -> dict[str, Any]:
        return {"header": {"msg_id": name}, "content": {"code": f"code of {name}"}}

    class Shell(NotebookShell):
        running = message("first")

        def request(self) -> dict[str, Any]:
            return self.running

        def send(self, kind: str, content: Any, parent: Any, **_: Any) -> None:
            assert kind == "stream"
            sent.append((content["text"], parent["header"]["msg_id"]))

    shell = Shell(SimpleNamespace(events=SimpleNamespace(register=lambda *_: None)))
    late, first = shell.part(Late), shell.running

    def show(text: str) -> None:
        late.send("stream", {"text": text}, first)

    def ends(code: str) -> None:
        late.ends(SimpleNamespace(info=SimpleNamespace(raw_cell=code)))

    show("a")
    ends("a cell within")
    show("b")
    ends("code of first")
    show("c")
    late.send("clear_output", {"wait": False}, first)
    show("d")
    shell.running = message("second")
    late.begins()
    late.send("clear_output", {"wait": False}, first)
    show("e")
    ends("code of second")
    assert sent == [("a", "first"), ("b", "first"), *((each, "second") for each in "cde")]
    show("after all\n")
    late.rest()
    late.rest()
    assert capfd.readouterr().err == "after all\n"


def test_functions_that_a_cell_submits_print_into_it(cell: Kernel) -> None:
    cell.ok("@gpunb.remote\ndef say(n):\n    print('said', n)\n    return n")
    result = cell.ok("%%gpu\nr = gpunb.get([say.remote(i) for i in range(2)])\nr")
    assert result.value == "[0, 1]"
    assert "said 0" in result.stdout
    assert "said 1" in result.stdout


# ------------------------------------------------------------------------------ crashes, time, Stop


@pytest.mark.parametrize(
    ("body", "expected_message"),
    [
        ("os._exit(3)", "exited with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    ],
)
def test_a_crash_is_one_clear_error(cell: Kernel, body: str, expected_message: str) -> None:
    result = cell(
        "%%gpu --name crashing\nimport os, signal, sys\nprint('out before')\n"
        f"print('last words', file=sys.stderr)\n{body}"
    )
    assert result.ename == "WorkerCrashedError"
    assert expected_message in result.evalue
    assert "crashing" in result.evalue
    first, _, last, *stack = result.evalue.splitlines()
    assert first.endswith("; its share of GPU 0 is free again")
    assert last == "last words"
    assert bool(stack) is (expected_message == "SIGSEGV")
    assert result.stdout == "out before\n"
    assert "gpunb/" not in result.traceback
    assert "Traceback" not in result.traceback


def test_a_cell_is_retried_after_a_crash_only(cell: Kernel) -> None:
    body = "import os\nopen('tries', 'a').write('x')\nn = os.path.getsize('tries')\nprint('try', n)"
    cell.ok(f"%%gpu --retries 2\n{body}\nif n < 3: os._exit(1)")
    assert cell.value("n") == 3
    assert cell(f"%%gpu --retries 2\n{body}\n1 / 0").ename == "ZeroDivisionError"
    assert cell.value("n") == 4


def test_a_timeout_names_the_seconds(cell: Kernel) -> None:
    result = cell("%%gpu --timeout 0.3\nbefore_timeout = 1\nimport time\ntime.sleep(60)")
    assert result.ename == "TimeoutError"
    assert "0.3 s and was stopped; its share of GPU 0 is free again" in result.evalue
    assert "gpunb/" not in result.traceback
    assert status(cell)["finished"][0]["state"] == "failed"


def test_processes_that_a_cell_started_end_with_it(cell: Kernel) -> None:
    cell.ok("%%gpu\nimport subprocess\npid = subprocess.Popen(['sleep', '600']).pid")
    pid = cell.value("pid")
    eventually(lambda: not alive(pid), "the cell's child is gone", 2)


# A timer says that the cell is ready, so that it is in the next line by then.
STOPPED = """%%gpu
import threading, time
bound = 1
try:
    threading.Timer(0.1, print, ['ready']).start()
    time.sleep(60)
finally:
    print('cleaning up')
    cleaned = True
never = 1"""


def test_stop_interrupts_the_line_that_runs(cell: Kernel) -> None:
    result = cell.start(STOPPED)
    cell.shows(result, "ready")
    cell.interrupt()
    cell.finish(result)
    assert (result.status, result.ename) == ("error", "KeyboardInterrupt")
    assert f"Cell In[{result.count}], line 6" in result.traceback
    assert "----> 6     time.sleep(60)" in result.traceback
    assert "gpunb" not in result.traceback.replace("%%gpu", "")
    assert result.stdout == "ready\ncleaning up\n"
    assert cell.value("(bound, cleaned, 'never' in globals())") == (1, True, False)
    assert status(cell)["finished"][0]["state"] == "cancelled"  # it is no failure of its code


def test_a_cell_can_handle_stop(cell: Kernel) -> None:
    result = cell.start(
        "%%gpu\nimport time\ntry:\n    print('ready')\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    handled = 1\nhandled + 1"
    )
    cell.shows(result, "ready")
    cell.interrupt()
    assert cell.finish(result)
    assert result.value == "2"
    assert cell.value("handled") == 1


def test_a_stubborn_cell_is_killed_by_the_second_stop(cell: Kernel) -> None:
    result = cell.start(
        "%%gpu\nimport time\nlate = 1\nwhile True:\n    try:\n        print('ready')\n"
        "        time.sleep(60)\n    except KeyboardInterrupt:\n        print('no')"
    )
    cell.shows(result, "ready")
    cell.interrupt()
    cell.shows(result, "no")
    cell.interrupt()
    cell.finish(result, 5)
    assert (result.status, result.ename) == ("error", "KeyboardInterrupt")
    assert result.evalue.endswith(
        " was stopped; its worker is gone, and its share of GPU 0 is free again"
    )
    assert cell.value("'late' in globals()") is False


def test_stop_removes_a_waiting_cell_from_the_queue(
    cell: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "stdin", True)
    cell.ok(
        "import os\nos.mkfifo('hold')\n@gpunb.remote(num_gpus=2, max_retries=0)\n"
        "def hold():\n    print('holds')\n    return open('hold').read()"
    )
    holding = cell.ok("ref = hold.remote()")
    cell.shows(holding, "holds")
    result = cell.start(
        "import threading, time\ndef tell():\n    while not gpunb.status()['waiting']:\n"
        "        time.sleep(0.01)\n    print('waits')\nthreading.Thread(target=tell).start()\n"
        "get_ipython().run_cell_magic('gpu', '-n w', 'w_ran = 1')"
    )
    cell.shows(result, "waits")
    cell.interrupt()
    cell.finish(result, 5)
    assert (result.status, result.ename) == ("error", "KeyboardInterrupt")
    assert result.evalue == "w was taken out of the queue before it ran"
    assert cell.value("'w_ran' in globals()") is False
    # What runs in the background was not touched.
    assert [job["name"] for job in status(cell)["running"]] == ["hold"]
    cell.ok("with open('hold', 'w') as f: f.write('done')")
    assert cell.value("gpunb.get(ref)") == "done"


def test_a_killed_kernel_leaves_nothing(tmp_path: Path) -> None:
    with kernel(tmp_path) as killed:
        body = "import subprocess\nprint('ready')\nsubprocess.run(['sleep', '600'])"
        result = killed.start(f"%%gpu\n{body}")
        killed.shows(result, "ready")


# ---------------------------------------------------------------------------- without a front end


def test_a_notebook_runs_without_a_front_end(tmp_path: Path) -> None:
    import nbformat

    cells = [
        "%load_ext gpunb\nimport gpunb\n_ = gpunb.init(num_gpus=1, num_cpus=1)",
        "%%gpu 0.5\nx = 20\nprint('printed')\ndisplay('displayed')\nx + 1",
        "print(x * 2)",
        f"{TALK}\nref = talk.remote()",
        "open('go', 'w').close()\nopen('gone').read()\ngpunb.get(ref)\nprint('own')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-m", "jupyter", "execute", str(path)]
    with leaving_nothing() as mark:
        subprocess.run(
            [*command, f"--output={tmp_path / 'out'}"],
            env=env | mark,
            check=True,
            capture_output=True,
            timeout=60,
        )
    done = nbformat.read(tmp_path / "out.ipynb", 4)
    first, second, third = done.cells[1].outputs
    assert (first.text, second.data["text/plain"]) == ("printed\n", "'displayed'")
    assert (third.output_type, third.data["text/plain"], third.execution_count) == (
        "execute_result",
        "21",
        2,
    )
    assert done.cells[2].outputs[0].text == "40\n"
    submitting, getting = ("".join(o.text for o in each.outputs) for each in done.cells[3:])
    assert re.findall("first|second|own", submitting + getting) == ["first", "second", "own"]
    assert "second" in getting


def test_both_streams_written_in_turn_arrive_in_turn(cell: Kernel) -> None:
    lines = (
        "import sys\nfor n in range(30):\n"
        "    print(n, 'out', flush=True)\n    print(n, 'err', file=sys.stderr, flush=True)"
    )
    expected = "".join(f"{n} out\n{n} err\n" for n in range(30))
    for session in ("", "-s turns"):
        ran = cell.ok(f"%%gpu 0 {session}\n{lines}")
        shown_text = [content["text"] for kind, content in ran.messages if kind == "stream"]
        assert "".join(shown_text) == expected
    cell.ok("%gpu stop turns")
    nested = (
        "import sys\nclass Loud:\n    def __del__(self): print('gone', file=sys.stderr)\n"
        "for n in range(50):\n    print(n); loud = [Loud()]; loud.append(loud); "
        "gpunb.put([loud[:0]])\nimport gc; gc.collect(); None"
    )
    assert cell.ok(f"%%gpu 0\n{nested}").stderr.count("gone") == 49
