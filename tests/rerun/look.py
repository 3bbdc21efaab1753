"""``python -m tests.rerun ARGS``: run pytest with ARGS, then run each failed test again, alone.

On a busy machine one test among thousands may fail by chance. A failed test runs again, at most
twice, in a pytest process of its own with nothing beside it. If it passes there, the test is
*unsteady*: the run is green, the last lines name the test, and ``build/unsteady/`` has its whole
first failure. A test that fails three times is red.

Nothing runs again after more than 10 failures, an error of collection, an internal error or any
other end of pytest than "tests failed", or if the tests left a process, a memory file or a device.

Exit status: 0 if all passed; 5 if some were unsteady and ``--strict`` is given; else pytest's own,
or 1. CPython's ``regrtest --rerun --fail-rerun`` is the model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gpunb.system.process_control import adopt_orphans
from tests.rerun.recorder import GRACE, RECORD

MOST = 10
"""Failures in the first pass above which the tests do not run again."""

AGAIN = 2
"""Times that a failed test runs again."""

FAILED, UNSTEADY = 1, 5
"""Exit statuses; 1 is also pytest's for "tests failed"."""

FOLDER = Path("build/unsteady")

print = functools.partial(print, flush=True)


@dataclass
class Outcome:
    """What happened in one run of pytest.

    Attributes:
        status: the exit status of pytest; negative for a signal.
        failed: the first failure of each test that failed, by its id.
        passed: the ids of the tests that passed.
        broken: errors after which no test runs again.
    """

    status: int
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)

    def red(self) -> str | None:
        """The reason why no test runs again, or None."""
        if self.broken:
            return "; ".join(self.broken)
        if self.status not in (0, FAILED):
            return f"pytest ended with status {self.status}"
        if len(self.failed) > MOST:
            return f"{len(self.failed)} tests failed, which is more than {MOST}"
        if bool(self.status) != bool(self.failed):
            return f"pytest ended with status {self.status} and {len(self.failed)} failed tests"
        return None


def run(arguments: list[str]) -> Outcome:
    """Run pytest, and wait until all processes of that run are gone."""
    with tempfile.TemporaryDirectory(prefix="gpunb-tests-") as folder:
        record = Path(folder) / "record"
        record.touch()
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "tests.rerun.recorder", *arguments],
            env={**os.environ, RECORD: str(record)},
        )
        process.returncode = _reap(process.pid)
        outcome = Outcome(process.returncode)
        for line in record.read_text(encoding="utf-8").splitlines():
            match json.loads(line):
                case {"failed": test, **failure}:
                    outcome.failed.setdefault(test, failure)
                case {"passed": test}:
                    outcome.passed.add(test)
                case {"broken": reason}:
                    outcome.broken.append(reason)
    outcome.passed -= outcome.failed.keys()  # a test whose teardown failed has not passed
    outcome.broken += _end_processes()
    return outcome


def _reap(pid: int) -> int:
    """Wait for this process, and meanwhile for orphans of its tests. Returns its exit status."""
    while True:
        try:
            ended, status = os.wait()
        except KeyboardInterrupt:
            continue  # pytest was interrupted, too, and ends
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _end_processes() -> list[str]:
    """Name the processes that are left `GRACE` seconds after the end of a run, and kill them."""
    deadline = time.monotonic() + GRACE
    while left := psutil.Process().children(recursive=True):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    found = []
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(f"the tests left process {each.pid}: {' '.join(each.cmdline())[:200]}")
                each.send_signal(signal.SIGKILL)
    return found


def run_again(test: str) -> tuple[bool, list[str]]:
    """Run a failed test alone, at most `AGAIN` times, until it passes.

    Returns whether it passed, and the errors after which no other test runs again.
    """
    for attempt in range(AGAIN):
        print(f"\nRunning again, alone ({attempt + 1} of {AGAIN}): {test}")
        outcome = run(["-p", "no:cacheprovider", test])
        if outcome.broken:
            return False, outcome.broken
        if outcome.status == 0 and test in outcome.passed:
            return True, []
    return False, []


def keep(test: str, failure: dict[str, Any]) -> None:
    """Write the whole first failure of an unsteady test."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.\[\]=-]+", "-", test)[-150:]
    head = f"{test}\nload average: {failure['load']:.1f}\n\n"
    (FOLDER / f"{name}.txt").write_text(head + failure["text"], encoding="utf-8")


def main(arguments: list[str]) -> int:
    strict = "--strict" in arguments
    arguments = [each for each in arguments if each != "--strict"]
    shutil.rmtree(FOLDER, ignore_errors=True)
    adopt_orphans()
    first = run(arguments)
    if reason := first.red():
        print(f"\nRED, nothing runs again: {reason}")
        return first.status or FAILED
    if not first.failed:
        return 0
    print(f"\n{len(first.failed)} failed; each runs again alone.")
    red: list[str] = []
    unsteady: list[str] = []
    for test, failure in first.failed.items():
        passed, broken = run_again(test)
        line = f"  {test}: {failure['line'][:300]} (load {failure['load']:.1f})"
        if broken:
            print(f"\nRED: {'; '.join(broken)}, after {test}")
            return FAILED
        (unsteady if passed else red).append(line)
        if passed:
            keep(test, failure)
    if unsteady:
        print(f"\nUNSTEADY, failed and then passed alone; the failures are in {FOLDER}/:")
        print(*unsteady, sep="\n")
    if red:
        print(f"\nRED, failed {1 + AGAIN} times:", *red, sep="\n")
        return FAILED
    return UNSTEADY if strict else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
