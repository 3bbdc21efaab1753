"""What a session with four devices costs while nothing runs: processes and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import peers, probe
from benchmarks.lines import MB, Line, Result, skipped

PRELOADS = {"nothing": [], "numpy": ["numpy"], "torch": ["torch"]}


def descendants() -> Result:
    """The processes that descend from this one; memory is their proportional share, in bytes."""
    found = []
    parents = _parents()
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and pid != above:
            try:
                memory = rollup(pid)
            except OSError:
                continue  # it ended meanwhile
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found.append([name, memory["Pss"], memory["Private_Dirty"]])
    return {"processes": len(found), "bytes": sum(each[1] for each in found), "each": found}


def rollup(pid: int | str = "self") -> dict[str, int]:
    """Bytes by kind, from /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) * 1024 for name, rest in (x.split(":") for x in lines)}


def _parents() -> dict[int, int]:
    found = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                stat = (each / "stat").read_text()
            except OSError:
                continue
            found[int(each.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def session(preload: list[str]) -> Result:
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
        name = f"idle, 4 devices, {label} preloaded"
        result = bench.run(probe.call("idle.session", *preload, preload=preload))
        if "skipped" in result:
            yield skipped(name, "B", result)
            continue
        known = {k: v for k, v in others.items() if "skipped" not in v} if not preload else {}
        kinds = [each[0] for each in result["each"]]
        names = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        torch = label == "torch"
        yield Line(
            f"{name}: memory",
            result["bytes"],
            "B",
            goal=None if torch else 80 * MB,
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
