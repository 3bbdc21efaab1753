"""What outlives the kernel that asked for it, on a head process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gpunb
from gpunb import cli
from gpunb.data import serialize
from gpunb.engine.job_log import PORTION, Log, items
from gpunb.exceptions import GpunbError, ObjectLostError
from gpunb.head import backend, discovery, retention
from gpunb.head import server as serving
from gpunb.protocol.backend import Call
from gpunb.protocol.sink import Sink
from gpunb.scheduler.options import Options
from gpunb.worker.cell.cell_types import Cell
from tests.head.heads import end, ended, start
from tests.notebook.kernels import Kernel, Result, kernel, plain
from tests.sessions import ROOT, alive
from tests.waiting import PATIENCE, Gate, eventually

PREPARE = """
import gpunb
%load_ext gpunb
gpunb.init('lab')
%config GpuMagics.headless = False
"""
DEFINES = """
given, longer = [1, 2], [1]

def scale(x):
    return 2 * x

class Model:
    def __init__(self, weight):
        self.weight = weight

@gpunb.remote
def task():
    import time
    time.sleep(600)

@gpunb.remote
class Own:
    pass
"""
ENTER = """
import sys
sys.path.insert(0, ROOT)
from pathlib import Path
from tests.waiting import Gate
"""
CELLS = {
    "runs": ENTER + "print('it runs', flush=True)\nGate(Path(FOLDER)).enter('runs')\nlate = 'home'",
    "done": f"""
from IPython.display import HTML, display
{ENTER}
Gate(Path(FOLDER) / 'second').enter('done')
print('trained')
display(HTML('<b>curve</b>'))
total = scale(20) + 1
same = given
longer.append(2)
model = Model(total)
model.weight
""",
    "failing": f"{ENTER}Gate(Path(FOLDER) / 'second').enter('failing')\nbefore = 7\n1 / 0",
    "nested": f"""
import gpunb
{ENTER}
Gate(Path(FOLDER) / 'second').enter('nested')
@gpunb.remote
def inner(x):
    print('from inside')
    return x + 1
