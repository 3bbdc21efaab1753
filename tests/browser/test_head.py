"""The live picture of a notebook that is attached to a head process: widget, panel, badges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.jupyter import Jupyter, Page
from tests.browser.sidebar import Sidebar, badge, toast, unfold
from tests.head import heads
from tests.waiting import Gate

pytestmark = pytest.mark.usefixtures("labextension")

ATTACH = '%load_ext gpunb\nimport gpunb\ngpunb.init("lab")\ngpunb.monitor()'
WAITS = """\
%%gpu 0.5 {options}
import os, time
print("begun", flush=True)
while not os.path.exists("{gate}/open"):
    time.sleep(0.01)
"""


@pytest.fixture
def head(jupyter: Jupyter, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A head process that the server and its kernels see."""
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(jupyter.runtime))
    facts = heads.start()
    yield facts
    heads.end(facts)


@pytest.mark.usefixtures("head")
def test_all_is_there_in_an_attached_notebook(visit: Callable[..., Page], tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    cells = [WAITS.format(options=options, gate=gate.folder) for options in ("-b -n away", "")]
    page = visit([ATTACH, *cells])
    widget = page.page.locator(".jp-OutputArea .gpunb-monitor").first
    sidebar = Sidebar(page)
    page.execute(0)
    page.execute(1)
    widget.locator(".gm-part", has_text="away").wait_for()
    name = page.path.removesuffix(".ipynb")
    assert name in sidebar.row("Running", "away").inner_text(), "whose it is"
    badge(page, 1, "GPU 0 (0.5)")
    page.run(2)
    page.cell(2).locator(".jp-OutputArea-output", has_text="begun").wait_for()
    badge(page, 2, "GPU 0 (0.5)").get_by_role("button", name="Stop").click()
    page.done(2)
    assert "KeyboardInterrupt" in page.output(2)

    row = widget.locator("section[aria-label=Running] .gm-row", has_text="away")
    row.get_by_role("button", name="Logs").click()
    widget.locator(".gm-log-text", has_text="begun").wait_for()
    sidebar.row("Running", "away").get_by_role("button", name="Go to cell").click()
    page.page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.content.activeCellIndex === 1"
    )
    gate.open()
    unfold(widget, "Finished")
    widget.locator("section[aria-label=Finished] .gm-row", has_text="away").wait_for()
    toast(page, "away is done after")
    page.cell(1).locator(".gpunb-badge").wait_for(state="detached")
