"""Devices that several kernels share: what a lease costs, and how soon a freed share arrives."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, median, skipped, spread, summary

LEASE = 0.1 * MS
ARRIVAL = 50 * MS


def lease(others: int, n: int) -> Result:
    """Take a share and give it back, beside other sessions that hold shares of the same devices."""
    from gpunb.leases.ledger import Ledger

    devices = [f"GPU-{at}" for at in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        sessions = [Ledger(Path(folder), devices, {}) for _ in range(others)]
        for at, each in enumerate(sessions):
            assert each.take({devices[at % 8]: 1000}, lasting=False, job="train")
        mine = Ledger(Path(folder), devices, {})
        taken, given = [], []
        for _ in range(n):
            began = time.perf_counter()
            mine.take({"GPU-0": 5000}, lasting=False, job="train")
            middle = time.perf_counter()
            mine.give({"GPU-0": 5000}, lasting=False)
            mine.publish()
            given.append(time.perf_counter() - middle)
            taken.append(middle - began)
        for each in [mine, *sessions]:
            each.close()
    return {"taken": taken, "given": given}


def fresh(ledger: bool, n: int) -> Result:
    """Round trips of fresh tasks with a device, leased or private."""
    import gpunb
    from benchmarks import sessions

    with tempfile.TemporaryDirectory() as folder:
        if ledger:
            os.environ["GPUNB_LEDGER_DIR"] = folder
        sessions.start(4, cpus=2)
        task = sessions.empty(num_gpus=1)
        seconds = []
        for _ in range(n):
            began = time.perf_counter()
            gpunb.get(task.remote())
            seconds.append(time.perf_counter() - began)
            time.sleep(0.01)
        gpunb.shutdown()
    return {"seconds": seconds}


_OTHER = """
import sys, time
import gpunb
gpunb.init(simulate="1xA100:40GiB", num_cpus=2, preload=[])

@gpunb.remote(num_gpus=1)
def hold(seconds):
    import time
    time.sleep(seconds)
    return time.monotonic()

for line in sys.stdin:
    print(gpunb.get(hold.remote(float(line))), flush=True)
"""


def arrival(n: int) -> Result:
    """From the end of a task in one kernel to the start of another kernel's task, which waited
    for its device: the end of the first one's process lies between."""
    import gpunb

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUNB_LEDGER_DIR"] = folder
        other = subprocess.Popen(
            [sys.executable, "-c", _OTHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=probe.environment(),
        )
        assert other.stdin is not None
        assert other.stdout is not None
        gpunb.init(simulate="1xA100:40GiB", num_cpus=2, preload=[])

        @gpunb.remote(num_gpus=1)
        @probe.by_value
        def begin() -> float:
            import time

            return time.monotonic()

        seconds = []
        for _ in range(n):
            other.stdin.write("0.1\n")
            other.stdin.flush()
            while gpunb.available_resources().get("GPU"):
                time.sleep(0.002)
            waiting = begin.remote()
            ended = float(other.stdout.readline())
            seconds.append(gpunb.get(waiting) - ended)
            while not gpunb.available_resources().get("GPU"):
                time.sleep(0.002)
        other.kill()
        other.communicate()
        gpunb.shutdown()
    return {"seconds": seconds}


def measure(bench: Any) -> Iterator[Line]:
    for others in (1, 8):
        result = bench.run(probe.call("leases.lease", others=others, n=bench.n(2000, 200)))
        for what in ("taken", "given"):
            name = f"a lease, {what}, {others} other kernel{'s' if others > 1 else ''}"
            yield _line(name, result, what, LEASE)
    for ledger, kind in ((False, "private"), (True, "leased")):
        call = probe.call("leases.fresh", ledger=ledger, n=bench.n(300, 50))
        yield _line(f"fresh GPU task, its device {kind}", bench.run(call), "seconds", None)
    result = bench.run(probe.call("leases.arrival", n=bench.n(50, 10)))
    yield _line("a freed device, until another kernel's task has it", result, "seconds", ARRIVAL)


def _line(name: str, result: Result, what: str, goal: float | None) -> Line:
    if "skipped" in result:
        return skipped(name, "s", result)
    samples = result[what]
    detail = {"summary": summary(samples), "seconds": samples}
    return Line(name, median(samples), "s", goal=goal, note=spread(samples), detail=detail)
