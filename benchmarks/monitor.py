"""The live picture: what an update of the widget costs the kernel, and what a watcher costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, skipped

DEVICES, JOBS = 16, 500


def update(rounds: int) -> Result:
    """Snapshots of a session with so many devices and jobs, each taken, compared, made small and
    set, as the runtime's thread does it; CPU seconds of each part. The comm goes nowhere."""
    import gpunb
    from benchmarks import sessions
    from benchmarks.probe import by_value
    from gpunb.engine.publisher import timeless
    from gpunb.live.compact import compact
    from gpunb.live.widget import Monitor
    from gpunb.protocol import backend

    sessions.init(DEVICES, cpus=4)

    @by_value
    def stays() -> None:
        time.sleep(3600)

    running = gpunb.remote(num_gpus=0.5)(stays)
    refs = [running.remote() for _ in range(2 * DEVICES)]
    refs += [gpunb.remote(num_gpus=1 + at % 8)(stays).remote() for at in range(JOBS - len(refs))]
    deadline = time.monotonic() + 60
    while len(gpunb.status()["running"]) < 2 * DEVICES and time.monotonic() < deadline:
        time.sleep(0.05)
    current: Any = backend.current()
    widget = Monitor(None)
    parts: dict[str, list[float]] = {"snapshot": [], "compare": [], "compact": [], "set": []}

    def once() -> None:
        times = [time.thread_time()]
        facts = current.engine.facts.get("status")
        times.append(time.thread_time())
        timeless(facts)
        times.append(time.thread_time())
        small = compact(facts)
        times.append(time.thread_time())
        widget.snapshot = small
        times.append(time.thread_time())
        for name, start, end in zip(parts, times, times[1:], strict=False):
            parts[name].append(end - start)

    for _ in range(rounds + 3):
        current.on_loop(once)  # the thread that does it in a session
    return {name: each[3:] for name, each in parts.items()}


def watching(seconds: float) -> Result:
    """CPU seconds for each second that somebody watches a session with four devices in which
    nothing happens, beyond those of one that nobody watches."""
    from benchmarks import sessions
    from gpunb.protocol import backend

    sessions.init(4)
    time.sleep(2)  # the first workers are there
    current: Any = backend.current()

    def cost() -> float:
        start, begun = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return (time.process_time() - start) / (time.monotonic() - begun)

    alone = cost()
    current.watch(bool)
    return {"watched": cost(), "alone": alone}


def measure(bench: Any) -> Iterator[Line]:
    result = bench.run(probe.call("monitor.update", "ipywidgets", rounds=bench.n(200, 20)))
    name = f"update of the widget, {DEVICES} devices and {JOBS} jobs"
    if "skipped" in result:
        yield skipped(name, "s", result)
    else:
        whole = [sum(each) for each in zip(*result.values(), strict=True)]
        note = ", ".join(f"{n} {statistics.median(v) / MS:.2f} ms" for n, v in result.items())
        yield Line(name, statistics.median(whole), "s", goal=5 * MS, note=f"CPU: {note}")
    result = bench.run(probe.call("monitor.watching", seconds=bench.n(20, 4)))
    name = "a watcher while nothing happens, of a core"
    if "skipped" in result:
        yield skipped(name, "", result)
        return
    extra = max(0.0, result["watched"] - result["alone"])
    yield Line(name, extra, "", goal=0.01, note=f"{result['alone']:.4f} without a watcher")