inside = gpunb.get(inner.remote(1))
""",
    "ranks": "import os\nrank = int(os.environ['RANK'])\nprint('from rank', rank)",
    "in session": f"{ENTER}Gate(Path(FOLDER) / 'second').enter('session')\nthere = memory + 1",
}


SHARES = {"in session": "--session lasting", "ranks": "0 --cpus 0 --ranks 2 --gather rank"}


class Story(NamedTuple):
    """A kernel that was killed, and the one after it.

    Attributes:
        jobs: the numbers of the cells that it has left, by name.
        kernel: the one after it.
        ended: processes of it that do not outlive it.
    """

    jobs: dict[str, int]
    kernel: Kernel
    gate: Gate
    ended: list[int]

    def wait(self, name: str) -> Result:
        return self.kernel.ok(f"%gpu wait {self.jobs[name]}")


@pytest.fixture(scope="module")
def story(
    head: dict[str, Any], by_value: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    (folder / "second").mkdir()
    gate, second_gate, jobs = Gate(folder), Gate(folder / "second"), {}
    named = {"JPY_SESSION_NAME": str(folder / "train.ipynb")}
    with kernel(folder, PREPARE, **named) as second:
        with kernel(folder, PREPARE, **named) as first:
            first.ok(DEFINES)
            first.ok("%%gpu 0.25 --session lasting\nmemory = 41")
            first.ok("%%gpu 0 --session spare\npass")
            for name, text in CELLS.items():
                code = text.replace("ROOT", repr(str(ROOT))).replace("FOLDER", repr(str(folder)))
                share = SHARES.get(name, "0.25")
                first.ok(f"%%gpu {share} --bg -n '{name}'\n{code}")
                jobs[name] = first.value("_.id")
            first.ok("ref, own = task.remote(), Own.remote()")
            sleeps = "seen = 1\nprint('on', flush=True)\nimport time\ntime.sleep(600)"
            cell = first.start(f"%%gpu --session spare\n{sleeps}")
            first.shows(cell, "on")  # and it does not see that others are over
            gate.await_("runs")
            second_gate.open()
            with gpunb.init("lab"):
                eventually(lambda: over(jobs) == jobs.keys() - {"runs"}, "the others are over")
                eventually(lambda: len(not_kept(jobs)) == 2, "a task and an actor run")
                found = not_kept(jobs)
                os.kill(first.manager.provisioner.pid, signal.SIGKILL)
                eventually(lambda: not any(map(alive, found)), "what was the kernel's alone ends")
        yield Story(jobs, second, gate, found)
        gate.open()


def over(jobs: dict[str, int]) -> set[str]:
    done = {each["id"] for each in gpunb.status()["finished"]}
    return {name for name, ident in jobs.items() if ident in done}


def not_kept(jobs: dict[str, int]) -> list[int]:
    """The processes of what is no background cell and no session."""
    status = gpunb.status()
    found = (*status["running"], *status["actors"])
    sessions = {each["pid"] for each in found if each["kind"] == "session"}
    own = [each for each in found if each["id"] not in jobs.values()]
    return [each["pid"] for each in own if each["pid"] and each["pid"] not in sessions]


def test_ps_lists_what_a_killed_kernel_has_left(story):
    shown = story.kernel.ok("%gpu ps").value
    assert shown is not None
    left = shown[shown.index("left") :]
    for name, ident in story.jobs.items():
        state = "running" if name == "runs" else "failed" if name == "failing" else "done"
        line = next(each for each in left.splitlines() if each.startswith(f"#{ident} "))
        assert name in line
        assert f"train.ipynb  {state}" in line
        assert line.endswith(f"%gpu wait {ident}")
    assert "%%gpu --session lasting" in left
    assert f"{story.jobs['runs']}" in story.kernel.ok("%gpu wait").stdout


def test_logs_show_the_output_so_far(story):
    assert story.kernel.ok(f"%gpu logs {story.jobs['runs']}").stdout == "it runs\n"
    assert "from inside" in story.kernel.ok(f"%gpu logs {story.jobs['nested']}").stdout


def test_a_cell_in_several_ranks_comes_home_with_their_output(story: Story) -> None:
    shown = story.wait("ranks")
    assert story.kernel.value("rank") == [0, 1]
    assert "from rank 0\n" in shown.stdout
    other = story.kernel.ok(f"%gpu logs {story.jobs['ranks']} --rank 1")
    assert other.stdout == "from rank 1\n"


def test_a_terminal_shows_it_too(
    story: Story, head: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def logs(name: str, *options: str) -> str:
        assert cli.main(["logs", f"{story.jobs[name]}", *options]) == 0
        return capsys.readouterr().out

    assert logs("runs") == logs("runs", "--of", "lab") == "it runs\n"
    assert "from inside" in logs("nested")
    assert logs("done") == "trained\n<IPython.core.display.HTML object>\n41\n"
    failed = logs("failing")
    assert "ZeroDivisionError: division by zero" in failed
    assert "\x1b" not in failed
    story.kernel.ok("%%gpu 0.25 -n front\nprint('in front')")
    ended = "{each['name']: each['id'] for each in gpunb.status()['finished']}"
    story.jobs["front"] = story.kernel.value(f"{ended}['front']")
    assert logs("front") == "in front\n"
    del story.jobs["front"]
    facts = json.loads(logs("runs", "--json"))
    about = {"pid": head["pid"], "job": story.jobs["runs"], "name": "runs", "state": "running"}
    assert facts == {**about, "text": "it runs\n", "truncated": False}


def test_wait_brings_names_output_and_value_home(story):
    story.kernel.ok("total = 'older'")
    result = story.wait("done")
    assert result.stdout == "trained\n1 done\n"
    assert [each.get("text/html") for each in result.displayed] == ["<b>curve</b>", None]
    assert result.displayed[1]["text/plain"] == "41"
    assert "model, same, sys, total" in result.stderr
    assert story.kernel.value("_") == 41
    names = "(total, same, longer, model.weight, type(model).__name__, scale(3) if 0 else 0)"
    assert story.kernel.value(names) == (41, [1, 2], [1, 2], 41, "Model", 0)
    assert f"wait {story.jobs['done']}" not in (story.kernel.ok("%gpu ps").value or "")
    again = story.wait("done")
    assert (again.stdout, again.stderr) == ("1 done\n", "")
    # Another kernel still gets the values.
    with gpunb.init("lab"):
        job = gpunb.get_job(story.jobs["done"])
        assert job.done()
        assert job.result == 41
        assert job.names["same"] == [1, 2]
        assert "trained" in job.logs()


def test_a_number_is_that_of_the_head_process_that_is_attached(own_folder, tmp_path):
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        gate, facts = Gate(tmp_path / name), start(name)
        enter = ENTER.replace("ROOT", repr(str(ROOT)))
        waits = f"{enter}Gate(Path({str(gate.folder)!r})).enter()\n{name!r}"
        try:
            with kernel(tmp_path, PREPARE.replace("lab", name)) as first:
                first.ok(f"%%gpu 0.25 --bg\n{waits}")
                number = first.value("_.id")
                os.kill(first.manager.provisioner.pid, signal.SIGKILL)
                gate.open()
                with gpunb.init(name):
                    found.append((number, gpunb.get_job(number).result))
        finally:
            end(facts)
    assert found == [(number, "one"), (number, "two")]


def test_an_error_is_the_cells_own(story):
    result = story.wait("failing")
    assert re.search(r"Cell In\[\d+\], line \d+", plain(result.stderr))
    assert plain(result.stderr).count("ZeroDivisionError: division by zero") == 2
    assert "1 failed" in result.stdout
    assert story.kernel.value("before") == 7
    failed = story.kernel(f"gpunb.get_job({story.jobs['failing']}).result")
    assert failed.ename == "ZeroDivisionError"


def test_a_running_one_is_followed_to_its_end(story):
    ident = story.jobs["runs"]
    story.kernel.ok(f"job = gpunb.get_job({ident})")
    assert story.kernel.value("(job.state, job.done(), job.name)") == ("running", False, "runs")
    waits = story.kernel.start("await job\njob.names['late']")
    story.gate.open()
    assert story.kernel.finish(waits).value == "'home'"
    assert story.kernel.value("late") == "home"


def test_a_session_goes_on_with_its_names(story):
    story.wait("in session")
    story.kernel.ok("del there")
    result = story.kernel.ok("%%gpu --session lasting\nmemory += 1\nmemory, there")
    assert result.value == "(42, 42)"
    assert "'lasting' goes on" in result.stderr
    assert "train.ipynb" in result.stderr
    again = story.kernel.ok("%%gpu --session lasting\nmemory")
    assert (again.value, again.stderr) == ("42", "")
    assert "has 0.25" in story.kernel("%%gpu 0.5 --session lasting\npass").stderr
    story.kernel.ok("%gpu stop lasting")
    # A cell in the foreground was stopped with its kernel, and its session was not.
    assert story.kernel.ok("%%gpu --session spare\nseen").value == "1"
    story.kernel.ok("%gpu stop spare")
    assert "no session of cells" in story.kernel("%gpu stop spare").stderr


def test_a_restarted_kernel_has_what_it_left(story, tmp_path):
    gate, running = Gate(tmp_path), story.kernel
    code = CELLS["runs"].replace("ROOT", repr(str(ROOT))).replace("FOLDER", repr(str(tmp_path)))
    running.ok(f"%%gpu 0 -c 2 --bg\n{code}")
    ident = running.value("_.id")
    running.ok("%%gpu 0 -c 1 --bg -n queued\nqueued = 1")
    queued = running.value("_.id")
    running.ok("%%gpu 0 --session s\nx = 1")
    gate.await_("runs")
    running.manager.restart_kernel(now=False)
    running.client.wait_for_ready(timeout=PATIENCE)
    running.results.clear()
    running.ok(PREPARE)
    assert running.value(f"gpunb.get_job({queued}).state") == "queued"
    assert running.ok("%%gpu --session s\nx").value == "1"
    running.ok("%gpu stop s")
    gate.open()
    running.ok(f"%gpu wait {ident} {queued}")
    assert running.value("(late, queued)") == ("home", 1)
    assert "no background cell" in running("%gpu wait 9999").stderr


# ------------------------------------------------------------------------- a head in this process


class Shown(Sink):
    """A kernel's sink for a background cell."""

    background = True
    place = (4, None)


