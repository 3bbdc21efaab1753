"""The drawing of the live picture in a bare page: how fast, how accessible, and how it looks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.pictures import GIB
from benchmarks.pictures import picture as snapshot
from tests.browser.bare import Draw, compare
from tests.browser.sidebar import unfold
from tests.browser.speed import check_updates
from tests.browser.test_groups import together
from tests.sessions import ROOT

AXE = ROOT / "labextension" / "node_modules" / "axe-core" / "axe.min.js"


def test_an_update_is_drawn_within_a_frame(draw: Draw) -> None:
    """With 16 devices and 500 jobs, of which each has changed, layout included."""
    page = draw(snapshot())
    turns = [snapshot(turn=turn) for turn in range(1, 13)]
    check_updates(page, "(each) => window.drawn.update(each)", turns)


def test_an_update_without_news_changes_nothing(draw: Draw) -> None:
    page = draw(snapshot())
    changes = page.evaluate(
        """async facts => {
            const now = Date.now();
            Date.now = () => now;  // no time passes, so no text grows
            window.drawn.update(facts);
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


LATE = r"""
([seconds, slept]) => {
    // A message comes; then the page sleeps, and hears of the message before it; then it draws.
    const now = Date.now() / 1000;
    const clock = new window.view_.Clock();
    clock.hear(now);
    const real = Date.now.bind(Date);
    if (slept) Date.now = () => real() + 1000 * slept;
    const jumped = clock.jumped();
    const job = { id: 1, name: "train", state: "running", seconds: 3, devices: [], memory: {} };
    const held = [{ id: 0, key: "a", free: 0.5, held: [[1, 0.5]] }];
    const totals = { gpu_seconds: 0.5 };
    const facts = { time: now - seconds, running: [job], devices: held, totals };
    const place = document.createElement("div");
    document.body.append(place);
    const view = window.view_.render(place, facts, { clock });
    const shown = place.querySelector(".gm-row .gm-time").textContent;
    const summary = place.querySelector(".gm-summary").textContent;
    view.dispose();
    Date.now = real;
    return [jumped, shown, summary.match(/(\S+\ss)\sof\sGPU\stime/)[1]];
}
"""


def test_times_are_right_whenever_a_snapshot_is_drawn(draw: Draw) -> None:
    """Of a snapshot that is nine seconds old, and in a page that slept for a minute."""
    page = draw(snapshot(1, 0))
    assert page.evaluate(LATE, [9, 0]) == [False, "12 s", "5\u00a0s"]
    assert page.evaluate(LATE, [9, 50]) == [True, "1:02", "30\u00a0s"]


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


SAID = r"""
window.parts = ["plain \u001b[31mred\u001b[0m\n"];
window.requests = 0;
window.said = async (job, position) => {
    window.requests += 1;
    const [text, more] = [window.parts.slice(position).join(""), window.parts.length];
    return { text, position: more, state: more < 3 ? "running" : "done", truncated: more > 2 };
};
"""


def test_a_log_has_colours_and_goes_on_while_it_is_open(draw: Draw) -> None:
    page = draw(snapshot(2, 20))
    page.evaluate(SAID)
    page.get_by_role("button", name="Logs #5 train_with_rate_4").click()
    log = page.get_by_label("Text of the log")
    log.filter(has_text="plain red").wait_for()
    assert "\x1b" not in log.inner_text()
    plain, red = (
        log.get_by_text(each).evaluate("each => getComputedStyle(each).color")
        for each in ("plain", "red")
    )
    assert plain == log.evaluate("each => getComputedStyle(each).color") == "rgb(28, 28, 28)"
    assert red == "rgb(179, 38, 30)"
    page.evaluate("window.parts.push('more\\n')")
    log.filter(has_text="more").wait_for()
    assert not page.get_by_text("The beginning is left out.").is_visible()
    page.get_by_role("button", name="Close the log").click()
    requests = page.evaluate("window.requests")
    time = page.locator("section[aria-label=Running] .gm-time").first
    for _ in range(3):  # it is drawn and the log is asked for by the same timer
        page.wait_for_function(
            "([each, before]) => each.textContent !== before",
            arg=[time.element_handle(), time.inner_text()],
        )
    assert page.evaluate("window.requests") <= requests + 1
    page.get_by_role("button", name="Logs #5 train_with_rate_4").click()
    page.evaluate("window.parts.push('the end')")
    log.filter(has_text="the end").wait_for()
    page.get_by_text("The beginning is left out.").wait_for()
    assert log.inner_text() == "plain red\nmore\nthe end"


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
    row = page.locator("section[aria-label=Running] .gm-row").nth(4)
    names = [each.get_attribute("aria-label") for each in row.get_by_role("button").all()]
    texts = [each.split()[0] for each in names]
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
    unfold(page, "Finished")
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
    finished = page.locator("section[aria-label=Finished] .gm-row")
    assert "CPU" not in finished.first.inner_text(), "it never ran"
    assert "GPU 1" in finished.nth(1).inner_text()
    finished.nth(1).click()
    assert "used 3 of 10 GiB: 0.2 would do" in finished.nth(1).inner_text()
    page.get_by_role("button", name="Kill #700 session s", exact=True).wait_for()


def test_long_lists_are_counted(draw: Draw) -> None:
    page = draw(snapshot())
    heading = page.locator("section[aria-label=Running] .gm-heading").inner_text()
    assert heading == "Running (200, 50 shown)"
    rows = page.locator("section[aria-label=Running] .gm-row")
    assert rows.count() == 50
    page.get_by_role("button", name="Show 50 more").first.click()
    assert rows.count() == 100


def test_a_wide_picture_has_columns_and_says_why_in_the_line_of_a_job(draw: Draw) -> None:
    page = draw(snapshot(2, 40))
    why = page.locator("section[aria-label=Waiting] .gm-row").first
    assert why.bounding_box()["height"] < 30
    assert why.locator(".gm-note").inner_text().startswith("needs 0.5 of one GPU")
    for column in (".gm-note", ".gm-time"):
        boxes = [each.bounding_box() for each in page.locator(f".gm-row {column}").all()]
        assert len({each["x"] for each in boxes if each}) == 1
    narrow = draw(snapshot(2, 40), width=240)
    assert not narrow.locator(".gm-note").first.is_visible()
    assert narrow.locator(".gm-detail").first.inner_text().startswith("needs 0.5 of one GPU")


def test_the_summary_adds_up_what_can_be_added(draw: Draw) -> None:
    facts = snapshot(2, 3)
    assert facts["totals"]["waited"] > 60
    text = draw(facts).locator(".gm-summary").inner_text().replace("\u00a0", " ")
    assert "of GPU time" in text
    assert "waited" not in text


def shared() -> dict[str, Any]:
    """A device with two holders that use half and more than all of their shares, another kernel,
    and a process that does not use gpunb."""
    facts = snapshot(1, 20)
    (device,) = facts["devices"]
    left, right = facts["running"][:2]
    for job, share, now in ((left, 0.5, 10), (right, 0.2, 9)):
        job["devices"] = [["GPU", 0, share]]
        job["memory"] = {"now": now * GIB, "peak": now * GIB, "share": int(40 * GIB * share)}
    kernel = {**device["others"][0], "kind": "kernel", "share": 0.1, "memory": None, "job": "fit"}
    kernel["since"] = facts["time"] - 3600
    device.update(held=[[left["id"], 0.5], [right["id"], 0.2]], free=0.2, memory=40 * GIB)
    device["usage"].update(memory_total=40 * GIB, power=212)
    outsider = {**device["others"][0], "memory": 4 * GIB, "since": facts["time"] - 60}
    device["others"] = [outsider, {**kernel, "pid": 98}]
    return facts


BOXES = """
() => [...document.querySelectorAll(".gm-line")].map((line) => {
    const box = (name) => line.querySelector(`.gm-${name}`).getBoundingClientRect();
    const parts = ["state", "text", "on", "time"].map(box);
    return [line.getBoundingClientRect().height, parts.map((each) => [each.left, each.right])];
})
"""


def test_a_device_says_for_whom_it_is_kept(draw: Draw) -> None:
    facts = shared()
    facts["devices"][0]["kept"] = text = "kept for #12 for 40 s; 2 min of GPU time so far"
    page = draw(facts)
    said = page.locator(".gm-facts").inner_text().replace("\u00a0", " ")
    assert said.endswith(f" W · {text}")


@pytest.mark.parametrize("width", [240, 900])
def test_a_device_shows_shares_and_memory_to_scale(draw: Draw, width: int) -> None:
    page = draw(shared(), width=width)
    lane = page.locator(".gm-lane")
    whole = lane.evaluate("each => each.clientWidth")
    boxes = [each.bounding_box() for each in lane.locator(".gm-part").all()]
    assert [each["width"] / whole for each in boxes] == pytest.approx(
        [0.5, 0.2, 0.1, 0.1, 0.1], abs=4 / whole
    )
    assert {each["height"] for each in boxes} == {24}
    used = lane.locator(".gm-own .gm-used")
    half, over = (
        each.evaluate("e => e.offsetWidth / e.parentElement.offsetWidth") for each in used.all()
    )
    assert half == pytest.approx(0.5, abs=0.05)
    assert over == 1
    assert "gm-over" in lane.locator(".gm-own").nth(1).get_attribute("class")
    assert "gm-unknown" in lane.locator(".gm-other").get_attribute("class")
    texts = [each.inner_text() for each in lane.locator(".gm-part").all()]
    assert texts[3:] == ["process 99, grace", "0.2 free"]
    said = page.locator(".gm-facts").inner_text().replace("\u00a0", " ")
    assert said == "20 GiB of 40 GiB · 37 % in use · 61 °C · 212 W"
    width_of_line = page.locator(".gm-trend").evaluate("each => each.getBoundingClientRect().width")
    assert width_of_line == 60
    lines = page.evaluate(BOXES)
    assert len(lines) > 8
    for height, parts in lines:
        assert height == 26
        starts, ends = zip(*parts, strict=True)
        assert all(end <= start + 1 for end, start in zip(ends, starts[1:], strict=False))
        assert ends[-1] <= width


def test_a_part_of_a_device_tells_all_on_demand(draw: Draw) -> None:
    """With the pointer and with the keyboard; nothing of it is cut off, and it leads to the row."""
    facts = shared()
    facts["running"][0]["hint"] = "used 3 of 20 GiB: 0.1 would do"
    outsider, kernel = facts["devices"][0]["others"]
    page = draw(facts, width=240)
    tip = page.locator(".gm-tip")
    assert not tip.is_visible()
    parts = page.locator(".gm-lane button")
    parts.first.hover()
    said = tip.inner_text()
    for each in (
        "#1 train_with_rate_0",
        "share 0.5",
        "cell In[0], sweep over learning rates.ipynb, ada",
        "running since",
        "used 3 of 20 GiB: 0.1 would do",
    ):
        assert each in said
    assert "10 GiB now" in said
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 240
    page.mouse.move(1, 800)
    assert not tip.is_visible()
    parts.first.focus()
    page.keyboard.press("ArrowRight")
    assert "uses more memory than its share of 8 GiB" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    said = tip.inner_text().splitlines()
    assert said == ["fit process 98, grace", "share 0.1", f"since {_clock(page, kernel)}"]
    page.keyboard.press("End")
    assert "does not use gpunb" in tip.inner_text()
    assert f"since {_clock(page, outsider)}" in tip.inner_text()
    assert parts.last.get_attribute("aria-describedby") == tip.get_attribute("id")
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    parts.nth(1).press("Enter")
    row = page.locator(".gm-row", has_text="#2 train")
    assert row.evaluate("each => each === document.activeElement")
    assert row.get_attribute("aria-expanded") == "true"


def _clock(page: Any, other: dict[str, Any]) -> str:
    """The time of day, in the page, since when a process is there."""
    text = "since => new Date(1000 * since).toLocaleTimeString('en-GB')"
    return str(page.evaluate(text, other["since"]))


def test_rows_are_used_with_the_keyboard_alone(draw: Draw) -> None:
    """Arrows, Enter for the cell, Space for the details, Delete to stop. The focus stays there."""
    facts = snapshot(2, 20)
    page = draw(facts)
    focused = "document.activeElement.getAttribute('aria-label')"
    press = page.keyboard.press
    page.locator(".gm-row").first.focus()
    press("ArrowDown")
    assert page.evaluate(focused).startswith("#2 train_with_rate_1 In[1], running")
    press("Space")
    details = page.locator(".gm-row:focus .gm-more")
    assert "memory 1 GiB now" in details.inner_text()
    press("Space")
    assert not details.is_visible()
    press("Enter")
    press("ArrowRight")
    assert page.evaluate(focused) == "Interrupt #2 train_with_rate_1"
    assert page.locator(".gm-tip").inner_text() == "Interrupt"
    press("ArrowLeft")
    press("Delete")
    assert page.evaluate(focused) == "Yes: Interrupt #2 train_with_rate_1"
    press("Escape")
    press("ArrowLeft")
    press("Delete")
    press("Enter")
    asked = [
        [name, what if name == "interrupt" else what["id"]]
        for name, what in page.evaluate("window.asked")
    ]
    assert asked == [["goTo", 2], ["interrupt", 2]]
    press("ArrowLeft")
    gone = {**facts, "running": [facts["running"][0], *facts["running"][2:]]}
    page.evaluate("facts => window.drawn.update(facts)", gone)
    assert page.evaluate(focused).startswith("#3 ")
    press("Home")
    assert page.evaluate("document.activeElement.textContent").startswith("Running")


def test_buttons_are_seen_below_the_pointer_or_with_the_focus_only(draw: Draw) -> None:
    page = draw(snapshot(2, 20))
    rows = page.locator("section[aria-label=Running] .gm-row")

    def seen() -> list[bool]:
        opacity = "each => getComputedStyle(each.querySelector('.gm-buttons')).opacity"
        return [row.evaluate(opacity) == "1" for row in rows.all()[:3]]

    assert seen() == [False, False, False]
    rows.nth(1).hover()
    assert seen() == [False, True, False]
    page.mouse.move(1, 1)
    assert seen() == [False, False, False]
    rows.nth(0).focus()
    assert seen() == [True, False, False]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert seen() == [False, True, False]


REASON = "needs 0.5 of one GPU: " + ", ".join(f"#{at} holds 0.5 of GPU {at}" for at in range(16))

CUT = "each => each.scrollWidth > each.clientWidth"


@pytest.mark.parametrize(("width", "brief"), [(900, ".gm-note"), (240, ".gm-detail")])
def test_a_reason_that_is_cut_opens_to_its_full_text(draw: Draw, width: int, brief: str) -> None:
    facts = snapshot(2, 40)
    facts["waiting"][0]["waits_for"] = REASON
    page = draw(facts, width=width)
    row = page.locator("section[aria-label=Waiting] .gm-row").first
    assert row.locator(brief).is_visible()
    assert row.locator(brief).evaluate(CUT)
    row.click()
    detail = row.locator(".gm-detail").first
    assert detail.inner_text() == REASON
    assert not detail.evaluate(CUT)
    box = detail.bounding_box()
    assert box["height"] > 30, "it has several lines"
    assert box["x"] + box["width"] <= width
    row.click()
    assert row.locator(brief).evaluate(CUT)


def test_a_log_a_queue_and_a_failure_need_no_pointer(draw: Draw) -> None:
    facts = snapshot(2, 20)
    facts["finished"] = facts["finished"][:8]  # failed: 2002, 2005
    page = draw(facts)
    press = page.keyboard.press

    def go(row: str, button: str) -> None:
        """To the button of a row that has the focus; the row is among the first 60 items."""
        page.locator("button.gm-heading:visible").first.focus()
        for key, label in (("ArrowDown", row), ("ArrowRight", f"{button} {row}")):
            for _ in range(60):
                if (_label(page) + " ").startswith(f"{label} "):
                    break
                press(key)
            assert _label(page).startswith(label)

    go("#5", "Logs")
    press("Enter")
    page.get_by_text("the log of 5").wait_for()
    assert _label(page) == "Close the log"
    press("Enter")
    waits = facts["waiting"][0]["id"]
    go(f"#{waits}", "Cancel")
    press("Enter")
    press("Enter")
    assert page.evaluate("window.asked") == [["cancel", waits, False]]
    failed = page.locator("section[aria-label=Finished] .gm-row")
    assert failed.count() == 2
    go("#2005", "Mark as seen")
    press("Enter")
    assert [each.split()[0] for each in failed.all_inner_texts()] == ["#2002"]
    go(f"#{waits}", "Cancel")
    counts = {**facts["counts"], "waiting": 0}
    update = {**facts, "waiting": [], "queued": 0, "counts": counts}
    page.evaluate("facts => window.drawn.update(facts)", update)
    assert page.evaluate("document.activeElement.textContent").startswith("Running")
    press("ArrowDown")
    assert _label(page).startswith("#1 "), "the focus is not lost with the last row of a list"


def _label(page: Any) -> str:
    """Of what has the focus."""
    return str(page.evaluate("document.activeElement.getAttribute('aria-label') || ''"))


def test_failures_stay_until_they_were_seen(draw: Draw) -> None:
    """While other jobs that are over are folded."""
    facts = snapshot(2, 20)
    facts["finished"] = facts["finished"][:8]  # failed: 2002, 2005
    page = draw(facts)
    section = page.locator("section[aria-label=Finished]")
    rows, heading = section.locator(".gm-row"), section.locator(".gm-heading")

    def shown() -> list[str]:
        return [each.split()[0] for each in rows.all_inner_texts()]

    states = {each["id"]: each["state"] for each in facts["finished"]}
    failed = [f"#{ident}" for ident, state in states.items() if state == "failed"]
    assert shown() == failed
    assert f"{len(failed)} failed" in heading.inner_text()
    rows.first.get_by_role("button", name="Mark as seen").click()
    assert shown() == failed[1:]
    rows.first.click()  # which shows its details, until the second click
    assert "took 3 s" in rows.first.inner_text()
    rows.first.click()
    assert shown() == failed[2:]
    heading.click()
    assert len(shown()) == 8
    heading.click()
    page.evaluate("facts => window.drawn.update(facts)", {**facts, "time": facts["time"] + 1})
    assert shown() == failed[2:]


def test_a_filter_finds_jobs_by_name_state_and_notebook(draw: Draw) -> None:
    facts = snapshot(2, 20)
    facts["running"][2]["owner"] = "other-notebook"
    page = draw(facts)
    field = page.get_by_label("Filter jobs")

    def found(words: str) -> list[str]:
        field.fill(words)
        return [each.split()[0] for each in page.locator(".gm-row").all_inner_texts()]

    assert found("other-note running") == ["#3"]
    assert found("learning rates.ipynb rate_3") == ["#4"], "the notebook of the session"
    assert found("rate_3") == ["#4"]
    states = {f"#{each['id']}" for each in facts["finished"] if each["state"] == "cancelled"}
    assert set(found("cancelled")) == states
    heading = page.locator("section[aria-label=Finished] .gm-heading")
    assert heading.inner_text().startswith(f"Finished ({len(states)} of ")
    assert found("nothing like it") == []
    page.get_by_text("No job has these words.").wait_for()
    assert len(found("")) > 8


@pytest.mark.parametrize(
    ("width", "look", "zoom"),
    [
        (900, "light", 1),
        (900, "dark", 2),
        (240, "dark", 1),
        (480, "light", 2),
        (480, "contrast", 2),
        (900, "contrast", 1),
        (240, "forced", 1),
    ],
)
def test_it_can_be_read_by_all(draw: Draw, width: int, look: str, zoom: int) -> None:
    """No violation is found by axe, nothing sticks out of a narrow page, at 200 % either, and it
    looks as before. 480 pixels at 200 % are as wide as 240."""
    page = draw(together(), width=width, look=look, zoom=zoom)
    page.locator(".gm-chart summary").click()
    page.locator(".gm-row", has_text="sweep of train").first.press("Space")
    page.get_by_role("button", name="Kill #1 ").first.click()
    page.locator("section[aria-label=Waiting] .gm-row").first.click()
    page.locator(".gm-lane button").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".gm-tip").is_visible()
    compare(page, f"view-{width}-{look}-{zoom}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width / zoom
    if not AXE.exists():
        pytest.skip("axe-core is not installed (npm ci in labextension)")
    page.evaluate(AXE.read_text())
    found = page.evaluate("async () => (await axe.run(document)).violations")
    said = [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]
    assert not said, json.dumps(said, indent=1)
