"""Actors and awaiting in a real kernel: whose devices, whose output, what Stop does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.kernels import Kernel
from tests.waiting import Gate, eventually

DEFINE = """
import asyncio, time
@gpunb.remote(num_gpus=1)
class Model:
    def ids(self):
        return gpunb.get_gpu_ids()
    def say(self, text, after=0.0):
        time.sleep(after)
        print(text)
@gpunb.remote
def later(seconds, value=None):
    time.sleep(seconds)
    return value
@gpunb.remote
def held(folder, value):
    from pathlib import Path
    from tests.waiting import Gate
    Gate(Path(folder)).enter()
    return value
"""


@pytest.fixture
def notebook(cell: Kernel) -> Kernel:
    cell.stdin = True  # a user sits there, who sees what comes late
    cell.ok(DEFINE)
    return cell


def free(cell: Kernel) -> float:
    value: float = cell.value("gpunb.available_resources().get('GPU', 0.0)")
    return value


def assert_free(cell: Kernel) -> None:
    eventually(lambda: free(cell) == 2.0, "the devices are free")


def test_rebinding_a_handle_frees_its_device(notebook: Kernel) -> None:
    for _ in range(4):  # more often than there are devices
        assert notebook.ok("m = Model.remote(); gpunb.get(m.ids.remote())").value in ("[0]", "[1]")
    notebook.ok("del m")
    assert_free(notebook)


def test_an_output_keeps_its_actor_for_one_more_cell(notebook: Kernel) -> None:
    shown = notebook.ok("Model.remote()")
    assert "Model" in (shown.value or "")
    assert notebook.ok("gpunb.get(_.ids.remote())").value == "[0]"
    assert_free(notebook)
    old = notebook(f"Out[{shown.count}].ids.remote()")
    assert old.ename == "ActorDiedError"
    assert f"only Out[{shown.count}] referred to it" in old.evalue


WHOLE = """
@gpunb.remote(num_gpus=2)
class Whole:
    def ids(self):
        return gpunb.get_gpu_ids()
    def fail(self):
        raise KeyError("on purpose")
def alone():  # an error keeps the variables of the frames that it went through
    own = Whole.remote()
    gpunb.get(own.fail.remote())
class Circle:
    def __init__(self):
        self.me, self.actor = self, Whole.remote()
