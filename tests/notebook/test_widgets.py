"""Widgets of GPU cells: the test is the front end that they talk to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import Kernel, Result
from tests.waiting import PATIENCE, Gate, eventually

pytestmark = pytest.mark.kernel

VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass
class Model:
    """A widget as the front end has it."""

    opened: dict[str, Any]
    state: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False


@pytest.fixture(autouse=True)
def idle_afterwards(cell: Kernel) -> Iterator[None]:
    """Whatever a test did, nothing runs any more, and what a test looks at is of its own."""
    cell.comms.clear()
    yield
    cell.ok("for job in gpunb.status()['running']: print(job)")
    look = "[s['running'], s['waiting']] if (s := gpunb.status())['running'] else []"
    eventually(lambda: not any(cell.value(look)), "the session is idle")


def models(cell: Kernel) -> dict[str, Model]:
    """The widgets that have been opened, by their ids, with the states that they have by now."""
    found: dict[str, Model] = {}
    for message in cell.comms:
        kind, content = message["msg_type"], message["content"]
        ident = content["comm_id"]
        if kind == "comm_open":
            assert ident not in found
            found[ident] = Model(message, dict(content["data"]["state"]))
        elif ident in found:
            found[ident].messages.append(message)
            found[ident].closed |= kind == "comm_close"
            if kind == "comm_msg":
                found[ident].state.update(content["data"].get("state", {}))
    return found


def model(cell: Kernel, name: str, which: int = 0) -> tuple[str, Model]:
    """The widget of this kind, such as ``"Button"``."""
    of_kind = [
        (ident, each)
        for ident, each in models(cell).items()
        if each.state.get("_model_name") == f"{name}Model"
    ]
    return of_kind[which]


def send(cell: Kernel, ident: str, data: dict[str, Any], buffers: list[bytes] | None = None) -> str:
    """What a front end does when somebody uses a widget."""
    session = cell.client.session
    message = session.msg("comm_msg", {"comm_id": ident, "data": data})
    session.send(cell.client.shell_channel.socket, message, buffers=buffers)
    return str(message["header"]["msg_id"])


def click(cell: Kernel, ident: str) -> str:
    return send(cell, ident, {"method": "custom", "content": {"event": "click"}})


def update(cell: Kernel, ident: str, **state: Any) -> str:
    return send(cell, ident, {"method": "update", "state": state, "buffer_paths": []})


def parents(each: Model) -> set[str]:
    return {message["parent_header"]["msg_id"] for message in each.messages}


def listed(cell: Kernel) -> set[str]:
    """The widgets that the kernel says it has."""
    cell.client.comm_info(target_name="jupyter.widget")
    reply = cell.client.get_shell_msg(timeout=PATIENCE)
    while reply["msg_type"] != "comm_info_reply":
        reply = cell.client.get_shell_msg(timeout=PATIENCE)
    return set(reply["content"]["comms"])


CLICKED = """
import threading, time
import ipywidgets as widgets
button = widgets.Button(description="go")
label = widgets.Label()
clicked = threading.Event()
def on_click(_):
    label.value = "clicked"
    print("handled", flush=True)
    clicked.set()
