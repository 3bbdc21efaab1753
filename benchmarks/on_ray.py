"""The Ray backend beside Ray itself: the same work on the same cluster, in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, median, skipped, spread

TIMES = 1.3
"""How many times as long as a plain Ray task one may take."""

BEFORE = 6
"""Calls of a block that do not count: they find workers that were started beforehand."""

PAUSE = 1.5
"""Seconds between two cells of somebody who looks at what the first has shown."""


def _timed(call: Callable[[], Any], pause: float) -> float:
    time.sleep(pause)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def work(gpus: float, n: int, kind: str, pause: float) -> Result:
    """Submit and get, on both in turns, so that they meet the same machine."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    import gpunb

    ray.init(
        "local",
        num_cpus=4,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=10**9,
    )
    cpus = 0 if gpus else 1
    with gpunb.init("ray"):
        plain = ray.remote(num_gpus=gpus, num_cpus=cpus)(probe.by_value(lambda: None))
        ours = gpunb.remote(num_gpus=gpus, num_cpus=cpus)(probe.by_value(lambda: None))
        cell = _cells(gpus) if kind == "cell" else None
        found: dict[str, list[float]] = {"ray": [], "gpunb": []}
        calls = {
            "ray": lambda: ray.get(plain.remote()),
            "gpunb": cell or (lambda: gpunb.get(ours.remote())),
        }
        # In blocks: Ray starts workers beforehand, which would all be found by one of the two.
        for name in ("ray", "gpunb", "gpunb", "ray"):
            took = [_timed(calls[name], pause) for _ in range(BEFORE + n // 2)]
            found[name] += took[BEFORE:]
    ray.shutdown()
    return found


def _cells(gpus: float) -> Callable[[], None]:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpunb")

    def cell() -> None:
        shell.run_cell(f"%%gpu {gpus:g}\nx = 1").raise_error()

    return cell


def measure(bench: Any) -> Iterator[Line]:
    for name, gpus, n, kind, pause in (
        ("cell on the Ray backend, one after the other", 1, bench.n(30, 8), "cell", 0.0),
        ("cell on the Ray backend, after a pause", 1, bench.n(20, 6), "cell", PAUSE),
        ("fresh GPU task on the Ray backend", 1, bench.n(30, 8), "task", 0.0),
        ("warm task on the Ray backend", 0, bench.n(500, 100), "task", 0.0),
    ):
        found = bench.run(
            probe.call("on_ray.work", "ray", gpus=gpus, n=n, kind=kind, pause=pause, timeout=600.0)
        )
        if "skipped" in found:
            yield skipped(name, "s", found)
            continue
        yield Line(
            name,
            median(found["gpunb"]),
            "s",
            goal_of_floor=TIMES if gpus else None,
            floor=("plain Ray", median(found["ray"])),
            note=spread(found["gpunb"]),
            detail=found,
        )
