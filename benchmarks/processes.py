"""The processes that descend from this one, and their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lines import Result


def descendants() -> Result:
    """The processes that descend from this one; memory is their proportional share, in bytes."""
    found = []
    for pid, name in names():
        try:
            memory = rollup(pid)
        except OSError:
            continue  # it ended meanwhile
        found.append([name, memory["Pss"], memory["Private_Dirty"]])
    return {"processes": len(found), "bytes": sum(each[1] for each in found), "each": found}


def names() -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each process that descends from this one."""
    parents = _parents()
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and pid != above:
            try:
                yield pid, Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                pass  # it ended meanwhile


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
