"""The status of a session as text and as HTML, from the snapshot that everything shows."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpunb.core.resources import GPU, devices_text, size_text
from gpunb.core.snapshot import actor_text
from gpunb.notebook.card import seconds

_STYLE = """
<style>
.gpunb-status table {border-collapse: collapse; margin: .3em 0}
.gpunb-status.gpunb-status table td, .gpunb-status.gpunb-status table th {
  padding: .1em .7em .1em 0; text-align: left}
.gpunb-status .bar {display: inline-block; width: 8em; height: .8em; border: 1px solid #8888;
  background: linear-gradient(#5a9 0 0) no-repeat; vertical-align: middle}
.gpunb-status .why {opacity: .75}
</style>
"""

FINISHED = 5
"""Finished jobs to show."""


class StatusView:
    """What `%gpu` shows: devices with who holds them, actors and sessions of cells, running,
    waiting and finished jobs, and what kernels that are gone have left in a head process."""

    def __init__(self, facts: Mapping[str, Any], left: Sequence[Mapping[str, Any]] = ()) -> None:
        self.facts = facts
        self._left = left

    def __repr__(self) -> str:
        lines = []
        for head, rows in self._tables():
            widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
            for row in [head, *rows]:
                cells = zip(row, widths, strict=True)
                lines.append("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
            lines.append("")
        lines.extend(self._rest())
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        tables = []
        for head, rows in self._tables(bars=True):
            header = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
            body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
            tables.append(f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>")
        rest = "".join(f"<div>{html.escape(each)}</div>" for each in self._rest())
        return f'<div class="gpunb-status">{_STYLE}{"".join(tables)}{rest}</div>'

    def _tables(self, *, bars: bool = False) -> Iterable[tuple[list[str], list[list[str]]]]:
        facts = self.facts
        names = {job["id"]: job["name"] for job in facts["running"]}
        names.update((actor["id"], actor_text(actor)) for actor in facts["actors"])
        devices = facts["devices"]
        plain = all(each["resource"] == GPU for each in devices)
        yield (
            ["GPU" if plain else "device", "type", "memory", "in use", "by"],
            [
                [str(each["id"]) if plain else f"{each['resource']} {each['id']}", *rest]
                for each in devices
                for rest in [_device(each, names, bars=bars)]
            ]
            or [["none", "", "", "", ""]],
        )
        if facts["actors"]:
            rows = [_actor(each) for each in facts["actors"]]
            yield ["actor", "", "on", "is"], rows
        if facts["running"]:
            rows = [_job(job, _since(job)) for job in facts["running"]]
            yield ["running", "job", "on", "since"], rows
        if facts["waiting"]:
            rows = [
                [f"#{job['id']}", job["name"], str(job["waits_for"] or "")]
                for job in facts["waiting"]
            ]
            yield ["waiting", "job", "why"], rows
        if facts["finished"]:
            rows = [
                [
                    f"#{job['id']}",
                    job["name"],
                    _was_on(job),
                    f"{job['seconds']:.2f} s",
                    job["state"] + (f", {job['hint']}" if job["hint"] else ""),
                ]
                for job in facts["finished"][:FINISHED]
            ]
            yield ["finished", "job", "on", "took", "ended"], rows
        if self._left:
            rows = [[f"#{each['id']}", each["name"], *_left(each)] for each in self._left]
            yield ["left", "job", "by", "is", "have it with"], rows

    def _rest(self) -> list[str]:
        """What has no place in a table."""
        more = self.facts["queued"] - len(self.facts["waiting"])
        said = [f"and {more} more waiting"] if more > 0 else []
        if not self.facts["devices"]:
            said += [each for each in self.facts["notes"] if each not in self.facts["warnings"]]
        return said + [f"warning: {each}" for each in self.facts["warnings"]]


def _device(device: Mapping[str, Any], names: Mapping[int, str], *, bars: bool) -> list[str]:
    """What there is to say of a device beside its name."""
    used = 1.0 - device["free"]
    holders = ", ".join(
        f"#{task} {names.get(task, '')}".strip() + f" ({share:g})" for task, share in device["held"]
    )
    holders = "; ".join(each for each in (holders, _others(device)) if each)
    kind = device["type"] or ("logical" if device["logical"] else device["name"])
    memory = _memory(device)
    shown = f"{used:.4f}".rstrip("0").rstrip(".")
    return [kind, memory, f"\x00{used:.4f}\x00{shown}" if bars else shown, holders]


def _memory(device: Mapping[str, Any]) -> str:
    """What there is of it, and what is used as far as somebody measures."""
    usage = device["usage"]
    total = usage["memory_total"] or device["memory"]
    if not total:
        return ""
    said = size_text(total)
    if usage["memory_used"] is not None:
        said = f"{size_text(usage['memory_used'])} of {said}"
    if usage["temperature"] is not None:
        said += f", {usage['temperature']:.0f} °C"
    return said


def _others(device: Mapping[str, Any]) -> str:
    """Who else is there: other kernels with their shares, and processes that know nothing of us."""
    said = []
    for each in device["others"]:
        who = (each["notebook"] or f"process {each['pid']}").rpartition("/")[2]
        user = f" of {each['user']}" if each["user"] else ""
        share = f" ({each['share']:g})" if each["share"] else ""
        memory = f" with {size_text(each['memory'])}" if each["memory"] else ""
        said.append(who + user + share + memory)
    return "also " + ", ".join(said) if said else ""


def _since(job: Mapping[str, Any]) -> str:
    memory = job["memory"]
    said = [f"for {job['seconds']:.1f} s"]
    if memory["now"] is not None:
        said.append(f"{size_text(memory['now'])} now")
    if memory["peak"] is not None:
        said.append(f"{size_text(memory['peak'])} at most")
    return ", ".join(said)


def _actor(actor: Mapping[str, Any]) -> list[str]:
    state = actor["state"]
    if state == "alive":
        running = f"runs {actor['running']}" if actor["running"] else "idle"
        state = running + (f", {actor['waiting']} waiting" if actor["waiting"] else "")
    held = devices_text(actor["devices"]) or _unless_nowhere(actor)
    return [f"#{actor['id']}", actor_text(actor), held, state]


def _left(cell: Mapping[str, Any]) -> list[str]:
    """A background cell or a session whose kernel is gone: whose, how it is, and the way to it."""
    whose = (cell["notebook"] or "a kernel that is gone").rpartition("/")[2]
    if cell["state"] == "session":
        return [whose, "there", f"%%gpu --session {cell['session']}"]
    state = str(cell["state"])
    if cell["ago"] is not None:
        state += f", {seconds(cell['ago'])} ago"
    return [whose, state, f"%gpu wait {cell['id']}"]


def _job(job: Mapping[str, Any], last: str) -> list[str]:
    return [f"#{job['id']}", job["name"], _on(job), last]


def _on(job: Mapping[str, Any]) -> str:
    return devices_text(job["devices"], shares=False) or "CPU"


def _was_on(job: Mapping[str, Any]) -> str:
    return devices_text(job["devices"], shares=False) or _unless_nowhere(job)


def _unless_nowhere(what: Mapping[str, Any]) -> str:
    """What has no process yet, or never had one, is on nothing."""
    return "" if what["pid"] is None else "CPU"


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{_cell(each)}</td>" for each in row)


def _cell(text: str) -> str:
    if not text.startswith("\x00"):
        return html.escape(text)
    _, used, shown = text.split("\x00")
    percent = 100 * float(used)
    return (
        f'<span class="bar" role="meter" aria-label="share in use" aria-valuemin="0" '
        f'aria-valuemax="1" aria-valuenow="{used}" style="background-size: {percent:.0f}% 100%">'
        f"</span> {shown}"
    )
