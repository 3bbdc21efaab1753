"""JupyterLab and Notebook 7 in a real browser.

Needs Chromium and playwright. ``GPUNB_TEST_BROWSER`` names the browser to use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.browser.bare import SCREENSHOTS, Draw, drawn
from tests.browser.jupyter import LABEXTENSION, Jupyter, Page, running
from tests.needs import absent
from tests.sessions import ROOT

AXE = ROOT / "labextension/node_modules/axe-core/axe.min.js"


@pytest.fixture(scope="package")
def executable() -> str:
    """The path of a browser."""
    asked = os.environ.get("GPUNB_TEST_BROWSER")
    if asked:
        found = shutil.which(asked)
        if found is None:
            pytest.fail(f"GPUNB_TEST_BROWSER is {asked!r}, and there is no such program")
        return found
    known = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, known)), None)
    if found is None:
        absent("browser", "no chromium, chromium-browser or google-chrome was found")
    return found


@pytest.fixture(scope="package")
def browser(executable: str) -> Iterator[Any]:
    """A browser, shared by all tests of this folder."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("browser", "playwright is not installed")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        started = playwright.chromium.launch(executable_path=executable, args=options)
        yield started
        started.close()


@pytest.fixture(scope="package")
def jupyter(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    """A Jupyter server under a base URL, with JupyterLab at ``lab`` and Notebook 7 at
    ``notebooks``; its kernels have two simulated GPUs."""
    try:
        import jupyterlab  # noqa: F401
        import notebook  # noqa: F401
    except ImportError as error:
        absent("browser", f"{error.name} is not installed")
    with running(tmp_path_factory.mktemp("jupyter")) as server:
        yield server


@pytest.fixture
def visit(browser: Any, jupyter: Jupyter) -> Iterator[Callable[..., Page]]:
    """Opens a notebook with these cells: ``visit(["1 + 1"], app="lab", theme="light")``.

    `prepare` is given the browser's context before. At the end the kernels are gone, and no script
    of ours has raised an error.
    """
    contexts = []
    pages: list[Page] = []

    def open_(
        cells: list[str] | None = None,
        app: str = "lab",
        theme: str = "light",
        prepare: Callable[[Any], object] | None = None,
    ) -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme=theme)
        contexts.append(context)
        if prepare is not None:
            prepare(context)
        page = Page(jupyter, context, app, theme)
        pages.append(page)
        page.open(jupyter.notebook(cells or []))
        return page

    yield open_
    for context in contexts:
        context.close()
    jupyter.shut_down_kernels()
    for page in pages:
        assert not page.errors, f"the page raised {page.errors}"


@pytest.fixture
def draw(browser: Any) -> Iterator[Draw]:
    """Draws a snapshot in a bare page: `tests.browser.bare.drawn`."""
    pages: list[Any] = []

    def draw(facts: dict[str, Any], **options: Any) -> Any:
        pages.append(drawn(browser, facts, **options))
        return pages[-1]

    yield draw
    for page in pages:
        page.context.close()


@pytest.fixture(scope="package")
def labextension() -> None:
    """Skips where the labextension is not built."""
    if not (LABEXTENSION / "package.json").exists():
        absent("browser", "the labextension is not built (make labextension, which needs Node 20)")


@pytest.fixture(scope="package")
def axe() -> Callable[..., None]:
    """Looks with axe-core for what keeps people out: ``axe(page, ".selector", ...)``."""
    if not AXE.exists():
        absent("browser", "axe-core is not installed (make labextension, which needs Node 20)")
    text = AXE.read_text()

    def check(page: Page, *selectors: str) -> None:
        page.page.evaluate(text)
        found = page.page.evaluate(
            """async selectors => {
                const context = { include: selectors.map(each => [each]) };
                // JupyterLab's body has no height, so axe would take all in it to be hidden.
                document.body.style.minHeight = '100vh';
                const { passes, violations } = await axe.run(context);
                document.body.style.minHeight = '';
                if (!passes.some(each => each.id === 'color-contrast')) return ['no text was seen'];
                return violations.map(each => [each.help, each.nodes.map(node => node.html)]);
            }""",
            list(selectors),
        )
        assert not found, found

    return check


@pytest.fixture
def picture() -> Callable[[Page, str], None]:
    """Takes a screenshot, for people to look at."""
    SCREENSHOTS.mkdir(exist_ok=True)

    def take(page: Page, name: str) -> None:
        page.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return take
