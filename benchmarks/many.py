"""5,000 empty CPU tasks at once, on two workers that are used again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import peers, probe
from benchmarks.lines import Line, Result, median, scaled, skipped

TASKS = 5000


def batch(n: int, runs: int) -> Result:
    """Submit all, get all; the socket echo after each run."""
    import gpunb
    from benchmarks import floors, sessions

    sessions.start(4, cpus=peers.WORKERS)
    task = sessions.empty()
    gpunb.get([task.remote() for _ in range(100)])
    rates, submits, floor = [], [], []
    with floors.Echo() as echo:
        for _ in range(runs):
            start = time.perf_counter()
            refs = [task.remote() for _ in range(n)]
            submits.append(time.perf_counter() - start)
            gpunb.get(refs)
            rates.append(n / (time.perf_counter() - start))
            del refs
            time.sleep(0.3)
            floor += [1 / echo.once() for _ in range(100)]
    gpunb.shutdown()
    return {"rates": rates, "submits": submits, "floor": floor}


def measure(bench: Any) -> Iterator[Line]:
    name = f"{TASKS:,} empty CPU tasks, {peers.WORKERS} workers"
    calls = {
        "gpunb": probe.call("many.batch", n=TASKS, runs=bench.n(3, 2)),
        **peers.many(bench, TASKS),
    }
    found = probe.in_turns(bench.n(2, 1), **calls)
    result = found.pop("gpunb")
    bench.note(found)
    if "skipped" in result:
        yield skipped(name, "1/s", result)
        return
    submit = median(result["submits"])
    yield Line(
        name,
        median(result["rates"]),
        "1/s",
        goal=12_000,
        goal_of_peer=("loky", 2),
        floor=("echoes one by one", median(result["floor"])),
        peers=peers.values(found, "rates"),
        note=f"submitted in {scaled(submit, 's')}",
        detail={**result, "peers": found},
    )
