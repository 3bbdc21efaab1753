"""On a real NVIDIA GPU with PyTorch: first kernels of fresh processes, and tasks side by side."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, median, quantile, scaled, skipped, spread

LAUNCH = """
import time, torch
torch.ones(1024, device="cuda").sum().item()
print(time.monotonic())
"""
"""The program of a bare process: its first kernel, and the time on the clock of all processes."""

STEPS = ("import torch", "cuInit", "context", "first kernel", "second kernel")


def _start(**settings: Any) -> str | None:
    """Start a session on one device, with torch preloaded; return why there is none. Without the
    preload it is slower, but works."""
    import gpunb
    from benchmarks import sessions
    from gpunb import accelerators

    found = accelerators.detect()
    if not any(each.vendor == "nvidia" for each in found.devices):
        return f"no NVIDIA GPU: {'; '.join(found.notes)}"[:200]
    try:
        gpunb.init(num_gpus=1, num_cpus=4, preload=["numpy", "torch"], **settings)
    except gpunb.exceptions.GpunbError as error:
        return str(error)
    with contextlib.suppress(RuntimeError):
        sessions.settle()
    return None


# --------------------------------------------------------------------------------- first kernel


@probe.by_value
def _launch() -> float:
    import time

    import torch

    torch.ones(1024, device="cuda").sum().item()
    return time.monotonic()


def _timed(run: Callable[[], float], n: int, pause: float) -> list[float]:
    """The seconds from each of n calls until the time that it returns, after two more calls."""
    seconds = []
    for turn in range(n + 2):
        start = time.monotonic()
        took = run() - start
        time.sleep(pause)  # until the process is gone, and the next standby is ready
        if turn >= 2:
            seconds.append(took)
    return seconds


def first_kernel(n: int, reused: bool = False, warm: bool = False) -> Result:
    """From `.remote()` until the first kernel of the task has ended."""
    import gpunb

    problem = _start(warm=warm)
    if problem is not None:
        return {"skipped": problem}
    task = gpunb.remote(num_gpus=1, max_calls=0 if reused else 1)(_launch)
    seconds = _timed(lambda: gpunb.get(task.remote()), n, 2.0 if warm else 0.5)
    notes = gpunb.status()["notes"]
    gpunb.shutdown()
    return {"seconds": seconds, "notes": notes}


def bare_first_kernel(n: int) -> Result:
    """From the start of an interpreter until its first kernel has ended."""

    def run() -> float:
        command = [sys.executable, "-c", LAUNCH]
        return float(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    return {"seconds": _timed(run, n, 0.0)}


def ray_first_kernel(n: int) -> Result:
    """The same of Ray's fresh worker."""
    from benchmarks import peers_ray

    ray = peers_ray.begin(gpus=1)
    task = ray.remote(num_gpus=1)(_launch)
    return {"seconds": _timed(lambda: ray.get(task.remote()), n, 0.5)}


def first_kernels(bench: Any) -> Iterator[Line]:
    """The first kernel of a fresh process, beside a bare one and Ray's; and of a reused one."""
    n = bench.n(20, 5)
    fresh = bench.run(probe.call("gpu.first_kernel", "torch", n=n))
    name = "first kernel in a fresh worker"
    if "skipped" in fresh:
        yield skipped(name, "s", fresh)
        return
    bare = bench.run(probe.call("gpu.bare_first_kernel", "torch", n=n))
    ray = bench.run(probe.call("gpu.ray_first_kernel", "torch", "ray", n=n)) if bench.peers else {}
    bench.note({"Ray": ray})
    yield Line(
        name,
        median(fresh["seconds"]),
        "s",
        floor=("python -c", median(bare["seconds"])) if "seconds" in bare else None,
        peers={"Ray": median(ray["seconds"])} if "seconds" in ray else {},
        note="; ".join([spread(fresh["seconds"]), *fresh["notes"], *_without(Ray=ray)]),
        detail={"fresh": fresh, "bare": bare, "ray": ray},
    )
    yield _line("first kernel of a bare python -c", bare)
    warm = bench.run(probe.call("gpu.first_kernel", "torch", n=n, warm=True))
    yield _line("first kernel in a warm standby", warm, goal=0.03)
    reused = bench.run(probe.call("gpu.first_kernel", "torch", n=n, reused=True))
    yield _line("first kernel in a reused worker", reused)


# ------------------------------------------------------------------------------ the start of CUDA


def start_of_cuda(loading: str) -> Result:
    """The steps until a process has run two kernels, with this CUDA_MODULE_LOADING."""
    import ctypes

    os.environ["CUDA_MODULE_LOADING"] = loading
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"skipped": str(error)}
    times = [time.perf_counter()]

    def done(status: int = 0) -> None:
        if status:
            raise RuntimeError(f"the driver returned {status}")
        times.append(time.perf_counter())

    import torch

    done()
    done(cuda.cuInit(0))
    done(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0))
    for _ in range(2):
        torch.ones(1024, device="cuda").sum().item()
        done()
    steps = zip(STEPS, times, times[1:], strict=False)
    return {name: [after - before] for name, before, after in steps}


def starts(bench: Any) -> Iterator[Line]:
    """Where the time of a fresh process goes, with modules loaded lazily and eagerly."""
    rounds = bench.n(5, 2)
    calls = {
        each: probe.call("gpu.start_of_cuda", "torch", loading=each) for each in ("LAZY", "EAGER")
    }
    found: dict[str, Result] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            result = bench.run(call)
            if "skipped" in result:
                yield skipped("the start of CUDA", "s", result)
                return
            before = found.setdefault(name, {})
            found[name] = {step: before.get(step, []) + took for step, took in result.items()}
    lazy, eager = found["LAZY"], found["EAGER"]
    for step in STEPS:
        note = f"modules loaded lazily, {spread(lazy[step])}"
        note = f"{note}; all at once: {scaled(median(eager[step]), 's')}"
        yield Line(f"the start of CUDA: {step}", median(lazy[step]), "s", note=note, detail=found)


