"""The alternatives, measured the same way: loky, the standard library's forkserver, ipyparallel
and Ray.

Each is given what favours it: a warm pool, as many workers as gpunb has, the preload where it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.lines import Result, median
from benchmarks.probe import Call, by_value, call

RAY_LIMIT = 150.0
"""Seconds for one probe of Ray's, its start and end included."""

WORKERS = 2

Turn = Callable[[], object]


def values(found: Mapping[str, Result], key: str) -> dict[str, float]:
    """The median of each peer that could be measured."""
    return {name: median(each[key]) for name, each in found.items() if each.get(key)}


def fresh(bench: Any, use: str | None) -> dict[str, Call]:
    """A new process for each task; with `use`, the task imports that module and uses it."""
    if not bench.peers:
        return {}
    needs, few = ([use] if use else []), bench.n(10, 3)
    return {
        "loky": call("peers.loky_fresh", "loky", *needs, use=use, n=3 if use else few),
        "forkserver": call("peers.forkserver_fresh", *needs, use=use, n=bench.n(30, 10)),
        "Ray": _ray("fresh", *needs, use=use, n=few),
    }


def fresh_rate(bench: Any) -> dict[str, Call]:
    if not bench.peers:
        return {}
    return {
        "forkserver": call("peers.forkserver_rate", n=bench.n(100, 20)),
        "Ray": _ray("rate", n=bench.n(20, 6)),
    }


def warm(bench: Any) -> dict[str, Call]:
    return _all(bench, "warm", n=bench.n(500, 100))


def many(bench: Any, n: int) -> dict[str, Call]:
    return _all(bench, "many", n=n)


def startup(bench: Any) -> dict[str, Call]:
    return _all(bench, "startup")


def idle(bench: Any) -> dict[str, Call]:
    return _all(bench, "idle")


def argument(bench: Any, nbytes: int) -> dict[str, Call]:
    if not bench.peers:
        return {}
    return {
        "loky": call("peers.loky_argument", "loky", "numpy", nbytes=nbytes),
        "ipyparallel": call("peers_ipyparallel.argument", "ipyparallel", "numpy", nbytes=nbytes),
        "Ray": _ray("argument", "numpy", nbytes=nbytes),
    }


def _all(bench: Any, name: str, **arguments: Any) -> dict[str, Call]:
    if not bench.peers:
        return {}
    return {
        "loky": call(f"peers.loky_{name}", "loky", **arguments),
        "forkserver": call(f"peers.forkserver_{name}", **arguments),
        "ipyparallel": call(f"peers_ipyparallel.{name}", "ipyparallel", **arguments),
        "Ray": _ray(name, **arguments),
    }


def _ray(name: str, *needs: str, **arguments: Any) -> Call:
    return call(f"peers_ray.{name}", "ray", *needs, timeout=RAY_LIMIT, **arguments)


# ------------------------------------------------------------------------------- what tasks do


def nothing() -> None:
    pass


def little(module: str) -> bool:
    """As `sessions.uses`."""
    import importlib

    used = importlib.import_module(module)
    if hasattr(used, "zeros"):
        used.zeros(1)
    return True


def ends(array: Any) -> float:
    return float(array[0] + array[-1])


def _send_back(pipe: Any, use: str | None) -> None:
    pipe.send(little(use) if use else nothing())


def timed(turn: Turn, n: int, *, before: int = 0, pause: float = 0.0) -> list[float]:
    """Seconds for each of n turns, after some that do not count."""
    for _ in range(before):
        turn()
        time.sleep(pause)
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        turn()
        seconds.append(time.perf_counter() - start)
        time.sleep(pause)
    return seconds


def rate(turn: Callable[[int], object], n: int) -> Result:
    turn(20)
    start = time.perf_counter()
    turn(n)
    return {"rates": [n / (time.perf_counter() - start)]}


# ---------------------------------------------------------------------------------------- loky


def _loky(workers: int = WORKERS) -> Any:
    from loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=workers, timeout=600)
    # A worker starts when there is work; each of these is long enough to need its own.
    for future in [executor.submit(time.sleep, 0.3) for _ in range(workers)]:
        future.result()
    return executor


def loky_fresh(use: str | None, n: int) -> Result:
    from multiprocessing import Pipe

    from loky.backend.process import LokyProcess

    def turn() -> None:
        ours, theirs = Pipe()
        process = LokyProcess(target=_send_back, args=(theirs, use))
        process.start()
        theirs.close()
        ours.recv()
        ended.append(process)

    ended: list[Any] = []
    seconds = []
    for _ in range(n + 1):
        seconds += timed(turn, 1)
        ended.pop().join()
    return {"seconds": seconds[1:]}


def loky_warm(n: int) -> Result:
    executor = _loky()
    function = by_value(lambda: None)
    return {"seconds": timed(lambda: executor.submit(function).result(), n, before=50)}


def loky_many(n: int) -> Result:
    executor = _loky()
    function = by_value(lambda: None)
    return rate(lambda n: [f.result() for f in [executor.submit(function) for _ in range(n)]], n)


def loky_startup() -> Result:
    start = time.perf_counter()
    from loky import get_reusable_executor

    imported = time.perf_counter()
    get_reusable_executor(max_workers=WORKERS).submit(by_value(lambda: None)).result()
    return {"import": [imported - start], "first": [time.perf_counter() - imported]}


def loky_idle() -> Result:
    from benchmarks.processes import descendants

    executor = _loky(4)
    time.sleep(1)
    found = descendants()
    executor.shutdown()
    return found


def loky_argument(nbytes: int) -> Result:
    import numpy as np

    executor, array = _loky(), np.ones(nbytes // 8)
    return {"seconds": timed(lambda: executor.submit(ends, array).result(), 1)}


# -------------------------------------------------------- concurrent.futures on the forkserver


def _forkserver(use: str | None = None, workers: int = WORKERS, **options: Any) -> Any:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([use] if use else [])
    return ProcessPoolExecutor(workers, mp_context=context, **options)


def forkserver_fresh(use: str | None, n: int) -> Result:
    with _forkserver(use, 1, max_tasks_per_child=1) as executor:
        task = (little, use) if use else (nothing,)
        seconds = timed(lambda: executor.submit(*task).result(), n, before=2, pause=0.03)
    return {"seconds": seconds}


def forkserver_rate(n: int) -> Result:
    with _forkserver(max_tasks_per_child=1) as executor:
        return rate(lambda n: [f.result() for f in [executor.submit(nothing) for _ in range(n)]], n)


def forkserver_warm(n: int) -> Result:
    with _forkserver() as executor:
        return {"seconds": timed(lambda: executor.submit(nothing).result(), n, before=50)}


def forkserver_many(n: int) -> Result:
    with _forkserver() as executor:
        return rate(lambda n: [f.result() for f in [executor.submit(nothing) for _ in range(n)]], n)


def forkserver_startup() -> Result:
    start = time.perf_counter()
    from concurrent.futures import ProcessPoolExecutor  # noqa: F401 - its import is what is timed

    imported = time.perf_counter()
    with _forkserver() as executor:
        executor.submit(nothing).result()
        first = time.perf_counter() - imported
    return {"import": [imported - start], "first": [first]}


def forkserver_idle() -> Result:
    from benchmarks.processes import descendants

    with _forkserver(workers=4) as executor:
        for future in [executor.submit(time.sleep, 0.3) for _ in range(4)]:
            future.result()
        time.sleep(1)
        return descendants()
