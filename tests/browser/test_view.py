"""The drawing of the live picture in a bare page: how fast, how accessible, and how it looks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.pictures import picture as snapshot
from tests.browser.conftest import SCREENSHOTS
from tests.browser.speed import check_updates
from tests.sessions import ROOT

MONITOR = ROOT / "gpunb" / "notebook" / "monitor"
AXE = ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js"

PAGE = """
<!doctype html><html lang="en"><head><title>The picture</title><style>{css}
body {{ margin: 0; background: light-dark(#fff, #1e1e1e); color-scheme: light dark;
    color: light-dark(#111, #eee); }}
</style></head><body><main><h1>The picture</h1><div id="here"></div></main></body></html>
"""

DRAW = """
async ([code, snapshot]) => {
    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    window.view_ = await import(url);
    window.asked = [];
    const note = (name) => async (...what) => { window.asked.push([name, ...what]); };
    const actions = { cancel: note("cancel"), interrupt: note("interrupt"), kill: note("kill"),
        goTo: note("goTo"), logs: async (job) => `the log of ${job}` };
    window.drawn = window.view_.render(document.getElementById("here"), snapshot, { actions });
}
"""

Draw = Callable[..., Any]


@pytest.fixture
def draw(browser: Any) -> Iterator[Draw]:
    """Draws a snapshot in a page; `width` of the page, `dark` or not."""
    contexts = []

    def drawn(facts: dict[str, Any], *, width: int = 900, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: pytest.fail(str(error)))
        page.set_content(PAGE.format(css=(MONITOR / "view.css").read_text()))
        page.evaluate(DRAW, [(MONITOR / "view.js").read_text(), facts])
        return page

    yield drawn
    for context in contexts:
        context.close()


def test_an_update_is_drawn_within_a_frame(draw: Draw) -> None:
    """With 16 devices and 500 jobs, of which each has changed, layout included."""
    page = draw(snapshot())
    turns = [snapshot(turn=turn) for turn in range(1, 13)]
    check_updates(page, "(each) => window.drawn.update(each)", turns)


def test_an_update_without_news_changes_nothing(draw: Draw) -> None:
    page = draw(snapshot())
    changes = page.evaluate(
        """async facts => {
            window.drawn.update(facts);  // the times shown are of this moment again
            const seen = [];
            const observer = new MutationObserver(each => seen.push(...each));
            observer.observe(document.body,
                { subtree: true, childList: true, attributes: true, characterData: true });
            window.drawn.update(facts);
            await new Promise(resolve => setTimeout(resolve));
            observer.disconnect();
            return seen.map(each => `${each.type} ${each.target.outerHTML || each.target.data}`);
        }""",
        snapshot(),
    )
    assert changes == []


def test_rows_and_focus_stay_while_others_come_and_go(draw: Draw) -> None:
    before, after = snapshot(2, 20), snapshot(2, 20)
    after["running"] = [{**after["running"][-1], "id": 900}, *after["running"][2:]]
    page = draw(before)
    button = page.get_by_role("button", name="Interrupt #5 train_with_rate_4")
    button.focus()
    page.evaluate("facts => window.drawn.update(facts)", after)
    assert button.evaluate("each => each === document.activeElement")
    shown = page.locator("section[aria-label=Running] .gm-row").all_inner_texts()
    assert [each.split()[0] for each in shown] == [f"#{job['id']}" for job in after["running"]]


def test_what_is_done_is_confirmed_and_has_the_right_number(draw: Draw) -> None:
    page = draw(snapshot(2, 20))
    for name in ("Interrupt #5 train_with_rate_4", "Kill #5 train_with_rate_4"):
        page.get_by_role("button", name=name, exact=True).click()
        assert page.evaluate("window.asked.length") == (1 if "Kill" in name else 0)
        page.get_by_role("button", name=f"Yes: {name}").click()
    assert page.evaluate("window.asked") == [["interrupt", 5], ["cancel", 5, True]]
    page.get_by_role("button", name="Logs #5 train_with_rate_4").click()
    page.get_by_text("the log of 5").wait_for()


def test_a_button_is_clicked_whatever_happens_while_it_is_pressed(draw: Draw) -> None:
    """What is pressed stays in its place until it is let go; then comes what has happened."""
    before, after = snapshot(2, 20), snapshot(2, 20)
    after["running"] = [{**each, "has_log": not each["has_log"]} for each in before["running"]]
    after["running"].insert(0, {**before["running"][0], "id": 900, "name": "new"})
    page = draw(before)
    button = page.get_by_role("button", name="Go to cell #5 ")
    box = button.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] - 2)
    page.mouse.down()
    page.evaluate("facts => window.drawn.update(facts)", after)
    page.mouse.up()
    page.wait_for_function("() => window.asked.length")
    assert [each[:1] for each in page.evaluate("window.asked")] == [["goTo"]]
    new = page.locator(".gm-row").filter(has_text="#900 new")
    new.wait_for()
    button.focus()
    page.keyboard.down("Space")
    page.evaluate("facts => window.drawn.update(facts)", before)
    page.keyboard.up("Space")
    page.wait_for_function("() => window.asked.length === 2")
    new.wait_for(state="detached")


def test_a_question_stays_while_other_buttons_come(draw: Draw) -> None:
    before, after = snapshot(2, 20), snapshot(2, 20)
    after["running"] = [{**each, "has_log": not each["has_log"]} for each in before["running"]]
    page = draw(before)
    page.get_by_role("button", name="Kill #5 ").click()
    yes = page.get_by_role("button", name="Yes: Kill #5 ")
    page.evaluate("facts => window.drawn.update(facts)", after)
    assert yes.evaluate("each => each === document.activeElement")
    yes.click()
    assert page.evaluate("window.asked") == [["cancel", 5, True]]
    texts = page.locator("section[aria-label=Running] .gm-row").nth(4).inner_text().split()
    assert texts.index("Kill") < texts.index("Go"), texts


def test_each_row_leads_to_its_cell(draw: Draw) -> None:
    """With the keyboard too; and no button is there that leads nowhere."""
    facts = snapshot(2, 20)
    actor = {**facts["running"][0], "class": "session s", "kind": "session", "state": "alive"}
    facts["actors"] = [{**actor, "id": 700, "name": "s", "running": 0, "waiting": 0}]
    facts["counts"]["actors"] = 1
    facts["waiting"][1]["cell_id"] = facts["finished"][1]["cell_id"] = None
    facts["finished"][0].update(devices=[], pid=None, gpu_seconds=0.0)
    page = draw(facts)
    lists = {
        "Actors and sessions": [700],
        "Running": [1, 2],
        "Waiting": [1001, None],
        "Finished": [2000, None],
    }
    asked = []
    for name, idents in lists.items():
        rows = page.locator(f"section[aria-label='{name}'] .gm-row")
        for at, ident in enumerate(idents):
            button = rows.nth(at).get_by_role("button", name="Go to cell")
            assert button.count() == (ident is not None)
            if ident is not None:
                assert f" #{ident} " in button.get_attribute("aria-label")
                button.press("Enter")
                asked.append(ident)
    assert [what[1]["id"] for what in page.evaluate("window.asked")] == asked
    assert {what[1]["cell_id"] for what in page.evaluate("window.asked")} == {actor["cell_id"]}
    finished = page.locator("section[aria-label=Finished] .gm-row .gm-more")
    assert "CPU" not in finished.first.inner_text(), "it never ran"
    assert "GPU 1" in finished.nth(1).inner_text()
    assert "used 3 of 10 GiB: 0.2 would do" in finished.nth(1).inner_text()
    page.get_by_role("button", name="Kill #700 session s", exact=True).wait_for()


def test_long_lists_are_counted(draw: Draw) -> None:
    page = draw(snapshot())
    heading = page.locator("section[aria-label=Running] .gm-heading").inner_text()
    assert heading == "Running (200, 50 shown)"
    assert page.locator("section[aria-label=Running] .gm-row").count() == 50


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [900, 320])
def test_it_can_be_read_by_all(draw: Draw, width: int, dark: bool) -> None:
    """No violation is found by axe; nothing sticks out of a narrow cell."""
    page = draw(snapshot(3, 24), width=width, dark=dark)
    page.locator(".gm-chart summary").click()
    page.get_by_role("button", name="Kill #1 ").first.click()
    SCREENSHOTS.mkdir(exist_ok=True)
    name = f"view-{width}-{'dark' if dark else 'light'}"
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if not AXE.exists():
        pytest.skip("axe-core is not installed (npm ci in labextension)")
    page.evaluate(AXE.read_text())
    found = page.evaluate("async () => (await axe.run(document)).violations")
    said = [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]
    assert not said, json.dumps(said, indent=1)
