"""`Timeline`: the history of a session as a table, an SVG or a trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from gpunb.scheduler.markup import as_html
from gpunb.scheduler.resources import GPU

TINTS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The colours of Okabe and Ito, which colour-blind people can tell apart."""

_WIDTH, _LEFT, _ROW, _GAP = 900, 90, 22, 8
_MAX_BARS = 2000
"""An SVG shows at most this many spans, the last ones."""


@dataclass(frozen=True, slots=True)
class CellUse:
    """The use of devices by all jobs of one cell.

    Attributes:
        cell: number of the cell, as in ``In[7]``; None for jobs that no cell submitted.
        notebook: path of the cell's notebook, in a head process; None in a kernel.
        jobs: number of jobs.
        gpu_seconds: sum over the jobs of their share of devices times their seconds.
        waited: sum of the seconds that the jobs waited.
        peak: the most bytes of device memory that one of the jobs used; None if not measured.
    """

    cell: int | None
    jobs: int
    gpu_seconds: float
    waited: float
    peak: int | None
    notebook: str | None = None


class Timeline:
    """The history of a session: which job ran when, on which devices.

    Attributes:
        spans: jobs and actors as dicts, in the order of their submission; times in seconds since
            1970, `devices` as triples of resource, id and share.
        devices: the session's devices, as dicts with id, name, type and resource.
        totals: sums over the whole session, also over jobs that are no longer in `spans`.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self.spans: Sequence[Mapping[str, Any]] = facts["spans"]
        self.devices: Sequence[Mapping[str, Any]] = facts["devices"]
        self.totals: Mapping[str, Any] = facts["totals"]

    @property
    def gpu_seconds(self) -> float:
        """Sum over the whole session of the shares of devices that were held, times the seconds."""
        return float(self.totals["gpu_seconds"])

    def cells(self) -> list[CellUse]:
        """The use of devices by each cell, in their order. Idle time of an actor, or of a session
        of cells, counts for the cell that started it."""
        found: dict[tuple[str | None, int | None], list[Mapping[str, Any]]] = {}
        for span in self.spans:
            found.setdefault((_notebook(span), span["cell"]), []).append(span)
        return [_cell_use(key, found[key], self.spans) for key in sorted(found, key=_sort_key)]

    def notebooks(self) -> dict[str | None, float]:
        """GPU-seconds by the path of the notebook: those that were attached to the head process.
        None holds the jobs of no notebook."""
        found: dict[str | None, float] = {}
        for use in self.cells():
            found[use.notebook] = round(found.get(use.notebook, 0.0) + use.gpu_seconds, 3)
        return found

    def to_json(self) -> str:
        """The whole history as JSON."""
        return json.dumps(self._facts)

    @overload
    def to_chrome_trace(self, path: None = None) -> str: ...

    @overload
    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None: ...

    def to_chrome_trace(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """The history in the Trace Event Format, for chrome://tracing and
        https://ui.perfetto.dev: a process for each device, and a row for each job that shares the
        device at the same time. Returns the text, or writes it to `path` and returns None."""
        events = list(_trace(self.devices, self.spans, self._facts["time"]))
        return _text_or_file(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), path)

    @overload
    def to_svg(self, path: None = None) -> str: ...

    @overload
    def to_svg(self, path: str | os.PathLike[str]) -> None: ...

    def to_svg(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """The history as an SVG image: time to the right, a lane for each device. Returns the
        text, or writes it to `path` and returns None."""
        return _text_or_file(_svg(self.devices, self.spans, self._facts["time"]), path)

    def __repr__(self) -> str:
        return (
            f"<gpunb timeline: {len(self.spans)} jobs on {len(self.devices)} devices, "
            f"{self.gpu_seconds:.1f} GPU-seconds>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{as_html(_cell_name(use))}</td><td>{use.jobs}</td>"
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


def _cell_name(use: CellUse) -> str:
    """The cell and its notebook, such as ``In[7]`` or ``In[7] sweep.ipynb``."""
    cell = "" if use.cell is None else f"In[{use.cell}]"
    return f"{cell} {os.path.basename(use.notebook or '')}".strip()


def _cell_use(
    key: tuple[str | None, int | None],
    spans: Sequence[Mapping[str, Any]],
    known: Sequence[Mapping[str, Any]],
) -> CellUse:
    """The use of one cell, from its spans. An actor's span has its GPU-seconds, not its calls."""
    actors = {each["id"] for each in known if each["kind"] == "actor"}
    own = [each for each in spans if each["actor"] not in actors and each["kind"] != "create"]
    peaks = [each["peak"] for each in spans if each["peak"] is not None]
    return CellUse(
        key[1],
        sum(each["kind"] != "actor" for each in spans),
        round(sum(each["gpu_seconds"] for each in own), 3),
        round(sum(each["waited"] for each in spans), 3),
        max(peaks, default=None),
        key[0],
    )


