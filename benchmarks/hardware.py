"""Runs the tests and the measurements that need a GPU, and writes one report: `make gpu`.

Needed beforehand: an NVIDIA driver, and a Python with PyTorch for CUDA. There is no need of a
network. The packages that this Python lacks are installed from the wheels in a folder, into an
environment of its own, which sees the packages of this Python too.

The parts run in the order of their importance, each with a limit of its own. The report is written
again after each test and each measured line, so that a run that is cut loses the one at which it
was cut.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.hardware_report import LATE, Part, Report, machine, rehearsal

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = ROOT / "tests" / "gpu" / "stand_in"

MINUTES = 7.5
"""The limit of the whole run, so that it ends within eight minutes."""

REHEARSAL = 20.0
"""The same in a rehearsal: it ends as soon, unless the machine is busy with other work too."""

SLACK = 5.0
"""The factor of the limits of parts in a rehearsal: the machine may be slow, or busy."""

LEAST = 3.0
"""Seconds that must be left for a part to begin."""

PARTS: Mapping[str, tuple[str, float]] = {
    # name: (a file of tests/gpu, or a part of the topic gpu; seconds)
    "one device": ("test_one_device.py", 120),  # PyTorch comes from the disk for the first time
    "memory back": ("test_memory_back.py", 60),
    "following": ("test_following.py", 100),
    "first kernel": ("", 110),
    "warm standbys": ("test_warm.py", 40),
    "results": ("test_results.py", 45),
    "parking": ("test_parking.py", 40),
    "shares": ("test_shares.py", 90),
    "cells": ("test_cells.py", 120),  # a compiler starts
    "start of CUDA": ("", 45),
    "libraries": ("test_libraries.py", 100),
    "figures": ("test_figures.py", 40),
    "two kernels": ("test_two_kernels.py", 60),
    "processes inside": ("test_inside.py", 60),
    "side by side": ("", 90),
    "disturbance": ("", 60),
}
"""The parts of a run, the most important first."""


# ----------------------------------------------------------------------- the environment


def environment(folder: Path, wheels: Path, log: Path) -> Path:
    """Make an environment that sees this Python's packages and has those of the wheels too.

    Returns its interpreter. `folder` may have it already. If the wheels cannot be installed, the
    log says why, and the report names the packages that are missing.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True, with_pip=False)
    scheme = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    # An environment of an environment sees the system's packages and not its parent's.
    seen = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        seen.append(site.getusersitepackages())
    lines = [str(ROOT), *(f"import site; site.addsitedir({each!r})" for each in seen)]
    (packages / "machine.pth").write_text("\n".join(lines) + "\n")
    found = sorted(map(str, wheels.glob("*.whl")))
    if found:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        options = ["--no-index", "--no-deps", "--no-compile", "--ignore-installed"]
        quiet = ["--disable-pip-version-check", "--root-user-action=ignore"]
        with open(log, "a") as output:
            command = [*pip, *options, *quiet, *found]
            subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT)
    return python


def variables(rehearse: bool, folder: str) -> dict[str, str]:
    """The environment variables of all parts."""
    found = {name: each for name, each in os.environ.items() if not name.startswith("GPUNB_")}
    found |= {"GPUNB_RUNTIME_DIR": folder, "PYTHONUNBUFFERED": "1"}
    if rehearse:
        found["GPUNB_TEST_PATIENCE"] = str(30 * SLACK)
        place = Path(folder, "card")
        place.mkdir()
        found["GPUNB_STAND_IN"] = str(place)
        found["PYTHONPATH"] = os.pathsep.join([str(STAND_IN), found.get("PYTHONPATH", "")])
        found["PATH"] = os.pathsep.join([str(STAND_IN), found["PATH"]])
        found.pop("CUDA_VISIBLE_DEVICES", None)
    return found


# ----------------------------------------------------------------------------------- the parts


