"""A plug-in of pytest that records what happened to each test, for `tests.rerun.look`.

Each record is one line of JSON in the file that ``GPUNB_TEST_RECORD`` names. Reports come from the
main process of a run, also those of tests whose worker process crashed. Leaks come from each
process that ran tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from typing import Any

import psutil
import pytest

RECORD = "GPUNB_TEST_RECORD"

GRACE = float(os.environ.get("GPUNB_TEST_GRACE", "5"))
"""Seconds after the end of a run within which its processes and descriptors must be gone."""


def _write(**record: Any) -> None:
    # One call of `write`: the processes of a run append to one file.
    with open(os.environ[RECORD], "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return next(iter(text.strip().splitlines()), "no message")


class Recorder:
    """Records the reports of a run's main process."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = "".join(f"\n--- {title}\n{text}" for title, text in report.sections)
            _write(
                failed=report.nodeid,
                line=_first_line(report),
                text=f"{report.longreprtext}\n{sections}",
                load=os.getloadavg()[0],
            )
        elif report.passed and report.when == "call":
            _write(passed=report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            _write(broken=f"collection of {report.nodeid} failed")

    def pytest_internalerror(self, excrepr: Any) -> None:
        _write(broken="pytest had an internal error")


def _open_files() -> dict[str, str]:
    """What the descriptors of this process refer to, where the system tells."""
    found = {}
    for each in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            found[each] = os.readlink(f"/proc/self/fd/{each}")
    return found


_BEFORE = set(_open_files().values())
"""Files that were open before the tests, such as one that has the output of the run."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # which only workers of xdist have
        config.pluginmanager.register(Recorder())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record what tests of this process have left: workers, memory files, files of sessions.

    A device that is still leased has an open file in the folder of the session.
    """
    deadline = time.monotonic() + GRACE
    while left := _descriptors() + _workers():
        if time.monotonic() > deadline:
            _write(broken=f"the tests left {', '.join(left)}")
            return
        time.sleep(0.05)


def _descriptors() -> list[str]:
    of_sessions = ("/memfd:gpunb", os.path.join(tempfile.gettempdir(), "gpunb-"))
    return [
        f"descriptor {each} ({path})"
        for each, path in _open_files().items()
        if path.startswith(of_sessions) and path not in _BEFORE
    ]


def _workers() -> list[str]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.name().startswith("gpunb") and each.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {each.pid} ({each.name()})")
    return found
