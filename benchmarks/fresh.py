"""Fresh processes: a GPU task and its result, until the device is free again, tasks per second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import peers, probe
from benchmarks.lines import MS, Line, Result, median, quantile, skipped, spread, summary

PAUSE = 0.02
"""Seconds between two tasks, as between the clicks of a user; a standby gets ready meanwhile."""

PRELOADS = {"": None, ", nothing preloaded": [], ", torch preloaded": ["torch"]}
"""By the name that a line has for it; first the default settings."""

_LOOK = 1e-4
"""Seconds between two looks whether the device is free."""


def latency(preload: list[str] | None, use: str | None, n: int) -> Result:
    """Submit, get, pause; in each pause a fork from a small process, with torch if it is used."""
    import gpunb
    from benchmarks import floors, sessions

    sessions.start(4, preload)
    task = sessions.uses(use, num_gpus=1) if use else sessions.empty(num_gpus=1)
    if use and not gpunb.get(task.remote()):
        raise RuntimeError(f"{use} was not preloaded")
    seconds, floor = [], []
    with floors.Forks(*preload or ()) as forks:
        for turn in range(n + 10):
            start = time.perf_counter()
            gpunb.get(task.remote())
            took = time.perf_counter() - start
            time.sleep(PAUSE / 2)
            least = forks.once()
            time.sleep(PAUSE / 2)
            if turn >= 10:
                seconds.append(took)
                floor.append(least)
    gpunb.shutdown()
    return {"seconds": seconds, "floor": floor}


def freed(preload: list[str] | None, n: int) -> Result:
    """From the submission of a task on the only device until the device is free again, which means
    that the process is gone."""
    import gpunb
    from benchmarks import floors, sessions

    sessions.start(1, preload)
    task = sessions.empty(num_gpus=1)
    seconds, floor = [], []
    with floors.Forks(*preload or ()) as forks:
        for turn in range(n + 10):
            start = time.perf_counter()
            gpunb.get(task.remote())
            while not gpunb.available_resources().get("GPU"):
                time.sleep(_LOOK)
            took = time.perf_counter() - start
            time.sleep(PAUSE / 2)
            least = forks.once()
            time.sleep(PAUSE / 2)
            if turn >= 10:
                seconds.append(took)
                floor.append(least)
    gpunb.shutdown()
    return {"seconds": seconds, "floor": floor}


def rate(preload: list[str] | None, n: int, runs: int) -> Result:
    """Tasks per second when many wait for two devices."""
    import gpunb
    from benchmarks import floors, sessions

    sessions.start(2, preload)
    task = sessions.empty(num_gpus=1)
    gpunb.get([task.remote() for _ in range(20)])
    rates, floor = [], []
    with floors.Forks(*preload or ()) as forks:
        for _ in range(runs):
            start = time.perf_counter()
            gpunb.get([task.remote() for _ in range(n)])
            rates.append(n / (time.perf_counter() - start))
            time.sleep(0.2)
            floor += [1 / forks.once() for _ in range(20)]
    gpunb.shutdown()
    return {"rates": rates, "floor": floor}


# --------------------------------------------------------------------------------------- lines


def measure(bench: Any) -> Iterator[Line]:
    for label, preload in PRELOADS.items():
        torch = "torch" in label
        goals = (3 * MS, 15 * MS) if torch else (1.4 * MS, 10 * MS)
        name = f"fresh GPU task{label}"
        yield from _latency(bench, name, preload, None, goals)
        if torch:
            yield from _latency(bench, "fresh GPU task that uses torch", preload, "torch", goals)
        yield _freed(bench, label, preload)
        yield _rate(bench, label, preload)


def _latency(
    bench: Any, name: str, preload: list[str] | None, use: str | None, goals: tuple[float, float]
) -> Iterator[Line]:
    n = bench.n(75, 25)
    calls = {
        "gpunb": probe.call("fresh.latency", *preload or (), preload=preload, use=use, n=n),
        **peers.fresh(bench, use),
    }
    found = probe.in_turns(bench.n(2, 1), **calls)
    result = found.pop("gpunb")
    bench.note(found)
    if "skipped" in result:
        yield skipped(name, "s", result)
        return
    samples, floor = result["seconds"], result["floor"]
    others = peers.values(found, "seconds")
    detail = {**result, "summary": summary(samples), "peers": found}
    yield Line(
        name,
        median(samples),
        "s",
        goal=goals[0],
        goal_of_floor=2.5,
        floor=("fork", median(floor)),
        peers=others,
        note=spread(samples),
        detail=detail,
    )
    yield Line(
        f"{name}: p99",
        quantile(samples, 0.99),
        "s",
        goal=goals[1],
        floor=("fork p99", quantile(floor, 0.99)),
        note=f"max {max(samples) / MS:.3g} ms",
    )


def _freed(bench: Any, label: str, preload: list[str] | None) -> Line:
    name = f"until its device is free{label}"
    result = bench.run(
        probe.call("fresh.freed", *preload or (), preload=preload, n=bench.n(100, 20)),
    )
    if "skipped" in result:
        return skipped(name, "s", result)
    return Line(
        name,
        median(result["seconds"]),
        "s",
        goal=(12 if "torch" in label else 3.5) * MS,
        floor=("fork", median(result["floor"])),
        note=spread(result["seconds"]),
        detail=result,
    )


def _rate(bench: Any, label: str, preload: list[str] | None) -> Line:
    name = f"fresh tasks, 2 devices{label}"
    n = bench.n(400, 100)
    rate = probe.call("fresh.rate", *preload or (), preload=preload, n=n, runs=bench.n(3, 1))
    calls = {"gpunb": rate}
    if preload is None:
        calls |= peers.fresh_rate(bench)
    found = probe.in_turns(1, **calls)
    result = found.pop("gpunb")
    bench.note(found)
    if "skipped" in result:
        return skipped(name, "1/s", result)
    return Line(
        name,
        median(result["rates"]),
        "1/s",
        goal=80 if "torch" in label else 300,
        floor=("forks one by one", median(result["floor"])),
        peers=peers.values(found, "rates"),
        note=f"{n} tasks at once",
        detail={**result, "peers": found},
    )
