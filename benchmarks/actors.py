"""Actors: round trips of their calls, calls at once, making and ending them, values one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, median, skipped, spread, summary
from benchmarks.probe import by_value

GOAL = 0.16 * MS


@by_value
class Empty:
    """An actor that does nothing."""

    def nothing(self) -> None:
        pass

    async def later(self) -> None:
        pass

    def count(self, n: int) -> Iterator[int]:
        for number in range(n):  # noqa: UP028 - Ray knows no `yield from` of an iterator
            yield number


@by_value
class Plain:
    """The same without coroutines."""

    def nothing(self) -> None:
        pass

    def count(self, n: int) -> Iterator[int]:
        for number in range(n):  # noqa: UP028 - Ray knows no `yield from` of an iterator
            yield number


def round_trips(n: int, kind: str = "Plain", **options: Any) -> Result:
    """Call and get, one after the other; every tenth time a socket echo beside it."""
    import gpunb
    from benchmarks import floors, sessions

    sessions.start(4, cpus=2)
    actor = remote(gpunb, kind, options).remote()
    call = actor.later if kind == "Empty" else actor.nothing
    found = floors.round_trips(lambda: gpunb.get(call.remote()), n)
    gpunb.shutdown()
    return found


def at_once(n: int, kind: str = "Plain", **options: Any) -> Result:
    """So many calls handed in, then all results."""
    import gpunb
    from benchmarks import sessions

    sessions.start(4, cpus=2)
    return {"rates": [calls_at_once(gpunb, n, kind, options)]}


def calls_at_once(api: Any, n: int, kind: str, options: dict[str, Any]) -> float:
    actor = remote(api, kind, options).remote()
    call = actor.later if kind == "Empty" else actor.nothing
    api.get([call.remote() for _ in range(200)])
    start = time.perf_counter()
    api.get([call.remote() for _ in range(n)])
    return n / (time.perf_counter() - start)


def lives(n: int) -> Result:
    """Make an actor with a device, call it, kill it; one after the other."""
    import gpunb
    from benchmarks import sessions

    sessions.start(1, cpus=2)
    return {"seconds": lives_of(gpunb, n)}


def lives_of(api: Any, n: int) -> list[float]:
    made = api.remote(num_gpus=1)(Plain)
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        actor = made.remote()
        api.get(actor.nothing.remote())
        api.kill(actor)
        seconds.append(time.perf_counter() - start)
    return seconds


def values(n: int) -> Result:
    """So many values of a generator, each got as it comes."""
    import gpunb
    from benchmarks import sessions

    sessions.start(4, cpus=2)
    return {"rates": [values_of(gpunb, n)]}


def values_of(api: Any, n: int) -> float:
    actor = api.remote(Plain).remote()
    api.get(actor.nothing.remote())
    start = time.perf_counter()
    for ref in actor.count.options(num_returns="streaming").remote(n):
        api.get(ref)
    return n / (time.perf_counter() - start)


def remote(api: Any, kind: str, options: dict[str, Any]) -> Any:
    cls = {"Plain": Plain, "Empty": Empty}[kind]
    return api.remote(**options)(cls) if options else api.remote(cls)


def measure(bench: Any) -> Iterator[Line]:
    n = bench.n(1000, 300)
    for name, arguments in (
        ("actor call, round trip", {"options": {}}),
        ("async actor call, round trip", {"kind": "Empty"}),
    ):
        arguments.pop("options", None)
        yield _timed(bench, name, "round_trips", GOAL, n=n, **arguments)
    many = bench.n(5000, 1000)
    name = f"{many:,} actor calls at once"
    yield _rate(bench, name, "at_once", goal=15_000, goal_of_peer=("Ray", 2), n=many)
    yield _rate(bench, f"{many:,} async actor calls at once", "at_once", n=many, kind="Empty")
    yield _rate(bench, f"{many:,} values of a generator, one by one", "values", n=many)
    yield _timed(bench, "make, call and kill a GPU actor", "lives", None, n=bench.n(100, 30))


def _found(bench: Any, probe_name: str, arguments: dict[str, Any]) -> dict[str, Result]:
    calls = {"gpunb": probe.call(f"actors.{probe_name}", **arguments)}
    if bench.peers:
        few = {**arguments, "n": min(arguments["n"], 300 if probe_name != "lives" else 5)}
        calls["Ray"] = probe.call(f"peers_ray.actor_{probe_name}", "ray", **few)
    found = probe.in_turns(bench.n(3, 1) if probe_name != "lives" else 1, **calls)
    bench.note({name: each for name, each in found.items() if name != "gpunb"})
    return found


def _timed(bench: Any, name: str, probe_name: str, goal: float | None, **arguments: Any) -> Line:
    found = _found(bench, probe_name, arguments)
    result = found.pop("gpunb")
    if "skipped" in result:
        return skipped(name, "s", result)
    floor = ("echo", median(result["floor"])) if "floor" in result else None
    peers = {key: median(x["seconds"]) for key, x in found.items() if "seconds" in x}
    detail = {"summary": summary(result["seconds"]), **result, "peers": found}
    note = spread(result["seconds"])
    return Line(
        name,
        median(result["seconds"]),
        "s",
        goal=goal,
        floor=floor,
        peers=peers,
        note=note,
        detail=detail,
    )


def _rate(
    bench: Any,
    name: str,
    probe_name: str,
    goal: float | None = None,
    goal_of_peer: tuple[str, float] | None = None,
    **arguments: Any,
) -> Line:
    found = _found(bench, probe_name, arguments)
    result = found.pop("gpunb")
    if "skipped" in result:
        return skipped(name, "1/s", result)
    peers = {key: median(x["rates"]) for key, x in found.items() if "rates" in x}
    return Line(
        name,
        median(result["rates"]),
        "1/s",
        goal=goal,
        goal_of_peer=goal_of_peer,
        peers=peers,
        detail={"peers": found},
    )
