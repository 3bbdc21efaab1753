"""The scheduler's core alone, without processes; measured by `bench_core`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import bench_core, probe
from benchmarks.lines import Line, skipped

_UNIT = " us"
_GOALS = {bench_core.DECISION: 20e-6}


def measure(bench: Any) -> Iterator[Line]:
    result = bench.run(probe.call("bench_core.run"))
    if "skipped" in result:
        yield skipped("the core", "s", result)
        return
    for name, value in result.items():
        if name.endswith(_UNIT):
            shown = f"core: {name.removesuffix(_UNIT)}"
            yield Line(shown, value / 1e6, "s", goal=_GOALS.get(name))
