"""The sidebar of a page, the badges of its cells and the notices that pop up."""

from __future__ import annotations

import re
from typing import Any

from tests.browser.jupyter import Page


class Sidebar:
    """The panel of a page, opened."""

    def __init__(self, page: Page) -> None:
        page.command("gpunb:open-panel")
        self.node = page.page.locator(".gpunb-panel")
        self.node.wait_for()

    def has(self, selector: str, text: str | re.Pattern[str]) -> Any:
        """What has this text, once it is there."""
        found = self.node.locator(selector).filter(has_text=text).first
        found.wait_for()
        return found

    def row(self, kind: str, text: str) -> Any:
        """A row of the list of that kind of job."""
        unfold(self.node, kind)
        return self.has(f"section[aria-label='{kind}'] .gm-row", text)

    def notice(self, text: str) -> Any:
        """What stands above the lanes."""
        return self.has(".gpunb-notice", text)


def unfold(node: Any, kind: str) -> None:
    """Open a list of jobs of a panel or a widget, once it is there."""
    heading = node.locator(f"section[aria-label='{kind}'] .gm-heading")
    heading.wait_for()
    if heading.get_attribute("aria-expanded") == "false":
        heading.click()


def badge(page: Page, at: int, text: str) -> Any:
    """The badge of a cell, once it says this."""
    found = page.cell(at).locator(".gpunb-badge").filter(has_text=text)
    found.wait_for()
    return found


def toast(page: Page, text: str) -> None:
    """Wait for a notice that pops up."""
    page.page.locator(".Toastify__toast").filter(has_text=text).first.wait_for()
