"""Ray, measured the same way; each probe starts and ends a Ray of its own."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.lines import Result
from benchmarks.peers import WORKERS, ends, little, timed
from benchmarks.peers import rate as batch_rate
from benchmarks.probe import by_value


def begin(gpus: int = 4) -> Any:
    import os

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(
        num_gpus=gpus,
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=3 << 30,
    )
    return ray


def fresh(use: str | None, n: int) -> Result:
    ray = begin()
    function = by_value((lambda: little(use)) if use else (lambda: None))
    task = ray.remote(num_gpus=1)(function)
    # The first few find workers that were started beforehand, and later ones do not.
    return {"seconds": timed(lambda: ray.get(task.remote()), n, before=4, pause=0.03)}


def rate(n: int) -> Result:
    ray = begin()
    task = ray.remote(num_gpus=1)(by_value(lambda: None))
    timed(lambda: ray.get(task.remote()), 4)
    start = time.perf_counter()
    ray.get([task.remote() for _ in range(n)])
    return {"rates": [n / (time.perf_counter() - start)]}


def warm(n: int) -> Result:
    ray = begin()
    task = ray.remote(by_value(lambda: None))
    return {"seconds": timed(lambda: ray.get(task.remote()), n, before=50)}


def many(n: int) -> Result:
    ray = begin()
    task = ray.remote(by_value(lambda: None))
    return batch_rate(lambda n: ray.get([task.remote() for _ in range(n)]), n)


def startup() -> Result:
    start = time.perf_counter()
    import ray

    imported = time.perf_counter()
    begin()
    ray.get(ray.remote(num_gpus=1)(by_value(lambda: None)).remote())
    return {"import": [imported - start], "first": [time.perf_counter() - imported]}


def idle() -> Result:
    from benchmarks.processes import descendants

    ray = begin()
    ray.get([ray.remote(by_value(lambda: None)).remote() for _ in range(WORKERS)])
    time.sleep(2)
    return descendants()


def argument(nbytes: int) -> Result:
    import numpy as np

    ray = begin()
    array = np.ones(nbytes // 8)
    task = ray.remote(ends)
    ray.get(task.remote(array[:8]))
    return {"seconds": timed(lambda: ray.get(task.remote(array)), 1)}


def actor_round_trips(n: int, kind: str = "Plain") -> Result:
    from benchmarks import actors

    ray = begin()
    actor = actors.remote(ray, kind, {}).remote()
    call = actor.later if kind == "Empty" else actor.nothing
    return {"seconds": timed(lambda: ray.get(call.remote()), n, before=50)}


def actor_at_once(n: int, kind: str = "Plain") -> Result:
    from benchmarks import actors

    return {"rates": [actors.calls_at_once(begin(), n, kind, {})]}


def actor_lives(n: int) -> Result:
    from benchmarks import actors

    return {"seconds": actors.lives_of(begin(), n)}


def actor_values(n: int) -> Result:
    from benchmarks import actors

    return {"rates": [actors.values_of(begin(), n)]}
