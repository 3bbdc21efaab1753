"""The extension in JupyterLab: the sidebar, the status bar, the badges, and how they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import sessions
from tests.browser.jupyter import Jupyter, Page
from tests.browser.sidebar import Sidebar, badge, toast
from tests.waiting import Gate, eventually

pytestmark = pytest.mark.usefixtures("labextension")

LOAD = "%load_ext gpunb"
WAITS = """\
%%gpu {share} {options}
import os, time
while not os.path.exists("{gate}/open"):
    time.sleep(0.01)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def waits(gate: Gate, options: str = "--bg", share: str = "0.5") -> str:
    """A cell that waits at the gate."""
    return WAITS.format(share=share, options=options, gate=gate.folder)


TRAIN = """\
%load_ext gpunb
import time
from pathlib import Path

def train(width):
    while not Path("~/done").expanduser().exists():
        time.sleep(0.01)
    return 1 / width
"""
CELL = "%%gpu {share} --bg --name {name}\n{name} = train(width={width})"


def test_halves_run_side_by_side_and_the_next_says_why_it_waits(
    visit: Callable[..., Page], jupyter: Jupyter, picture: Any, axe: Callable[..., None]
) -> None:
    cells = [("0.5", "small", 64), ("0.5", "medium", 256), ("2", "large", 4096)]
    texts = [CELL.format(share=share, name=name, width=width) for share, name, width in cells]
    page = visit([TRAIN, *texts])
    sidebar = Sidebar(page)
    sidebar.notice("No kernel uses gpunb now")
    for at in range(4):
        page.execute(at)
    lane = sidebar.has(".gm-device", "GPU 0").locator(".gm-lane")
    for name in ("small", "medium"):
        lane.locator(".gm-own").filter(has_text=name).wait_for()
    assert sidebar.has(".gm-device", "GPU 1").locator(".gm-own").count() == 0
    assert "needs 2 whole GPUs" in sidebar.row("Waiting", "large").inner_text()
    assert "needs 2 whole GPUs" in badge(page, 3, "waits").inner_text()
    badge(page, 1, "GPU 0 (0.5)")
    page.page.locator(".gpunb-status").filter(has_text="GPU 1/2, 1 waiting").wait_for()
    for theme in ("light", "dark"):
        page.set_theme(theme)
        axe(page, ".gpunb-panel", ".gpunb-badge", ".gpunb-status")
        picture(page, f"lab-{theme}")
    done = jupyter.folder / "home" / "done"
    done.touch()
    sidebar.row("Finished", "large")
    page.page.locator(".gpunb-badge").first.wait_for(state="detached")
    toast(page, "is done")
    done.unlink()


def test_work_is_stopped_from_the_sidebar_and_from_its_cell(
    visit: Callable[..., Page], gate: Gate
) -> None:
    """The latter while the cell keeps the kernel; the former with the keyboard alone."""
    page = visit([LOAD, waits(gate, "--bg -n victim"), waits(gate, ""), waits(gate, "--bg", "2")])
    page.execute(0)
    page.execute(1)
    page.execute(3)
    badge(page, 3, "waits").get_by_role("button").click()
    page.cell(3).locator(".gpunb-badge").wait_for(state="detached")
    page.run(2)
    badge(page, 2, "").get_by_role("button").click()  # wherever it is: it may be starting yet
    page.done(2)
    assert "KeyboardInterrupt" in page.output(2)

    keyboard = page.page.keyboard
    page.page.locator(".gpunb-status").focus()
    keyboard.press("Enter")
    kill = page.page.locator(".gpunb-panel").get_by_role("button", name="Kill #1 victim")
    kill.wait_for()
    for _ in range(20):
        keyboard.press("Tab")
        if kill.evaluate("each => each === document.activeElement"):
            break
    keyboard.press("Enter")
    keyboard.press("Enter")
    ended = Sidebar(page).row("Finished", "victim")
    assert "cancelled" in ended.inner_text() or "failed" in ended.inner_text()
    page.cell(1).locator(".gpunb-badge").wait_for(state="detached")


