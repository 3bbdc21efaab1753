"""Arrays of float64 as arguments, results and put objects, against a memcpy of the same size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import peers, probe
from benchmarks.lines import Line, Result, median, skipped, spread

SIZES = {"1 MB": 1_000_000, "64 MB": 64_000_000, "1 GB": 1_000_000_000}
USERS = 8
NEEDED = 8 << 30
"""Bytes that must be available for the largest size: the array, its copy, a segment, a result."""

GOALS = {"put, used by 8 tasks": 0.8, "returned": 0.8}
"""Times a copy into fresh ordinary pages, for the largest size."""

SMALL_GOALS = {"argument": 1e-3, "returned": 1e-3}
"""Seconds, for the smallest size."""


def have_memory(nbytes: int) -> None:
    """Touch and free so much memory, so that the system has it at hand.

    A virtual machine may have to get it from its host first, page by page, which can take ten
    times as long as the copy. What is measured needs up to three times the array's size, its floor
    only once.
    """
    import numpy as np

    np.empty(nbytes, np.uint8)[::4096] = 1


def available() -> int:
    """Bytes of memory that can be had: the system's, or what the cgroup leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kinds = {name: rest.split()[0] for name, rest in (line.split(":") for line in lines)}
    least = int(kinds["MemAvailable"]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return least if limit == "max" else min(least, int(limit) - used)
    except OSError:
        return least


@probe.by_value
def ends(values: Any) -> float:
    """A task that reads an array."""
    return float(values[0] + values[-1])


@probe.by_value
def made(count: int) -> Any:
    """A task that makes an array."""
    import numpy

    return numpy.ones(count)


def transfers(nbytes: int, n: int) -> Result:
    """In turns: a.copy(), argument, a.copy(), put for 8 tasks, a.copy(), result.

    The tasks are fresh GPU tasks that read the first and the last element; what is returned is
    made by the task, and that is part of the time. The copy is made beforehand, not with it.
    """
    import numpy as np

    import gpunb
    from benchmarks import floors, sessions

    sessions.start(4)
    array = np.random.default_rng(0).random(nbytes // 8)

    reads, makes = (gpunb.remote(num_gpus=0.5)(each) for each in (ends, made))

    def argument() -> None:
        gpunb.get(reads.remote(array))

    def put() -> None:
        ref = gpunb.put(array)
        gpunb.get([reads.remote(ref) for _ in range(USERS)])

    def put_again() -> None:
        gpunb.get([reads.remote(kept) for _ in range(USERS)])

    def returned() -> None:
        result = gpunb.get(makes.remote(array.size))
        assert result[0] == result[-1] == 1.0

    kept = gpunb.put(array)
    kinds: dict[str, Callable[[], None]] = {
        "argument": argument,
        "put, used by 8 tasks": put,
        "the same put, used by 8 more": put_again,
        "returned": returned,
    }
    for turn in kinds.values():
        turn()
    found: Result = {name: [] for name in [*kinds, "copy", "small", "file"]}
    for _ in range(n):
        for name, turn in kinds.items():
            time.sleep(0.1)  # the last one's memory is given back meanwhile
            have_memory(3 * nbytes)
            found["copy"].append(floors.copy_time(array))
            found["small"].append(floors.small_copy_time(array))
            found["file"].append(floors.file_time(array))
            start = time.perf_counter()
            turn()
            found[name].append(time.perf_counter() - start)
    gpunb.shutdown()
    return found


def measure(bench: Any) -> Iterator[Line]:
    for label, nbytes in SIZES.items():
        large = nbytes >= 1_000_000_000
        if large and available() < NEEDED:
            yield Line(f"{label} arrays", None, "s", note="less than 8 GiB of memory is available")
            continue
        n = bench.n(7, 3) if large else bench.n(20, 5)
        calls = {"gpunb": probe.call("data.transfers", "numpy", nbytes=nbytes, n=n)}
        if large:
            calls |= peers.argument(bench, nbytes)
        found = probe.in_turns(1, **calls)
        result = found.pop("gpunb")
        bench.note(found)
        if "skipped" in result:
            yield skipped(f"{label} arrays", "s", result)
            continue
        floors = {name: result.pop(name) for name in ("copy", "small", "file")}
        small, file = median(floors["small"]), median(floors["file"])
        for kind, samples in result.items():
            yield Line(
                f"{label} {kind}",
                median(samples),
                "s",
                goal=SMALL_GOALS.get(kind) if label == "1 MB" else None,
                goal_of_floor=GOALS.get(kind) if large else None,
                floor=("copy, ordinary pages", small),
                peers=peers.values(found, "seconds") if kind == "argument" else {},
                note=f"{median(samples) / median(floors['copy']):.2g}x a.copy(), "
                f"{median(samples) / file:.2g}x a write into a memory file; {spread(samples)}",
                detail={"seconds": samples, **floors, "peers": found},
            )
