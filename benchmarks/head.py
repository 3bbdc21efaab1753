"""A head process: its start, and round trips of a kernel that is attached to it."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, median, skipped, spread, summary

START = 300 * MS
TIMES = 2.0
"""How many times as long an attached kernel may take as one with a scheduler of its own."""


@contextlib.contextmanager
def head() -> Iterator[float]:
    """A head process in a folder of its own, and the seconds until it listened."""
    from gpunb import cli

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUNB_RUNTIME_DIR"] = folder
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main(["start", "--head", "--simulate", "4xA100:40GiB", "--num-cpus", "2"])
        seconds = time.perf_counter() - start
        try:
            yield seconds
        finally:
            with contextlib.redirect_stdout(io.StringIO()):
                cli.main(["stop"])


def round_trips(n: int) -> Result:
    """Submit and get, one after the other, on a worker that is used again."""
    import gpunb
    from benchmarks import floors, sessions

    with head() as seconds:
        gpunb.init("auto")
        sessions.settle()
        task = sessions.empty()
        found = floors.round_trips(lambda: gpunb.get(task.remote()), n)
        gpunb.shutdown()
    return {**found, "start": [seconds]}


def measure(bench: Any) -> Iterator[Line]:
    n = bench.n(1000, 300)
    calls = {
        "attached": probe.call("head.round_trips", n=n),
        "own": probe.call("warm.round_trips", options={}, n=n),
    }
    found = probe.in_turns(bench.n(5, 2), **calls)
    attached, own = found["attached"], found["own"]
    name = "warm round trip, attached to a head process"
    if "skipped" in attached or "skipped" in own:
        yield skipped(name, "s", attached if "skipped" in attached else own)
        return
    yield Line(
        name,
        median(attached["seconds"]),
        "s",
        goal_of_floor=TIMES,
        floor=("scheduler in the kernel", median(own["seconds"])),
        note=spread(attached["seconds"]),
        detail={"summary": summary(attached["seconds"]), **attached},
    )
    yield Line(
        "gpunb start --head",
        median(attached["start"]),
        "s",
        goal=START,
        note=spread(attached["start"]),
    )