def test_a_badge_is_clicked_whatever_happens_while_it_is_pressed(
    visit: Callable[..., Page], gate: Gate
) -> None:
    """Its job begins to run, and so says something else, between the two halves of a click."""
    page = visit([LOAD, waits(gate, "--bg", "2"), waits(gate, "--bg -n next")])
    for at in range(3):
        page.execute(at)
    sidebar = Sidebar(page)
    button = badge(page, 2, "waits").get_by_role("button")
    box = button.bounding_box()
    page.page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
    page.page.mouse.down()
    page.jupyter.cancel(1)
    sidebar.row("Running", "next")
    assert "waits" in page.cell(2).locator(".gpunb-badge").inner_text()
    page.page.mouse.up()
    page.cell(2).locator(".gpunb-badge").wait_for(state="detached")
    ended = sidebar.row("Finished", "next").inner_text()
    assert "cancelled" in ended or "failed" in ended


def test_a_reload_brings_everything_back_and_a_job_leads_to_its_cell_and_its_log(
    visit: Callable[..., Page], gate: Gate, picture: Any, axe: Callable[..., None]
) -> None:
    fill = ["\n".join(["x = 1"] * 30)] * 3
    says = 'for at in 1, 2, 3: print(f"\\x1b[31mred line {at}\\x1b[0m ends", flush=True)\n'
    lasting = waits(gate, "--bg -n lasting").replace("while", f"{says}while") + 'print("the end")\n'
    page = visit([LOAD, lasting, *fill], prepare=_let_read_clipboard)
    page.execute(0)
    page.execute(1)
    badge(page, 1, "GPU 0")
    page.save()
    page.reload()
    badge(page, 1, "GPU 0")
    sidebar = Sidebar(page)
    row = sidebar.row("Running", "lasting")
    page.page.evaluate(
        """() => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            notebook.activeCellIndex = 4;
            return notebook.scrollToItem(4, 'end');
        }"""
    )
    row.get_by_role("button", name="Go to cell").click()
    page.page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.content.activeCellIndex === 1"
    )
    row.get_by_role("button", name="Logs").click()
    log = page.page.locator(".gpunb-log-text")
    log.filter(has_text="red line 2").wait_for()
    tab = page.page.locator(".jp-MainAreaWidget", has=log)
    assert page.page.locator(".lm-TabBar-tab.jp-mod-current", has_text="#1 lasting").count()
    red, plain = (
        each.evaluate("each => getComputedStyle(each).color")
        for each in (log.locator("span", has_text="red line 2"), log.locator("pre"))
    )
    assert red == "rgb(179, 38, 30)"
    assert plain != red
    tab.get_by_role("button", name="Copy the output").click()
    copied = "".join(f"red line {at} ends\n" for at in (1, 2, 3))
    assert page.page.evaluate("navigator.clipboard.readText()") == copied
    tab.get_by_label("Search the output").fill("LINE")
    tab.get_by_text("1 of 3").wait_for()
    page.page.keyboard.press("Enter")
    tab.get_by_text("2 of 3").wait_for()
    assert not tab.get_by_label("Follow").is_checked(), "or the next line would lead away"
    with page.page.expect_download() as saved:
        tab.get_by_role("button", name="Download the output").click()
    assert "line 3" in Path(saved.value.path()).read_text()
    tab.get_by_label("Follow").check()
    gate.open()
    log.filter(has_text="the end").wait_for()
    axe(page, ".gpunb-log", ".gpunb-log-search", ".gpunb-log-follow")
    picture(page, "lab-log")


def _let_read_clipboard(context: Any) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])


def test_a_failure_is_marked_in_the_status_bar_until_it_was_seen(
    visit: Callable[..., Page], gate: Gate
) -> None:
    """A click there opens the panel; the rest is done with the keyboard alone."""
    talks = waits(gate, "--bg -n talks").replace("while", 'print("it talks", flush=True)\nwhile')
    page = visit([LOAD, FAILS, talks, waits(gate, "--bg -n both", "2")])
    status, panel = page.page.locator(".gpunb-status"), page.page.locator(".gpunb-panel")
    mark = status.locator(".gpunb-failed")
    page.execute(0)
    assert not mark.is_visible()
    for at in (1, 2, 3):
        page.execute(at)
    mark.filter(has_text="✗ 1 failed").wait_for()
    assert mark.evaluate("each => getComputedStyle(each).backgroundColor") == "rgb(179, 38, 30)"
    assert not panel.is_visible()
    status.click()
    panel.wait_for()
    panel.locator(".gm-row", has_text="both").wait_for()
    _walk(page, "Tab", "#2 talks In[3], running")
    _walk(page, "ArrowRight", "Logs #2 talks")
    page.page.keyboard.press("Enter")
    page.page.get_by_label("Output of #2 talks").filter(has_text="it talks").wait_for()
    status.focus()
    page.page.keyboard.press("Enter")
    _walk(page, "Tab", "#2 talks In[3], running")
    _walk(page, "ArrowDown", "#3 both")
    page.page.keyboard.press("Delete")
    page.page.keyboard.press("Enter")
    panel.locator("section[aria-label=Waiting]").wait_for(state="hidden")
    page.page.locator(".Toastify__toast", has_text="was cancelled").wait_for()
    assert mark.is_visible()
    _walk(page, "ArrowDown", "#1 bad")
    _walk(page, "ArrowRight", "Mark as seen #1 bad")
    page.page.keyboard.press("Enter")
    mark.wait_for(state="hidden")


