"""The live picture in a kernel: what is sent, when, and what is left in the notebook."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import Kernel
from tests.sessions import ROOT
from tests.waiting import PATIENCE, Gate, eventually

MONITOR = ROOT / "gpunb" / "live"


def test_the_functions_of_the_view_work_in_node(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    shutil.copytree(MONITOR / "view", tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    run = subprocess.run(
        [node, "--test", str(Path(__file__).parent / "monitor" / "view.test.mjs")],
        env={**os.environ, "GPUNB_VIEW": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def test_the_widget_is_one_module(tmp_path: Path) -> None:
    """It travels as a text, and loads nothing from anywhere."""
    from gpunb.live.widget import Monitor

    text = Monitor._esm
    assert not [line for line in text.splitlines() if line.startswith("import ")]
    exports = [line for line in text.splitlines() if line.startswith("export ")]
    assert exports == ["export default { render: open };"]
    assert not re.search(r"\b(import|require|fetch)\s*\(", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    synced = {name for name in Monitor.class_trait_names(sync=True) if not name.startswith("_")}
    assert synced - {"layout", "tabbable", "tooltip", "comm"} == {"snapshot"}
    if node := shutil.which("node"):
        (tmp_path / "widget.mjs").write_text(text)
        subprocess.run([node, "--check", str(tmp_path / "widget.mjs")], check=True)


VIEW = "application/vnd.jupyter.widget-view+json"


class Page:
    """Plays the front end of a monitor."""

    def __init__(self, cell: Kernel) -> None:
        self.cell = cell
        self.cell.comms.clear()
        self.shown = cell.ok("gpunb.monitor()")
        (self.data,) = self.shown.displayed
        self.model = self.data[VIEW]["model_id"]

    def send(self, **content: Any) -> None:
        """Send what the widget's script sends."""
        session = self.cell.client.session
        data = {"method": "custom", "content": {"from": "view", **content}}
        message = session.msg("comm_msg", {"comm_id": self.model, "data": data})
        session.send(self.cell.client.shell_channel.socket, message)

    def see(self, *, visible: bool = True, focus: bool = False) -> None:
        self.send(do="visible", visible=visible, focus=focus)

    def views(self) -> int:
        """The views of which the kernel knows that they are in sight."""
        widgets = "__import__('ipywidgets').widgets.widget._instances"
        return int(self.cell.value(f"len({widgets}[{self.model!r}]._views)"))

    def _received(self) -> list[dict[str, Any]]:
        messages = [each["content"] for each in self.cell.comms if each["msg_type"] == "comm_msg"]
        return [each["data"] for each in messages if each["comm_id"] == self.model]

    def snapshots(self) -> list[dict[str, Any]]:
        """Those that were sent after the first."""
        return [each["state"]["snapshot"] for each in self._received() if "state" in each]

    def answers(self) -> list[dict[str, Any]]:
        return [each["content"] for each in self._received() if each["method"] == "custom"]

    def saved(self) -> list[str]:
        """The texts with which the output was brought up to date."""
        updates = self.shown.of("update_display_data")
        return [each["data"]["text/plain"] for each in updates]


@pytest.fixture
def page(cell: Kernel) -> Iterator[Page]:
    cell.stdin = True  # a user sits there, who sees what comes late
    made = Page(cell)
    yield made
    made.see(visible=False)
    cell.ok("gpunb.get([])")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def waits(gate: Gate, name: str, how: str = "--bg") -> str:
    """A cell that waits at the gate."""
    return (
        f"%%gpu 0.5 {how} --name {name}\nimport os, time\n"
        f"print('{name} is there', flush=True)\n"
        f"while not os.path.exists('{gate.folder}/open'): time.sleep(0.01)"
    )


IN_COLAB = """\
import sys, types
colab = sys.modules["google.colab.output"] = types.ModuleType("google.colab.output")
colab.enable_custom_widget_manager = lambda: None
colab._widgets = types.SimpleNamespace(_installed_url="https://of.colab/manager.js")
shown = gpunb.monitor()
shown"""


@pytest.mark.kernel
def test_colab_finds_the_code_that_draws_widgets(cell: Kernel) -> None:
    made = cell.ok(IN_COLAB)
    cell.ok(
        "del sys.modules['google.colab.output']\n"
        "get_ipython().events.unregister('post_run_cell', shown._after_cell)\nshown.close()"
    )
    (shown,) = [content for kind, content in made.messages if kind == "display_data"]
    (metadata,) = shown["metadata"].values()
    assert metadata == {"colab": {"custom_widget_manager": {"url": "https://of.colab/manager.js"}}}
    assert "<table" in shown["data"]["text/html"]


