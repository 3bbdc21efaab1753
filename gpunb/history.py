"""The history of a session as people and other programs read it: a table, an SVG, a trace."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from gpunb.core.resources import GPU

TINTS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which people tell apart whatever colours they see."""

_WIDTH, _LEFT, _ROW, _GAP = 900, 90, 22, 8
_DRAWN = 2000
"""Bars in an SVG, at most: the last ones."""


@dataclass(frozen=True, slots=True)
class CellUse:
    """What the jobs of one cell took together.

    Attributes:
        cell: its number, as in ``In[7]``; None for what no cell has handed in.
        notebook: the attached notebook that it is in, in a head process; None in a kernel.
        jobs: how many there were.
        gpu_seconds: the shares of devices that they had, times the seconds.
        waited: seconds that they waited, together.
        peak: bytes that one of them had at most; None if nobody measured.
    """

    cell: int | None
    jobs: int
    gpu_seconds: float
    waited: float
    peak: int | None
    notebook: str | None = None


class Timeline:
    """What ran when, on which devices.

    Attributes:
        spans: jobs and actors as dicts, in the order in which they were handed in; times in
            seconds since 1970, `devices` as triples of resource, id and share.
        devices: the session's, as dicts with id, name, type and resource.
        totals: of the whole session, also of what is not among the spans any more.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self.spans: Sequence[Mapping[str, Any]] = facts["spans"]
        self.devices: Sequence[Mapping[str, Any]] = facts["devices"]
        self.totals: Mapping[str, Any] = facts["totals"]

    @property
    def gpu_seconds(self) -> float:
        """Of the whole session: the shares of devices that were held, times the seconds."""
        return float(self.totals["gpu_seconds"])

    def cells(self) -> list[CellUse]:
        """What each cell took, in their order. The time that a session of cells, or an actor, is
        idle belongs to the cell that started it."""
        found: dict[tuple[str | None, int | None], list[Mapping[str, Any]]] = {}
        for span in self.spans:
            found.setdefault((_notebook(span), span["cell"]), []).append(span)
        return [_use(key, found[key], self.spans) for key in sorted(found, key=_last_without)]

    def notebooks(self) -> dict[str | None, float]:
        """GPU-seconds of each notebook, by its path: of a head process those of the notebooks that
        were attached to it, and None for what belongs to none."""
        found: dict[str | None, float] = {}
        for use in self.cells():
            found[use.notebook] = round(found.get(use.notebook, 0.0) + use.gpu_seconds, 3)
        return found

    def to_json(self) -> str:
        """Everything, as a text of JSON."""
        return json.dumps(self._facts)

    @overload
    def to_chrome_trace(self, path: None = None) -> str: ...

    @overload
    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None: ...

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """In the Trace Event Format, for chrome://tracing and https://ui.perfetto.dev: a process
        for each device, and a row for each job that shares it at one time. Returns the text, or
        writes it to `path` and returns None."""
        events = list(_trace(self.devices, self.spans, self._facts["time"]))
        return _written(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), path)

    @overload
    def to_svg(self, path: None = None) -> str: ...

    @overload
    def to_svg(self, path: str | os.PathLike[str]) -> None: ...

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """As a picture: time to the right, a lane for each device. Returns the text, or writes it
        to `path` and returns None."""
        return _written(_svg(self.devices, self.spans, self._facts["time"]), path)

    def __repr__(self) -> str:
        return (
            f"<gpunb timeline: {len(self.spans)} jobs on {len(self.devices)} devices, "
            f"{self.gpu_seconds:.1f} GPU-seconds>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(_place(use))}</td><td>{use.jobs}</td>"
            f"<td>{use.gpu_seconds:.1f}</td><td>{use.waited:.1f}</td>"
            f"<td>{'' if use.peak is None else f'{use.peak / 2**30:.2f} GiB'}</td></tr>"
            for use in self.cells()
        )
        head = "".join(
            f"<th>{each}</th>" for each in ("cell", "jobs", "GPU-seconds", "waited, s", "peak")
        )
        return f"<div>{self.to_svg()}<table><tr>{head}</tr>{rows}</table></div>"


def _notebook(span: Mapping[str, Any]) -> str | None:
    client = span.get("client") or {}
    notebook: str | None = client.get("notebook")
    return notebook


def _place(use: CellUse) -> str:
    """Such as ``In[7]``, or ``In[7] sweep.ipynb``."""
    cell = "" if use.cell is None else f"In[{use.cell}]"
    return f"{cell} {os.path.basename(use.notebook or '')}".strip()


def _use(
    key: tuple[str | None, int | None],
    spans: Sequence[Mapping[str, Any]],
    known: Sequence[Mapping[str, Any]],
) -> CellUse:
    """Of these spans of a cell. Calls of an actor do not count beside its own life."""
    lives = {each["id"] for each in known if each["kind"] == "actor"}
    own = [each for each in spans if each["actor"] not in lives and each["kind"] != "create"]
    peaks = [each["peak"] for each in spans if each["peak"] is not None]
    return CellUse(
        key[1],
        sum(each["kind"] != "actor" for each in spans),
        round(sum(each["gpu_seconds"] for each in own), 3),
        round(sum(each["waited"] for each in spans), 3),
        max(peaks, default=None),
        key[0],
    )


def _last_without(key: tuple[str | None, int | None]) -> tuple[str, bool, int]:
    notebook, cell = key
    return notebook or "", cell is None, cell or 0


def _written(text: str, path: str | os.PathLike[str] | None) -> str | None:
    """The text, unless it goes into a file."""
    if path is None:
        return text
    with open(os.path.expanduser(path), "w", encoding="utf-8") as file:
        file.write(text)
    return None


Bar = tuple[Mapping[str, Any], float, float, float, int]
"""A span on a device: the span, its share, when it began and ended, and its row there."""


def bars(device: Mapping[str, Any], spans: Sequence[Mapping[str, Any]], now: float) -> list[Bar]:
    """What held shares of a device, in rows such that no two bars of a row overlap."""
    ends: list[float] = []
    found: list[Bar] = []
    for span in sorted(spans, key=lambda each: each["started"] or 0.0):
        held = {(kind, ident): share for kind, ident, share in span["devices"]}
        share = held.get((device.get("resource", GPU), device["id"]))
        if share is None or span["started"] is None or span["kind"] in ("create", "method"):
            continue
        if span["actor"] is not None:
            continue  # the actor, or the session of cells, has a bar
        end = now if span["ended"] is None else span["ended"]
        row = next((at for at, free in enumerate(ends) if free <= span["started"]), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        found.append((span, share, span["started"], end, row))
    return found


def _named(device: Mapping[str, Any]) -> str:
    return f"{device.get('resource', GPU)} {device['id']}"


def _trace(
    devices: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], now: float
) -> Iterator[dict[str, Any]]:
    start = min((each["submitted"] for each in spans), default=now)
    for number, device in enumerate(devices):
        name = f"{_named(device)} {device['type'] or ''}".strip()
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
        for span, share, began, ended, row in bars(device, spans, now):
            yield {
                "ph": "X",
                "pid": number,
                "tid": row,
                "name": _label(span),
                "cat": span["kind"],
                "ts": round((began - start) * 1e6),
                "dur": max(1, round((ended - began) * 1e6)),
                "args": {
                    "id": span["id"],
                    "state": span["state"],
                    "share": share,
                    "waited": span["waited"],
                    "peak": span["peak"],
                },
            }


def _label(span: Mapping[str, Any]) -> str:
    place = f"In[{span['cell']}]"
    return f"#{span['id']} {span['name']}" + (
        "" if span["cell"] is None or span["name"] == place else f" {place}"
    )


def _svg(
    devices: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], now: float
) -> str:
    spans = spans[-_DRAWN:]
    start = min((each["submitted"] for each in spans), default=now - 1)
    end = max([each["ended"] or now for each in spans], default=now)
    scale = (_WIDTH - _LEFT) / max(0.001, end - start)
    pieces, top = [], 4
    for device in devices:
        lanes = bars(device, spans, now)
        rows = 1 + max((each[-1] for each in lanes), default=0)
        height = rows * _ROW
        pieces.append(
            f'<text x="0" y="{top + 15}">{html.escape(_named(device))}</text>'
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT}" height="{height}" '
            'fill="none" stroke="#8888"/>'
        )
        pieces += [_drawn(each, top, _LEFT, start, scale) for each in lanes]
        top += height + _GAP
    pieces.append(
        f'<text x="{_LEFT}" y="{top + 12}">0 s</text>'
        f'<text x="{_WIDTH}" y="{top + 12}" text-anchor="end">{end - start:.1f} s</text>'
    )
    title = f"{len(spans)} jobs on {len(devices)} devices in {end - start:.1f} s"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 20}" role="img" '
        f'aria-label="{title}" style="max-width:{_WIDTH}px" font-family="sans-serif" '
        f'font-size="12" fill="currentColor"><title>{title}</title>{"".join(pieces)}</svg>'
    )


def _drawn(bar: Bar, top: int, left: int, start: float, scale: float) -> str:
    span, share, began, ended, row = bar
    x, width = left + (began - start) * scale, max(1.0, (ended - began) * scale)
    label = html.escape(_label(span))
    text = f"{label}: {html.escape(span['state'])}, {ended - began:.1f} s, share {share:g}"
    dashes = "" if span["state"] == "done" else ' stroke-dasharray="3 2"'
    tint = TINTS[span["id"] % len(TINTS)]
    shown = label if len(label) * 7 < width else ""
    y = top + row * _ROW + 2
    return (
        f'<g><title>{text}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{_ROW - 4}" fill="{tint}" fill-opacity=".35" stroke="{tint}"{dashes}/>'
        f'<text x="{x + 4:.1f}" y="{y + 13}">{shown}</text></g>'
    )
