"""What the sidebar says where there is nothing to show, and how fast it is where there is much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures import picture as snapshot
from tests.browser.jupyter import LABEXTENSION, TOKEN, Page, running
from tests.browser.pretence import Pretence
from tests.browser.sidebar import Sidebar
from tests.browser.speed import check_updates

pytestmark = pytest.mark.usefixtures("labextension")

LARGEST = 150_000
"""Bytes of JavaScript that a page loads for the extension at most."""


def test_whatever_is_missing_is_said_with_what_to_do(visit: Callable[..., Page]) -> None:
    pretence = Pretence()
    page = visit([], prepare=pretence.prepare)
    sidebar = Sidebar(page)
    notice = sidebar.notice("has no extension named gpunb.server")
    assert "pip install gpunb" in notice.inner_text()
    pretence.retry(page, 403)
    assert "Log in again" in sidebar.notice("You may not see").inner_text()
    pretence.retry(page, 0)
    sidebar.notice("The Jupyter server does not answer")
    assert page.page.locator(".gpunb-status").inner_text() == "GPU ?"
    none = {"devices": [], "notes": ["NVML is not installed"], "problem": None}
    pretence.retry(page, machine=none)
    notice = sidebar.notice("No GPU was found. NVML is not installed.")
    assert "gpunb doctor" in notice.inner_text()


def test_a_server_that_dies_is_said(browser: Any, tmp_path: Path) -> None:
    with running(tmp_path) as server:
        context = browser.new_context()
        page = Page(server, context, "lab")
        page.page.goto(f"{server.url}lab?reset&token={TOKEN}")
        page.page.locator(".gpunb-status").filter(has_text="GPU 0/2").wait_for()
        sidebar = Sidebar(page)
        sidebar.notice("No kernel uses gpunb now")
        server.process.kill()
        sidebar.notice("The Jupyter server does not answer")
        context.close()


LATE = """() => {
    // The panel is closed; what it hears was sent nine seconds ago.
    const { shell } = window.jupyterapp;
    const panel = [...shell.widgets('right')].find((each) => each.id === 'gpunb-panel');
    const time = Date.now() / 1000 - 9;
    const job = { id: 1, name: 'train', state: 'running', seconds: 3, devices: [], memory: {} };
    const session = { time, session: { pid: 7 }, devices: [], running: [job] };
    panel.connection.hear({ time, sessions: { 7: session }, gone: [], whole: true });
}"""


def test_an_update_takes_less_than_a_frame(visit: Callable[..., Page]) -> None:
    """All of it: state, lanes, status bar and badges, with 16 devices and 500 jobs. And a panel
    that is opened late has the right times from its first drawing on, and a hidden one draws
    nothing."""
    page = visit([])
    page.page.locator(".gpunb-status").filter(has_text="GPU 0/2").wait_for()
    page.page.evaluate(LATE)
    time = Sidebar(page).row("Running", "train").locator(".gm-time")
    assert 12 <= int(time.inner_text().removesuffix(" s")) <= 20
    update = """(each) => {
        const { shell } = window.jupyterapp;
        const panel = [...shell.widgets('right')].find((each) => each.id === 'gpunb-panel');
        const at = performance.now() / 1000;
        panel.connection.set({ sessions: new Map([[7, each]]), machine: {}, at }, null);
    }"""
    check_updates(page.page, update, [snapshot(turn=turn) for turn in range(12)])
    assert page.page.locator(".gpunb-panel .gm-device").count() == 16
    page.page.evaluate("window.jupyterapp.shell.collapseRight()")
    page.page.locator(".gpunb-panel").wait_for(state="hidden")
    page.page.evaluate(f"each => ({update})(each)", snapshot(turn=12))
    assert page.page.locator(".gpunb-panel .gpunb-monitor").count() == 0, "nobody sees it"


def test_little_is_shipped() -> None:
    shipped = sum(each.stat().st_size for each in (LABEXTENSION / "static").glob("*.js"))
    assert 10_000 < shipped <= LARGEST