def submit(client: Any, source: str = "x = 1", name: str = "cell", **more: Any) -> int:
    """Hand in a background cell."""
    cell = Cell(source, "<cell>", 4, lasting=True, **more)
    arguments = serialize.dumps((cell, {}))
    spec = Options(num_gpus=0, max_calls=1, name=name).spec(name, "cell")
    ((ident, _),) = client.submit(Call(spec, b"", arguments, kind="cell", sink=Shown()))
    return int(ident)


def done(client: Any, ident: int) -> None:
    """Wait for the end of a cell."""
    assert client.wait([(ident, 0)], 1, PATIENCE)


@pytest.fixture
def served(own_folder: Path) -> Iterator[Any]:
    """A head process that is this one, and attaches clients to itself."""
    with contextlib.ExitStack() as stack:
        gpunb.init(num_cpus=2, num_gpus=0, preload=("IPython",))
        stack.callback(gpunb.shutdown)
        local: Any = serving.local(gpunb.protocol.backend.existing())
        one = serving.serve(local, "private")

        def close() -> None:
            gpunb.shutdown()
            one.close()

        stack.callback(close)

        def attach() -> Any:
            client = backend.attach("private")
            stack.callback(client.shutdown)
            return client

        attach.retained = one.retention  # type: ignore[attr-defined]
        yield attach


