"""The live picture in a browser: what an update takes there, and what the server has to do."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, skipped

DEVICES, JOBS = 16, 500
PACKAGE = Path(__file__).resolve().parent.parent / "gpunb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_TIMES = """
async ([code, turns]) => {
    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    const { render } = await import(url);
    const timed = (what) => {
        const start = performance.now();
        what();
        document.body.offsetHeight;
        return performance.now() - start;
    };
    let view;
    const first = timed(() => { view = render(document.body, turns[0]); });
    return [first, turns.slice(1).map((each) => timed(() => view.update(each)))];
}
"""


def update(rounds: int) -> Result:
    """Seconds that a page takes for the first drawing, and for updates in which each job has
    changed, layout included."""
    from playwright.sync_api import sync_playwright

    from benchmarks.pictures import picture
    from gpunb.live.scripts import joined

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        return {"skipped": f"none of {', '.join(BROWSERS)} is installed"}
    view = PACKAGE / "live"
    code = joined("view/index.js") + "export { render };"
    turns = [picture(DEVICES, JOBS, turn=turn) for turn in range(rounds + 1)]
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=executable, args=options)
        page = browser.new_page()
        page.set_content(f"<style>{(view / 'view.css').read_text('utf-8')}</style>")
        first, times = page.evaluate(_TIMES, [code, turns])
        browser.close()
    return {"first": first * MS, "updates": [each * MS for each in times]}


def listening(seconds: float) -> Result:
    """CPU seconds of the server's loop for each second that a page looks at a session in which
    nothing happens; and while no page is open."""
    from benchmarks import sessions
    from gpunb.server.watcher import NewsListener, Watcher

    sessions.init(4)

    async def sent(_: str) -> None:
        pass

    async def cost() -> float:
        start, begun = time.thread_time(), time.monotonic()
        await asyncio.sleep(seconds)
        return (time.thread_time() - start) / (time.monotonic() - begun)

    async def both() -> Result:
        alone = await cost()
        watcher, listener = Watcher(), NewsListener(sent)
        watcher.join(listener)
        await asyncio.sleep(2)
        found = {"listening": await cost(), "alone": alone}
        watcher.leave(listener)
        return found

    return asyncio.run(both())


def measure(bench: Any) -> Iterator[Line]:
    result = bench.run(probe.call("browser.update", "playwright", rounds=bench.n(100, 20)))
    name = f"update in a page, {DEVICES} devices and {JOBS} jobs"
    if "skipped" in result:
        yield skipped(name, "s", result)
    else:
        times = result["updates"]
        note = f"{min(times) / MS:.1f} ms at best; {result['first'] / MS:.0f} ms from nothing"
        yield Line(name, statistics.median(times), "s", goal=16 * MS, note=note)
    result = bench.run(probe.call("browser.listening", "jupyter_server", seconds=bench.n(20, 4)))
    name = "the server with a page open, of a core"
    if "skipped" in result:
        yield skipped(name, "", result)
    else:
        note = f"{result['alone']:.4f} without a page"
        yield Line(name, result["listening"], "", goal=0.01, note=note)
    scripts = list((PACKAGE / "labextension" / "static").glob("*.js"))
    size = float(sum(os.path.getsize(each) for each in scripts)) if scripts else None
    note = "" if scripts else "the extension is not built"
    yield Line("scripts of the extension", size, "B", goal=150e3, note=note)
