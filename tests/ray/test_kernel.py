"""A real kernel on the cluster: what asks the user, and what the user clicks on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.notebook.kernels import Kernel, kernel
from tests.notebook.test_input import asked, start
from tests.notebook.test_widgets import CLICKED, click, model, update

pytestmark = [pytest.mark.needs_ray, pytest.mark.kernel]
WITHIN = 120

PREPARE = """
import gpunb
%load_ext gpunb
gpunb.init("ray")
"""


@pytest.fixture(scope="module")
def cell(nodes: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    address = nodes.cluster.address
    with kernel(tmp_path_factory.mktemp("notebook"), PREPARE, RAY_ADDRESS=address) as running:
        running.finish(running.start("%%gpu 0.5\nprint('warm')"), WITHIN)
        yield running


def test_input_asks_the_user(cell: Kernel) -> None:
    running = start(cell, "%%gpu 0.5\nprint('before')\nname = input('name? ')\nprint(name)")
    assert asked(cell) == {"prompt": "name? ", "password": False}
    cell.shows(running, "before\n")
    cell.client.input("Ann")
    cell.finish(running, WITHIN)
    assert running.stdout == "before\nAnn\n"
    assert cell.value("name") == "Ann"


def test_stop_ends_a_question(cell: Kernel) -> None:
    running = start(cell, "%%gpu 0.5\ninput('? ')")
    asked(cell)
    cell.interrupt()
    cell.finish(running, WITHIN)
    assert running.ename == "KeyboardInterrupt"


def test_a_breakpoint_asks_in_the_notebook(cell: Kernel) -> None:
    running = start(cell, "%%gpu 0.5\nx = 1\nbreakpoint()\nx")
    assert "ipdb" in asked(cell)["prompt"]
    cell.client.input("x = 5")
    asked(cell)
    cell.client.input("c")
    cell.finish(running, WITHIN)
    assert cell.value("x") == 5


def test_a_breakpoint_without_a_user_is_an_error(cell: Kernel) -> None:
    result = cell("%%gpu 0.5\nbreakpoint()")
    assert result.ename == "StdinNotImplementedError"


def test_a_slider_moves_while_its_cell_runs_and_in_order(cell: Kernel) -> None:
    running = cell.start(
        "%%gpu 0.5 --out none\nimport time\nimport ipywidgets as widgets\n"
        "slider = widgets.IntSlider(0, 0, 1000)\nseen = []\n"
        "slider.observe(lambda change: seen.append(change.new), 'value')\ndisplay(slider)\n"
        "print('ready', flush=True)\nwhile slider.value < 300: time.sleep(0.01)\n"
        "print(seen == list(range(1, 301)))"
    )
    cell.shows(running, "ready")
    ident, slider = model(cell, "IntSlider")
    assert slider.state["value"] == 0
    for value in range(1, 301):
        update(cell, ident, value=value)
    cell.finish(running, WITHIN)
    assert running.stdout == "ready\nTrue\n"


def test_a_button_works_between_the_cells_of_a_session(cell: Kernel) -> None:
    try:
        first = cell.start(f"%%gpu 0.5 --session live --out none\n{CLICKED}\nbutton")
        assert cell.finish(first, WITHIN), first.traceback
        click(cell, model(cell, "Button")[0])
        cell.until(lambda: "handled" in first.stdout, first, WITHIN)
        assert cell.ok("%%gpu --session live\nprint(clicked.is_set())").stdout == "True\n"
    finally:
        cell.ok("%gpu stop live")
