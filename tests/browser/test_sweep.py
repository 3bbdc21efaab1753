"""The live table of a sweep in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.jupyter import Page
from tests.browser.sidebar import Sidebar, badge

SWEEP = """\
%%gpu 0.5 --sweep rate=0.3,0.1,0.2,0 --out loss
import gpunb
from IPython.display import SVG, display
for step in range(3):
    gpunb.report(loss=rate / (step + 1))
print("the rate is", rate)
size = "width='30' height='20'"
display(SVG(f"<svg xmlns='http://www.w3.org/2000/svg' {size}><rect {size}/></svg>"))
loss = 1 / rate
"""


WAITS = """\
%%gpu 0.5 --bg --sweep at=1,2,3,4
import threading
threading.Event().wait()
"""


@pytest.mark.usefixtures("labextension")
def test_the_table_sorts_and_a_click_on_a_trial_shows_its_output(
    visit: Callable[..., Page], picture: Any
) -> None:
    """And its row in the panel has the parameters of each trial, and stops all of them."""
    page = visit(["%load_ext gpunb", SWEEP, WAITS])
    page.execute(0)
    page.execute(1)
    sweep = page.page.locator(".gpunb-sweep").first
    sweep.locator(".gm-summary").filter(has_text="4 trials: 3 done, 1 failed").wait_for()
    sweep = page.page.locator(".gpunb-sweep").first
    assert sweep.locator(".gs-chart polyline").count() >= 3
    sweep.get_by_role("button", name="loss").click()
    sweep.locator("th[aria-sort=ascending]").filter(has_text="loss").wait_for()
    cells = sweep.locator("tbody tr td:nth-child(2)").all_text_contents()
    assert cells == ["0", "0.3", "0.2", "0.1"], "0 is the last report of the trial that failed"
    row = sweep.locator("tbody tr").nth(0)
    assert "ZeroDivisionError: division by zero" in row.text_content()
    sweep.locator("tbody tr").nth(1).get_by_role("button").click()
    sweep.locator("pre").filter(has_text="the rate is 0.3").wait_for()
    image = sweep.get_by_role("img", name="figure of trial 0")
    assert image.evaluate("image => image.naturalWidth") == 30
    assert sweep.locator("polyline.gs-chosen").count() == 1
    picture(page, "sweep")
    row = Sidebar(page).row("Finished", "sweep of In[2]")
    assert "1 failed, 3 done" in row.get_attribute("aria-label")
    row.click()
    members = row.locator("[role=group] .gm-row")
    shown = [each.inner_text().splitlines()[0] for each in members.all()]
    assert sorted(each.split(" ", 1)[1] for each in shown) == [
        f"rate={rate}" for rate in (0, 0.1, 0.2, 0.3)
    ]
    page.execute(2)
    badge(page, 2, "4 running").get_by_role("button", name="Stop sweep of In[3]").wait_for()
    row = Sidebar(page).row("Running", "sweep of In[3]")
    row.focus()
    page.page.keyboard.press("Delete")
    page.page.keyboard.press("Enter")
    row = Sidebar(page).row("Finished", "sweep of In[3]")
    assert "4 cancelled" in row.get_attribute("aria-label")
    page.cell(2).locator(".gm-summary").filter(has_text="4 cancelled").wait_for()
