"""What a session with four devices costs while nothing runs: processes and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import peers, probe
from benchmarks.lines import MB, MIB, Line, Result, skipped
from benchmarks.processes import descendants, rollup

PRELOADS = {"": None, ", nothing preloaded": [], ", torch preloaded": ["torch"]}


def session(preload: list[str] | None) -> Result:
    """After some tasks and two seconds of rest. The kernel's growth is that of its private memory,
    because its proportional share falls when others come to share its pages."""
    import gpunb
    from benchmarks import sessions

    gpunb.remote  # noqa: B018 - loads what a session needs
    import multiprocessing.connection  # noqa: F401

    import loky.backend.process  # noqa: F401

    before = rollup()["Private_Dirty"]
    sessions.start(4, preload)
    task = sessions.empty(num_gpus=1)
    for _ in range(3):
        gpunb.get([task.remote() for _ in range(8)])
    time.sleep(2)
    found = descendants()
    growth = rollup()["Private_Dirty"] - before
    gpunb.shutdown()
    return {**found, "growth": growth}


def measure(bench: Any) -> Iterator[Line]:
    others = probe.in_turns(1, **peers.idle(bench))
    bench.note(others)
    for label, preload in PRELOADS.items():
        name = f"idle, 4 devices{label}"
        result = bench.run(probe.call("idle.session", *preload or (), preload=preload))
        if "skipped" in result:
            yield skipped(name, "B", result)
            continue
        known = {k: v for k, v in others.items() if "skipped" not in v} if not preload else {}
        kinds = [each[0] for each in result["each"]]
        names = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        torch = "torch" in label
        yield Line(
            f"{name}: memory",
            result["bytes"],
            "B",
            goal=None if torch else 70 * MIB,
            peers={name: each["bytes"] for name, each in known.items()},
            note=f"the kernel itself grew by {result['growth'] / MB:.3g} MB",
            detail={**result, "peers": known},
        )
        yield Line(
            f"{name}: processes",
            result["processes"],
            "",
            goal=6,
            peers={name: each["processes"] for name, each in known.items()},
            note=names,
        )
