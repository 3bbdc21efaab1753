"""Measures gpunb and prints a table: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import probe, report
from benchmarks.lines import Line, Result
from benchmarks.sessions import REAL

TOPICS = (
    "floors",
    "startup",
    "fresh",
    "steps",
    "cells",
    "warm",
    "head",
    "on_ray",
    "many",
    "actors",
    "data",
    "queue",
    "leases",
    "idle",
    "core",
    "sampler",
    "gpu",
    "monitor",
    "sweeps",
    "ranks",
    "browser",
    "growth",
)
OUT = Path(__file__).parent / "out"


class Bench:
    """What a topic may want to know, and tell."""

    def __init__(self, *, quick: bool, peers: bool) -> None:
        self.quick = quick
        self.peers = peers
        self.skipped: dict[str, str] = {}

    def n(self, full: int, quick: int) -> int:
        """The number of runs."""
        return quick if self.quick else full

    def run(self, call: probe.Call) -> Result:
        return probe.run(call)

    def note(self, peers: Mapping[str, Result]) -> None:
        """Remember which peers could not be measured, and why."""
        self.skipped |= {name: x["skipped"] for name, x in peers.items() if "skipped" in x}


def main() -> int:
    options = _options()
    if options.list:
        for name in TOPICS:
            print(f"{name:8} {_topic(name).__doc__.splitlines()[0]}")
        return 0
    if options.real:
        os.environ[REAL] = "1"
    # As an installation leaves it, and all that it is compared with: processes that start load it.
    compileall.compile_dir(Path(__file__).parent.parent / "gpunb", quiet=1)
    bench = Bench(quick=options.quick, peers=options.peers)
    facts = report.machine()
    print(report.headline(facts), flush=True)
    lines: list[Line] = []
    try:
        for name in options.only:
            _measure(bench, name, lines)
    finally:
        # What was measured is shown even if the rest could not be.
        _report(bench, facts, lines, options.json)
    return 1 if options.check and any(line.met is False for line in lines) else 0


def _measure(bench: Bench, name: str, lines: list[Line]) -> None:
    print(f"{name} ...", file=sys.stderr, flush=True)
    for line in _topic(name).measure(bench):
        lines.append(line)
        print(f"  {report.brief(line)}", file=sys.stderr, flush=True)


def _report(bench: Bench, facts: dict[str, Any], lines: list[Line], path: Path | None) -> None:
    print("\n" + report.table(lines) + "\n")
    for name, why in bench.skipped.items():
        print(f"{name}: {why}")
    path = path or OUT / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": facts,
        "quick": bench.quick,
        "lines": [line.as_dict() for line in lines],
        "skipped": bench.skipped,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    missed = [line.name for line in lines if line.met is False]
    for name in missed:
        print(f"falls short: {name}")
    print(f"{len(missed)} of {sum(x.met is not None for x in lines)} goals missed; all in {path}")


def _topic(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs: minutes, and more noise")
    parser.add_argument("--only", metavar="NAME,...", default=",".join(TOPICS), help="some topics")
    parser.add_argument("--json", metavar="PATH", type=Path, help="where all figures go")
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="leave the alternatives out"
    )
    parser.add_argument(
        "--real", action="store_true", help="use the machine's own devices, not simulated ones"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--list", action="store_true", help="say what topics there are")
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = set(options.only) - set(TOPICS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TOPICS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
