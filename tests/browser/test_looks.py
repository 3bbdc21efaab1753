"""The panel in JupyterLab and Notebook 7, as people with different screens and eyes see it.

Each picture is compared with the stored one. Not all combinations are taken, but all pairs of a
look, a width, a zoom and a number of jobs.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.pictures import GIB
from benchmarks.pictures import picture as snapshot
from tests.browser.bare import difference
from tests.browser.jupyter import Page
from tests.browser.pretence import PANEL, Pretence, news
from tests.browser.sidebar import Sidebar

pytestmark = pytest.mark.usefixtures("labextension")

WINDOW = (1600, 900)
"""Pixels of the screen."""

LOOKS = {
    "light": ("light", {}),
    "dark": ("dark", {}),
    "contrast": ("dark high contrast", {"contrast": "more"}),
    "forced": ("dark high contrast", {"forced_colors": "active"}),
}
"""The theme, and what the browser's user has asked for."""

CALM = {"contrast": "no-preference", "forced_colors": "none", "reduced_motion": "reduce"}

JOBS = ("none", "three", "many", "offline")

STILL = f"""() => {{
    window.jupyterapp.shell.collapseLeft();
    const {{ connection }} = {PANEL};
    connection.clock.now = () => connection.state.at;  // no time passes, so no text grows
    document.head.append(Object.assign(document.createElement('style'),
        {{ textContent: '.Toastify {{ display: none; }}' }}));
}}"""

WIDTH = f"""(width) => {{
    let part = {PANEL};
    while (!part.parent.setRelativeSizes) part = part.parent;
    const split = part.parent;
    const others = split.widgets.filter((each) => each !== part && !each.isHidden);
    const rest = (each) => (each === others.at(-1) ? split.node.clientWidth - width : 0);
    split.setRelativeSizes(split.widgets.map((each) => (each === part ? width : rest(each))));
    return Math.abs({PANEL}.node.offsetWidth - width) < 15;
}}"""
"""Whether the panel has nearly this width; JupyterLab allows no less than 250 pixels."""


class Screen:
    """The window of a page, and the browser's settings."""

    def __init__(self, page: Page) -> None:
        self.page = page.page
        self._session = page.page.context.new_cdp_session(page.page)

    def zoom(self, zoom: int) -> None:
        """At 200 % there are half as many CSS pixels, each twice as large."""
        width, height = (each // zoom for each in WINDOW)
        size = {"width": width, "height": height, "deviceScaleFactor": zoom, "mobile": False}
        self._session.send("Emulation.setDeviceMetricsOverride", size)
        self.page.wait_for_function("width => innerWidth === width", arg=width)

    def picture(self) -> bytes:
        """The panel as it is now."""
        box = self.page.locator(".gpunb-panel").bounding_box()
        clip = {**{name: round(value) for name, value in box.items()}, "scale": 1}
        said = self._session.send("Page.captureScreenshot", {"format": "png", "clip": clip})
        return base64.b64decode(said["data"])


def three(time: float) -> dict[str, Any]:
    """A job with a progress bar, one that waits for it, and one that has failed."""
    facts = {**snapshot(2, 10), "time": time, "warnings": []}
    train, large, bad = facts["running"][0], facts["waiting"][0], facts["finished"][1]
    memory = {"now": 12 * GIB, "peak": 14 * GIB, "share": 70 * GIB}
    train.update(name="train", cell=4, devices=[["GPU", 0, 0.5]], memory=memory, progress=0.6)
    large.update(id=2, name="large", cell=5, waits_for="needs 2 whole GPUs; #1 holds GPU 0")
    bad.update(id=3, name="In[6]", cell=6, state="failed", ended=time - 9)
    counts = {"running": 1, "waiting": 1, "finished": 1, "actors": 0}
    facts.update(running=[train], waiting=[large], finished=[bad], counts=counts, queued=1)
    for device, held in zip(facts["devices"], ([[1, 0.5]], []), strict=True):
        device.update(held=held, free=1 - 0.5 * len(held))
    return facts


def said(jobs: str, time: float) -> dict[str, Any]:
    """The message of the server for a number of jobs."""
    if jobs == "none":
        devices = [{**each, "held": [], "free": 1} for each in snapshot(2, 0)["devices"]]
        return news(machine={"devices": devices}, time=time)
    return news({**snapshot(), "time": time} if jobs == "many" else three(time))


def combinations(app: str) -> Iterator[tuple[str, str, int, int]]:
    """Each look with each number of jobs; each of both with all widths and zooms."""
    for (at, look), (number, jobs) in itertools.product(enumerate(LOOKS), enumerate(JOBS)):
        width, zoom = (240, 900)[(at ^ number) & 1], 1 + ((at ^ number) >> 1)
        if app == "lab" or (width, zoom) in ((240, 1), (900, 2)):
            yield look, jobs, width, zoom


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_the_panel_looks_as_before(
    visit: Callable[..., Page], axe: Callable[..., None], app: str
) -> None:
    """And keeps nobody out, as far as axe can tell, and comes back when the server does."""
    pretence = Pretence()
    pretence.status, pretence.news = 200, said("none", 1)
    page = visit([], app=app, prepare=pretence.prepare)
    sidebar, screen = Sidebar(page), Screen(page)
    page.page.evaluate(STILL)
    problems = []
    try:
        for time, (look, jobs, width, zoom) in enumerate(combinations(app), 1_800_000_000):
            theme, settings = LOOKS[look]
            page.set_theme(theme)
            page.page.emulate_media(**{**CALM, **settings})
            screen.zoom(zoom)
            page.page.wait_for_function(WIDTH, arg=width if zoom == 1 else max(240, width // 2))
            pretence.tell(page, said(jobs, time))
            if jobs == "offline":
                pretence.fail()
                sidebar.notice("The Jupyter server does not answer")
            name = f"{app}-{look}-{jobs}-{width}-{zoom}"
            problems.append(difference(page.page, name, screen.picture()))
            if look != "forced":
                axe(page, ".gpunb-panel")
            if jobs == "offline":
                pretence.status = 200
                pretence.tell(page, said(jobs, time))
                sidebar.node.locator(".gpunb-notice").wait_for(state="hidden")
    finally:
        page.page.emulate_media(**{**CALM, "reduced_motion": "no-preference"})
        page.set_theme("light")
    assert not list(filter(None, problems))
