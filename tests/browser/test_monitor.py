"""The live picture in a browser: what it shows, and what its buttons do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.jupyter import Page
from tests.browser.sidebar import unfold
from tests.waiting import Gate

WAITS = """\
%%gpu {share} --bg --name {name}
import os, time
print("{name} has begun", flush=True)
while not os.path.exists("{gate}/open"):
    time.sleep(0.01)
"""

OPEN = "%load_ext gpunb\nimport gpunb\ngpunb.monitor()"


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def waits(gate: Gate, name: str, share: str = "0.5") -> str:
    """A cell that waits at the gate."""
    return WAITS.format(share=share, name=name, gate=gate.folder)


def shown(page: Page) -> Any:
    """The picture."""
    found = page.page.locator(".gpunb-monitor").first
    found.wait_for()
    return found


def seen(page: Page, selector: str, text: str | re.Pattern[str]) -> Any:
    """What has this text, once it is there."""
    found = shown(page).locator(selector).filter(has_text=text).first
    found.wait_for()
    return found


def over(page: Page, text: str) -> Any:
    """The row of a job that is over."""
    unfold(shown(page), "Finished")
    return seen(page, "section[aria-label=Finished] .gm-row", text)


def test_two_halves_run_side_by_side_and_the_third_waits(
    visit: Callable[..., Page], gate: Gate, picture: Any
) -> None:
    page = visit([OPEN, waits(gate, "left"), waits(gate, "right"), waits(gate, "whole", "2")])
    page.execute(0)
    for at in (1, 2, 3):
        page.execute(at)
    seen(page, ".gm-part", "left")
    lane = shown(page).locator(".gm-lane").first
    lane.locator(".gm-part").nth(1).filter(has_text="right").wait_for()
    left, right = lane.locator(".gm-own").all()
    widths = [each.bounding_box()["width"] for each in (left, right)]
    assert abs(widths[0] - widths[1]) < 3
    assert sum(widths) == pytest.approx(lane.bounding_box()["width"], abs=8)
    assert "In[2]" in left.inner_text()
    row = seen(page, "section[aria-label=Waiting] .gm-row", "whole")
    assert "needs 2 whole GPUs" in row.inner_text() or "needs 2" in row.inner_text()
    picture(page, "monitor")
    gate.open()
    over(page, "whole")


def test_a_job_is_killed_while_a_cell_keeps_the_kernel(
    visit: Callable[..., Page], gate: Gate
) -> None:
    """Not before somebody has confirmed it."""
    blocks = f"import os, time\nwhile not os.path.exists('{gate.folder}/open'): time.sleep(0.01)"
    page = visit([OPEN, waits(gate, "victim"), blocks])
    page.execute(0)
    page.execute(1)
    row = seen(page, "section[aria-label=Running] .gm-row", "victim")
    page.cell(1).locator(".jp-OutputArea-output", has_text="victim has begun").wait_for()
    page.run(2)
    page.page.wait_for_selector(".jp-Notebook .jp-Cell >> nth=2 >> text=[*]")
    row.get_by_role("button", name="Logs #1 victim").click()
    seen(page, ".gm-log-text", "victim has begun")
    shown(page).get_by_role("button", name="Close the log").click()
    row.get_by_role("button", name="Kill #1 victim").click()
    row.get_by_role("button", name="No: Kill #1 victim").click()
    kill = row.get_by_role("button", name="Kill #1 victim")
    kill.press("Enter")
    assert page.page.evaluate("document.activeElement.getAttribute('aria-label')") == (
        "Yes: Kill #1 victim"
    )
    page.page.keyboard.press("Escape")
    kill.wait_for()
    assert page.page.evaluate("document.activeElement.getAttribute('aria-label')") == (
        "Kill #1 victim"
    )
    page.page.keyboard.press("Enter")
    page.page.keyboard.press("Enter")
    ended = over(page, "victim")
    assert "cancelled" in ended.inner_text()
    assert "[*]" in page.cell(2).inner_text(), "the cell goes on"
    gate.open()
    page.done(2)


def test_an_open_log_goes_on(visit: Callable[..., Page], gate: Gate) -> None:
    says = 'print("\\x1b[31m{name} has begun\\x1b[0m", flush=True)'
    text = WAITS.replace('print("{name} has begun", flush=True)', says) + 'print("the end")\n'
    page = visit([OPEN, text.format(share="0.5", name="talks", gate=gate.folder)])
    page.execute(0)
    page.execute(1)
    row = seen(page, "section[aria-label=Running] .gm-row", "talks")
    row.get_by_role("button", name="Logs #1 talks").click()
    log = seen(page, ".gm-log-text", "talks has begun")
    assert log.inner_text() == "talks has begun\n"
    gate.open()
    log.filter(has_text="the end").wait_for()


def test_a_session_of_cells_is_ended_with_the_keyboard(visit: Callable[..., Page]) -> None:
    """Whose keys are shortcuts of the notebook elsewhere."""
    page = visit([OPEN, "%%gpu 0.5 --session kept\nx = 1"])
    page.execute(0)
    page.execute(1)
    row = seen(page, "section[aria-label='Actors and sessions'] .gm-row", "session kept")
    seen(page, ".gm-part", "session kept")
    shown(page).locator(".gm-heading").first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowLeft", "Delete", "Enter"):
        page.page.keyboard.press(key)
    row.wait_for(state="hidden")
    seen(page, ".gm-part", re.compile("^free$"))


def test_a_reload_brings_it_back(visit: Callable[..., Page], gate: Gate) -> None:
    page = visit([OPEN, waits(gate, "lasting")])
    page.execute(0)
    page.execute(1)
    seen(page, ".gm-part", "lasting")
    page.save()
    page.reload()
    seen(page, ".gm-part", "lasting")
    gate.open()
    over(page, "lasting")