# ---------------------------------------------------------------------------------- side by side


@probe.by_value
def _train(steps: int) -> tuple[float, float]:
    """Train a small model; return the begin and the end, without the start of CUDA."""
    import time

    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256, device="cuda"),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10, device="cuda"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(64, 256, device="cuda")

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()

    train(20)
    start = time.monotonic()
    train(steps)
    return start, time.monotonic()


def four(steps: int, rounds: int, share: float, mps: bool = False) -> Result:
    """Four tasks that train a small model, submitted at once: steps a second while they train, and
    the seconds from the submission to the last result."""
    import gpunb

    problem = _start(mps=mps)
    if problem is not None:
        return {"skipped": problem}
    task = gpunb.remote(num_gpus=share)(_train)
    gpunb.get(task.remote(1))
    rates, seconds = [], []
    for _ in range(rounds):
        start = time.monotonic()
        spans = gpunb.get([task.remote(steps) for _ in range(4)])
        seconds.append(time.monotonic() - start)
        begin, end = min(each[0] for each in spans), max(each[1] for each in spans)
        alone = sum(end - begin for begin, end in spans)
        rates.append(4 * steps / (alone if share == 1 else end - begin))
    gpunb.shutdown()
    return {"rates": rates, "seconds": seconds}


def side_by_side(bench: Any) -> Iterator[Line]:
    """Four quarters at once beside four in a row, for a small model."""
    arguments = {"steps": bench.n(2000, 500), "rounds": bench.n(5, 2)}
    row = None
    for name, share, mps in (
        ("four small models in a row", 1, False),
        ("four small models at once, a quarter each", 0.25, False),
        ("four small models at once, with MPS", 0.25, True),
    ):
        found = bench.run(probe.call("gpu.four", "torch", share=share, mps=mps, **arguments))
        if "skipped" in found:
            yield skipped(name, "1/s", found)
            continue
        rate = median(found["rates"])
        note = "steps of training"
        note += "" if row is None else f", {rate / row:.3g} times as fast as in a row"
        row = row or rate
        note += f"; the four tasks took {scaled(median(found['seconds']), 's')} with their starts"
        yield Line(name, rate, "1/s", note=note, detail=found)


# ----------------------------------------------------------------------------------- disturbance


def disturbance(n: int, hog: bool, mps: bool = False) -> Result:
    """The seconds of single small kernels in a quarter; if `hog`, beside another quarter that keeps
    the device busy."""
    import gpunb

    problem = _start(mps=mps)
    if problem is not None:
        return {"skipped": problem}

    @gpunb.remote(num_gpus=0.25)
    @probe.by_value
    def busy(folder: str) -> int:
        import os

        import torch

        rows, turns = torch.randn(2048, 2048, device="cuda"), 0
        while not os.path.exists(os.path.join(folder, "stop")):
            (rows @ rows).sum().item()
            turns += 1
            if turns == 1:
                open(os.path.join(folder, "busy"), "w").close()
        return turns

    @gpunb.remote(num_gpus=0.25)
    @probe.by_value
    def small(n: int) -> list[float]:
        import time

        import torch

        rows, seconds = torch.ones(1024, device="cuda"), []
        for _ in range(n + 50):
            start = time.perf_counter()
            rows.sum().item()
            seconds.append(time.perf_counter() - start)
        return seconds[50:]

    with tempfile.TemporaryDirectory() as folder:
        other = busy.remote(folder) if hog else None
        while hog and not Path(folder, "busy").exists():
            time.sleep(0.01)
        seconds = gpunb.get(small.remote(n))
        Path(folder, "stop").touch()
        if other is not None:
            gpunb.get(other)
    gpunb.shutdown()
    return {"seconds": seconds}


def disturbances(bench: Any) -> Iterator[Line]:
    """How much one share disturbs another."""
    n, alone = bench.n(5000, 1000), None
    for name, arguments in (
        ("a small kernel in a quarter, alone", {"hog": False}),
        ("a small kernel beside a busy quarter", {"hog": True}),
        ("a small kernel beside a busy quarter, with MPS", {"hog": True, "mps": True}),
    ):
        found = bench.run(probe.call("gpu.disturbance", "torch", n=n, **arguments))
        if "skipped" in found:
            yield skipped(name, "s", found)
            continue
        seconds = found["seconds"]
        note = "" if alone is None else f"{median(seconds) / alone:.3g} times as long as alone; "
        alone = alone or median(seconds)
        note = f"{note}p99 {scaled(quantile(seconds, 0.99), 's')}"
        yield Line(name, median(seconds), "s", note=note, detail=found)


PARTS: Mapping[str, Callable[[Any], Iterator[Line]]] = {
    "first kernel": first_kernels,
    "start of CUDA": starts,
    "side by side": side_by_side,
    "disturbance": disturbances,
}
"""The parts of this topic, the most important first."""


def measure(bench: Any) -> Iterator[Line]:
    for part in PARTS.values():
        yield from part(bench)


def _without(**peers: Result) -> list[str]:
    return [f"{name}: {each['skipped']}" for name, each in peers.items() if "skipped" in each]


def _line(name: str, result: Result, goal: float | None = None) -> Line:
    if "skipped" in result:
        return skipped(name, "s", result)
    seconds = result["seconds"]
    return Line(name, median(seconds), "s", goal, note=spread(seconds), detail=result)