def test_what_is_kept_is_bounded_in_number(served, monkeypatch):
    monkeypatch.setattr(retention, "MOST", 2)
    first = served()
    idents = [submit(first, name=f"n{number}") for number in range(4)]
    for each in idents:
        done(first, each)
    first.shutdown()
    second = served()
    assert [each["id"] for each in second.retained()] == idents[2:]
    with pytest.raises(ObjectLostError, match=r"#\d+ n0 .*at most 2 results.*%gpu logs"):
        second.adopt(idents[0])
    # What somebody has brought home goes first.
    second.adopt(idents[3])
    second.brought_home(idents[3])
    own = submit(second)
    done(second, own)
    second.shutdown()
    third = served()
    assert {each["id"] for each in third.retained()} == {idents[2], own}


def test_what_is_kept_is_bounded_in_memory(served):
    served.retained.most_bytes = 3_000_000
    first = served()
    idents = [submit(first, "x = bytes(2_000_000)") for _ in range(2)]
    for each in idents:
        done(first, each)
    assert [first.adopt(each)["over"] for each in idents] == [True, True]  # its kernel is there
    first.shutdown()
    second = served()
    (there,) = second.retained()
    assert there["id"] == idents[1]
    assert there["size"] >= 2_000_000
    with pytest.raises(ObjectLostError, match=r"at most 2\.9 MiB of results"):
        second.adopt(idents[0])
    second.adopt(idents[1])
    assert not second.fetch([(idents[1], 0)], 0)[0].failed


