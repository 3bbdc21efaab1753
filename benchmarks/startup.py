"""Importing gpunb, and from `init` to the first result, each in fresh interpreters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import peers, probe
from benchmarks.lines import Line, Result, median, skipped, spread

IMPORTS = {
    "import gpunb": "import gpunb",
    "import gpunb, and a first use of its names": "from gpunb import init, remote, get",
}


def imports(code: str, n: int) -> Result:
    """Whole runs of an interpreter with and without the import, in turns."""
    from benchmarks.floors import python_start

    python_start(code)
    bare, whole = [], []
    for _ in range(n):
        bare.append(python_start())
        whole.append(python_start(code))
    return {"bare": bare, "whole": whole}


def first(preload: list[str] | None) -> Result:
    """In this fresh interpreter: import, init, the result of the first GPU task."""
    start = time.perf_counter()
    import gpunb

    remote = gpunb.remote
    from benchmarks import floors, sessions

    imported = time.perf_counter()
    sessions.init(4, preload)
    ready = time.perf_counter()
    nothing = probe.by_value(lambda: None)
    gpunb.get(remote(num_gpus=1)(nothing).remote())
    result = time.perf_counter()
    gpunb.shutdown()
    ended = time.perf_counter()
    return {
        "import": [imported - start],
        "init": [ready - imported],
        "first": [result - imported],
        "shutdown": [ended - result],
        "whole": [ended - start],
        "floor": [floors.python_start()],
    }


def measure(bench: Any) -> Iterator[Line]:
    for name, code in IMPORTS.items():
        yield _imports(name, bench.run(probe.call("startup.imports", code=code, n=bench.n(9, 5))))
    calls = {
        "gpunb": probe.call("startup.first", preload=None),
        "nothing": probe.call("startup.first", preload=[]),
        "torch": probe.call("startup.first", "torch", preload=["torch"]),
        **peers.startup(bench),
    }
    found = probe.in_turns(bench.n(7, 3), **calls)
    ours = {name: found.pop(name) for name in ("gpunb", "nothing", "torch")}
    bench.note(found)
    for label, key in (
        ("", "gpunb"),
        (", preload=[]", "nothing"),
        (", preload=['torch']", "torch"),
    ):
        result = ours[key]
        name = f"init to first GPU result{label}"
        if "skipped" in result:
            yield skipped(name, "s", result)
            continue
        yield Line(
            name,
            median(result["first"]),
            "s",
            goal=0.25,
            floor=("python -c pass", median(result["floor"])),
            peers=peers.values(found, "first") if key == "gpunb" else {},
            note=spread(result["first"]),
            detail={**result, "peers": found},
        )
    if "skipped" not in ours["gpunb"]:
        whole = ours["gpunb"]["whole"]
        name = "import, init, first GPU task, shutdown"
        yield Line(name, median(whole), "s", goal=0.3, note=spread(whole))
        for name, key in (("init returns", "init"), ("shutdown", "shutdown")):
            samples = ours["gpunb"][key]
            yield Line(name, median(samples), "s", note=spread(samples))


def _imports(name: str, result: Result) -> Line:
    if "skipped" in result:
        return skipped(name, "s", result)
    bare = median(result["bare"])
    return Line(
        name,
        max(0.0, median(result["whole"]) - bare),
        "s",
        goal=0.1,
        floor=("python -c pass", bare),
        note=f"beyond the {bare * 1e3:.3g} ms of a bare interpreter",
        detail=result,
    )
