"""Takes the pictures of JupyterLab for the documentation: `make pictures`.

Each is taken in a real JupyterLab with the extension as it was built last. The folder `cards` has a
stand-in for NVML with two GPUs, and what the cells run.
The animated one shows the same cells from the first to the end of a sweep.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.jupyter import LABEXTENSION, Jupyter, Page, running
from tests.browser.sidebar import Sidebar, badge
from tests.sessions import ROOT

IMAGES = ROOT / "docs" / "images"
CARDS = Path(__file__).parent / "cards"

SIZE = (1060, 680)
"""Pixels of the page."""

COLOURS = 96
"""Colours of a picture, which has few; fewer make a smaller file."""

PERIOD = 0.9
"""Seconds from one frame of the animated picture to the next."""

FRAMES = 20

TRAIN = """\
%load_ext gpunb
from training import train"""

CELL = "%%gpu {share} --bg --name {name}\n{name} = train(width={width})"
CELLS = [
    CELL.format(share="0.5", name="small", width=64),
    CELL.format(share="0.5", name="medium", width=256),
    CELL.format(share="2", name="large", width=4096),
]
SWEEP = "%%gpu 0.5 --bg --sweep width=16,32,64,128,256 --name widths\ntrain(width)"


def shot(page: Page) -> Image.Image:
    """The page without JupyterLab's menu and left bar."""
    box = page.page.locator("#jp-main-dock-panel").bounding_box()
    clip = {
        "x": box["x"],
        "y": box["y"],
        "width": SIZE[0] - box["x"],
        "height": SIZE[1] - box["y"],
    }
    data = page.page.screenshot(clip=clip, animations="disabled")
    return Image.open(io.BytesIO(data)).convert("RGB")


def few(picture: Image.Image) -> Image.Image:
    """The picture in a small file."""
    return picture.quantize(COLOURS, dither=Image.Dither.NONE)


def opened(jupyter: Jupyter, browser: Any, cells: list[str]) -> Page:
    context = browser.new_context(viewport=dict(zip(("width", "height"), SIZE, strict=True)))
    page = Page(jupyter, context, "lab")
    page.open(jupyter.notebook(cells))
    page.command("application:toggle-left-area")
    Sidebar(page)
    return page


def still(jupyter: Jupyter, browser: Any) -> None:
    """Two cells share a GPU, and the third waits for two; in the light and the dark theme."""
    page = opened(jupyter, browser, [TRAIN, *CELLS])
    for at in range(4):
        page.execute(at)
    badge(page, 3, "waits")
    page.page.wait_for_timeout(32_000)  # the line of the last minute has some length
    for theme in ("light", "dark"):
        page.set_theme(theme)
        few(shot(page)).save(IMAGES / f"lab-{theme}.png", optimize=True)
    page.set_theme("light")
    page.page.context.close()
    jupyter.shut_down_kernels()


def frames(jupyter: Jupyter, browser: Any) -> Iterator[Image.Image]:
    """The same cells, started one after another, and a sweep after them."""
    page = opened(jupyter, browser, [TRAIN, *CELLS[:2], SWEEP, CELLS[2]])
    page.execute(0)
    start, at = time.monotonic(), 1
    for number in itertools.count():
        if number % 3 == 1 and at < 5:
            page.run(at)
            at += 1
        if at == 4 and number % 3 == 0:
            page.page.locator(".gpunb-panel .gm-row", has_text="sweep of").first.click()
        page.page.wait_for_timeout(max(0, 1000 * (start + PERIOD * number - time.monotonic())))
        yield shot(page)
        if number == FRAMES:
            return


def animated(jupyter: Jupyter, browser: Any) -> None:
    first, *rest = frames(jupyter, browser)
    options: dict[str, Any] = {"duration": round(1000 * PERIOD), "loop": 0}
    first.save(
        IMAGES / "lab.webp", save_all=True, append_images=rest, lossless=True, method=6, **options
    )


def main() -> None:
    if not (LABEXTENSION / "package.json").exists():
        sys.exit("the extension is not built: make labextension")
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as cards,
        running(
            Path(folder),
            GPUNB_PICTURES=cards,
            PYTHONPATH=f"{CARDS}{os.pathsep}{ROOT}",
            GPUNB_SIMULATE="",
        ) as jupyter,
        sync_playwright() as playwright,
    ):
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=executable, args=options)
        step = Path(cards) / "step"
        step.write_text("0.5")
        still(jupyter, browser)
        step.write_text("0.04")
        animated(jupyter, browser)
        browser.close()
    for each in sorted(IMAGES.glob("lab*")):
        sys.stdout.write(f"{each.relative_to(ROOT)}: {each.stat().st_size / 1e3:.0f} kB\n")


if __name__ == "__main__":
    main()
