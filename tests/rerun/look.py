"""Run pytest, then run each failed test again, alone.

On a busy machine one test among thousands may fail by chance. A failed test runs again, at most
twice, in a pytest process of its own with nothing beside it. If it passes there, the test is
*unsteady*; one that fails three times is red.

Nothing runs again after more than 10 failures, an error of collection, an internal error or any
other end of pytest than "tests failed", or if the tests left a process, a memory file or a device.

CPython's ``regrtest --rerun`` is the model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.rerun.recorder import GRACE, RECORD

MOST = 10
"""Failures in the first pass above which the tests do not run again."""

AGAIN = 2
"""Times that a failed test runs again."""

FAILED, UNSTEADY = 1, 5
"""Exit statuses; 1 is also pytest's for "tests failed"."""

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


@dataclass
class Verdict:
    """What both looks say.

    Attributes:
        status: the exit status for this run: 0, `UNSTEADY`, or another one for red.
        unsteady: the first failures of the tests that passed when they ran again, by their ids.
        red: those of the tests that failed each time, or that did not run again.
        reason: why no test runs again, or None.
    """

    status: int
    unsteady: dict[str, dict[str, Any]]
    red: dict[str, dict[str, Any]]
    reason: str | None = None


def run(arguments: list[str]) -> Outcome:
    """Run pytest, and wait until all processes of that run are gone."""
    before = psutil.Process().children()
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
    outcome.broken += _end_processes(before)
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


def _end_processes(before: list[psutil.Process]) -> list[str]:
    """Name the processes that are left `GRACE` seconds after the end of a run, and kill them."""
    deadline = time.monotonic() + GRACE
    while left := [
        each for each in psutil.Process().children(recursive=True) if each not in before
    ]:
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


def look_again(first: Outcome) -> Verdict:
    """Run the failed tests of a run again, one after the other."""
    if reason := first.red():
        return Verdict(first.status or FAILED, {}, first.failed, reason)
    if first.failed:
        print(f"\n{len(first.failed)} failed; each runs again alone.")
    unsteady: dict[str, dict[str, Any]] = {}
    for test in first.failed:
        passed, broken = run_again(test)
        if broken:
            left = {each: first.failed[each] for each in first.failed if each not in unsteady}
            return Verdict(FAILED, unsteady, left, f"{'; '.join(broken)}, after {test}")
        if passed:
            unsteady[test] = first.failed[test]
    red = {each: first.failed[each] for each in first.failed if each not in unsteady}
    return Verdict(FAILED if red else UNSTEADY if unsteady else 0, unsteady, red)


def keep(failures: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write the whole first failure of each of these tests into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for test, failure in failures.items():
        name = re.sub(r"[^\w.\[\]=-]+", "-", test)[-150:]
        head = f"{test}\nload average: {failure['load']:.1f}\n\n"
        (folder / f"{name}.txt").write_text(head + failure["text"], encoding="utf-8")
