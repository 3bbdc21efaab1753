"""Sweeps: CPU time of the kernel for a trial beyond a bare call, and for the live table."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, median, skipped

TRIALS, SHOWN = 5000, 1000


def overhead(n: int, runs: int) -> Result:
    """CPU seconds of this process for so many calls: bare ones, a sweep's, and those of a sweep
    with a file."""
    import gpunb
    from benchmarks import sessions
    from benchmarks.probe import by_value

    @by_value
    def trial(number: int) -> dict[str, int]:
        return {"loss": number}

    def bare(_: str) -> None:
        gpunb.get([remote.remote(number=number) for number in range(n)])

    def swept(_: str) -> None:
        gpunb.sweep(trial, {"number": range(n)}).wait()

    def stored(path: str) -> None:
        gpunb.sweep(trial, {"number": range(n)}, storage=path).wait()

    sessions.start(4, [], cpus=2)
    remote = gpunb.remote(trial)
    found: dict[str, list[float]] = {"bare": [], "sweep": [], "stored": []}
    with tempfile.TemporaryDirectory() as folder:
        gpunb.get([remote.remote(number=number) for number in range(100)])
        for run in range(runs):
            for name, function in zip(found, (bare, swept, stored), strict=True):
                start = time.process_time()
                function(str(Path(folder) / f"{name}-{run}.sqlite"))
                found[name].append(time.process_time() - start)
                time.sleep(0.3)
    gpunb.shutdown()
    return found


def table(trials: int, seconds: float) -> Result:
    """CPU seconds of this process for each second of a sweep with so many trials, each with four
    reports: without a table, and with the live one. The comm goes nowhere."""
    import gpunb
    from benchmarks import sessions
    from benchmarks.probe import by_value
    from gpunb.live.sweep_widget import SweepWidget

    pause = seconds * 2 / trials / 4

    @by_value
    def trial(number: int) -> dict[str, float]:
        for step in range(4):
            time.sleep(pause)
            gpunb.report(loss=number / (step + 1))
        return {"loss": float(number)}

    def cost(shown: bool) -> float:
        start, begun = time.process_time(), time.monotonic()
        sweep = gpunb.sweep(trial, {"number": range(trials)})
        if shown:
            sweep.watch(SweepWidget(sweep, Any).update)
        sweep.wait()
        return (time.process_time() - start) / (time.monotonic() - begun)

    sessions.start(4, [], cpus=2)
    cost(False)
    found = {"alone": cost(False), "shown": cost(True)}
    gpunb.shutdown()
    return found


def measure(bench: Any) -> Iterator[Line]:
    result = bench.run(probe.call("sweeps.overhead", timeout=400, n=TRIALS, runs=bench.n(3, 2)))
    for kind, words in (("sweep", "a trial"), ("stored", "a trial whose result is kept in a file")):
        name = f"{words}, beyond a bare call, {TRIALS:,} trials: CPU"
        if "skipped" in result:
            yield skipped(name, "s", result)
            continue
        bare = median(result["bare"]) / TRIALS
        note = f"a bare call takes {bare / MS:.3f} ms"
        extra = median(result[kind]) / TRIALS - bare
        yield Line(name, max(0.0, extra), "s", goal=1 * MS, note=note, detail=result)
    result = bench.run(
        probe.call("sweeps.table", "ipywidgets", trials=SHOWN, seconds=bench.n(20, 5))
    )
    name = f"the live table of a sweep with {SHOWN:,} trials, of a core"
    if "skipped" in result:
        yield skipped(name, "", result)
        return
    extra = max(0.0, result["shown"] - result["alone"])
    yield Line(name, extra, "", goal=0.02, note=f"{result['alone']:.4f} without it")
