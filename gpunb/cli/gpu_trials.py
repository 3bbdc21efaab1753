"""What ``gpunb doctor --gpu-report`` tries on an NVIDIA GPU, with PyTorch.

Each trial is a function that gets the device and returns figures, or raises an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpunb import accelerators
from gpunb.api import public
from gpunb.scheduler.resources import Device

MIB = 2**20

PATIENCE = 60.0
"""Seconds of a single wait."""

ROUNDS = 5
"""How often the first kernel is timed."""

STEPS = 300
"""The steps of training of each of four models."""

_BLOCK = 1024 * MIB

_SLACK = 64 * MIB

_LAUNCH = """
import time, torch
torch.ones(1024, device="cuda").sum().item()
print(time.monotonic())
"""
"""The program of a bare process: its first kernel, and the time on the clock of all processes."""

Figures = dict[str, str]


class Failure(Exception):
    """What a trial found wrong."""


def _sees_its_device(device: Device) -> Figures:
    @public.remote(num_gpus=1)
    def look() -> tuple[int, float, list[Any]]:
        import torch

        found = float(torch.arange(1000, device="cuda").sum())
        return torch.cuda.device_count(), found, public.get_gpu_ids()

    _expect(_get(look.remote()), (1, 499500.0, [device.id]))
    return {}


def _memory_is_back(
    device: Device, end: Callable[[public.ObjectRef[Any], Path], object]
) -> Figures:
    _wait_until_free()
    before = _used(device)
    with _folder() as folder:
        ref = _hold.remote(_BLOCK, str(folder))
        _wait_until(lambda: _used(device) >= before + _BLOCK, "the task has its memory")
        end(ref, folder)
        start = time.monotonic()
        _wait_until(lambda: _used(device) <= before + _SLACK, "the memory is free again")
    return {"seconds until it is": f"{time.monotonic() - start:.3f}"}


def _back_after_a_task(device: Device) -> Figures:
    def end(ref: public.ObjectRef[Any], folder: Path) -> None:
        (folder / "open").touch()
        _get(ref)

    return _memory_is_back(device, end)


def _back_after_a_cancel(device: Device) -> Figures:
    return _memory_is_back(device, lambda ref, _: public.cancel(ref))


def _back_after_a_kill(device: Device) -> Figures:
    return _memory_is_back(device, lambda ref, _: public.cancel(ref, force=True))


def _a_part_has_its_limit(device: Device) -> Figures:
    @public.remote(num_gpus=0.1, max_retries=0)
    def fill(size: int) -> int:
        import torch

        block = torch.ones(size // 4, device="cuda")
        torch.cuda.synchronize()
        return len(block)

    assert device.memory is not None
    modest = fill.remote(64 * MIB)
    try:
        _get(fill.remote(device.memory // 5))
    except Exception as error:
        if "out of memory" not in str(error):
            raise
    else:
        raise Failure("a tenth of the device took a fifth of its memory")
    _expect(_get(modest), 16 * MIB)
    return {}


def _comes_home(device: Device) -> Figures:
    @public.remote(num_gpus=1)
    def compute() -> Any:
        import torch

        return torch.arange(5, device="cuda")

    value = _get(compute.remote())
    _expect((value.tolist(), str(value.device)), ([0, 1, 2, 3, 4], "cpu"))
    processes = accelerators.measure([device])[device.key].processes or ()
    if os.getpid() in [each.pid for each in processes]:
        raise Failure("the program itself has a context on the device")
    return {}


def _says_what_nvidia_smi_says(device: Device) -> Figures:
    if shutil.which("nvidia-smi") is None:
        return {"nvidia-smi": "not found"}
    with _folder() as folder:
        ref = _hold.remote(_BLOCK, str(folder))

        def both() -> tuple[int, int] | None:
            (row,) = public.status()["devices"]
            ours = (row["usage"]["memory_used"] or 0) // MIB
            theirs = int(ask_smi("memory.used", device))
            near = ours * MIB >= _BLOCK and abs(ours - theirs) * MIB <= _SLACK
            return (ours, theirs) if near else None

        ours, theirs = _wait_until(both, "both say the same of the memory in use")
        (folder / "open").touch()
        _get(ref)
    return {"gpunb": f"{ours} MiB", "nvidia-smi": f"{theirs} MiB"}


def _first_kernel(_device: Device) -> Figures:
    @public.remote(num_gpus=1)
    def launch() -> float:
        import time

        import torch

        torch.ones(1024, device="cuda").sum().item()
        return time.monotonic()

    def bare() -> float:
        command = [sys.executable, "-c", _LAUNCH]
        done = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE)
        return float(done.stdout)

    ways: dict[str, Callable[[], float]] = {
        "fresh worker": lambda: float(_get(launch.remote())),
        "python -c": bare,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.monotonic()
            took[name].append(run() - start)
            _wait_until_free()
    medians = {name: statistics.median(each) for name, each in took.items()}
    ratio = medians["fresh worker"] / medians["python -c"]
    return {name: f"{each:.3f} s" for name, each in medians.items()} | {"ratio": f"{ratio:.2f}"}


def _four_quarters(_device: Device) -> Figures:
    def train(steps: int) -> tuple[float, float]:
        import time

        import torch

        model = torch.nn.Linear(256, 256, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rows = torch.randn(64, 256, device="cuda")
        start = 0.0
        for step in range(steps + 20):
            if step == 20:
                torch.cuda.synchronize()
                start = time.monotonic()
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return start, time.monotonic()

    seconds = {}
    for share in (1, 0.25):
        task = public.remote(num_gpus=share)(train)
        spans = [_get(each) for each in [task.remote(STEPS) for _ in range(4)]]
        alone = sum(end - begin for begin, end in spans)
        together = max(each[1] for each in spans) - min(each[0] for each in spans)
        seconds[share] = alone if share == 1 else together
    ratio = seconds[1] / seconds[0.25]
    return {
        "in a row": f"{seconds[1]:.3f} s",
        "at once": f"{seconds[0.25]:.3f} s",
        "times as fast": f"{ratio:.2f}",
    }


TRIALS: Mapping[str, Callable[[Device], Figures]] = {
    "a task sees its device and no other": _sees_its_device,
    "memory is free after a task": _back_after_a_task,
    "a part has its limit of memory": _a_part_has_its_limit,
    "a tensor comes home, and the program never touches the device": _comes_home,
    "memory is free after a kill": _back_after_a_kill,
    "memory is free after a cancel": _back_after_a_cancel,
    "figures are those of nvidia-smi": _says_what_nvidia_smi_says,
    "first kernel of a fresh process": _first_kernel,
    "four small models at once": _four_quarters,
}
"""The trials, the most important first."""


@public.remote(num_gpus=0.5)
def _hold(size: int, folder: str) -> int:
    """Hold so many bytes of the device until the folder has a file "open"."""
    import torch

    block = torch.ones(size // 4, device="cuda")
    torch.cuda.synchronize()
    while not Path(folder, "open").exists():
        time.sleep(0.01)
    return len(block)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _get(ref: public.ObjectRef[Any]) -> Any:
    return public.get(ref, timeout=PATIENCE)


def _expect(found: Any, expected: Any) -> None:
    if found != expected:
        raise Failure(f"{found!r} in place of {expected!r}")


def _wait_until_free() -> None:
    _wait_until(lambda: public.available_resources().get("GPU") == 1, "the device is free")


def _wait_until(true: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (answer := true()):
        if time.monotonic() > end:
            raise Failure(f"not within {PATIENCE:g} s: {what}")
        time.sleep(0.01)
    return answer


def _used(device: Device) -> int:
    used = accelerators.measure([device])[device.key].memory_used
    if used is None:
        raise Failure("the driver does not report the memory in use")
    return used


def ask_smi(what: str, device: Device) -> str:
    """What nvidia-smi says of a device, such as its `driver_version`."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        [*command, f"--id={device.key}"], capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()
