"""The status as text and HTML, from a snapshot."""

from __future__ import annotations

from gpunb.live.status_view import StatusView
from gpunb.scheduler.markup import control

EMPTY = {
    "devices": [],
    "actors": [],
    "running": [],
    "waiting": [],
    "finished": [],
    "queued": 0,
    "warnings": [],
    "notes": ["no NVIDIA driver library (<libnvidia-ml>) found"],
}
DEVICE = {
    "id": 0,
    "type": None,
    "name": "GPU",
    "memory": None,
    "logical": True,
    "free": 1.0,
    "held": [],
    "others": [],
    "usage": {"memory_used": None, "memory_total": None, "utilization": None},
    "health": None,
    "kept": None,
    "resource": "GPU",
}


def test_without_devices_the_view_tells_the_reason():
    view = StatusView(EMPTY)
    assert repr(view).endswith("\n\nno NVIDIA driver library (<libnvidia-ml>) found")
    assert "(&lt;libnvidia-ml&gt;) found" in view._repr_html_()


def test_devices_of_other_kinds_have_their_own_names():
    npu = {**DEVICE, "resource": "NPU", "type": "910B", "free": 0.0, "held": [[1, 1.0]]}
    facts = {**EMPTY, "devices": [DEVICE, npu]}
    facts["running"] = [
        {
            "id": 1,
            "name": "train",
            "seconds": 2.0,
            "memory": {"now": None, "peak": None},
            "devices": [["NPU", 0, 1.0]],
        }
    ]
    head, gpu, other, _, _, job = repr(StatusView(facts)).splitlines()[:6]
    assert head.split()[0] == "device"
    assert gpu.startswith("GPU 0   logical")
    assert other.split() == ["NPU", "0", "910B", "1", "#1", "train", "(1)"]
    assert job.split()[:4] == ["#1", "train", "NPU", "0"]
    assert "<td>NPU 0</td>" in StatusView(facts)._repr_html_()


def test_no_name_is_taken_for_html_or_for_an_escape_sequence():
    names = ["\x001\x00<img src=x onerror=alert(1)>", "\0x", "\x1b[2J", "two\nlines"]
    used = {"memory": {"now": None, "peak": None}, "devices": [["GPU", 0, 0.2]], "seconds": 2.0}
    jobs = [{**used, "id": at, "name": name} for at, name in enumerate(names)]
    other = {"notebook": "/a/\x1b[31m.ipynb", "user": "<eve>", "share": 0.1, "memory": None}
    device = {**DEVICE, "others": [other], "free": 0.5, "held": [[0, 0.5]]}
    facts = {**EMPTY, "devices": [device], "running": jobs, "warnings": ["\x1b]0;<b>"]}
    page, text = StatusView(facts)._repr_html_(), repr(StatusView(facts))
    assert r"<td>\x001\x00&lt;img src=x onerror=alert(1)&gt;</td>" in page
    assert r"\x1b[31m.ipynb of &lt;eve&gt; (0.1)" in page
    assert '<span class="bar" role="meter"' in page
    assert r"warning: \x1b]0;<b>" in text
    assert sum(r"two\nlines" in line for line in text.splitlines()) == 1
    assert [control(each.replace("\n", "")) for each in (text, page)] == [None, None]


def test_a_job_that_never_had_a_process_has_no_device():
    job = {"id": 1, "name": "one", "seconds": 2.0, "state": "done", "devices": [], "pid": 9}
    job["hint"] = None
    never = {**job, "id": 2, "name": "two", "state": "cancelled", "pid": None}
    actor = {"id": 3, "name": None, "class": "Act", "devices": [], "waiting": 0, "running": 0}
    actors = [{**actor, "state": "queued", "pid": None}, {**actor, "state": "alive", "pid": 8}]
    facts = {**EMPTY, "devices": [DEVICE], "finished": [job, never], "actors": actors}
    lines = [line.split() for line in repr(StatusView(facts)).splitlines()]
    assert ["#1", "one", "CPU", "2.00", "s", "done"] in lines
    assert ["#2", "two", "2.00", "s", "cancelled"] in lines
    assert ["#3", "Act", "queued"] in lines
    assert ["#3", "Act", "CPU", "idle"] in lines


def test_the_hint_for_a_better_share_is_beside_the_end_of_a_job():
    job = {"id": 1, "name": "one", "seconds": 2.0, "state": "done", "pid": 9}
    hinted = {**job, "devices": [["GPU", 0, 0.5]], "hint": "used 2 of 12 GiB: 0.1 would do"}
    text = repr(StatusView({**EMPTY, "devices": [DEVICE], "finished": [hinted]}))
    assert "done, used 2 of 12 GiB: 0.1 would do" in text


def test_with_devices_the_view_shows_no_notes():
    assert "libnvidia" not in repr(StatusView({**EMPTY, "devices": [DEVICE]}))
