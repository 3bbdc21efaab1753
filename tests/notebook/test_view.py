"""The status as text and HTML, from a snapshot."""

from __future__ import annotations

from gpunb.notebook.view import StatusView

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
    "resource": "GPU",
}


def test_without_devices_it_says_why():
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


def test_what_never_had_a_process_was_on_nothing():
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


def test_what_would_have_been_a_better_share_stands_beside_how_it_ended():
    job = {"id": 1, "name": "one", "seconds": 2.0, "state": "done", "pid": 9}
    hinted = {**job, "devices": [["GPU", 0, 0.5]], "hint": "used 2 of 12 GiB: 0.1 would do"}
    text = repr(StatusView({**EMPTY, "devices": [DEVICE], "finished": [hinted]}))
    assert "done, used 2 of 12 GiB: 0.1 would do" in text


def test_with_devices_notes_are_left_to_init():
    assert "libnvidia" not in repr(StatusView({**EMPTY, "devices": [DEVICE]}))
