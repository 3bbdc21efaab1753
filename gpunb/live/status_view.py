"""The status of a session as text and as HTML, drawn from a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpunb.live.text import titled
from gpunb.notebook.job_card import seconds
from gpunb.scheduler.markup import LAYOUT, Bar, Piece, as_html, as_text, escaped
from gpunb.scheduler.resources import GPU, devices_text, size_text
from gpunb.scheduler.snapshot import actor_text

_STYLE = """
<style>
.gpunb-status table {border-collapse: collapse; margin: .3em 0}
.gpunb-status.gpunb-status table td, .gpunb-status.gpunb-status table th {
  padding: .1em .7em .1em 0; text-align: left}
.gpunb-status .why {opacity: .75}
</style>
"""

FINISHED = 5
"""Finished jobs to show."""


class StatusView:
    """The view of `%gpu`: devices with their holders, actors and sessions of cells, jobs that run,
    wait or have finished, and cells that ended kernels have left in a head process."""

    def __init__(self, facts: Mapping[str, Any], left: Sequence[Mapping[str, Any]] = ()) -> None:
        self.facts = facts
        self._left = left

    def __repr__(self) -> str:
        lines = []
        for head, rows in self._tables():
            table = [[as_text(each) for each in row] for row in (head, *rows)]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for row in table:
                cells = zip(row, widths, strict=True)
                lines.append("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
            lines.append("")
        lines.extend(escaped(each, LAYOUT) for each in self._rest())
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        tables = []
        for head, rows in self._tables():
            header = "".join(f"<th>{as_html(cell)}</th>" for cell in head)
            body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
            tables.append(f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>")
        rest = "".join(f"<div>{as_html(each)}</div>" for each in self._rest())
        return f'<div class="gpunb-status">{_STYLE}{"".join(tables)}{rest}</div>'

    def _tables(self) -> Iterable[tuple[list[str], Sequence[Sequence[Piece]]]]:
        """The head and the rows of each table that is not empty; of devices always."""
        facts = self.facts
        yield _devices(facts)
        finished = facts["finished"][:FINISHED]
        tables: list[tuple[list[str], list[list[str]]]] = [
            (["actor", "", "on", "is"], [_actor(each) for each in facts["actors"]]),
            (["running", "job", "on", "since"], [_running(each) for each in facts["running"]]),
            (["waiting", "job", "why"], [_waiting(each) for each in facts["waiting"]]),
            (["finished", "job", "on", "took", "ended"], [_finished(each) for each in finished]),
            (["left", "job", "by", "is", "have it with"], [_left(each) for each in self._left]),
        ]
        yield from (table for table in tables if table[1])

    def _rest(self) -> list[str]:
        """Lines below the tables."""
        more = self.facts["queued"] - len(self.facts["waiting"])
        lines = [f"and {more} more waiting"] if more > 0 else []
        if not self.facts["devices"]:
            lines += [each for each in self.facts["notes"] if each not in self.facts["warnings"]]
        return lines + [f"warning: {each}" for each in self.facts["warnings"]]


def _devices(facts: Mapping[str, Any]) -> tuple[list[str], list[list[Piece]]]:
    """The table of the devices."""
    names = {job["id"]: job["name"] for job in facts["running"]}
    names.update((actor["id"], actor_text(actor)) for actor in facts["actors"])
    plain = all(each["resource"] == GPU for each in facts["devices"])
    rows = [_device(each, names, plain) for each in facts["devices"]]
    head = ["GPU" if plain else "device", "type", "memory", "in use", "by"]
    return head, rows or [["none", "", "", "", ""]]


def _device(device: Mapping[str, Any], names: Mapping[int, str], plain: bool) -> list[Piece]:
    """The row of a device; `plain` if the table has GPUs only."""
    title = str(device["id"]) if plain else f"{device['resource']} {device['id']}"
    holders = ", ".join(
        f"#{task} {names.get(task, '')}".strip() + f" ({share:g})" for task, share in device["held"]
    )
    holders = "; ".join(each for each in (holders, _others(device)) if each)
    kind = device["type"] or ("logical" if device["logical"] else device["name"])
    return [title, kind, _memory(device), Bar.of(device), holders]


def _memory(device: Mapping[str, Any]) -> str:
    """The memory of a device, and the part in use where that is measured."""
    usage = device["usage"]
    total = usage["memory_total"] or device["memory"]
    if not total:
        return ""
    text = size_text(total)
    if usage["memory_used"] is not None:
        text = f"{size_text(usage['memory_used'])} of {text}"
    if usage["temperature"] is not None:
        text += f", {usage['temperature']:.0f} °C"
    if usage.get("power") is not None:
        text += f", {usage['power']:.0f} W"
    return text


def _others(device: Mapping[str, Any]) -> str:
    """Other users of a device: kernels with their shares, and processes without gpunb."""
    others = []
    for each in device["others"]:
        who = (each["notebook"] or f"process {each['pid']}").rpartition("/")[2]
        user = f" of {each['user']}" if each["user"] else ""
        share = f" ({each['share']:g})" if each["share"] else ""
        memory = f" with {size_text(each['memory'])}" if each["memory"] else ""
        others.append(who + user + share + memory)
    return "also " + ", ".join(others) if others else ""


def _running(job: Mapping[str, Any]) -> list[str]:
    memory = job["memory"]
    since = [f"for {job['seconds']:.1f} s"]
    if memory["now"] is not None:
        since.append(f"{size_text(memory['now'])} now")
    if memory["peak"] is not None:
        since.append(f"{size_text(memory['peak'])} at most")
    on = devices_text(job["devices"], shares=False) or "CPU"
    return [f"#{job['id']}", titled(job), on, ", ".join(since)]


def _waiting(job: Mapping[str, Any]) -> list[str]:
    return [f"#{job['id']}", titled(job), str(job["waits_for"] or "")]


def _finished(job: Mapping[str, Any]) -> list[str]:
    on = devices_text(job["devices"], shares=False) or _unless_nowhere(job)
    ended = job["state"] + (f", {job['hint']}" if job["hint"] else "")
    return [f"#{job['id']}", titled(job), on, f"{job['seconds']:.2f} s", ended]


def _actor(actor: Mapping[str, Any]) -> list[str]:
    state = actor["state"]
    if state == "alive":
        running = f"runs {actor['running']}" if actor["running"] else "idle"
        state = running + (f", {actor['waiting']} waiting" if actor["waiting"] else "")
    held = devices_text(actor["devices"]) or _unless_nowhere(actor)
    return [f"#{actor['id']}", actor_text(actor), held, state]


def _left(cell: Mapping[str, Any]) -> list[str]:
    """A background cell or a session whose kernel is gone: its kernel, its state, and the line that
    fetches it."""
    kernel = (cell["notebook"] or "a kernel that is gone").rpartition("/")[2]
    title, state = [f"#{cell['id']}", cell["name"], kernel], str(cell["state"])
    if state == "session":
        return [*title, "there", f"%%gpu --session {cell['session']}"]
    if cell["ago"] is not None:
        state += f", {seconds(cell['ago'])} ago"
    return [*title, state, f"%gpu wait {cell['id']}"]


def _unless_nowhere(what: Mapping[str, Any]) -> str:
    """``"CPU"``, or nothing for a job or actor without a process."""
    return "" if what["pid"] is None else "CPU"


def _cells(row: Sequence[Piece]) -> str:
    return "".join(f"<td>{as_html(each)}</td>" for each in row)
