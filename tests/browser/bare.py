"""The drawing of the live picture in a bare page, without Jupyter."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpunb.live.scripts import joined
from tests.sessions import ROOT

LIVE = ROOT / "gpunb" / "live"

Draw = Callable[..., Any]

SCREENSHOTS = Path(__file__).parent / "screenshots"
PICTURES = Path(__file__).parent / "pictures"

TOLERANCE = 0.012
"""Mean difference of two pictures, of black from white 1."""

PAGE = """
<!doctype html><html lang="en"><head><title>The picture</title><style>{css}
body {{ margin: 0; background: light-dark(#fff, #1e1e1e); color-scheme: light dark;
    color: light-dark(#111, #eee); }}
</style></head><body><main><h1>The picture</h1><div id="here"></div></main></body></html>
"""

CODE = joined("view/index.js") + "export { Clock, render };"

DRAW = """
async ([code, snapshot]) => {
    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    window.view_ = await import(url);
    window.asked = [];
    const note = (name) => async (...what) => { window.asked.push([name, ...what]); };
    window.said = (job) => ({ text: `the log of ${job}`, position: 1, state: "done" });
    const actions = { cancel: note("cancel"), interrupt: note("interrupt"), kill: note("kill"),
        stop: note("stop"), goTo: note("goTo"), logs: async (...what) => window.said(...what) };
    window.drawn = window.view_.render(document.getElementById("here"), snapshot, { actions });
}
"""

SMALL = """
async (urls) => {
    const pictures = [];
    for (const url of urls) {
        const image = new Image();
        image.src = url;
        await image.decode();
        const canvas = document.createElement("canvas");
        const scale = Math.sqrt(8000 / image.width / image.height);
        const small = [image.width, image.height].map((each) => Math.round(scale * each));
        [canvas.width, canvas.height] = pictures.length ? [image.width, image.height] : small;
        const context = canvas.getContext("2d");
        context.imageSmoothingQuality = "high";
        context.drawImage(image, 0, 0, canvas.width, canvas.height);
        pictures.push([canvas, context.getImageData(0, 0, canvas.width, canvas.height).data]);
    }
    const [[canvas, one], [, other] = [null, null]] = pictures;
    if (!other) return [canvas.toDataURL(), null];
    if (one.length !== other.length) return [canvas.toDataURL(), 1];
    const sum = one.reduce((all, each, at) => all + Math.abs(each - other[at]), 0);
    return [canvas.toDataURL(), sum / one.length / 255];
}
"""

LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "contrast": {"color_scheme": "light", "contrast": "more"},
    "forced": {"forced_colors": "active"},
}


def drawn(
    browser: Any, facts: dict[str, Any], *, width: int = 900, look: str = "light", zoom: float = 1
) -> Any:
    """A page of a context of its own that draws a snapshot.

    Args:
        width: of the page on the screen.
        look: a name of `LOOKS`; ``"forced"`` has only the few colours that a user has chosen.
        zoom: 2 is 200 %: half as many CSS pixels, each twice as large.
    """
    size = {"width": round(width / zoom), "height": round(900 / zoom)}
    context = browser.new_context(viewport=size, device_scale_factor=zoom, **LOOKS[look])
    page = context.new_page()
    page.on("pageerror", lambda error: pytest.fail(str(error)))
    page.set_content(PAGE.format(css=(LIVE / "view.css").read_text()))
    page.evaluate(DRAW, [CODE, facts])
    return page


def compare(page: Any, name: str) -> None:
    """Take a picture of the page, and compare it with the stored one."""
    problem = difference(page, name, page.screenshot(animations="disabled"))
    assert not problem, problem


def difference(page: Any, name: str, data: bytes) -> str:
    """Keep a picture for people to look at, and compare it, reduced, with the stored one: rows,
    cards and colours of the page, but not the shapes of letters. Returns what is wrong, or ''."""
    SCREENSHOTS.mkdir(exist_ok=True)
    seen, stored = SCREENSHOTS / f"{name}.png", PICTURES / f"{name}.png"
    seen.write_bytes(data)
    both = [data, stored.read_bytes()] if stored.exists() else [data]
    urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in both]
    small, apart = page.evaluate(SMALL, urls)
    if not stored.exists():
        stored.parent.mkdir(exist_ok=True)
        stored.write_bytes(base64.b64decode(small.partition(",")[2]))
        return f"{stored} was missing, and is stored now: look at {seen}"
    if apart <= TOLERANCE:
        return ""
    return (
        f"{seen} is not as before, by {apart:.3f}: if it is as it should be, delete {stored} and "
        "run the test twice"
    )
