"""The scheduler's core alone, without processes; measured by `bench_core`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line


def measure(bench: Any) -> Iterator[Line]:
    """Its lines, if it makes lines; else run it as a program, which prints for itself."""
    if not probe.installed("benchmarks.bench_core"):
        yield Line("the core", None, "", note="benchmarks/bench_core.py is not there")
        return
    module = importlib.import_module("benchmarks.bench_core")
    if hasattr(module, "measure"):
        yield from module.measure(bench)
        return
    command = [sys.executable, "-m", "benchmarks.bench_core"]
    run = subprocess.run(
        command, env=probe.environment(), capture_output=True, text=True, check=False, timeout=600
    )
    bench.after(run.stdout)
    note = "printed below" if run.returncode == 0 else f"failed: {run.stderr.strip()[-100:]}"
    yield Line("the core", None, "", note=note)
