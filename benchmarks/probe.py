"""Runs one measurement in a process of its own: `run` there, `main` here.

A probe is a function of a module of this package that takes keyword arguments and returns a dict
of plain values. In its own process, no session, preload or import of another one disturbs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lines import Result

ROOT = Path(__file__).resolve().parent.parent

_MARK = "benchmarks.probe:"
_TIMEOUT = 120.0


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True, slots=True)
class Call:
    """A probe with its arguments; `needs` are modules without which it is skipped."""

    target: str
    arguments: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    timeout: float = _TIMEOUT


def call(target: str, *needs: str, timeout: float = _TIMEOUT, **arguments: Any) -> Call:
    """`target` as in ``"fresh.latency"``."""
    return Call(target, arguments, needs, timeout)


def run(wanted: Call) -> Result:
    """Run a probe and return its result, or ``{"skipped": reason}``."""
    for module in wanted.needs:
        if not installed(module):
            return {"skipped": f"{module} is not installed"}
    command = [sys.executable, "-m", "benchmarks.probe", wanted.target]
    process = subprocess.Popen(
        [*command, json.dumps(dict(wanted.arguments))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=wanted.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"skipped": f"gave up after {wanted.timeout:g} s"}
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    for line in reversed(out.splitlines()):
        if line.startswith(_MARK):
            result: Result = json.loads(line.removeprefix(_MARK))
            return result
    words = (err.strip() or out.strip() or f"exit status {process.returncode}").splitlines()
    sys.stderr.write(f"\n{wanted.target} failed:\n" + "\n".join(words[-25:]) + "\n")
    return {"skipped": f"failed: {words[-1][:120]}"}


def in_turns(rounds: int, **calls: Call) -> dict[str, Result]:
    """Run probes in turns, because a shared machine is faster now and slower then.

    Lists in their results are joined; of anything else the last round's is kept. A probe that
    could not measure is not tried again.
    """
    merged: dict[str, Result] = {name: {} for name in calls}
    for _ in range(rounds):
        for name, wanted in calls.items():
            if "skipped" not in merged[name]:
                merged[name] = joined(merged[name], run(wanted))
    return merged


def joined(before: Result, now: Result) -> Result:
    """The result of several rounds."""
    if "skipped" in now:
        return before or now
    lists = {
        name: before.get(name, []) + value if isinstance(value, list) else value
        for name, value in now.items()
    }
    return {**before, **lists}


def environment() -> dict[str, str]:
    """For processes that must find this package, started in whatever directory."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function counts as the notebook's own, which is pickled by value."""
    function.__module__ = "__main__"
    return function


def main() -> None:
    target, arguments = sys.argv[1:]
    module, _, name = target.partition(".")
    result = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**json.loads(arguments))
    print(_MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
