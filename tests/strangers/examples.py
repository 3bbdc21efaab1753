"""Runs examples of other projects plainly and under gpunb, and prints what differs.

``python -m tests.strangers.examples FOLDER``. Each script or notebook in the folder runs plainly;
with each cell under ``%%gpu 0.5``; with the odd cells under ``%%gpu``; with the even cells under
``%%gpu``; and with each cell in a session. If a run differs from the plain one, the example runs
plainly a second time: a difference between the two plain runs is not counted. An example runs in
its own folder, and may write there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_core.utils import ensure_event_loop

from tests.strangers.comparing import Difference, Expected, differences, expected
from tests.strangers.running import MODES, PLAIN, run

EXPECTED = Path(__file__).parent / "expected_examples.toml"


@dataclass
class Report:
    """What was found of one example.

    Attributes:
        left_out: why the example cannot be compared; empty if it was.
        found: differences that nothing names.
        known: differences that are expected, each with the reason.
    """

    name: str
    cells: int = 0
    left_out: str = ""
    found: list[Difference] = field(default_factory=list)
    known: list[tuple[Difference, Expected]] = field(default_factory=list)

    @property
    def state(self) -> str:
        if self.left_out:
            return "left out"
        return "DIFFERS" if self.found else "expected" if self.known else "identical"

    def judge(self, known: Sequence[Expected]) -> None:
        """Move the differences that are expected."""
        for each in list(self.found):
            reason = next((one for one in known if one.covers(self.name, each)), None)
            if reason is not None:
                self.found.remove(each)
                self.known.append((each, reason))

    def text(self) -> str:
        lines = [f"{self.state:9}  {self.cells:3}  {self.name}"]
        if self.left_out:
            lines.append(f"{'':16}{self.left_out}")
        lines += [f"{'':16}{each.text()}" for each in self.found]
        lines += [f"{'':16}({each})" for each in sorted({each.reason for _, each in self.known})]
        return "\n".join(lines)


def examine(
    path: Path, name: str, seconds: float, modes: Sequence[str], known: Sequence[Expected]
) -> Report:
    """Run one example in all modes and compare."""
    report, began = Report(name), time.monotonic()
    try:
        plain = run(path, PLAIN, seconds)
        report.cells = len(plain.cells)
        failed = [each for each in plain.cells if each["status"] != "ok"]
        if failed:
            report.left_out = f"fails plainly: {failed[0]['status']}: {failed[0]['error'][:120]}"
            return report
        seconds += 4 * (time.monotonic() - began)
        others = {mode: run(path, mode, seconds) for mode in modes}
        if any(differences(mode, plain, other) for mode, other in others.items()):
            again = run(path, PLAIN, seconds)
            for mode, other in others.items():
                report.found += differences(mode, plain, other, again)
    except Exception as error:  # noqa: BLE001 - of whatever the example does to a kernel
        report.left_out = f"could not be run: {' '.join(f'{error}'.split())[:300]}"
        if report.cells:
            report.found.append(Difference("all", "example", "ends", report.left_out))
            report.left_out = ""
    finally:
        ensure_event_loop().close()  # jupyter_client has made it for this thread
    report.judge(known)
    return report


def examples_in(folder: Path, only: str) -> dict[str, Path]:
    """The scripts and notebooks in a folder, by their paths in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in (".py", ".ipynb") and path.stem != "__init__" and path.match(only):
            found[name] = path
    return found


def totals(reports: Sequence[Report]) -> str:
    """A line on the examples of each first folder, and one on all."""
    lines = []
    for group in [*sorted({_group(each) for each in reports}), ""]:
        own = [each for each in reports if _group(each) == group or not group]
        states = Counter(each.state for each in own)
        counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        cells = sum(each.cells for each in own if not each.left_out)
        lines.append(f"{group or 'all'}: {len(own)} examples, {cells} cells compared: {counted}")
    return "\n".join(lines)


def _group(report: Report) -> str:
    return report.name.partition("/")[0] if "/" in report.name else "examples"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers.examples", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="as in plot_*.py")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a cell, run plainly")
    parser.add_argument("--jobs", type=int, default=1, help="examples at the same time")
    parser.add_argument("--mode", choices=MODES, action="append", help="by default, all")
    parser.add_argument("--expected", type=Path, default=EXPECTED, help="differences with reasons")
    options = parser.parse_args(arguments)
    known, folder = expected(options.expected), options.folder.resolve()
    modes, reports = options.mode or list(MODES), []
    with (
        tempfile.TemporaryDirectory(prefix="gpunb-") as runtime,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        os.environ["GPUNB_RUNTIME_DIR"] = runtime
        waiting = [
            pool.submit(examine, path, name, options.timeout, modes, known)
            for name, path in examples_in(folder, options.only).items()
        ]
        for each in waiting:
            reports.append(each.result())
            sys.stdout.write(f"{reports[-1].text()}\n")
            sys.stdout.flush()
    sys.stdout.write(f"\n{totals(reports)}\n")
    return int(any(each.found for each in reports))


if __name__ == "__main__":
    sys.exit(main())
