"""Rows that open: the ranks of a job, the tasks of a placement group, the trials of a sweep."""

from __future__ import annotations

from typing import Any

from benchmarks.pictures import picture as snapshot
from tests.browser.bare import Draw


def together() -> dict[str, Any]:
    """A sweep of 40 trials, of which 8 are listed, a placement group with an actor and a task, and
    a job in two ranks."""
    facts = snapshot(2, 40)
    trials = [*facts["running"][:3], *facts["waiting"][:2], *facts["finished"][:3]]
    for at, each in enumerate(trials):
        each.update(part_of="sweep 1", name=f"train trial_{at}")
    states = ("done", "failed", "cancelled")
    for each, state in zip(trials[-3:], states, strict=True):
        each["state"] = state
    task, ranks = facts["running"][3:5]
    task["part_of"] = "group 700"
    gang = {**task, "id": 700, "class": "placement group", "name": None, "kind": "group"}
    gang.update(state="alive", part_of=None, running=0, waiting=0)
    actor = {**gang, "id": 701, "class": "Trainer", "kind": "actor", "part_of": "group 700"}
    facts["actors"] = [gang, actor]
    facts["counts"]["actors"] = 2
    rank = {"state": "running", "seconds": 9.0, "devices": [["GPU", 0, 0.5]]}
    ranks.update(kind="ranks", ranks=[{**rank, "rank": 0}, {**rank, "rank": 1, "state": "failed"}])
    group = {"began": facts["time"] - 75, "ended": None, "cell": 3, "cell_id": "cell-3"}
    counts = {"running": 3, "queued": 26, "done": 8, "failed": 2, "cancelled": 1}
    sweep = {"id": "sweep 1", "kind": "sweep", "name": "train", "actor": None, **group}
    gang_facts = {"id": "group 700", "kind": "group", "name": "", "actor": 700, **group}
    facts["groups"] = [
        {**sweep, "states": counts, "total": 40},
        {**gang_facts, "states": {"alive": 1, "running": 1}, "total": 2},
    ]
    return facts


def texts(rows: Any) -> list[str]:
    return [each.inner_text() for each in rows.locator(":scope > .gm-line > .gm-text").all()]


def label(row: Any) -> str:
    text: str = row.get_attribute("aria-label")
    return text


def test_what_belongs_together_is_one_row_that_opens(draw: Draw) -> None:
    """It has the number of members in each state, and stays open while others come and go."""
    facts = together()
    page = draw(facts)
    top = page.locator(".gm-rows > .gm-row")
    sweep = top.filter(has_text="sweep of train")
    counts = sweep.locator(":scope > .gm-line > .gm-states > .gm-count")
    assert counts.all_inner_texts() == ["3", "26", "2", "1", "8"]
    assert "3 running, 26 waiting, 2 failed, 1 cancelled, 8 done" in label(sweep)
    assert sweep.locator(".gm-time").inner_text().startswith("1:1")
    width = sweep.locator(":scope > .gm-progress").get_attribute("style")
    assert "28%" in width, "11 of 40 are over"
    assert not [each for each in texts(top) if "trial_" in each], "they stand in its row only"
    heading = page.locator("section[aria-label=Running] .gm-heading")
    assert heading.inner_text().startswith("Running (15, 1 failed"), "a task is in the gang"
    waiting = page.locator("section[aria-label=Waiting] .gm-heading")
    assert waiting.inner_text() == "Waiting (6)"
    assert sweep.get_attribute("aria-expanded") == "false"
    members = sweep.locator("[role=group] .gm-row")
    assert members.count() == 0
    sweep.click()
    assert sweep.get_attribute("aria-expanded") == "true"
    assert [each.split()[-1] for each in texts(members)] == [f"trial_{at}" for at in range(8)]
    assert members.locator(".gm-time").first.inner_text() != "", "at once"
    assert "32 more are only counted" in sweep.inner_text()
    members.nth(1).click()
    assert members.nth(1).get_attribute("aria-expanded") == "true"
    assert "memory" in members.nth(1).inner_text()
    after = together()
    after["running"] = after["running"][1:]
    after["groups"][0]["states"]["running"] = 2
    page.evaluate("facts => window.drawn.update(facts)", after)
    assert sweep.get_attribute("aria-expanded") == "true"
    assert [each.split()[-1] for each in texts(members)] == [f"trial_{at}" for at in range(1, 8)]
    assert members.first.get_attribute("aria-expanded") == "true", "the row, not its place"
    gang = page.locator("section[aria-label='Actors and sessions'] .gm-rows > .gm-row")
    assert gang.count() == 1
    assert "1 alive, 1 running" in label(gang)
    gang.click()
    assert texts(gang.locator("[role=group] .gm-row")) == ["#701 Trainer", "#4 train_with_rate_3"]
    ranks = top.filter(has_text="#5 train")
    assert "1 running, 1 failed" in label(ranks)
    ranks.click()
    assert texts(ranks.locator("[role=group] .gm-row")) == ["rank 0", "rank 1"]


def test_a_row_is_opened_and_left_with_the_keyboard(draw: Draw) -> None:
    """The buttons of its members stop these only, and that of a sweep stops all of them."""
    page = draw(together())
    press = page.keyboard.press
    focused = "document.activeElement.getAttribute('aria-label')"
    page.locator(".gm-row", has_text="sweep of train").focus()
    press("ArrowRight")
    press("ArrowDown")
    press("ArrowDown")
    assert page.evaluate(focused).startswith("#2 trial_1")
    press("Delete")
    press("Enter")
    assert page.evaluate("window.asked") == [["interrupt", 2]]
    press("ArrowLeft")
    press("ArrowLeft")
    assert page.evaluate(focused).startswith("sweep of train In[3], running, 3 running")
    tabbed = "document.querySelectorAll('.gm-rows .gm-row[tabindex=\"0\"]').length"
    assert page.evaluate(tabbed) == page.locator(".gm-rows:has(.gm-row)").count()
    press("ArrowLeft")
    assert page.locator(".gm-row:focus").get_attribute("aria-expanded") == "false"
    press("Enter")
    assert page.evaluate("window.asked.at(-1)[1].cell_id") == "cell-3"
    press("Delete")
    assert page.evaluate(focused) == "Yes: Stop sweep of train"
    press("Enter")
    assert page.evaluate("window.asked.at(-1)") == ["stop", "sweep 1"]
    over = together()
    over["groups"][0].update(ended=over["time"], states={"done": 40})
    page.evaluate("facts => window.drawn.update(facts)", over)
    assert not page.get_by_role("button", name="Stop sweep of train").count()


def test_a_filter_finds_members_and_failures_are_seen_with_their_row(draw: Draw) -> None:
    page = draw(together())
    field = page.get_by_label("Filter jobs")
    field.fill("trial_4")
    sweep = page.locator(".gm-row", has_text="sweep of train").first
    assert texts(sweep.locator("[role=group] .gm-row")) == ["#1002 trial_4"]
    field.fill("sweep of")
    assert sweep.locator("[role=group] .gm-row").count() == 0
    field.fill("")
    heading = page.locator("section[aria-label=Running] .gm-heading")
    assert "failed" in heading.inner_text()
    sweep.get_by_role("button", name="Mark as seen").click()
    assert "failed" not in heading.inner_text()
