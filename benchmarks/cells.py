"""Cells in a real kernel, as a notebook sees them: until the cell is over and its output shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, median, skipped, spread

KINDS = {"plain": "pass", "gpu": "%%gpu\npass", "background": "%%gpu --bg\npass"}
PAUSE = 0.02
"""Seconds between two cells, in which a standby gets ready for the next one."""

_SETUP = """\
import gpunb
gpunb.init(simulate="4xA100:40GiB")
%load_ext gpunb
while gpunb.status()["preload"] is None:
    __import__("time").sleep(0.02)
"""


def empty(n: int) -> Result:
    """Empty cells of each kind, in turns."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    seconds: Result = {name: [] for name in KINDS}

    def run(code: str) -> float:
        start = time.perf_counter()
        reply = client.execute_interactive(
            code, store_history=False, output_hook=lambda _: None, timeout=60
        )
        took = time.perf_counter() - start
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{code!r}: {reply['content']}")
        return took

    try:
        run(_SETUP)
        for turn in range(n + 10):
            for name, code in KINDS.items():
                took = run(code)
                time.sleep(PAUSE)
                if turn >= 10:
                    seconds[name].append(took)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
    return seconds


def measure(bench: Any) -> Iterator[Line]:
    result = bench.run(probe.call("cells.empty", "jupyter_client", "ipykernel", n=bench.n(100, 25)))
    goals = {
        "gpu": ("an empty %%gpu cell", 4 * MS),
        "background": ("an empty %%gpu --bg cell", None),
    }
    for kind, (cell, goal) in goals.items():
        name = f"{cell}, beyond a plain one"
        if "skipped" in result:
            yield skipped(name, "s", result)
            continue
        plain = median(result["plain"])
        yield Line(
            name,
            median(result[kind]) - plain,
            "s",
            goal=goal,
            floor=("a plain cell", plain),
            note=f"whole cells: {spread(result[kind])}",
            detail=result,
        )
