"""Reduces a snapshot to the parts that the widget shows, a few kilobytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LIMIT = 20_000
"""Bytes of JSON, at most."""

TEXT = 120
"""Characters of a name or a reason."""

_LISTS = ("actors", "running", "waiting", "finished")

_ROUNDS = (
    {"actors": 5, "running": 16, "waiting": 5, "finished": 5},
    {"actors": 10, "running": 40, "waiting": 10, "finished": 10},
    dict.fromkeys(_LISTS, 50),
)
"""Entries that each list gets, in three rounds, as far as there is room. `counts` has the whole
numbers."""

_POINTS = 13
"""Points of a device's history: those of the last minute."""

_GROUPS = 20
_OTHERS = 4
_WARNINGS = 5
_COPIED = ("version", "time", "session", "cpus", "cpus_free", "queued", "counts", "totals")
_OF_JOB = (
    "id name state seconds cell kind actor devices memory hint has_log waits_for ended class "
    "running waiting client part_of gpu_seconds waited pid progress"
).split()
_OF_RANK = ("rank", "state", "seconds", "devices")
_OF_DEVICE = "id key name type memory logical resource free held kept usage health leased".split()


def compact(snapshot: Mapping[str, Any], limit: int = LIMIT) -> dict[str, Any]:
    """A part of the snapshot of at most `limit` bytes. Jobs lack the entries that are null."""
    small = {name: snapshot[name] for name in _COPIED}
    small["warnings"] = [_short(each, 2 * TEXT) for each in snapshot["warnings"][:_WARNINGS]]
    small["devices"] = [_device(each) for each in snapshot["devices"]]
    small["groups"] = [
        {**each, "name": _short(each["name"], TEXT)} for each in snapshot["groups"][:_GROUPS]
    ]
    small.update((name, []) for name in _LISTS)
    room = limit - _size(small)
    if room < 0:
        room = _thin(small, limit)
    todo = {name: iter(_ordered(name, snapshot[name])) for name in _LISTS}
    for most in _ROUNDS:
        for name, jobs in todo.items():
            room = _fill(small[name], jobs, most[name], room)
    return small


def _thin(small: dict[str, Any], limit: int) -> int:
    """Show less of each of very many devices, then fewer devices; return the room that is left."""
    devices = small["devices"]
    for each in devices:
        each["history"], each["others"] = None, []
    left_out = 0
    while devices and _size(small) > limit:
        count = max(1, len(devices) // 8)
        del devices[-count:]
        left_out += count
        small["warnings"] = [f"{left_out} more devices are not shown here"]
    return limit - _size(small)


def _ordered(name: str, jobs: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The jobs, those with devices first, because they are the labels of the devices."""
    if name != "running":
        return jobs
    there = [job for job in jobs if job["devices"]]
    return [*there, *(job for job in jobs if not job["devices"])]


def _fill(
    chosen: list[dict[str, Any]], jobs: Iterator[Mapping[str, Any]], most: int, room: int
) -> int:
    """Add jobs while there is room; return the room that is left."""
    while len(chosen) < most and room > 0:
        job = next(jobs, None)
        if job is None:
            break
        small = _job(job)
        room -= _size(small) + 2
        if room >= 0:
            chosen.append(small)
    return room


def _job(job: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: job[name] for name in _OF_JOB if job.get(name) is not None}
    for name in ("name", "waits_for", "class"):
        if name in chosen:
            chosen[name] = _short(chosen[name], TEXT)
    if "seconds" in chosen:
        chosen["seconds"] = round(chosen["seconds"], 1)
    if ranks := job.get("ranks"):
        chosen["ranks"] = [{name: each[name] for name in _OF_RANK} for each in ranks]
    chosen["memory"] = {n: each for n, each in job["memory"].items() if each is not None}
    return chosen


def _device(device: Mapping[str, Any]) -> dict[str, Any]:
    others = [
        {**each, "job": each["job"] and _short(each["job"], TEXT)}
        for each in device["others"][:_OTHERS]
    ]
    history = device["history"]
    measured = any(each is not None for each in history["memory"])
    names = ("memory", "utilization") if measured else ("share",)
    last = {name: history[name][-_POINTS:] for name in names}
    return {
        **{name: device[name] for name in _OF_DEVICE if name in device},
        "others": others,
        "history": {"step": history["step"], **last},
    }


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _size(value: Any) -> int:
    return len(json.dumps(value))
