"""50,000 GPU tasks in the queue: to submit them, to keep them, to work them off."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, median, scaled, skipped

TASKS = 50_000
DRAINED = 1000


def flood(n: int, drained: int, n_devices: int = 2) -> Result:
    """The devices work from the first submission on, so submitting competes with that.

    Memory is what the process grew by, divided by the number of tasks that waited then.
    """
    import gpunb
    from benchmarks import processes, sessions

    sessions.start(n_devices)
    task = sessions.empty(num_gpus=1)
    gpunb.get([task.remote() for _ in range(20)])
    gc.collect()
    before = processes.rollup()["Private_Dirty"]
    start = time.perf_counter()
    refs = [task.remote() for _ in range(n)]
    submitted = time.perf_counter()
    queued = gpunb.status()["queued"]
    taken = time.perf_counter()
    gc.collect()
    memory = processes.rollup()["Private_Dirty"] - before
    queued = gpunb.status()["queued"]
    done = n - queued
    begun = time.perf_counter()
    gpunb.get(refs[: done + drained])
    ended = time.perf_counter()
    gpunb.shutdown()
    return {
        "submit": [submitted - start],
        "taken": [taken - start],
        "memory": [memory / queued],
        "rates": [drained / (ended - begun)],
        "shutdown": [time.perf_counter() - ended],
        "done_meanwhile": [done],
    }


def measure(bench: Any) -> Iterator[Line]:
    runs = bench.n(3, 1)
    calls = {"gpunb": probe.call("queue.flood", n=TASKS, drained=bench.n(DRAINED, 300))}
    result = probe.in_turns(runs, **calls)["gpunb"]
    name = f"{TASKS:,} queued GPU tasks"
    if "skipped" in result:
        yield skipped(name, "s", result)
        return
    submit = median(result["submit"])
    taken = scaled(median(result["taken"]), "s")
    yield Line(
        f"{name}: submit",
        submit,
        "s",
        goal=1.2,
        note=f"{TASKS / submit:,.0f} /s; all in the queue after {taken}",
        detail=result,
    )
    yield Line(f"{name}: memory each", median(result["memory"]), "B", goal=2048)
    yield Line(f"{name}: worked off", median(result["rates"]), "1/s", goal=250, note="2 devices")
    yield Line(f"{name}: shutdown", median(result["shutdown"]), "s")