ready = gpunb.get
"""


AGAIN = "w = Whole.remote()\ngpunb.get(w.ids.remote(), timeout=20)"
LATER = "%%gpu 2\ngpunb.get_gpu_ids()"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Whole.remote()", AGAIN),
        ("Whole.remote()", LATER),
        ("w = Whole.remote()\nready(w.ids.remote())\nw", AGAIN),
        ("alone()", AGAIN),
        ("alone()", LATER),
        ("round = Circle()\nready(round.actor.ids.remote())\nround = None", AGAIN),
    ],
    ids=["output", "output-cell", "also-an-output", "error", "error-cell", "circle"],
)
def test_a_cell_that_waits_gets_devices_of_actors_without_a_usable_handle(
    notebook: Kernel, before: str, after: str
) -> None:
    notebook.ok(WHOLE)
    notebook.ok("import gc; gc.collect(); gc.disable()")
    notebook(before)
    assert notebook.ok(after).value == "[0, 1]"
    notebook.ok("w = None; gc.enable()")
    assert_free(notebook)


def test_an_actor_in_an_output_does_not_keep_its_name(notebook: Kernel) -> None:
    notebook.ok("Model.options(name='shown').remote()")
    again = "m = Model.options(name='shown').remote(); gpunb.get(m.ids.remote())"
    assert notebook.ok(again).value in ("[0]", "[1]")
    taken = notebook("Model.options(name='shown').remote()")
    assert (taken.ename, "'shown' is taken" in taken.evalue) == ("ActorAlreadyExistsError", True)
    notebook.ok("del m")
    assert_free(notebook)


def test_outputs_do_not_keep_an_actor_whose_name_is_deleted(notebook: Kernel) -> None:
    notebook.ok("m = Model.remote()")
    notebook.ok("m")
    notebook.ok("[m, m]")
    assert notebook.ok("gpunb.get(_[0].ids.remote())").value == "[0]"
    assert notebook.ok("gpunb.get(m.ids.remote())").value == "[0]"
    notebook.ok("del m")
    assert_free(notebook)


def test_a_cell_run_again_replaces_its_named_actor(notebook: Kernel) -> None:
    code = "named = Model.options(name='only').remote(); gpunb.get(named.ids.remote())"
    notebook.ok(code)
    notebook.ok("another = named")
    for _ in range(3):
        notebook.ok(code)
        assert notebook.value("gpunb.get_actor('only') == named")
    other = notebook("other = Model.options(name='only').remote()")
    assert other.ename == "ActorAlreadyExistsError"
    assert "taken" in other.evalue
    notebook.ok("del named, another")
    assert_free(notebook)


def test_an_actor_prints_into_the_cell_that_called_it(notebook: Kernel) -> None:
    first = notebook.ok("m = Model.remote(); ref = m.say.remote('first', 0.5)")
    second = notebook.ok("m.say.remote('second'); None")
    notebook.shows(first, "first")
    notebook.shows(second, "second")
    assert "second" not in first.stdout
    assert "first" not in second.stdout
    assert first.stdout.startswith("(Model pid=")
    notebook.ok("del m, ref")
    assert_free(notebook)


def test_a_gpu_cell_can_use_a_handle_of_the_notebook(notebook: Kernel) -> None:
    notebook.ok("m = Model.remote()")
    assert notebook.ok(
        "%%gpu\nids = gpunb.get(m.ids.remote()), gpunb.get_gpu_ids()\nids"
    ).value == ("([0], [1])")
    notebook.ok("%%gpu 0.5\ninner = later.remote(0, 5)")
    assert notebook.ok("gpunb.get(inner)").value == "5"
    notebook.ok("del m, inner, ids")
    assert_free(notebook)


def test_a_notebook_can_await_refs(notebook: Kernel, tmp_path: Path) -> None:
    assert notebook.ok("await later.remote(0, 1)").value == "1"
    code = "await asyncio.gather(*[later.remote(0, i) for i in range(5)])"
    assert notebook.ok(code).value == "[0, 1, 2, 3, 4]"
    code = f"""
    done = []
    slow = held.remote({str(tmp_path)!r}, "slow")
    async for ref in gpunb.as_completed([slow, later.remote(0, "quick")]):
        done.append(await ref)
        open({str(tmp_path / "open")!r}, "w").close()
    done
    """
    assert notebook.ok(code).value == "['quick', 'slow']"


@pytest.mark.parametrize(
    "wait",
    [
        "gpunb.get(ref)",
        "await ref",
        "await asyncio.gather(ref, later.remote(0))",
        "gpunb.wait([ref])",
        "next(gpunb.as_completed([ref]))",
    ],
)
def test_stop_ends_the_wait_and_not_the_task(notebook: Kernel, wait: str, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    notebook.ok(f"ref = held.remote({str(tmp_path)!r}, 7)")
    waiting = notebook.waits(wait)
    notebook.interrupt()
    notebook.finish(waiting)
    assert waiting.ename in ("KeyboardInterrupt", "CancelledError")
    gate.open()
    assert notebook.ok("gpunb.get(ref)").value == "7"


def test_errors_of_functions_name_the_cells_of_their_lines(notebook: Kernel) -> None:
    helper = notebook.ok("def invert(x):\n    return 1 / x")
    made = notebook.ok("@gpunb.remote(num_gpus=0.5)\ndef bad(x):\n    return invert(x)")
    failed = notebook("gpunb.get(bad.remote(0))")
    lines = [
        f"  Cell In[{made.count}], line 3, in bad",
        "    return invert(x)",
        f"  Cell In[{helper.count}], line 2, in invert",
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]
    assert "\n".join(lines) in failed.evalue
    within = notebook("%%gpu 0.5\ngpunb.get(bad.remote(0))")
    assert "----> 2 gpunb.get(bad.remote(0))" in within.traceback
    assert "\n".join(lines) in within.traceback
    assert "site-packages" not in within.traceback
    assert "gpunb/" not in within.traceback
