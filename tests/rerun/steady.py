"""``python -m tests.rerun.steady --runs N ARGS``: look for tests that fail by chance.

The tests run N times, with as many busy processes beside them as there are cores; failed tests run
again alone, without the busy processes. At the end comes a table of the tests that failed: how
often, in these runs and in all earlier ones, and with which first line.

``build/steady/history.jsonl`` has a line for each run; the folders beside it have the whole
failures. Exit status: 0 if no test failed, 5 if some were unsteady, 1 if a run was red.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpunb.system.process_control import adopt_orphans
from tests.rerun import look

FOLDER = Path("build/steady")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep this many processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
        for each in processes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, 0)
            each.returncode = 0  # it was waited for here, or by the run itself


def revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def one_run(arguments: list[str], processes: int) -> dict[str, Any]:
    """Run the tests once. Returns the line of the history."""
    began = time.time()
    at = datetime.datetime.fromtimestamp(began, datetime.UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
    with busy(processes):
        first = look.run(arguments)
    seconds = round(time.time() - began)
    verdict = look.look_again(first)
    failures = verdict.unsteady | verdict.red
    if failures:
        look.keep(failures, FOLDER / at)
    return {
        "at": at,
        "revision": revision(),
        "seconds": seconds,
        "status": verdict.status,
        "reason": verdict.reason,
        "passed": len(first.passed),
        "unsteady": {test: failure["line"] for test, failure in verdict.unsteady.items()},
        "red": {test: failure["line"] for test, failure in verdict.red.items()},
    }


def table(runs: list[dict[str, Any]], history: list[dict[str, Any]]) -> list[str]:
    """A line for each test that failed in these runs, the most frequent first."""

    def count(of: list[dict[str, Any]]) -> collections.Counter[str]:
        return collections.Counter(test for run in of for test in (*run["unsteady"], *run["red"]))

    now, ever = count(runs), count(history)
    lines = [f"in {len(runs)} runs | in all {len(history)} | test: first line"]
    for test, times in now.most_common():
        failure = next(
            line for run in runs for kind in ("red", "unsteady") if (line := run[kind].get(test))
        )
        red = " RED" if any(test in run["red"] for run in runs) else ""
        lines.append(f"{times:9} | {ever[test]:6} |{red} {test}: {failure[:200]}")
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rerun.steady", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=5, help="how often the tests run")
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="busy processes beside")
    options, arguments = parser.parse_known_args(arguments)
    adopt_orphans()
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "history.jsonl"
    earlier = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    history = [json.loads(line) for line in earlier]
    runs = []
    for number in range(options.runs):
        runs.append(one_run(arguments, options.busy))
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(runs[-1]) + "\n")
        print(f"\nRun {number + 1} of {options.runs}: status {runs[-1]['status']}", flush=True)
        print(*table(runs, history + runs), sep="\n", flush=True)
    if any(run["red"] or run["reason"] for run in runs):
        return look.FAILED
    return look.UNSTEADY if any(run["unsteady"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