@pytest.mark.kernel
def test_the_widget_shows_the_status_and_sends_a_small_snapshot(
    cell: Kernel, page: Page, gate: Gate
) -> None:
    opened = [each["content"] for each in cell.comms if each["msg_type"] == "comm_open"]
    state = next(each["data"]["state"] for each in opened if each["comm_id"] == page.model)
    assert len(state["snapshot"]["devices"]) == 2
    assert len(json.dumps(state["snapshot"])) <= 20_000
    assert page.data["text/plain"].startswith("GPU  type")
    assert "<table" in page.data["text/html"]
    page.see(visible=False)
    cell.settle()
    made = cell.ok(waits(gate, "first"))
    cell.shows(made, "first is there")
    cell.settle()
    assert page.snapshots() == [], "nobody sees it"
    page.see()
    cell.late(page.snapshots)
    (job,) = page.snapshots()[-1]["running"]
    assert (job["name"], job["cell"], job["kind"]) == ("first", made.count, "cell")
    cell.settle(1.5)
    known = len(page.snapshots())
    cell.settle(1.5)
    assert len(page.snapshots()) == known, "nothing has changed"
    page.see(visible=False)
    eventually(lambda: page.views() == 0, "the kernel knows that nobody sees it")
    known = len(page.snapshots())
    gate.open()
    cell.ok("%gpu wait")
    assert len(page.snapshots()) == known
    assert any(job["name"] == "first" for job in page.snapshots()[-1]["running"])


@pytest.mark.kernel
def test_a_change_is_sent_at_once_and_not_too_often(cell: Kernel, page: Page) -> None:
    page.see()
    cell.late(page.snapshots)
    before = time.monotonic()
    cell.ok("gpunb.get([gpunb.remote(len).remote('a') for _ in range(300)]);")
    cell.late(lambda: page.snapshots()[-1]["counts"]["running"] == 0)
    most = 2 + (time.monotonic() - before) / 0.25
    assert len(page.snapshots()) <= most


@pytest.mark.kernel
def test_buttons_work_while_a_cell_keeps_the_kernel(cell: Kernel, page: Page, gate: Gate) -> None:
    made = cell.ok(waits(gate, "victim"))
    cell.shows(made, "victim is there")
    job = int(cell.value(f"Out[{made.count}].id"))
    blocked = cell.start(
        f"import os, time\nprint('blocks', flush=True)\n"
        f"while not os.path.exists('{gate.folder}/open'): time.sleep(0.01)"
    )
    cell.shows(blocked, "blocks")
    page.send(do="logs", job=job, id=1)
    cell.late(page.answers)
    (answer,) = page.answers()
    assert answer["value"].pop("position") > 0
    reported = {
        "name": "victim",
        "state": "running",
        "text": "victim is there\n",
        "truncated": False,
    }
    assert answer == {"ok": True, "value": reported, "to": "view", "id": 1}
    page.send(do="cancel", job=job, force=True, id=2)
    cell.late(lambda: len(page.answers()) == 2)
    page.see()
    cell.late(lambda: page.snapshots() and not page.snapshots()[-1]["running"])
    ended = page.snapshots()[-1]["finished"][0]
    assert (ended["id"], ended["state"]) == (job, "cancelled")
    page.send(do="interrupt", job=job, id=3)
    cell.late(lambda: len(page.answers()) == 3)
    assert page.answers()[-1]["ok"] is False
    assert "is not over" in page.answers()[-1]["error"]
    assert not blocked.status, "the cell goes on"
    gate.open()
    assert cell.finish(blocked)


@pytest.mark.kernel
def test_wrong_messages_of_the_front_end_change_nothing(cell: Kernel, page: Page) -> None:
    for content in ({"do": "dance", "id": 1}, {"id": 2}, {"do": "kill", "actor": "x", "id": 3}):
        page.send(**content)
    cell.late(lambda: len(page.answers()) == 3)
    assert [each["ok"] for each in page.answers()] == [False] * 3


@pytest.mark.kernel
def test_the_last_state_stays_in_the_notebook(cell: Kernel, page: Page, gate: Gate) -> None:
    page.see()
    made = cell.ok(waits(gate, "kept"))
    cell.shows(made, "kept is there")
    cell.late(lambda: page.snapshots() and page.snapshots()[-1]["running"])
    gate.open()
    cell.ok("%gpu wait")
    cell.late(page.saved)
    assert "finished" in page.saved()[-1]
    assert "kept" in page.saved()[-1]
    page.see(focus=True)
    cell.ok("gpunb.get(gpunb.remote(len).options(name='busy').remote('a'));")
    cell.settle(3)
    assert "busy" not in page.saved()[-1], "the user is busy in it"
    page.see()
    cell.late(lambda: "busy" in page.saved()[-1])


@pytest.mark.kernel
def test_a_program_that_runs_a_notebook_keeps_the_last_state(cell: Kernel, page: Page) -> None:
    """Nobody ever sees it; the output is brought up to date by each cell."""
    after = cell.ok("gpunb.get(gpunb.remote(len).options(name='headless').remote('a'));")
    (update,) = after.of("update_display_data")
    assert "headless" in update["data"]["text/plain"]
    assert update["data"][VIEW]["model_id"] == page.model
    assert page.snapshots()[-1]["finished"][0]["name"] == "headless"


@pytest.mark.kernel
def test_the_next_session_is_shown_when_there_is_one(cell: Kernel, page: Page) -> None:
    page.see()
    cell.late(page.snapshots)
    cell.ok("gpunb.shutdown()")
    cell.late(lambda: page.snapshots()[-1].get("ended"))
    page.send(do="cancel", job=1, id=1)
    cell.late(page.answers)
    assert page.answers()[0]["error"] == "this session was shut down"
    cell.ok("gpunb.init(num_cpus=2, num_gpus=3);")
    page.see()
    cell.late(lambda: len(page.snapshots()[-1]["devices"]) == 3)
    assert not page.snapshots()[-1].get("ended")
    cell.ok("gpunb.shutdown()\ngpunb.init(num_cpus=2, num_gpus=2);")