def _sort_key(key: tuple[str | None, int | None]) -> tuple[str, bool, int]:
    """Sort key by notebook and cell; jobs of no cell come last."""
    notebook, cell = key
    return notebook or "", cell is None, cell or 0


def _text_or_file(text: str, path: str | os.PathLike[str] | None) -> str | None:
    """The text; None after it was written to `path`, if there is one."""
    if path is None:
        return text
    with open(os.path.expanduser(path), "w", encoding="utf-8") as file:
        file.write(text)
    return None


Bar = tuple[Mapping[str, Any], float, float, float, int]
"""A span on a device: the span, its share, the times of its begin and end, and its row."""


def bars(device: Mapping[str, Any], spans: Sequence[Mapping[str, Any]], now: float) -> list[Bar]:
    """The bars of the jobs and actors that held a device, in rows without overlapping bars."""
    ends: list[float] = []
    found: list[Bar] = []
    for span in sorted(spans, key=lambda each: each["started"] or 0.0):
        held = {(kind, ident): share for kind, ident, share in span["devices"]}
        share = held.get((device.get("resource", GPU), device["id"]))
        if share is None or span["started"] is None or span["kind"] in ("create", "method"):
            continue
        if span["actor"] is not None:
            continue  # its actor, or its session of cells, has a bar
        end = now if span["ended"] is None else span["ended"]
        row = next((at for at, free in enumerate(ends) if free <= span["started"]), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        found.append((span, share, span["started"], end, row))
    return found


def _device_name(device: Mapping[str, Any]) -> str:
    return f"{device.get('resource', GPU)} {device['id']}"


def _trace(
    devices: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], now: float
) -> Iterator[dict[str, Any]]:
    start = min((each["submitted"] for each in spans), default=now)
    for number, device in enumerate(devices):
        name = f"{_device_name(device)} {device['type'] or ''}".strip()
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
    spans = spans[-_MAX_BARS:]
    start = min((each["submitted"] for each in spans), default=now - 1)
    end = max([each["ended"] or now for each in spans], default=now)
    scale = (_WIDTH - _LEFT) / max(0.001, end - start)
    pieces, top = [], 4
    for device in devices:
        lanes = bars(device, spans, now)
        rows = 1 + max((each[-1] for each in lanes), default=0)
        height = rows * _ROW
        pieces.append(
            f'<text x="0" y="{top + 15}">{as_html(_device_name(device))}</text>'
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT}" height="{height}" '
            'fill="none" stroke="#8888"/>'
        )
        pieces += [_svg_bar(each, top, _LEFT, start, scale) for each in lanes]
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


def _svg_bar(bar: Bar, top: int, left: int, start: float, scale: float) -> str:
    span, share, began, ended, row = bar
    x, width = left + (began - start) * scale, max(1.0, (ended - began) * scale)
    label = as_html(_label(span))
    text = f"{label}: {as_html(span['state'])}, {ended - began:.1f} s, share {share:g}"
    dashes = "" if span["state"] == "done" else ' stroke-dasharray="3 2"'
    tint = TINTS[span["id"] % len(TINTS)]
    shown = label if len(label) * 7 < width else ""
    y = top + row * _ROW + 2
    return (
        f'<g><title>{text}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{_ROW - 4}" fill="{tint}" fill-opacity=".35" stroke="{tint}"{dashes}/>'
        f'<text x="{x + 4:.1f}" y="{y + 13}">{shown}</text></g>'
    )
