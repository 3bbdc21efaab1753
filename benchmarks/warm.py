"""Round trips of an empty task on a worker that is used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import peers, probe
from benchmarks.lines import MS, Line, Result, median, skipped, spread, summary

GOAL = 0.18 * MS


def round_trips(options: dict[str, Any], n: int) -> Result:
    """Submit and get, one after the other; every tenth time a socket echo beside it."""
    import gpunb
    from benchmarks import floors, sessions

    sessions.start(4, cpus=2)
    task = sessions.empty(**options)
    found = floors.round_trips(lambda: gpunb.get(task.remote()), n)
    gpunb.shutdown()
    return found


def measure(bench: Any) -> Iterator[Line]:
    kinds = {"CPU task": {}, "GPU task with max_calls=0": {"num_gpus": 1, "max_calls": 0}}
    for kind, options in kinds.items():
        name = f"warm round trip, {kind}"
        calls = {"gpunb": probe.call("warm.round_trips", options=options, n=bench.n(1000, 300))}
        if not options:
            calls |= peers.warm(bench)
        found = probe.in_turns(bench.n(3, 1), **calls)
        result = found.pop("gpunb")
        bench.note(found)
        if "skipped" in result:
            yield skipped(name, "s", result)
            continue
        yield Line(
            name,
            median(result["seconds"]),
            "s",
            goal=GOAL,
            goal_of_peer=None if options else ("loky", 1.6),
            floor=("echo", median(result["floor"])),
            peers=peers.values(found, "seconds"),
            note=spread(result["seconds"]),
            detail={"summary": summary(result["seconds"]), **result, "peers": found},
        )
