"""A sweep as rows of plain values for the widget, and as HTML for front ends without widgets."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpunb.api.reports import as_plain, is_scalar
from gpunb.scheduler.markup import LAYOUT, as_html, escaped
from gpunb.sweeps.sweep import Sweep
from gpunb.sweeps.trials import Trial, shown

ROWS = 50
"""Rows of the table that stays in the notebook."""

POINTS = 60
"""Points of a curve."""

CURVES = 4
"""Metrics with a curve."""

TEXT = 200_000
"""Characters of a trial's output that are shown."""

IMAGES = ("image/png", "image/jpeg", "image/svg+xml")

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_COLUMNS = ("state", "seconds", "devices", "error")


def state_of(sweep: Sweep) -> dict[str, Any]:
    """Everything but the rows."""
    counts = sweep.counts()
    return {
        "name": escaped(sweep.name),
        "total": len(sweep.trials),
        "counts": counts,
        "over": sweep.done,
        "notes": [escaped(each, LAYOUT) for each in sweep.notes],
    }


def row_of(trial: Trial) -> dict[str, Any]:
    """A trial as plain values."""
    return {
        "number": trial.number,
        "state": trial.state,
        "params": {escaped(name): _cell(each) for name, each in trial.params.items()},
        "metrics": {escaped(name): _cell(each) for name, each in trial.metrics.items()},
        "seconds": trial.seconds,
        "devices": trial.devices,
        "error": escaped(trial.reason),
        "resumed": trial.resumed,
        "curves": _curves(trial),
    }


def signature(trial: Trial) -> tuple[Any, ...]:
    """A value that changes with the row, but for the seconds of a running trial."""
    return trial.state, len(trial.reports), len(trial.params), trial.devices


def _cell(value: Any) -> Any:
    """A finite number, a bool or a text."""
    plain = as_plain(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    if is_scalar(plain) and not isinstance(plain, str) and plain is not None:
        return plain
    return escaped(shown(plain))


def _curves(trial: Trial) -> dict[str, list[float]]:
    """The numbers that were reported, by metric, thinned out to `POINTS`."""
    names = dict.fromkeys(itertools.chain.from_iterable(trial.reports))
    curves = {}
    for name in itertools.islice(names, CURVES):
        values = [each.get(name) for each in trial.reports]
        numbers = [
            each for each in values if isinstance(each, (int, float)) and math.isfinite(each)
        ]
        step = max(1, math.ceil(len(numbers) / POINTS))
        if len(numbers) > 1:
            curves[escaped(name)] = numbers[::step]
    return curves


def output_of(trial: Trial) -> list[dict[str, str]]:
    """The output of a trial, in order: texts and images, each by its type; at the end its error."""
    found = list(_merged(_items(trial)))
    size = 0
    for at, each in enumerate(found):
        size += len(each["data"])
        if each["type"] == "text" and size > TEXT:
            found[at] = {"type": "text", "data": "... the rest is not shown ...\n"}
            del found[at + 1 :]
            break
    if trial.error is not None:
        found.append({"type": "text", "data": escaped(str(trial.error), LAYOUT)})
    if trial.resumed:
        text = "The result is from the sweep's file, which keeps no output.\n"
        found.append({"type": "text", "data": text})
    return found


def _items(trial: Trial) -> Iterator[dict[str, str]]:
    for kind, what, content in trial.log:
        if kind == "text":
            yield {"type": "text", "data": _COLOUR.sub("", content["text"])}
        elif "traceback" in content:
            text = _COLOUR.sub("", "\n".join(content["traceback"])) + "\n"
            yield {"type": "text", "data": text}
        elif what != "clear_output":
            data: Mapping[str, Any] = content["data"]
            kinds = [each for each in IMAGES if isinstance(data.get(each), str)]
            if kinds:
                yield {"type": kinds[0], "data": data[kinds[0]]}
            elif "text/plain" in data:
                yield {"type": "text", "data": f"{data['text/plain']}\n"}


def _merged(items: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The items, with texts that follow each other as one."""
    for kind, group in itertools.groupby(items, key=lambda item: item["type"]):
        if kind != "text":
            yield from group
        else:
            text = "".join(each["data"] for each in group)
            yield {"type": kind, "data": escaped(text, LAYOUT + "\r")}


def html_of(sweep: Sweep) -> str:
    """The sweep as a table: trials with a result first, at most `ROWS`."""
    facts = state_of(sweep)
    trials = sorted(sweep.trials, key=lambda each: each.state in ("queued", "cancelled"))
    rows = [row_of(each) for each in trials[:ROWS]]
    names = dict.fromkeys(name for row in rows for name in (*row["params"], *row["metrics"]))
    head = ("trial", *names, *_COLUMNS)
    body = []
    for row in rows:
        values = {**row["params"], **row["metrics"]}
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        more = (row["state"], seconds, row["devices"], row["error"])
        cells = [row["number"], *(values.get(name, "") for name in names), *more]
        body.append("".join(f"<td>{as_html(shown(each))}</td>" for each in cells))
    rest = len(trials) - len(rows)
    lines = [*facts["notes"], *([f"and {rest:,} more trials"] if rest else [])]
    return (
        f'<div class="gpunb-sweep"><p><b>{as_html(facts["name"])}</b> '
        f"{as_html(summary(facts))}</p><table><thead><tr>"
        f"{''.join(f'<th>{as_html(each)}</th>' for each in head)}</tr></thead><tbody>"
        f"{''.join(f'<tr>{each}</tr>' for each in body)}</tbody></table>"
        f"{''.join(f'<p>{as_html(each)}</p>' for each in lines)}</div>"
    )


def summary(facts: Mapping[str, Any]) -> str:
    """The counts in words."""
    counts = ", ".join(f"{count:,} {state}" for state, count in facts["counts"].items())
    return f"{facts['total']:,} trials: {counts}"
