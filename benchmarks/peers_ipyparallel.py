"""ipyparallel, measured the same way; each probe starts and ends a cluster of its own.

Its engines are used again, so it has no line about fresh processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.lines import Result
from benchmarks.peers import WORKERS, ends, nothing, rate, timed
from benchmarks.probe import by_value


@contextlib.contextmanager
def view(engines: int = WORKERS) -> Iterator[Any]:
    """The load-balanced view of a new cluster on this machine, with files of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder
        import ipyparallel

        with ipyparallel.Cluster(n=engines, log_level=logging.ERROR) as client:
            client.wait_for_engines(engines, timeout=60)
            yield client.load_balanced_view()


def warm(n: int) -> Result:
    function = by_value(lambda: None)
    with view() as engines:
        return {"seconds": timed(lambda: engines.apply_sync(function), n, before=50)}


def many(n: int) -> Result:
    function = by_value(lambda: None)
    with view() as engines:

        def turn(n: int) -> None:
            for result in [engines.apply_async(function) for _ in range(n)]:
                result.get()

        return rate(turn, n)


def startup() -> Result:
    start = time.perf_counter()
    import ipyparallel  # noqa: F401 - its import is what is timed

    imported = time.perf_counter()
    with view() as engines:
        engines.apply_sync(by_value(nothing))
        first = time.perf_counter() - imported
    return {"import": [imported - start], "first": [first]}


def idle() -> Result:
    from benchmarks.processes import descendants

    with view(4) as engines:
        for result in [engines.apply_async(time.sleep, 0.3) for _ in range(4)]:
            result.get()
        time.sleep(1)
        return descendants()


def argument(nbytes: int) -> Result:
    import numpy as np

    array = np.ones(nbytes // 8)
    with view() as engines:
        engines.apply_sync(nothing)
        return {"seconds": timed(lambda: engines.apply_sync(ends, array), 1)}
