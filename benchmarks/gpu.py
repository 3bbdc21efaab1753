"""On a real NVIDIA GPU with PyTorch: the first kernel of a fresh worker, and tasks side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, median, skipped, spread


def _start() -> str | None:
    """A session on one device, torch preloaded; why there is none."""
    import gpunb
    from benchmarks import sessions
    from gpunb import accelerators

    found = accelerators.detect()
    if not any(each.vendor == "nvidia" for each in found.devices):
        return f"no NVIDIA GPU: {'; '.join(found.notes)}"[:200]
    gpunb.init(num_gpus=1, num_cpus=4, preload=["numpy", "torch"])
    sessions.settle()
    return None


def first_kernel(n: int, reused: bool) -> Result:
    """From `.remote()` until the first kernel of the task was started and has ended, as the task
    itself tells on the clock that all processes share."""
    import gpunb

    problem = _start()
    if problem is not None:
        return {"skipped": problem}

    @gpunb.remote(num_gpus=1, max_calls=0 if reused else 1)
    @probe.by_value
    def launch() -> float:
        import time

        import torch

        torch.ones(1024, device="cuda").sum().item()
        return time.monotonic()

    seconds = []
    for turn in range(n + 2):
        start = time.monotonic()
        took = gpunb.get(launch.remote()) - start
        time.sleep(0.5)  # until the process is gone, and a standby is ready
        if turn >= 2:
            seconds.append(took)
    gpunb.shutdown()
    return {"seconds": seconds}


def packing(rounds: int, share: float) -> Result:
    """Four tasks that keep the device busy a little and wait a little, as a training loop that
    reads data does; all handed in at once."""
    import gpunb

    problem = _start()
    if problem is not None:
        return {"skipped": problem}

    @gpunb.remote(num_gpus=share)
    @probe.by_value
    def train() -> float:
        import time

        import torch

        weights = torch.randn(1024, 1024, device="cuda")
        for _ in range(100):
            weights = (weights @ weights).tanh()
            torch.cuda.synchronize()
            time.sleep(0.01)
        return float(weights.sum())

    gpunb.get(train.remote())
    seconds = []
    for _ in range(rounds):
        start = time.monotonic()
        gpunb.get([train.remote() for _ in range(4)])
        seconds.append(time.monotonic() - start)
    gpunb.shutdown()
    return {"seconds": seconds}


def measure(bench: Any) -> Iterator[Line]:
    n = bench.n(20, 5)
    calls = {
        "first kernel in a fresh worker": probe.call(
            "gpu.first_kernel", "torch", timeout=600, n=n, reused=False
        ),
        "first kernel in a reused worker": probe.call(
            "gpu.first_kernel", "torch", timeout=600, n=n, reused=True
        ),
    }
    for name, call in calls.items():
        yield _line(name, bench.run(call))
    rounds = bench.n(5, 2)
    call = probe.call("gpu.packing", "torch", timeout=600, rounds=rounds, share=1)
    row = bench.run(call)
    yield _line("four tasks, one after the other", row)
    call = probe.call("gpu.packing", "torch", timeout=600, rounds=rounds, share=0.25)
    packed = bench.run(call)
    line = _line("four tasks of a quarter each, at once", packed)
    if line.value and row.get("seconds"):
        note = f"{median(row['seconds']) / line.value:.3g} times as fast as in a row"
        line = Line(line.name, line.value, "s", note=note, detail=packed)
    yield line


def _line(name: str, result: Result) -> Line:
    if "skipped" in result:
        return skipped(name, "s", result)
    seconds = result["seconds"]
    return Line(name, median(seconds), "s", note=spread(seconds), detail=result)
