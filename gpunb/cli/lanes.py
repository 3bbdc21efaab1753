"""Snapshots as lines for a terminal: a lane for each device, drawn to scale, and the jobs below.

Each line is a list of (text, style) pieces, so that it can be shown with colours or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from gpunb.core.resources import devices_text, size_text

Piece: TypeAlias = tuple[str, str]
"""A text and its style: "" for none, "head", "soft", "warn", or "job0" to "job5"."""

Line: TypeAlias = list[Piece]

ROWS = 8
"""Jobs of each list; the rest is counted."""

_SIGNS = {"done": "✓", "failed": "✗", "cancelled": "■"}


def lines(snapshot: Mapping[str, Any], width: int, passed: float = 0.0) -> Iterator[Line]:
    """A session, in so many columns, `passed` seconds after the snapshot."""
    session, counts = snapshot["session"], snapshot["counts"]
    said = f"{counts['running']} running, {counts['waiting']} waiting, {counts['finished']} done"
    yield [(f"{_notebook(session)} ", "head"), (f"pid {session['pid']}: {said}", "soft")]
    for device in snapshot["devices"]:
        yield [(_device(device), "")]
        yield lane(device, snapshot, width)
        for other in device["others"]:
            if not other["share"]:
                yield [(f"  also here: {_who(other)}{_size(other['memory'])}", "soft")]
    for title, rows in (
        ("running", [_running(each, passed) for each in snapshot["running"]]),
        ("waiting", [_waiting(each, passed) for each in snapshot["waiting"]]),
        ("finished", [_finished(each) for each in snapshot["finished"]]),
    ):
        for row in rows[: ROWS if title != "finished" else ROWS // 2]:
            yield [(_cut(f"  {row}", width), "" if title == "running" else "soft")]
        if (more := counts[title] - ROWS) > 0 and title != "finished":
            yield [(f"  and {more} more {title}", "soft")]
    for each in snapshot["warnings"]:
        yield [(_cut(f"  ! {each}", width), "warn")]


def lane(device: Mapping[str, Any], snapshot: Mapping[str, Any], width: int) -> Line:
    """The shares of a device, drawn to scale between two bars."""
    names = {job["id"]: job["name"] for job in snapshot["running"]}
    for each in snapshot["actors"]:
        names[each["id"]] = each["class"] or each["name"] or "actor"
    parts = [
        (share, f"#{ident} {names.get(ident, '')}", f"job{ident % 6}")
        for ident, share in device["held"]
    ]
    parts += [(each["share"], _who(each), "soft") for each in device["others"] if each["share"]]
    room, pieces, begun, drawn = max(10, width - 2), [("|", "")], 0.0, 0
    for share, text, style in parts:
        begun += share
        end = min(room, round(room * begun))
        pieces.append((_fitted(text, end - drawn), style))
        drawn = max(drawn, end)
    pieces.append((" " * (room - drawn), ""))
    return [*pieces, ("|", "")]


def _fitted(text: str, width: int) -> str:
    """The text in exactly so many columns, with a mark where it begins."""
    if width <= 0:
        return ""
    return "[" + _cut(text, width - 1).ljust(width - 1, "·") if width > 1 else "["


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _device(device: Mapping[str, Any]) -> str:
    usage = device["usage"]
    total = usage["memory_total"] or device["memory"]
    said = [device["type"] or ("logical" if device["logical"] else device["name"])]
    if usage["memory_used"] is not None and total:
        said.append(f"{size_text(usage['memory_used'])} of {size_text(total)}")
    elif total:
        said.append(size_text(total))
    if usage["utilization"] is not None:
        said.append(f"{usage['utilization']:.0f} % in use")
    if usage["temperature"] is not None:
        said.append(f"{usage['temperature']:.0f} °C")
    if device["health"]:
        said.append(device["health"])
    return f"{device['resource']} {device['id']}  {', '.join(said)}, {device['free']:g} free"


def _running(job: Mapping[str, Any], passed: float) -> str:
    on = devices_text(job["devices"]) or "CPU"
    memory = job["memory"]
    said = [f"▶ {_job(job)}", on, f"{job['seconds'] + passed:.0f} s"]
    if memory["now"] is not None:
        said.append(f"{size_text(memory['now'])} now")
    if memory["peak"] is not None:
        said.append(f"{size_text(memory['peak'])} at most")
    return "  ".join(said)


def _waiting(job: Mapping[str, Any], passed: float) -> str:
    return f"… {_job(job)}  {job['seconds'] + passed:.0f} s  {job['waits_for'] or ''}".rstrip()


def _finished(job: Mapping[str, Any]) -> str:
    took = f"{job['state']} after {job['seconds']:.1f} s"
    hint = f", {job['hint']}" if job.get("hint") else ""
    return f"{_SIGNS.get(job['state'], ' ')} {_job(job)}  {took}{hint}"


def _job(job: Mapping[str, Any]) -> str:
    place = f"In[{job['cell']}]"
    said = "" if job["cell"] is None or job["name"] == place else f" {place}"
    return f"#{job['id']} {job['name']}{said}"


def _notebook(session: Mapping[str, Any]) -> str:
    return str(session["notebook"] or "session").rpartition("/")[2]


def _who(other: Mapping[str, Any]) -> str:
    name = str(other["notebook"] or f"process {other['pid']}").rpartition("/")[2]
    return f"{name} ({other['user']})" if other["user"] else name


def _size(value: int | None) -> str:
    return "" if value is None else f", {size_text(value)}"


def joined(line: Line) -> str:
    """The line without styles."""
    return "".join(text for text, _ in line).rstrip()