def _walk(page: Page, key: str, label: str) -> None:
    """Press a key until the focus is on what has this label, or begins with it."""
    focused = "document.activeElement.getAttribute('aria-label') || ''"
    seen = []
    while not page.page.evaluate(focused).startswith(label):
        seen.append(page.page.evaluate(focused))
        assert len(seen) < 40, seen
        page.page.keyboard.press(key)


def test_a_cell_is_run_on_a_share_and_the_first_one_is_inserted(
    visit: Callable[..., Page], axe: Callable[..., None]
) -> None:
    page = visit(["import gpunb\nprint('on', gpunb.get_gpu_ids())"])
    sidebar = Sidebar(page)
    axe(page, ".gpunb-panel")
    notice = sidebar.notice("No kernel uses gpunb now")
    assert notice.locator("code").all_inner_texts() == ["%load_ext gpunb", "%%gpu 0.5"]
    notice.get_by_role("button").click()
    page.page.wait_for_function(
        """() => window.jupyterapp.shell.currentWidget.content.widgets
            .map(each => each.model.sharedModel.source).slice(1).join('|')
            === '%load_ext gpunb|%%gpu 0.5\\n'"""
    )
    page.cell(0).locator(".jp-InputArea-editor").click()
    page.cell(0).locator(".jp-InputArea-editor").click(button="right")
    page.page.locator(".lm-Menu-item").filter(has_text="Run Cell on GPU").click()
    asked = page.page.locator(".jp-Dialog input")
    free = page.page.get_by_label("What is free").locator("li")
    assert [each.inner_text().split() for each in free.all()] == [
        ["GPU", str(at), "1", "free"] for at in (0, 1)
    ]
    axe(page, ".gpunb-share")
    page.page.locator(".gpunb-choices").get_by_role("button", name="0.5").click()
    assert asked.input_value() == "0.5"
    asked.fill("0.25")
    asked.press("Enter")
    page.done(0)
    page.cell(0).locator(".jp-OutputArea").filter(has_text="on [0]").wait_for()
    source = page.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.widgets[0].model.sharedModel.source"
    )
    assert source.startswith("%%gpu 0.25\nimport gpunb")
    page.command("gpunb:run-cell")
    assert asked.input_value() == "0.25"
    page.page.locator(".gpunb-choices").get_by_role("button", name="auto").click()
    asked.press("Enter")
    _says(page, 0, "%%gpu auto\nimport gpunb")
    _numbered(page, 0, 2)
    page.command("gpunb:run-cell")
    assert asked.input_value() == "auto", "it is what the cell has, and is taken as it is"
    asked.press("Enter")
    _numbered(page, 0, 3)
    _says(page, 0, "%%gpu auto\nimport gpunb")
    labels = page.page.evaluate(
        "() => ['gpunb:run-cell', 'gpunb:open-panel'].map(n => window.jupyterapp.commands.label(n))"
    )
    assert labels == ["Run Cell on GPU…", "Open GPU Panel"]


def _says(page: Page, at: int, start: str) -> None:
    """Wait until the source of a cell begins like this."""
    page.page.wait_for_function(
        """([at, start]) => window.jupyterapp.shell.currentWidget.content.widgets[at]
            .model.sharedModel.source.startsWith(start)""",
        arg=[at, start],
    )


