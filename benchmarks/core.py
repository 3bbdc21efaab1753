"""The scheduler's core alone, without processes; measured by `bench_core`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, skipped

_UNIT = " us"


def measure(bench: Any) -> Iterator[Line]:
    if not probe.installed("benchmarks.bench_core"):
        yield Line("the core", None, "", note="benchmarks/bench_core.py is not there")
        return
    result = bench.run(probe.call("bench_core.run"))
    if "skipped" in result:
        yield skipped("the core", "s", result)
        return
    for name, value in result.items():
        if name.endswith(_UNIT):
            yield Line(f"core: {name.removesuffix(_UNIT)}", value / 1e6, "s")
