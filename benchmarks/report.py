"""The table, and the machine that it was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.lines import Line, scaled

HEAD = ("measure", "to floor", "to peers", "value", "goal", "met?", "note")
PACKAGES = ("numpy", "torch", "cloudpickle", "loky", "ipython", "ipyparallel", "ray")


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table whose columns are aligned."""
    rows = [HEAD, *(_row(line) for line in lines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    widths[-1] = len(HEAD[-1])
    text = ["| " + " | ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(row if row.endswith("|") else f"{row} |" for row in text)


def _row(line: Line) -> tuple[str, ...]:
    floor = f"{_times(line.to_floor)} {line.floor[0]}" if line.floor and line.to_floor else ""
    others = ", ".join(f"{name} {_times(ratio)}" for name, ratio in line.to_peers.items())
    value = "-" if line.value is None else scaled(line.value, line.unit)
    met = {True: "yes", False: "NO", None: ""}[line.met]
    return line.name, floor, others, value, _goal(line), met, line.note


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _goal(line: Line) -> str:
    goals = []
    if line.goal is not None:
        goals.append(f"{'>=' if line.unit == '1/s' else '<='} {scaled(line.goal, line.unit)}")
    if line.goal_of_floor is not None:
        goals.append(f"<= {line.goal_of_floor:g}x the floor")
    if line.goal_of_peer is not None:
        goals.append(f">= {line.goal_of_peer[1]:g}x {line.goal_of_peer[0]}")
    return ", ".join(goals)


def machine() -> dict[str, Any]:
    """What a reader has to know about where and when this was measured."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "load": [round(each, 2) for each in os.getloadavg()],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def headline(facts: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return (
        f"{facts['processor']}, {facts['cpus']} CPUs, load {facts['load'][0]}; "
        f"Python {facts['python']}; {packages}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            return next(names, platform.machine())
    except OSError:
        return platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def brief(line: Line) -> str:
    """A line as it comes in, for whoever waits."""
    value = "-" if line.value is None else scaled(line.value, line.unit)
    return f"{line.name}: {value}{'  (' + line.note + ')' if line.note else ''}"
