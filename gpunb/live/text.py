"""Snapshots as lines for a terminal: a lane for each device, and the jobs below.

Each line is a list of (text, style) pieces, so that it can be shown with colours or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from gpunb.scheduler.markup import escaped
from gpunb.scheduler.resources import devices_text, size_text

Piece: TypeAlias = tuple[str, str]
"""A text and its style: "" for none, "head", "soft", "warn", "job0" to "job5" for the memory that a
job uses, or "rest0" to "rest5" for the rest of its share."""

Line: TypeAlias = list[Piece]

ROWS = 8
"""Jobs of each list; the rest is counted."""

MINUTE = 12
"""Points of a device's history in the last minute."""

_LEVELS = "▁▂▃▄▅▆▇█"
_SIGNS = {"done": "✓", "failed": "✗", "cancelled": "■"}


def lines(snapshot: Mapping[str, Any], width: int, passed: float = 0.0) -> Iterator[Line]:
    """A session in lines of `width` columns, `passed` seconds after the snapshot."""
    session, counts = snapshot["session"], snapshot["counts"]
    text = f"{counts['running']} running, {counts['waiting']} waiting, {counts['finished']} done"
    yield [(f"{_notebook(session)} ", "head"), (f"pid {session['pid']}: {text}", "soft")]
    for device in snapshot["devices"]:
        yield [(_device(device), ""), (_trend(device["history"]), "soft")]
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
    memory = {each["id"]: each["memory"] for each in (*snapshot["running"], *snapshot["actors"])}
    for each in snapshot["actors"]:
        names[each["id"]] = each["class"] or each["name"] or "actor"
    parts: list[tuple[float, str, str, float]] = [
        (share, f"#{ident} {names.get(ident, '')}", str(ident % 6), _used(memory.get(ident)))
        for ident, share in device["held"]
    ]
    parts += [(each["share"], _who(each), "", 1.0) for each in device["others"] if each["share"]]
    room, pieces, begun, drawn = max(10, width - 2), [("|", "")], 0.0, 0
    for share, text, tint, used in parts:
        begun += share
        end = min(room, round(room * begun))
        fitted = _fitted(text, end - drawn)
        cut = round(used * len(fitted))
        pieces.append((fitted[:cut], f"job{tint}" if tint else "soft"))
        pieces.append((fitted[cut:], f"rest{tint}"))
        drawn = max(drawn, end)
    pieces = [each for each in pieces if each[0]]
    pieces.append((" " * (room - drawn), ""))
    return [*pieces, ("|", "")]


def _used(memory: Mapping[str, Any] | None) -> float:
    """The part of its share that a job uses, at most 1.0; 1.0 if it is not known."""
    if not memory or memory["now"] is None or not memory["share"]:
        return 1.0
    return min(1.0, float(memory["now"] / memory["share"]))


def _trend(history: Mapping[str, Any] | None) -> str:
    """The use of a device in the last minute, a character a point; empty if nobody measures it."""
    points = history["utilization"][-MINUTE:] if history else []
    if all(each is None for each in points):
        return ""
    top = len(_LEVELS) - 1
    return "  " + "".join(" " if each is None else _LEVELS[each * top // 100] for each in points)


def _fitted(text: str, width: int) -> str:
    """The text in exactly `width` columns, with a mark at its start."""
    if width <= 0:
        return ""
    return "[" + _cut(text, width - 1).ljust(width - 1, "·") if width > 1 else "["


def _cut(text: str, width: int) -> str:
    text = escaped(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _device(device: Mapping[str, Any]) -> str:
    usage = device["usage"]
    total = usage["memory_total"] or device["memory"]
    facts = [device["type"] or ("logical" if device["logical"] else device["name"])]
    if usage["memory_used"] is not None and total:
        facts.append(f"{size_text(usage['memory_used'])} of {size_text(total)}")
    elif total:
        facts.append(size_text(total))
    if usage["utilization"] is not None:
        facts.append(f"{usage['utilization']:.0f} % in use")
    if usage["temperature"] is not None:
        facts.append(f"{usage['temperature']:.0f} °C")
    if usage.get("power") is not None:
        facts.append(f"{usage['power']:.0f} W")
    facts += [each for each in (device["health"], device["kept"]) if each]
    text = f"{device['resource']} {device['id']}  {', '.join(facts)}, {device['free']:g} free"
    return escaped(text)


def _running(job: Mapping[str, Any], passed: float) -> str:
    on = devices_text(job["devices"]) or "CPU"
    memory = job["memory"]
    facts = [f"▶ {_job(job)}", on, f"{job['seconds'] + passed:.0f} s"]
    if memory["now"] is not None:
        facts.append(f"{size_text(memory['now'])} now")
    if memory["peak"] is not None:
        facts.append(f"{size_text(memory['peak'])} at most")
    return "  ".join(facts)


def _waiting(job: Mapping[str, Any], passed: float) -> str:
    return f"… {_job(job)}  {job['seconds'] + passed:.0f} s  {job['waits_for'] or ''}".rstrip()


def _finished(job: Mapping[str, Any]) -> str:
    took = f"{job['state']} after {job['seconds']:.1f} s"
    hint = f", {job['hint']}" if job.get("hint") else ""
    return f"{_SIGNS.get(job['state'], ' ')} {_job(job)}  {took}{hint}"


def _job(job: Mapping[str, Any]) -> str:
    place = f"In[{job['cell']}]"
    cell = "" if job["cell"] is None or place in job["name"].split() else f" {place}"
    return f"#{job['id']} {titled(job)}{cell}"


def titled(job: Mapping[str, Any]) -> str:
    """The name of a job, and the number of its ranks if it has any."""
    ranks = len(job.get("ranks", ()))
    return f"{job['name']} in {ranks} ranks" if ranks else str(job["name"])


def _notebook(session: Mapping[str, Any]) -> str:
    return escaped(str(session["notebook"] or "session").rpartition("/")[2])


def _who(other: Mapping[str, Any]) -> str:
    name = str(other["notebook"] or f"process {other['pid']}").rpartition("/")[2]
    return escaped(f"{name} ({other['user']})" if other["user"] else name)


def _size(value: int | None) -> str:
    return "" if value is None else f", {size_text(value)}"


def joined(line: Line) -> str:
    """The line without styles."""
    return "".join(text for text, _ in line).rstrip()