button.on_click(on_click)
"""


def test_a_click_reaches_a_cell_that_is_busy(cell: Kernel) -> None:
    running = cell.start(
        f"%%gpu 0.5 --out none\n{CLICKED}\ndisplay(widgets.HBox([button, label]))\n"
        "print('ready', flush=True)\nassert clicked.wait(10)\nprint('over')"
    )
    cell.shows(running, "ready")
    ident, button = model(cell, "Button")
    assert button.opened["parent_header"]["msg_id"] == running.ident
    (shown,) = running.displayed
    assert models(cell)[shown[VIEW]["model_id"]].state["_model_name"] == "HBoxModel"
    sent = click(cell, ident)
    cell.finish(running)
    assert running.stdout == "ready\nhandled\nover\n"
    assert ident in listed(cell)
    label = model(cell, "Label")[1]
    assert label.state["value"] == "clicked"
    assert label.messages[-1]["parent_header"]["msg_id"] == sent


def test_a_slider_moves_and_is_echoed_under_the_message_that_moved_it(cell: Kernel) -> None:
    running = cell.start(
        "%%gpu 0.5 --out none\nimport time\nimport ipywidgets as widgets\n"
        "slider = widgets.IntSlider(3)\nslider\nprint('ready', flush=True)\n"
        "while slider.value != 8: time.sleep(0.01)\nprint(slider.value)"
    )
    cell.shows(running, "ready")
    ident, slider = model(cell, "IntSlider")
    assert slider.state["value"] == 3
    sent = update(cell, ident, value=8)
    cell.finish(running)
    assert running.stdout == "ready\n8\n"
    answer = model(cell, "IntSlider")[1].messages[-1]
    assert answer["content"]["data"] == {
        "method": "echo_update",
        "state": {"value": 8},
        "buffer_paths": [],
    }
    assert answer["parent_header"]["msg_id"] == sent


def test_a_cell_waits_for_a_result_and_its_button_works(cell: Kernel, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    running = cell.start(
        f"%%gpu 0.5 --out none\n{CLICKED}\nfrom pathlib import Path\n"
        "from tests.waiting import Gate\n@gpunb.remote(num_cpus=0)\n"
        f"def slow():\n    Gate(Path({str(tmp_path)!r})).enter()\n    return 5\n"
        "ref = slow.remote()\nprint('ready', flush=True)\nprint(gpunb.get(ref), clicked.is_set())"
    )
    cell.shows(running, "ready")
    gate.await_()
    click(cell, model(cell, "Button")[0])
    cell.shows(running, "handled")
    gate.open()
    cell.finish(running)
    assert running, running.traceback
    assert "handled\n" in running.stdout
    assert running.stdout.endswith("5 True\n")


def test_in_the_background_widgets_talk_to_their_own_cell(cell: Kernel, tmp_path: Path) -> None:
    cell.ok("%config GpuMagics.headless = False")
    running = cell.ok(
        f"%%gpu 0.5 --bg --out none\n{CLICKED}\ndisplay(button)\nprint('ready', flush=True)\n"
        "assert clicked.wait(10)"
    )
    cell.shows(running, "ready")
    ident, button = model(cell, "Button")
    assert button.opened["parent_header"]["msg_id"] == running.ident
    gate = Gate(tmp_path)
    other = cell.start(
        "from pathlib import Path\nfrom tests.waiting import Gate\n"
        f"Gate(Path({str(tmp_path)!r})).enter()"
    )
    gate.await_()
    click(cell, ident)
    gate.open()
    cell.shows(running, "handled")
    assert model(cell, "Label")[1].state["value"] == "clicked"
    cell.finish(other)
    assert not other.stdout


def test_between_the_cells_of_a_session_widgets_live(cell: Kernel) -> None:
    first = cell.ok(f"%%gpu 0.5 --session live --out none\n{CLICKED}\nbutton")
    ident = model(cell, "Button")[0]
    try:
        sent = click(cell, ident)
        cell.until(lambda: "handled" in first.stdout, first)
        assert first.stdout == "handled\n"
        label = model(cell, "Label")[1]
        assert (label.state["value"], parents(label)) == ("clicked", {sent})
        again = cell.ok(
            "%%gpu --session live\nassert clicked.is_set()\nlabel.value = 'anew'\n"
            "print(threading.current_thread() is threading.main_thread())"
        )
        assert again.stdout == "True\n"
        assert model(cell, "Label")[1].messages[-1]["parent_header"]["msg_id"] == again.ident
        # A cell that came later is busy, and the button of the first one works.
        busy = cell.start(
            "%%gpu --session live\nclicked.clear()\nprint('ready', flush=True)\n"
            "assert clicked.wait(10)"
        )
        cell.shows(busy, "ready")
        click(cell, ident)
        cell.finish(busy)
        assert busy.stdout == "ready\nhandled\n"
        # An error of a handler ends nothing.
        cell.ok(
            "%%gpu --session live --out none\nfailing = widgets.Button()\n"
            "failing.on_click(lambda _: 1 / 0)"
        )
        last = list(cell.results.values())[-1]
        click(cell, model(cell, "Button", -1)[0])
        cell.until(lambda: last.ename == "ZeroDivisionError", last)
        assert cell.ok("%%gpu --session live\n1 + 1").value == "2"
    finally:
        cell.ok("%gpu stop live")


def test_messages_for_a_worker_that_is_gone_change_nothing(cell: Kernel) -> None:
    result = cell.ok(
        "%%gpu 0.5 --out none\nimport ipywidgets as widgets\nslider = widgets.IntSlider(3)\n"
        "slider.value = 5\nslider"
    )
    assert VIEW in (result.result or {})
    ident = model(cell, "IntSlider")[0]
    update(cell, ident, value=6)
    asked = send(cell, ident, {"method": "request_state"})
    cell.ok("1")
    # When the page is loaded again, the widget is asked for.
    assert ident in listed(cell)
    answer = model(cell, "IntSlider")[1].messages[-1]
    assert answer["parent_header"]["msg_id"] == asked
    assert answer["content"]["data"]["method"] == "update"
    assert answer["content"]["data"]["state"]["value"] == 6
    assert answer["content"]["data"]["state"]["max"] == 100
    assert cell.ok("1 + 1").stderr == ""


def test_binary_data_goes_both_ways(cell: Kernel) -> None:
    running = cell.start(
        "%%gpu 0.5 --out none\nimport time\nimport ipywidgets as widgets\n"
        "image = widgets.Image(value=bytes(range(256)) * 1000)\ngot = []\n"
        "image.on_msg(lambda _, content, buffers: got.append((content, buffers)))\n"
        "print('ready', flush=True)\nwhile len(got) < 2: time.sleep(0.01)\n"
        "print([(content, [bytes(each[:4]) for each in buffers], len(buffers[0]))"
        " for content, buffers in got])"
    )
    cell.shows(running, "ready")
    ident, image = model(cell, "Image")
    (sent,) = image.opened["buffers"]
    assert bytes(sent) == bytes(range(256)) * 1000
    assert image.opened["content"]["data"]["buffer_paths"] == [["value"]]
    send(cell, ident, {"method": "custom", "content": 1}, [b"abcd", b"e"])
    send(cell, ident, {"method": "custom", "content": 2}, [b"x" * 300_000])
    cell.finish(running)
    assert running.stdout == ("ready\n[(1, [b'abcd', b'e'], 4), (2, [b'xxxx'], 300000)]\n"), (
        running.traceback
    )


def test_many_widgets_and_many_messages_come_in_order(cell: Kernel) -> None:
    result = cell.ok(
        "%%gpu 0.5 --out none\nimport ipywidgets as widgets\n"
        "labels = [widgets.Label(str(n)) for n in range(200)]\n"
        "for n in range(500): labels[n % 200].value = f'at {n}'\n"
        "labels[0].close()"
    )
    found = [each for each in models(cell).values() if each.state["_model_name"] == "LabelModel"]
    assert len(found) == 200
    assert {each.opened["parent_header"]["msg_id"] for each in found} == {result.ident}
    last = [[n for n in range(500) if n % 200 == index][-1] for index in range(200)]
    assert [each.state["value"] for each in found] == [f"at {n}" for n in last]
    assert [each.closed for each in found] == [True] + [False] * 199
    there = listed(cell)
    idents = [ident for ident, each in models(cell).items() if each in found]
    assert [each in there for each in idents] == [False] + [True] * 199


def test_all_of_many_clicks_are_handled(cell: Kernel) -> None:
    running = cell.start(
        "%%gpu 0.5 --out none\nimport time\nimport ipywidgets as widgets\n"
        "slider = widgets.IntSlider(0, 0, 1000)\nseen = []\n"
        "slider.observe(lambda change: seen.append(change.new), 'value')\n"
        "print('ready', flush=True)\nwhile slider.value < 300: sum(range(1000))\n"
        "print(seen == list(range(1, 301)))"
    )
    cell.shows(running, "ready")
    ident = model(cell, "IntSlider")[0]
    for value in range(1, 301):
        update(cell, ident, value=value)
    cell.finish(running)
    assert running.stdout == "ready\nTrue\n"


@pytest.mark.parametrize("module", ["notebook", "auto"])
def test_bars_end_at_full(cell: Kernel, module: str) -> None:
    result = cell.ok(
        f"%%gpu 0.5\nfrom tqdm.{module} import tqdm\nfor x in tqdm(range(7), 'busy'): pass\n"
        "import sys\nprint('ipykernel.zmqshell' in sys.modules)\n"
        "print('IPKernelApp' in get_ipython().config)\n"
        "import gpunb\nprint(gpunb.status()['running'][0]['progress'])"
    )
    assert (result.stdout, result.stderr) == ("False\nTrue\n1.0\n", "")
    bar = model(cell, "FloatProgress")[1]
    assert (bar.state["value"], bar.state["max"], bar.state["bar_style"]) == (7, 7, "success")
    assert "7/7" in model(cell, "HTML", 1)[1].state["value"]


def test_interact_and_output_widgets_work(cell: Kernel) -> None:
    running = cell.start(
        "%%gpu 0.5 --out none\nimport threading\nimport ipywidgets as widgets\n"
        "done = threading.Event()\n"
        "@widgets.interact(x=3)\ndef double(x):\n"
        "    print('twice', 2 * x, flush=True)\n    if x == 6: done.set()\n"
        "out = widgets.Output()\nwith out:\n    print('caught', flush=True)\n    1 / 0\n"
        "print('ready', flush=True)\nassert done.wait(10)"
    )
    cell.shows(running, "ready")
    update(cell, model(cell, "IntSlider")[0], value=6)
    cell.finish(running)
    assert running, running.traceback
    assert running.stdout == "twice 6\ncaught\nready\ntwice 12\n"
    assert running.ename == "ZeroDivisionError"  # it is shown in the widget, and the cell goes on
    # The widget catches what has this request as its parent, between these two.
    caught = [
        message["content"]["data"]["state"]["msg_id"]
        for message in model(cell, "Output", -1)[1].messages
        if "msg_id" in message["content"]["data"].get("state", {})
    ]
    assert caught == [running.ident, ""]


def test_widgets_stay_in_the_worker_with_one_line_of_explanation(cell: Kernel) -> None:
    result = cell.ok(
        "%%gpu 0.5\nimport ipywidgets as widgets\nfrom tqdm.notebook import tqdm\n"
        "a_slider, number = widgets.IntSlider(), 5\na_bar = tqdm(range(3))\n"
        "def a_handler(_): a_slider.value = 1\na_slider"
    )
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpunb: 'a_")
    for name in ("a_slider", "a_bar", "a_handler"):
        assert repr(name) in line
        assert cell.value(f"{name!r} in globals()") is False
    assert line.endswith(
        "stay in the worker: widgets live in the process that made them, which ends with the "
        "cell; in a session (--session NAME) they live on"
    )
    assert cell.value("number") == 5
    result = cell.ok("%%gpu 0 -s lasting\nimport ipywidgets\nslider = ipywidgets.IntSlider()")
    assert result.stderr == (
        "gpunb: 'slider' lives on in the session 'lasting': widgets live in the process that made "
        "them; cells with --session lasting have it\n"
    )
    assert cell.ok("%%gpu -s lasting\nslider.value").value == "0"
    cell.ok("%gpu stop lasting")


def test_an_interrupted_cell_of_a_session_keeps_its_widgets(cell: Kernel) -> None:
    running = cell.start(
        f"%%gpu 0.5 --session stopped --out none\n{CLICKED}\nprint('ready', flush=True)\n"
        "while True: label.value = str(time.time())"
    )
    try:
        cell.shows(running, "ready")
        cell.until(lambda: len(model(cell, "Label")[1].messages) > 2, running)
        cell.interrupt()
        cell.finish(running)
        assert running.ename == "KeyboardInterrupt"
        click(cell, model(cell, "Button")[0])
        cell.until(lambda: "handled" in running.stdout, running)
        assert cell.ok("%%gpu --session stopped\nclicked.is_set()").value == "True"
    finally:
        cell.ok("%gpu stop stopped")


def test_a_fork_of_a_cell_sends_nothing_to_its_widgets(cell: Kernel) -> None:
    result = cell.ok(
        "%%gpu 0.5 --out none\nimport os\nimport ipywidgets as widgets\n"
        "bar = widgets.IntProgress(1)\npid = os.fork()\n"
        "if not pid:\n    bar.value = 50\n    os._exit(0)\n"
        "print(os.waitpid(pid, 0)[1])\nbar.value = 7"
    )
    assert result.stdout == "0\n"
    values = [
        message["content"]["data"]["state"]["value"]
        for message in model(cell, "IntProgress")[1].messages
    ]
    assert values == [7]


def test_widgets_of_the_notebook_itself_work_as_ever(cell: Kernel) -> None:
    cell.ok("%%gpu 0.5 --out none\nimport ipywidgets as widgets\nwidgets.IntSlider()")
    cell.ok("import ipywidgets\nmine = ipywidgets.IntSlider(4)")
    update(cell, model(cell, "IntSlider", -1)[0], value=9)
    cell.ok("1")
    assert cell.value("mine.value") == 9
    result: Result = cell("%%gpu 0.5\nmine.value")
    assert result.stderr.startswith("UsageError: %%gpu: mine")
