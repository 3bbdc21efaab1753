"""A plugin for pytest that writes the outcome of each test into a file, one JSON object a line."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOT_THERE = "NotThere: "
"""The shim's error and its text: the test uses a part that the shim does not have."""

END = "the end"
"""Stands for a test in the file when all tests have an outcome."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a program that a shell runs in the background; the tests' programs inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """Writes outcomes, and leaves out the tests that have one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._now = ("passed", "")

    def _write(self, test: str, outcome: str, why: str = "") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([test, outcome, why]) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._write(report.nodeid, *_outcome(report))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        over = read(self._path)
        items[:] = [each for each in items if each.nodeid not in over]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._now = ("passed", "")
        self._write(nodeid, "failed", "the process of the tests ended during this test")

    def pytest_sessionfinish(self) -> None:
        self._write(END, "passed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        report.text = "" if call.excinfo is None else "\n".join(_texts(call.excinfo.value))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        report = yield
        report.text = report.longreprtext
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed and self._now[0] == "passed":
            self._now = _outcome(report)
        if report.when == "teardown":
            self._write(report.nodeid, *self._now)


def _texts(error: BaseException | None) -> Iterator[str]:
    """The texts of an error and of the errors that it comes from."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def _outcome(report: Any) -> tuple[str, str]:
    """The outcome and its reason in one line."""
    if NOT_THERE in report.text:
        return "not there", report.text.rpartition(NOT_THERE)[2].partition("\n")[0]
    if report.skipped:
        return "skipped", ""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.strip()[-300:]
    return "failed", " | ".join(text.split("\n")[:6])[:600]


def read(path: Path) -> dict[str, tuple[str, str]]:
    """The last outcome of each test, and its reason."""
    lines = path.read_text().splitlines() if path.exists() else ()
    return {test: (outcome, why) for test, outcome, why in map(json.loads, lines)}