def test_what_is_kept_is_bounded_in_time(served, monkeypatch):
    monkeypatch.setattr(retention, "UNSEEN_FOR", 0.0)
    first = served()
    ident = submit(first)
    done(first, ident)
    first.shutdown()
    second = served()
    eventually(lambda: not second.retained(), "it is given up")
    with pytest.raises(ObjectLostError, match="0 hours have passed"):
        second.adopt(ident)
    monkeypatch.setattr(retention, "UNSEEN_FOR", 1000.0)
    monkeypatch.setattr(retention, "SEEN_FOR", 0.0)
    own = submit(second)
    done(second, own)
    second.brought_home(own)
    third = served()

    def gone() -> bool:
        try:
            third.adopt(own)
        except ObjectLostError as error:
            return f"kernel {os.getpid()} has brought it home" in str(error)
        return False

    eventually(gone, "nobody needs it any more")
    assert not second.fetch([(own, 0)], 0)[0].failed  # who has a reference to it has it


def test_what_it_has_shown_comes_in_portions(served):
    first = served()
    ident = submit(first, f"for _ in range(3): print('x' * {PORTION})")
    done(first, ident)
    first.shutdown()
    second = served()
    position, count, text = 0, 0, ""
    while True:
        portion, position = second.log_of(ident, position)
        if not portion:
            break
        count += 1
        text += "".join(item[2]["text"] for item in items(portion))
    assert text == ("x" * PORTION + "\n") * 3
    assert count > 1
    with pytest.raises(ValueError, match="#77777"):
        second.log_of(77777, 0)


def test_an_empty_log_has_no_portions():
    assert Log().portion(0) == (b"", 0)


def test_who_has_not_been_heard_of_yet_is_gone(served):
    """A killed kernel may have left more messages than are read at once."""
    first, second = served(), served()
    job = submit(first, "import time; time.sleep(600)")
    loop = serving.local(gpunb.protocol.backend.existing()).loop
    held = threading.Event()
    loop.post((held.wait, PATIENCE))
    for _ in range(200):
        first.brought_home(12345)
    first.shutdown()
    held.set()
    assert [each["id"] for each in second.retained()] == [job]
    second.cancel((job, 0), True, True)


# -------------------------------------------------------------------------------------- gpunb stop


def test_stop_loses_nothing_unless_forced(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / "run"))
    facts = start()
    client = backend.attach("lab")
    ident = submit(client, name="train")
    done(client, ident)
    client.shutdown()
    assert cli.main(["stop"]) == 1
    printed = capsys.readouterr().err
    assert f"#{ident} train: over, and not brought home" in printed
    assert "--force" in printed
    client = backend.attach("lab")
    gate = Gate(tmp_path)
    code = CELLS["runs"].replace("ROOT", repr(str(ROOT))).replace("FOLDER", repr(str(tmp_path)))
    second = submit(client, code)
    gate.await_("runs")
    waits = subprocess.Popen(
        [sys.executable, "-m", "gpunb", "stop", "--wait"], stderr=subprocess.PIPE, text=True
    )
    assert waits.stderr is not None
    assert f"waiting for #{ident} train" in waits.stderr.readline()
    client.adopt(ident)
    client.brought_home(ident)
    assert f"waiting for #{second} cell: not over" in waits.stderr.readline()
    gate.open()
    done(client, second)
    assert not client.fetch([(second, 0)], PATIENCE)[0].failed
    assert waits.wait(PATIENCE) == 0
    waits.stderr.close()
    with pytest.raises(GpunbError, match="is gone"):
        client.retained()
    client.shutdown()
    ended(facts)


def test_stop_by_force(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / "run"))
    facts = start()
    client = backend.attach("lab")
    submit(client, "import time; time.sleep(600)")
    assert cli.main(["stop", "lab"]) == 1
    assert "not over" in capsys.readouterr().err
    assert discovery.pid_of("lab") == facts["pid"]
    assert cli.main(["stop", "lab", "--force"]) == 0
    client.shutdown()
    ended(facts)
