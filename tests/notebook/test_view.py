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


def test_with_devices_notes_are_left_to_init():
    assert "libnvidia" not in repr(StatusView({**EMPTY, "devices": [DEVICE]}))
