"""A cell in several ranks in JupyterLab: its output, its row in the panel, and its end by Stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.jupyter import Page
from tests.browser.sidebar import Sidebar, badge
from tests.waiting import Gate, eventually

LOAD = "%load_ext gpunb\nfrom pathlib import Path\nfrom tests.waiting import Gate"
SHOWS = """\
%%gpu 0.5 --ranks 2 --name shows
import os
from IPython.display import SVG, display
rank = int(os.environ["RANK"])
for step in range(3):
    print(f"step {step} of rank {rank}")
size = "width='30' height='20'"
display(SVG(f"<svg xmlns='http://www.w3.org/2000/svg' {size}><rect {size}/></svg>"))
"""
WAITS = """\
%%gpu 0.5 --ranks 2 --name waits
import os
gate, rank = Gate(Path({folder!r})), os.environ["RANK"]
print(f"rank {{rank}} has begun", flush=True)
try:
    gate.enter(rank)
finally:
    gate.note(f"end-of-{{rank}}")
"""


@pytest.mark.usefixtures("labextension")
def test_other_ranks_are_a_line_that_opens_and_stop_ends_all(
    visit: Callable[..., Page], picture: Any, axe: Callable[..., None], tmp_path: Path
) -> None:
    """The panel has one row for all ranks, which opens too."""
    gate = Gate(tmp_path)
    page = visit([LOAD, SHOWS, WAITS.format(folder=str(tmp_path))])
    page.execute(0)
    page.execute(1)
    output = page.cell(1).locator(".jp-OutputArea").first
    line = output.get_by_text("rank 1: 4 lines")
    line.wait_for()
    assert "step 2 of rank 0" in output.inner_text()
    assert output.locator("img").count() == 1, "the figure of rank 0"
    other = output.get_by_text("step 2 of rank 1")
    assert not other.is_visible()
    line.click()
    other.wait_for()

    page.run(2)
    gate.await_(0)
    gate.await_(1)
    page.cell(2).get_by_text("rank 0 has begun").wait_for()
    badge(page, 2, "on GPU 0 (1)")
    sidebar = Sidebar(page)
    row = sidebar.row("Running", "waits")
    assert sidebar.node.locator("section[aria-label=Running] .gm-row").count() == 1
    assert "2 running" in row.get_attribute("aria-label")
    row.click()
    ranks = row.locator("[role=group] .gm-row")
    assert [each.inner_text().splitlines()[0] for each in ranks.all()] == ["rank 0", "rank 1"]
    picture(page, "ranks")
    axe(page, ".gpunb-panel", ".jp-OutputArea details")
    badge(page, 2, "").get_by_role("button", name="Stop").click()
    page.done(2)
    assert "KeyboardInterrupt" in page.output(2)
    eventually(lambda: gate.came("end-of-0") and gate.came("end-of-1"), "both ranks are stopped")
    ended = sidebar.row("Finished", "waits")
    assert "cancelled" in ended.get_attribute("aria-label")
    assert "2 cancelled" in ended.get_attribute("aria-label")
    picture(page, "ranks-ended")
