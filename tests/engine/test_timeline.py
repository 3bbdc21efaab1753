"""What ran when: the history of a session and its exports."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.api.timeline import Timeline, bars
from tests.waiting import PATIENCE, Gate, eventually


def span(ident: int, started: float | None, ended: float | None, **more: Any) -> dict[str, Any]:
    return {
        "id": ident,
        "name": f"t{ident}",
        "kind": "call",
        "state": "done" if ended is not None else "running",
        "actor": None,
        "cell": None,
        "cell_id": None,
        "devices": [["GPU", 0, 0.5]],
        "submitted": started or 0.0,
        "started": started,
        "ended": ended,
        "waited": 0.0,
        "gpu_seconds": 0.0,
        "peak": None,
        **more,
    }


def timeline(*spans: dict[str, Any]) -> Timeline:
    devices = [{"id": at, "name": "simulated", "type": "A100"} for at in (0, 1)]
    totals = {"jobs": 0, "gpu_seconds": 1.5, "waited": 0.0, "peak": None}
    return Timeline(
        {"version": 1, "time": 100.0, "devices": devices, "spans": spans, "totals": totals}
    )


def test_bars_of_one_row_do_not_overlap() -> None:
    spans = [span(1, 0, 50), span(2, 10, 60), span(3, 50, 70), span(4, 65, None)]
    spans += [span(6, None, 20), span(7, 20, 30, actor=9)]
    spans += [span(5, 20, 30, devices=[["GPU", 1, 1.0]]), span(8, 0, 9, devices=[["NPU", 0, 1.0]])]
    on = bars({"id": 0, "resource": "GPU"}, spans, 100)
    found = [(each["id"], began, ended, row) for each, _, began, ended, row in on]
    assert found == [(1, 0, 50, 0), (2, 10, 60, 1), (3, 50, 70, 0), (4, 65, 100, 1)]


def test_use_of_cells() -> None:
    spans = [
        span(1, 0, 2, cell=3, gpu_seconds=1.0, waited=0.5, peak=100),
        span(2, 2, 3, cell=3, gpu_seconds=0.5, peak=300),
        span(3, 0, 10, cell=4, kind="actor", gpu_seconds=5.0),
        span(3, 0, 1, cell=4, kind="create", gpu_seconds=0.5),
        span(4, 1, 2, cell=5, kind="cell", actor=3, gpu_seconds=0.5),
        span(5, 1, 2, gpu_seconds=2.0),
    ]
    third, fourth, fifth, none = timeline(*spans).cells()
    assert (third.cell, third.jobs, third.gpu_seconds) == (3, 2, 1.5)
    assert (third.waited, third.peak) == (0.5, 300)
    assert (fourth.cell, fourth.jobs, fourth.gpu_seconds) == (4, 1, 5.0)
    assert (fifth.cell, fifth.gpu_seconds) == (5, 0), "what the actor held is counted once"
    assert (none.cell, none.gpu_seconds) == (None, 2.0)


def test_use_of_notebooks_that_share_a_head_process() -> None:
    one, other = ({"pid": at, "notebook": f"/home/ada/{at}.ipynb"} for at in (1, 2))
    spans = [
        span(1, 0, 2, cell=3, gpu_seconds=1.0, client=one),
        span(2, 0, 2, cell=3, gpu_seconds=2.0, client=other),
        span(3, 0, 2, cell=4, gpu_seconds=4.0, client=other),
        span(4, 0, 2, gpu_seconds=8.0),
    ]
    made = timeline(*spans)
    assert [(each.notebook, each.cell) for each in made.cells()] == [
        (None, None),
        ("/home/ada/1.ipynb", 3),
        ("/home/ada/2.ipynb", 3),
        ("/home/ada/2.ipynb", 4),
    ]
    assert made.notebooks() == {None: 8.0, "/home/ada/1.ipynb": 1.0, "/home/ada/2.ipynb": 6.0}
    assert "In[3] 2.ipynb" in made._repr_html_()


def test_exports(tmp_path: Path) -> None:
    spans = [span(1, 0, 50, name='a<b>"&', cell=7), span(2, 10, None, state="running")]
    made = timeline(*spans)
    assert made.to_svg(tmp_path / "out.svg") is None
    assert made.to_chrome_trace(str(tmp_path / "out.json")) is None
    svg = ET.fromstring(made.to_svg())
    assert (tmp_path / "out.svg").read_text() == made.to_svg()
    assert (tmp_path / "out.json").read_text() == made.to_chrome_trace()
    text = "".join(svg.itertext())
    assert 'a<b>"& In[7]' in text
    events = json.loads(made.to_chrome_trace())["traceEvents"]
    names = [(each["ph"], each["name"]) for each in events]
    assert names == [
        ("M", "process_name"),
        ("X", '#1 a<b>"& In[7]'),
        ("X", "#2 t2"),
        ("M", "process_name"),
    ]
    first = events[1]
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (0, 50_000_000, 0, 0)
    assert json.loads(made.to_json())["spans"][0]["id"] == 1
    assert "1.5 GPU-seconds" in repr(made)
    assert "In[7]" in made._repr_html_()
    ET.fromstring(timeline().to_svg())


def test_a_picture_is_xml_whatever_the_names_are() -> None:
    made = timeline(span(1, 0, 50, name="\0<b>\x1b[2J\udcff", cell=7))
    text = "".join(ET.fromstring(made.to_svg()).itertext())
    assert r"#1 \x00<b>\x1b[2J\udcff In[7]" in text
    made.to_svg().encode()


def test_a_real_one(start: Callable[..., Any], tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    start(simulate="1xA100:40GiB")

    def enter() -> None:
        gate.enter()

    @gpunb.remote(num_gpus=0.5)
    class Actor:
        def done(self) -> bool:
            return True

    first = gpunb.remote(num_gpus=1, name="first")(enter).remote()
    second = gpunb.remote(num_gpus=1, name="second")(enter).remote()
    gate.await_()
    now = {each["name"]: each for each in gpunb.timeline().spans}
    assert (now["first"]["state"], now["first"]["ended"]) == ("running", None)
    assert (now["second"]["state"], now["second"]["started"]) == ("queued", None)
    gate.open()
    gpunb.get([first, second], timeout=PATIENCE)
    actor = Actor.remote()
    assert gpunb.get(actor.done.remote(), timeout=PATIENCE)
    alive = gpunb.timeline()
    assert [each["state"] for each in alive.spans if each["kind"] == "actor"] == ["running"]
    gpunb.kill(actor)
    eventually(lambda: not gpunb.status()["actors"])
    over = gpunb.timeline()
    spans = {(each["name"], each["kind"]): each for each in over.spans}
    life = spans["Actor", "actor"]
    assert life["state"] == "cancelled"
    assert life["devices"] == [["GPU", 0, 0.5]]
    later = spans["second", "call"]
    assert later["waited"] > 0
    assert later["started"] >= spans["first", "call"]["ended"] - 0.01
    own = sum(spans[each]["gpu_seconds"] for each in spans if each[1] in ("call", "actor"))
    assert over.gpu_seconds == pytest.approx(own, abs=0.01)
    (use,) = over.cells()
    assert use.gpu_seconds == pytest.approx(own, abs=0.01)


@gpunb.remote(num_gpus=0.25)
class Mortal:
    def __init__(self, *, fails: bool = False) -> None:
        if fails:
            raise ValueError("not today")

    def work(self) -> int:
        return os.getpid()

    def crash(self) -> None:
        os._exit(3)

    def leave(self) -> None:
        gpunb.actor.exit_actor()


def finished() -> dict[int, dict[str, Any]]:
    """What is over, by number, once it agrees with the counts."""
    found = gpunb.status()
    over = {job["id"]: job for job in found["finished"]}
    assert len(over) == len(found["finished"]), "nothing stands there twice"
    assert len(over) == found["counts"]["finished"] == found["totals"]["jobs"]
    return over


def test_an_actor_is_over_with_its_process_and_not_with_its_constructor(
    start: Callable[..., Any],
) -> None:
    """Each in its own way, and with all that it had."""
    start(simulate="1xA100:40GiB")
    actors = [Mortal.options(name="first").remote(), *(Mortal.remote() for _ in range(3))]
    gpunb.get([each.work.remote() for each in actors], timeout=PATIENCE)
    ids = [actor["id"] for actor in gpunb.status()["actors"]]
    calls = finished()
    assert [job["kind"] for job in calls.values()] == ["method"] * 4
    assert {job["gpu_seconds"] for job in calls.values()} == {0}, "the actor has them"

    waits = Mortal.options(num_gpus=1).remote()
    gpunb.kill(actors[0])
    ends = [actors[1].crash.remote(), actors[2].leave.remote()]
    for end in ends:
        with pytest.raises(gpunb.exceptions.ActorDiedError):
            gpunb.get(end, timeout=PATIENCE)
    gpunb.kill(waits)
    actors.clear()
    eventually(lambda: not gpunb.status()["actors"], "all are gone")
    fails = Mortal.remote(fails=True)
    with pytest.raises(gpunb.exceptions.ActorDiedError):
        gpunb.get(fails.work.remote(), timeout=PATIENCE)
    eventually(lambda: not gpunb.status()["actors"], "it is gone")

    over = finished()
    ended = {at: over[at]["state"] for at in ids}
    assert list(ended.values()) == ["cancelled", "failed", "done", "done"]
    for at in ids:
        assert over[at]["kind"] == "actor"
        assert over[at]["devices"] == [["GPU", 0, 0.25]]
        assert over[at]["gpu_seconds"] == pytest.approx(over[at]["seconds"] / 4, abs=0.001)
    assert [over[at]["name"] for at in ids[:2]] == ["Mortal first", "Mortal"]
    never = {(job["kind"], job["state"], job["pid"] is None) for job in over.values()}
    assert never - {("actor", state, False) for state in ended.values()} == {
        ("method", "done", False),
        ("method", "failed", False),
        ("method", "failed", True),  # its actor was never made
        ("create", "cancelled", True),
        ("create", "failed", False),
    }
    lives = {each["id"]: each for each in gpunb.timeline().spans if each["kind"] == "actor"}
    assert {at: lives[at]["state"] for at in ids} == ended
    had = sum(lives[at]["gpu_seconds"] for at in lives)
    assert gpunb.timeline().gpu_seconds == pytest.approx(had, abs=0.01)


def test_an_actor_that_was_started_again_is_over_once(start: Callable[..., Any]) -> None:
    start(simulate="1xA100:40GiB")
    actor = Mortal.options(max_restarts=1, max_task_retries=1).remote()
    first = gpunb.get(actor.work.remote(), timeout=PATIENCE)
    with pytest.raises(gpunb.exceptions.ActorError):
        gpunb.get(actor.crash.options(max_task_retries=0).remote(), timeout=PATIENCE)
    assert gpunb.get(actor.work.remote(), timeout=PATIENCE) != first
    (ident,) = (each["id"] for each in gpunb.status()["actors"])
    assert ident not in finished()
    gpunb.kill(actor)
    eventually(lambda: not gpunb.status()["actors"], "it is gone")
    lives = [each for each in gpunb.timeline().spans if each["kind"] == "actor"]
    assert [each["state"] for each in lives] == ["failed", "cancelled"]
    assert all(each["started"] < each["ended"] for each in lives)
    assert lives[0]["ended"] <= lives[1]["started"] + 0.001
    ended = finished()[ident]
    assert ended["state"] == "cancelled"
    both = sum(each["ended"] - each["started"] for each in lives)
    assert ended["seconds"] == pytest.approx(both, abs=0.01)
