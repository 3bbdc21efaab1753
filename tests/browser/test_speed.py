"""How soon a change is seen, and what it costs that somebody looks on."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.jupyter import Page
from tests.browser.sidebar import Sidebar

pytestmark = pytest.mark.usefixtures("labextension")

SOON = 0.4
"""Seconds from a change to its sight."""

CHANGES = 7

OPEN = "%load_ext gpunb\nimport gpunb\ngpunb.monitor()"

CHANGE = f"""\
import time
def nothing(): pass
for _ in range({CHANGES}):
    gpunb.get(gpunb.remote(num_gpus=0.5)(nothing).remote())
    time.sleep(0.7)  # by the clock: updates that follow each other are put together
"""

WATCH = """
(count) => {
    // When the number of jobs that are over first grew to each value, here and there; and how long
    // the server takes meanwhile to ask the session, which is the same way to and fro.
    const seen = { panel: {}, widget: {} };
    window.seen_ = { seen, asked: [] };
    const places = { panel: ".gpunb-panel", widget: ".jp-OutputArea .gpunb-monitor" };
    for (const [name, place] of Object.entries(places)) {
        const look = () => {
            const heading = `${place} section[aria-label=Finished] .gm-heading`;
            const text = document.querySelector(heading).textContent;
            const over = Number(/\\((\\d+)/.exec(text)?.[1] ?? 0);
            for (let at = 1; at <= over; at++) seen[name][at] ??= Date.now() / 1000;
        };
        const options = { subtree: true, childList: true, characterData: true };
        new MutationObserver(look).observe(document.querySelector(place), options);
    }
    const ask = async () => {
        while (Object.keys(seen.panel).length < count) {
            const start = performance.now();
            await fetch(MACHINE);
            window.seen_.asked.push((performance.now() - start) / 1000);
            await new Promise((resolve) => setTimeout(resolve, 200));
        }
    };
    void ask();
}
"""


def test_a_change_is_seen_soon(visit: Callable[..., Page]) -> None:
    """In the widget and in the sidebar; where the machine is slow, in comparison with a question
    to the session."""
    page = visit([OPEN, CHANGE])
    page.execute(0)
    page.page.locator(".jp-OutputArea .gpunb-monitor").wait_for()
    Sidebar(page).has(".gm-device", "GPU 0")
    machine = repr(f"{page.jupyter.url}gpunb/api/machine")
    page.page.evaluate(WATCH.replace("MACHINE", machine), CHANGES)
    page.run(1)
    page.page.wait_for_function(
        """count => Object.values(window.seen_.seen)
            .every(each => Object.keys(each).length >= count)""",
        arg=CHANGES,
    )
    times: dict[str, Any] = page.page.evaluate("window.seen_")
    (session,) = page.jupyter.ask("gpunb/api/machine")["sessions"].values()
    ended = sorted(each["ended"] for each in session["finished"])
    assert len(ended) == CHANGES
    asked = statistics.median(times["asked"])
    for place, seen in times["seen"].items():
        late = sorted(seen[str(at)] - each for at, each in enumerate(ended, 1))
        middle = statistics.median(late)
        assert middle <= SOON + 2 * asked, (place, late, times["asked"])
