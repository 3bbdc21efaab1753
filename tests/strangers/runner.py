"""Runs test files of another project, and compares the outcomes with its kept list."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.strangers import outcomes
from tests.strangers.kept import KINDS, Kept

ROOT = Path(__file__).resolve().parents[2]
FILE_LIMIT = 1200.0
"""Seconds for all tests of a file, after which its process is killed."""


@dataclass(slots=True)
class Report:
    """The outcomes of a file's tests, compared with the kept list.

    Attributes:
        counts: numbers of tests by outcome; each kind of reason is an outcome.
        why: numbers of tests by kind and reason.
        unexpected: tests that did not pass without a reason, with their errors.
        passing: tests that passed although the kept list has a reason why they do not.
    """

    counts: Counter[str] = field(default_factory=Counter)
    why: Counter[tuple[str, str]] = field(default_factory=Counter)
    unexpected: dict[str, str] = field(default_factory=dict)
    passing: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, found: Mapping[str, tuple[str, str]], kept: Kept) -> Report:
        """Compare outcomes with the kept list."""
        report = cls()
        for test, (outcome, text) in found.items():
            reason = kept.of(test)
            if outcome == "failed" and reason is not None:
                report._add(reason.kind, reason.why)
            elif outcome == "failed":
                report.counts["unexpected"] += 1
                report.unexpected[test] = text
            elif outcome == "not there":
                report._add(outcome, text)
            else:
                report.counts[outcome] += 1
                if (
                    outcome == "passed"
                    and test in kept.reasons
                    and not kept.reasons[test].sometimes
                ):
                    report.passing.append(test)
        return report

    def _add(self, kind: str, why: str) -> None:
        self.counts[kind] += 1
        self.why[kind, why] += 1

    def __iadd__(self, other: Report) -> Report:
        self.counts += other.counts
        self.why += other.why
        self.unexpected |= other.unexpected
        self.passing += other.passing
        return self

    def line(self) -> str:
        """The numbers of tests by outcome."""
        known = ("passed", "skipped", *KINDS, "unexpected")
        return ", ".join(f"{self.counts[each]} {each}" for each in known if self.counts[each])

    def surprises(self) -> str:
        """The tests that did not behave as the kept list says, a line each."""
        lines = [f"  UNEXPECTED {test}: {text}" for test, text in self.unexpected.items()]
        lines += [f"  PASSES, and the kept list says why not: {test}" for test in self.passing]
        return "\n".join(lines)

    def reasons(self) -> str:
        """The reasons and their numbers of tests, a line each."""
        return "\n".join(
            f"{count:5} {kind}: {why}"
            for (kind, why), count in sorted(
                self.why.items(), key=lambda each: (each[0][0], -each[1])
            )
        )


def run(suite: str, source: Path, files: Iterable[str], kept: Kept, limit: float) -> Report:
    """Run files of a suite one after another, and print a line for each.

    Args:
        suite: the name of the plugin `tests.strangers.on_*`.
        source: the folder with the files.
        files: their names.
        kept: the kept list.
        limit: seconds for a test.
    """
    total = Report()
    with tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        copy = Path(folder) / f"{suite}_tests"
        copy.mkdir()
        # Links, so that nothing is written into the user's folder, and so that modules have a
        # name of their own. Its conftest.py starts what is not there.
        for each in source.iterdir():
            if each.name not in ("conftest.py", "__pycache__") and (
                each.name != "__init__.py" or kept.package
            ):
                (copy / each.name).symlink_to(each.resolve())
        for name in files:
            report = Report.of(run_file(suite, copy, name, limit), kept)
            sys.stdout.write(f"{name}: {report.line() or 'no tests'}\n")
            if surprises := report.surprises():
                sys.stdout.write(surprises + "\n")
            sys.stdout.flush()
            total += report
    return total


def run_file(suite: str, folder: Path, name: str, limit: float) -> dict[str, tuple[str, str]]:
    """The outcome of each test of a file. If the process ends during a test, that test has
    failed, and another process runs the rest."""
    path = folder.parent / f"{name}.outcomes"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", str(folder / name), "-q", "--noconftest"]
    command += ["-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), "--timeout", str(limit)]
    for plugin in ("pytest_timeout", "tests.strangers.outcomes", f"tests.strangers.on_{suite}"):
        command += ["-p", plugin]
    command += ["--outcomes", str(path)]
    found: dict[str, tuple[str, str]] = {}
    known = -1
    while known < len(found) and outcomes.END not in found:
        known = len(found)
        _run(command, folder)
        found = outcomes.read(path)
    found.pop(outcomes.END, None)
    return found or {name: ("failed", f"no test of it ran: {_tail(folder.parent / 'log')}")}


def _tail(path: Path) -> str:
    return " | ".join(path.read_text(errors="replace").splitlines()[-8:])


def _run(command: list[str], folder: Path) -> None:
    """Run a command at most FILE_LIMIT seconds, and end all processes of its group."""
    with (
        tempfile.TemporaryDirectory(prefix="gpunb-") as runtime,
        (folder.parent / "log").open("ab") as log,
    ):
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={
                **os.environ,
                "GPUNB_RUNTIME_DIR": runtime,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = os.pidfd_open(process.pid)
        try:
            select.select([ended], [], [], FILE_LIMIT)
        finally:
            os.close(ended)
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so this is still its group
            process.wait()
