"""What the sidebar says where there is nothing to show, and how fast it is where there is much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures import picture as snapshot
from tests.browser.jupyter import LABEXTENSION, TOKEN, Page, running
from tests.browser.sidebar import Sidebar
from tests.browser.speed import check_updates

pytestmark = pytest.mark.usefixtures("labextension")

LARGEST = 150_000
"""Bytes of JavaScript that a page loads for the extension at most."""


class Pretence:
    """A server that is not as it should be."""

    def __init__(self) -> None:
        self.status = 404
        self.said: dict[str, Any] | None = None

    def prepare(self, context: Any) -> None:
        context.route_web_socket(re.compile("gpunb/api/changes"), self._socket)
        context.route("**/gpunb/api/machine*", self._answer)

    def retry(self, page: Page, status: int = 404, said: dict[str, Any] | None = None) -> None:
        """Be otherwise from now on, and have the page try again at once."""
        self.status, self.said = status, said
        page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def _socket(self, socket: Any) -> None:
        if self.said is None:
            socket.close()
        else:
            whole = {"sessions": {}, "gone": [], "whole": True, "machine": self.said}
            socket.send(json.dumps(whole))

    def _answer(self, route: Any) -> None:
        if self.status:
            route.fulfill(status=self.status, body="{}")
        else:
            route.abort()


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
    pretence.retry(page, said=none)
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


def test_an_update_takes_less_than_a_frame(visit: Callable[..., Page]) -> None:
    """All of it: state, lanes, status bar and badges, with 16 devices and 500 jobs."""
    page = visit([])
    Sidebar(page).notice("No kernel")
    update = """(each) => {
        const { shell } = window.jupyterapp;
        const panel = [...shell.widgets('right')].find((each) => each.id === 'gpunb-panel');
        const at = performance.now() / 1000;
        panel.connection.set({ sessions: new Map([[7, each]]), machine: {}, at }, null);
    }"""
    check_updates(page.page, update, [snapshot(turn=turn) for turn in range(12)])
    assert page.page.locator(".gpunb-panel .gm-device").count() == 16


def test_little_is_shipped() -> None:
    shipped = sum(each.stat().st_size for each in (LABEXTENSION / "static").glob("*.js"))
    assert 10_000 < shipped <= LARGEST