def _numbered(page: Page, at: int, number: int) -> None:
    """Wait until a cell is over and has this number."""
    page.page.wait_for_function(
        """([at, number]) => window.jupyterapp.shell.currentWidget.content.widgets[at]
            .model.executionCount === number""",
        arg=[at, number],
    )


OTHER = """\
import gpunb

@gpunb.remote(num_gpus=1, name="theirs")
def wait():
    import threading
    threading.Event().wait()

gpunb.init()
ref = wait.remote()
try:
    gpunb.get(ref)
except gpunb.exceptions.GpunbError:
    print("ended", flush=True)
input()
"""


def test_other_kernels_are_seen_and_a_dead_one_is_said(
    visit: Callable[..., Page], gate: Gate
) -> None:
    page = visit([LOAD, waits(gate, "--bg -n mine")])
    page.execute(0)
    page.execute(1)
    sidebar = Sidebar(page)
    env = {"GPUNB_RUNTIME_DIR": str(page.jupyter.runtime), "GPUNB_SIMULATE": "1xH100:80GiB"}
    with sessions.running(OTHER, env=env) as other:
        sidebar.has(".gm-device", "H100").locator(".gm-own").filter(has_text="theirs").wait_for()
        sidebar.row("Running", "mine")
        row = sidebar.row("Running", "theirs")
        row.get_by_role("button", name="Kill").click()
        row.get_by_role("button", name="Yes").click()
        assert other.stdout is not None
        assert other.stdout.readline() == "ended\n"
    page.page.locator(".gm-device").filter(has_text="H100").wait_for(state="detached")
    sidebar.row("Running", "mine")
    (kernel,) = page.jupyter.kernels()
    page.jupyter.ask(f"api/kernels/{kernel}/restart", "POST", {})
    toast(page, "has ended, and a job")
    sidebar.notice("No kernel uses gpunb now")


FAILS = """\
%%gpu 0.5 --bg -n bad
raise ValueError("no")
"""


def test_what_waits_and_what_is_over_leads_to_its_cell(
    visit: Callable[..., Page], gate: Gate, picture: Any, axe: Callable[..., None]
) -> None:
    """And says how it ended: a session only when it is over, with all that it had."""
    session = "%%gpu 0.25 --session s1\nx = 1"
    holds = waits(gate, "--bg -n one")
    both = waits(gate, "--bg -n both", "2")
    page = visit([LOAD, session, FAILS, holds, both, "%gpu stop s1", both])
    for at in range(5):
        page.execute(at)
    sidebar = Sidebar(page)
    row = sidebar.row("Actors and sessions", "session s1")
    sidebar.row("Finished", "bad")
    finished = sidebar.node.locator("section[aria-label=Finished] .gm-row")
    assert not finished.filter(has_text="session s1").count()
    _leads(page, row, 1)
    page.execute(5)
    row.wait_for(state="detached")
    row = sidebar.row("Finished", "session s1")
    assert "GPU 0 (0.25)" in row.get_attribute("aria-label")
    row.get_by_role("img", name="cancelled").wait_for()
    _leads(page, row, 1)
    _leads(page, sidebar.row("Waiting", "both"), 4)
    _leads(page, sidebar.row("Finished", "bad"), 2)
    page.execute(6)
    badge(page, 6, "waits").get_by_role("button").click()
    cancelled = sidebar.row("Finished", "both")
    assert "CPU" not in cancelled.get_attribute("aria-label"), "it never ran"
    _leads(page, cancelled, 6)
    notice = page.page.locator(".Toastify__toast").filter(has_text="was cancelled")
    notice.wait_for()
    assert "Toastify__toast--info" in notice.get_attribute("class").split()
    axe(page, ".gpunb-panel")
    picture(page, "lab-over")


def _leads(page: Page, row: Any, cell: int) -> None:
    """The button of a row, pressed with the keyboard, shows that cell."""
    row.get_by_role("button", name="Go to cell").press("Enter")
    page.page.wait_for_function(
        "at => window.jupyterapp.shell.currentWidget.content.activeCellIndex === at", arg=cell
    )


