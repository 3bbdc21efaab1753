"""``gpunb history``: the GPU memory and the time that earlier runs took."""

from __future__ import annotations

import argparse
import json
import time

from gpunb.cli.output import print_text
from gpunb.engine.peak_history import PeakHistory, Row, history_file
from gpunb.exceptions import GpunbError
from gpunb.scheduler.auto_share import units_for
from gpunb.scheduler.explain import time_text
from gpunb.scheduler.resources import UNIT, amount, size_text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="forget all runs")


def run(options: argparse.Namespace) -> int:
    history = PeakHistory()
    if options.clear:
        history.clear()
    rows = history.rows()
    if history.problem:
        raise GpunbError(f"the history cannot be used: {history.problem}")
    if options.json:
        runs = [{**row._asdict(), "share": row.share / UNIT} for row in rows]
        print(json.dumps({"file": str(history_file()), "runs": runs}, indent=2))
        return 0
    for row in rows:
        print_text(_line(row))
    if not rows:
        print_text(f"no runs in {history_file()}: only those with the share `auto` are noted")
    return 0


def _line(row: Row) -> str:
    ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.ended))
    ran = "" if row.seconds is None else f" for {time_text(row.seconds)}"
    return (
        f"{ended} {row.name}: {size_text(row.peak)} of {size_text(row.memory)} at a share of "
        f"{amount(row.share)}{ran}, inputs of {size_text(row.size)}; alone it would get "
        f"{amount(units_for(row.peak, row.memory))} (code {row.code[:8]})"
    )
