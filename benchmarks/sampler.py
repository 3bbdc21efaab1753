"""What the sampler costs while tasks hold devices: processor time of the kernel for each look."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, skipped
from benchmarks.sessions import REAL

GOAL = 5 * MS
"""A look each second then takes half a percent of one core."""

PERIOD = 0.02
"""Seconds between two looks here, so that there are many of them."""


def cost(devices: int, seconds: float, real: bool) -> Result:
    """Processor time with the sampler and without, on devices held by actors. Made-up devices
    list processes that exist; real ones are asked through their vendor's library."""
    import gpunb
    from gpunb.engine import sampler, share_checks

    looks = 0
    look = sampler.Sampler._look  # noqa: SLF001 - to count them

    def counted(self: Any, plugins: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(self, plugins)

    sampler.Sampler._look = counted  # type: ignore[method-assign] # noqa: SLF001
    sampler.hidden = lambda: False  # type: ignore[assignment]
    share_checks.PERIOD = share_checks.REST = PERIOD
    if not real:
        _make_up(devices)
    gpunb.init(num_gpus=devices if real else None, num_cpus=4, preload=[])
    found = gpunb.status()["devices"]
    if not found or all(each["logical"] for each in found):
        gpunb.shutdown()
        return {"skipped": "no device that can be asked"}

    @gpunb.remote(num_gpus=1)
    @probe.by_value
    class Holder:
        def ready(self) -> None:
            pass

    holders = [Holder.remote() for _ in found]
    gpunb.get([each.ready.remote() for each in holders])
    time.sleep(0.5)
    begun, before = looks, time.process_time()
    time.sleep(seconds)
    taken, looks_taken = time.process_time() - before, looks - begun
    local: Any = gpunb.protocol.backend.existing()
    local.engine.sampler.close()
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(seconds)
    rest = time.process_time() - before
    gpunb.shutdown()
    return {"looks": looks_taken, "seconds": taken - rest, "without": rest, "devices": len(found)}


def _make_up(count: int) -> None:
    from gpunb.accelerators import Accelerator, Process, Usage, registry
    from gpunb.scheduler.resources import Device

    class Made(Accelerator):
        name: ClassVar[str] = "made"

        def devices(self) -> Sequence[Device]:
            return [
                Device(f"made-{at}", at, "made up", "MADE", 2**35, "made") for at in range(count)
            ]

        def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
            pids = [os.getppid(), 1, *_children()]
            running = tuple(Process(pid, 2**30) for pid in pids[:8])
            return {each.key: Usage(2**33, 2**35, 50, 40, running) for each in devices}

    registry._known.clear()  # noqa: SLF001 - these devices and no others
    registry.register(Made)


def _children() -> list[int]:
    import gpunb

    local: Any = gpunb.protocol.backend.existing()
    found = local.engine.pool.processes() if local is not None else []
    return [each.pid for each in found if each.pid]


def measure(bench: Any) -> Iterator[Line]:
    for devices in (1, 8):
        name = f"sampler, {devices} device{'s' if devices > 1 else ''}: a look"
        real = bool(os.environ.get(REAL))
        seconds = bench.n(10, 3)
        result = bench.run(probe.call("sampler.cost", devices=devices, seconds=seconds, real=real))
        if "skipped" in result or not result["looks"]:
            yield skipped(name, "s", {"skipped": "it never looked", **result})
            continue
        each = result["seconds"] / result["looks"]
        note = f"{100 * each:.2g}% of a core at one look a second; {result['looks']} looks"
        yield Line(name, max(each, 0.0), "s", goal=GOAL, note=note, detail=result)