def test_notebook_7(
    visit: Callable[..., Page], gate: Gate, picture: Any, axe: Callable[..., None]
) -> None:
    begun = 'print("seven has begun", flush=True)\nwhile'
    seven = waits(gate, "--bg -n seven").replace("while", begun)
    page = visit([LOAD, FAILS, seven], app="notebook")
    page.execute(0)
    page.execute(1)
    toast(page, "#1 bad has failed")
    page.execute(2)
    badge(page, 2, "GPU 0 (0.5)")
    page.page.locator(".Toastify__toast").get_by_role("button", name="Go to cell").click()
    page.page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget.content.activeCellIndex === 1"
    )
    sidebar = Sidebar(page)
    sidebar.row("Running", "seven")
    assert "failed" in sidebar.row("Finished", "bad").inner_text()
    axe(page, ".gpunb-panel", ".gpunb-badge")
    picture(page, "notebook-light")
    # The main area has room for the notebook only, so a log is below it; the last one is in front.
    sidebar.row("Running", "seven").get_by_role("button", name="Logs").click()
    log = page.page.get_by_label("Output of #2 seven")
    log.filter(has_text="seven has begun").wait_for()
    assert log.bounding_box()["height"] > 100
    bad = page.page.get_by_label("Output of #1 bad")
    sidebar.row("Finished", "bad").get_by_role("button", name="Logs").click()
    bad.filter(has_text="ValueError: no").wait_for()
    assert not log.is_visible()
    for _ in "again":
        sidebar.row("Running", "seven").get_by_role("button", name="Logs").click()
        log.wait_for()
    assert not bad.is_visible()
    axe(page, ".gpunb-log")
    picture(page, "notebook-log")
    tabs = page.page.locator("#jp-down-stack .lm-TabBar-tab")
    assert tabs.all_inner_texts() == ["#2 seven", "#1 bad"]
    for name in ("#2 seven", "#1 bad"):
        tabs.filter(has_text=name).locator(".lm-TabBar-tabCloseIcon").click()
    page.page.locator("#jp-down-stack").wait_for(state="hidden")
    # From another notebook it leads to a page of its own, and there to the cell.
    page.open(page.jupyter.notebook([]))
    row = Sidebar(page).row("Running", "seven")
    with page.page.context.expect_page() as opened:
        row.get_by_role("button", name="Go to cell").click()
    opened.value.wait_for_function(
        "() => window.jupyterapp?.shell?.currentWidget?.content?.activeCellIndex === 2"
    )
    page.page.locator(".gm-problem").wait_for(state="hidden")


AHEAD = """
const ours = Date.now.bind(Date);
Date.now = () => ours() + 20000;
"""


def test_times_are_the_kernels_in_a_page_whose_clock_is_wrong(
    visit: Callable[..., Page], gate: Gate
) -> None:
    """From the first message on, in the panel, the badge and the widget."""
    cells = [LOAD, waits(gate, "--bg -n timed"), "import gpunb\ngpunb.monitor()"]
    page = visit(cells, prepare=lambda context: context.add_init_script(AHEAD))
    for at in range(3):
        page.execute(at)
    page.save()
    page.reload()
    sidebar = Sidebar(page)
    row = sidebar.row("Running", "timed")
    widget = page.page.locator(".jp-OutputArea .gpunb-monitor").first
    times = [
        row.locator(".gm-time"),
        badge(page, 1, "GPU 0 (0.5)").locator(".gpunb-badge-time"),
        widget.locator("section[aria-label=Running] .gm-time"),
    ]

    def seconds() -> float:
        (session,) = page.jupyter.ask("gpunb/api/machine")["sessions"].values()
        return float(session["running"][0]["seconds"])

    def fits(time: Any) -> bool:
        """Whole seconds, drawn once a second; on a busy machine later, so it is looked at again."""
        before = seconds()
        shown = int(time.inner_text().removesuffix(" s"))
        return before - 2 <= shown <= seconds() + 1

    for time in times:
        time.filter(has_text=" s").wait_for()
        eventually(functools.partial(fits, time), str(time))


def test_badges_can_be_switched_off(visit: Callable[..., Page], gate: Gate) -> None:
    page = visit([LOAD, waits(gate, "--bg -n plain")], app="notebook")
    page.execute(0)
    page.execute(1)
    badge(page, 1, "GPU 0 (0.5)")
    settings = "lab/api/settings/gpunb:plugin"
    page.jupyter.ask(settings, "PUT", {"raw": '{"badges": false}'})
    try:
        page.reload()
        Sidebar(page).row("Running", "plain")
        assert page.page.locator(".gpunb-badge").count() == 0
    finally:
        page.jupyter.ask(settings, "PUT", {"raw": "{}"})