class Run:
    """A run of the parts in the environment."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out = out
        self.deadline = deadline
        self.report = Report(out, PARTS)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def all(self, chosen: Sequence[str]) -> bool:
        """Run the chosen parts; return whether none failed."""
        try:
            self.report.facts = machine()
        except Exception as error:  # noqa: BLE001 - the parts are worth more than these facts
            self.report.facts = {"unknown machine": repr(error)}
        for part in self.report.parts:
            limit = min(slack() * PARTS[part.name][1], self.left())
            if part.name not in chosen:
                part.note = "not chosen"
            elif limit < LEAST:
                part.note = LATE
            else:
                self.one(part, limit)
                print(f"{part.name}: {part.state}, {part.seconds:g} s {part.note}", flush=True)
        self.report.write()
        return not any(each.state in ("failed", "cut") for each in self.report.parts)

    def one(self, part: Part, limit: float) -> None:
        """Run a part. If this process ends meanwhile, the report says at which part."""
        part.state, part.note = "cut", "the run ended in this part"
        self.report.write()
        start = time.monotonic()
        try:
            (self.test if PARTS[part.name][0] else self.measure)(part, limit)
        except Exception as error:  # noqa: BLE001 - the next parts are run all the same
            part.state, part.note = "failed", repr(error)
        finally:
            part.seconds = round(time.monotonic() - start, 1)
            self.report.write()

    def test(self, part: Part, limit: float) -> None:
        """Run a file of tests; what was tested before the limit counts."""
        file = ROOT / "tests" / "gpu" / PARTS[part.name][0]
        record = self.out / "tests.jsonl"
        record.unlink(missing_ok=True)

        def read() -> None:
            lines = record.read_text().splitlines(keepends=True) if record.exists() else []
            found = [json.loads(line) for line in lines if line.endswith("\n")]
            if len(found) > len(part.tests):
                part.tests = found
                self.report.write()

        # No other plug-ins, and no errors for warnings: both come from the machine's packages.
        options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-W", "default"]
        more = {"GPUNB_TEST_RECORD": str(record), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", *options, f"--timeout={limit / 2:.0f}"]
        status = self.command([*command, str(file)], limit, more, read)
        read()
        record.unlink(missing_ok=True)
        outcomes = [each["outcome"] for each in part.tests]
        counts = {each: outcomes.count(each) for each in dict.fromkeys(outcomes)}
        part.note = ", ".join(f"{count} {each}" for each, count in counts.items())
        part.state = "cut" if status is None else "failed" if status else "ok"
        if status and "failed" not in outcomes:
            part.note += f"; pytest ended with {status}: see log.txt"

    def command(
        self,
        command: Sequence[str],
        limit: float,
        more: Mapping[str, str],
        meanwhile: Callable[[], object],
    ) -> int | None:
        """Run a command, with its output in the log; return its status, None if it was cut.
        `meanwhile` is called each second."""
        with open(self.out / "log.txt", "a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **more},
                start_new_session=True,
            )
            end = time.monotonic() + limit
            try:
                while (left := end - time.monotonic()) > 0:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(min(left, 1.0))
                    meanwhile()
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def measure(self, part: Part, limit: float) -> None:
        """Measure the lines of a part of the topic; those that lack time are left out."""
        from benchmarks import gpu, probe
        from benchmarks.__main__ import Bench

        end = time.monotonic() + limit

        class Limited(Bench):
            def n(self, full: int, quick: int) -> int:
                return max(1, quick // 2) if rehearsal() else quick

            def run(self, call: probe.Call) -> dict[str, Any]:
                left = end - time.monotonic()
                if left < 2:
                    return {"skipped": LATE}
                return probe.run(replace(call, timeout=min(call.timeout, left)))

        for line in gpu.PARTS[part.name](Limited(quick=True, peers=True)):
            part.lines.append(line)
            self.report.write()
        lacks = [each.name for each in part.lines if each.value is None]
        part.state = "ok" if len(lacks) < len(part.lines) else "failed"
        part.note = f"{len(part.lines) - len(lacks)} values"
        part.note += f"; none for: {', '.join(lacks)}" if lacks else ""


def slack() -> float:
    return SLACK if rehearsal() else 1.0


# ---------------------------------------------------------------------------------- the command


def main() -> int:
    options = _options()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.until is None:
        _enter_environment(options, out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return 0 if Run(out, options.until).all(options.only) else 1
    finally:
        shutil.rmtree(os.environ["GPUNB_RUNTIME_DIR"], ignore_errors=True)
        print(f"The report is {out / 'report.md'}")


def _enter_environment(options: argparse.Namespace, out: Path) -> NoReturn:
    """Make the environment, and go on in it: this process becomes its interpreter."""
    minutes = options.minutes or (REHEARSAL if options.rehearse else MINUTES)
    deadline = time.monotonic() + 60 * minutes
    (out / "log.txt").write_text("")
    python = environment(options.env.resolve(), options.wheels.resolve(), out / "log.txt")
    command = [str(python), "-m", "benchmarks.hardware", *sys.argv[1:], "--out", str(out)]
    os.chdir(ROOT)
    folder = tempfile.mkdtemp(prefix="gpunb-")
    os.execve(python, [*command, "--until", str(deadline)], variables(options.rehearse, folder))


def _names(text: str) -> list[str]:
    names = [each.strip() for each in text.split(",")]
    if unknown := set(names) - PARTS.keys():
        raise argparse.ArgumentTypeError(f"no part is {unknown.pop()!r}: {', '.join(PARTS)}")
    return names


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hardware", description=__doc__)
    path: Callable[[str], Path] = Path
    parser.add_argument("--out", type=path, default=ROOT / "build" / "gpu-report", help="a folder")
    parser.add_argument("--wheels", type=path, default=ROOT / ".whl", help="a folder of wheels")
    parser.add_argument(
        "--env", type=path, default=ROOT / "build" / "gpu", help="the folder of the environment"
    )
    parser.add_argument("--minutes", type=float, help=f"the limit of the run: {MINUTES:g}")
    parser.add_argument("--only", type=_names, default=list(PARTS), help="some parts, with commas")
    parser.add_argument(
        "--rehearse", action="store_true", help="with a stand-in for the GPU, which computes here"
    )
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
