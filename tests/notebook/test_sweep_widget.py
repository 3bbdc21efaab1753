"""The live table of a sweep in a kernel, and its script."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import Kernel
from tests.sessions import ROOT
from tests.waiting import PATIENCE, Gate

VIEW = "application/vnd.jupyter.widget-view+json"


def messages_of(cell: Kernel, model: str) -> list[dict[str, Any]]:
    """The messages of a widget to its views."""
    received = [each["content"] for each in cell.comms if each["msg_type"] == "comm_msg"]
    data = [each["data"] for each in received if each["comm_id"] == model]
    return [each["content"] for each in data if each["method"] == "custom"]


@pytest.mark.kernel
def test_the_table_is_live_and_a_click_shows_the_output_of_a_trial(
    cell: Kernel, tmp_path: Path
) -> None:
    cell.stdin = True  # a user sits there
    cell.comms.clear()
    gate = Gate(tmp_path)
    result = cell.start(
        "%%gpu 0.5 --sweep rate=1,2\n"
        "import os, time\n"
        "from IPython.display import display\n"
        f"while not os.path.exists('{gate.folder}/open'): time.sleep(0.01)\n"
        "print('rate', rate)\n"
        "display({'image/png': 'QUJD', 'text/plain': 'figure'}, raw=True)\n"
        "rate / 2"
    )
    cell.until(lambda: result.of("display_data"), result)  # the table is there before the results
    gate.open()
    assert cell.finish(result)
    (shown,) = result.of("display_data")
    model = shown["data"][VIEW]["model_id"]
    cell.until(lambda: result.of("update_display_data"), result)
    (last,) = result.of("update_display_data")
    assert "2 trials: 2 done" in last["data"]["text/html"]
    (opened,) = [each["content"] for each in cell.comms if each["msg_type"] == "comm_open"][-1:]
    rows = list(opened["data"]["state"]["table"]["rows"])
    assert len(rows) == 2
    rows += [row for message in messages_of(cell, model) for row in message["rows"]]
    ended = {row["number"]: row for row in rows if row["state"] == "done"}
    assert [ended[number]["metrics"] for number in (0, 1)] == [{"value": 0.5}, {"value": 1.0}]
    session = cell.client.session
    data = {"method": "custom", "content": {"trial": 1}}
    message = session.msg("comm_msg", {"comm_id": model, "data": data})
    session.send(cell.client.shell_channel.socket, message)
    cell.late(lambda: any("output" in each for each in messages_of(cell, model)))
    (answer,) = [each for each in messages_of(cell, model) if "output" in each]
    assert answer["trial"] == 1
    assert [each["type"] for each in answer["output"]] == ["text", "image/png", "text"]
    assert answer["output"][0]["data"] == "rate 2\n"


@pytest.mark.kernel
def test_a_sweep_in_the_background_goes_on_and_shows_its_end(cell: Kernel, tmp_path: Path) -> None:
    cell.stdin = True
    gate = Gate(tmp_path)
    result = cell.ok(
        "%%gpu 0.5 --bg --sweep rate=1,2\nimport os, time\n"
        f"while not os.path.exists('{gate.folder}/open'): time.sleep(0.01)\nrate"
    )
    assert cell.value("sweep.done") is False
    gate.open()
    cell.until(lambda: result.of("update_display_data"), result)
    assert cell.value("[each.value for each in sweep.trials]") == [1, 2]


@pytest.mark.kernel
def test_stop_cancels_the_trials(cell: Kernel, tmp_path: Path) -> None:
    cell.stdin = True
    gate = Gate(tmp_path)
    result = cell.start(
        "%%gpu 1 --sweep rate=1,2,3\nimport os, time\n"
        f"open('{gate.folder}/came-task', 'w').close()\ntime.sleep(60)"
    )
    gate.await_()
    cell.until(lambda: result.of("display_data"), result)  # all trials are submitted
    cell.interrupt()
    cell.finish(result)
    assert result.ename == "KeyboardInterrupt"
    assert "the sweep was stopped: 3 cancelled" in result.evalue
    assert cell.value("sweep.counts()") == {"cancelled": 3}


TRAIN = """\
from pathlib import Path
from tests.waiting import Gate

def train(rate):
    with open("{folder}/ran", "a") as file:
        file.write(f"{{rate}}\\n")
    if rate > 1:
        Gate(Path("{folder}")).enter(rate)
    return rate
"""
SWEEP = "sweep = gpunb.sweep(train, {'rate': [1, 2, 3]}, num_gpus=1, name='NAME')\n"


@pytest.mark.kernel
@pytest.mark.parametrize(
    "code",
    [
        SWEEP + "sweep.wait()",
        SWEEP + "for trial in sweep: pass",
        "%%gpu 1 --sweep rate=1,2,3 --name NAME\ntrain(rate)",
    ],
    ids=["wait", "loop", "cell"],
)
def test_a_named_sweep_that_was_stopped_goes_on_with_what_is_missing(
    cell: Kernel, tmp_path: Path, code: str, request: pytest.FixtureRequest
) -> None:
    cell.stdin = True
    gate = Gate(tmp_path)
    cell.ok(TRAIN.format(folder=tmp_path))
    code = code.replace("NAME", f"digits-{request.node.callspec.id}")
    result = cell.start(code)
    gate.await_(2)
    gate.await_(3)  # there are two devices, so the first trial has ended
    cell.interrupt()
    cell.finish(result)
    assert result.ename == "KeyboardInterrupt"
    assert result.evalue == "the sweep was stopped: 1 done, 2 cancelled"
    gate.open()
    cell.ok(code)
    assert cell.value("[(each.resumed, each.value) for each in sweep.trials]") == [
        (True, 1),
        (False, 2),
        (False, 3),
    ]
    assert sorted((tmp_path / "ran").read_text().split()) == ["1", "2", "2", "3", "3"]


def test_the_functions_of_the_widget_work_in_node(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    view = tmp_path / "sweep.mjs"
    view.write_text((ROOT / "gpunb" / "live" / "sweep.js").read_text())
    run = subprocess.run(
        [node, "--test", str(Path(__file__).parent / "monitor" / "sweep.test.mjs")],
        env={**os.environ, "GPUNB_VIEW": str(view)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
