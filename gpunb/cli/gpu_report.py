"""``gpunb doctor --gpu-report FILE``: tries gpunb on the NVIDIA GPU of this machine, with PyTorch,
and writes what came out, for the project's issue tracker.

The report has the card, the versions and the figures, and no names of people, hosts or folders. It
is written again after each trial, so that a run that is cut loses one trial.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpunb import accelerators
from gpunb._version import __version__
from gpunb.api import public
from gpunb.cli import gpu_trials
from gpunb.exceptions import GpunbError
from gpunb.scheduler.resources import Device

MINUTES = 7.0
"""The limit of all trials together: none begins later."""

_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "jax", "numpy", "cloudpickle", "nvidia-ml-py")


def write(path: Path) -> int:
    """Run all trials on one NVIDIA GPU, and write the report. Returns the exit status."""
    problem = missing()
    if problem is not None:
        raise GpunbError(f"--gpu-report needs {problem}")
    deadline = time.monotonic() + 60 * MINUTES
    device = public.init(num_gpus=1, preload=["numpy", "torch"]).devices[0]
    trials: list[dict[str, Any]] = []
    report = {"machine": machine(device), "trials": trials}
    try:
        for name, trial in gpu_trials.TRIALS.items():
            late = time.monotonic() > deadline
            result = {"result": "not run", "seconds": 0.0} if late else tried(trial, device)
            trials.append({"trial": name, **result})
            print(f"{result['result']:7}  {name}", flush=True)
            path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            path.write_text("\n".join(text(report)) + "\n")
    finally:
        public.shutdown()
    print(f"The report is in {path} and {path.with_suffix('.json')}.")
    return 0 if all(each["result"] == "ok" for each in trials) else 1


def missing() -> str | None:
    """What this machine lacks for a report, and why."""
    found = accelerators.detect()
    if not any(each.vendor == "nvidia" for each in found.devices):
        return f"an NVIDIA GPU: {'; '.join(found.notes) or 'none was found'}"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch for CUDA, and this Python has none: pip install torch"
    return None


def tried(trial: Callable[[Device], Mapping[str, str]], device: Device) -> dict[str, Any]:
    """The result of a trial."""
    start = time.monotonic()
    result: dict[str, Any] = {"result": "ok"}
    try:
        result["figures"] = trial(device)
    except Exception as error:  # noqa: BLE001 - what fails is what the report is for
        result |= {"result": "failed", "says": nameless(f"{type(error).__name__}: {error}"[:2000])}
    return {**result, "seconds": round(time.monotonic() - start, 2)}


def machine(device: Device) -> dict[str, str]:
    """The card and the versions."""
    found = {
        "card": device.name,
        "memory": f"{(device.memory or 0) // gpu_trials.MIB} MiB",
        "driver": gpu_trials.ask_smi("driver_version", device)
        if shutil.which("nvidia-smi")
        else "unknown",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
        "gpunb": __version__,
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def text(report: Mapping[str, Any]) -> Iterator[str]:
    """The report in Markdown."""
    yield f"# gpunb on {report['machine']['card']}\n"
    yield from (f"- {name}: {value}" for name, value in report["machine"].items())
    yield "\n| trial | result | seconds | figures |\n|---|---|--:|---|"
    for each in report["trials"]:
        figures = ", ".join(f"{name} {value}" for name, value in each.get("figures", {}).items())
        yield f"| {each['trial']} | {each['result']} | {each['seconds']:g} | {figures} |"
    for each in report["trials"]:
        if "says" in each:
            yield f"\n{each['trial']}:\n\n```\n{each['says']}\n```"


def nameless(words: str) -> str:
    """A text without the names of the user, the host and folders."""
    words = re.sub(r"(?<![\w.])/(?:[^\s/:\"']+/)+", ".../", words)
    names = {socket.gethostname(), Path.home().name}
    with contextlib.suppress(OSError, KeyError):
        names.add(getpass.getuser())
    for name in names - {"", "root"}:
        words = re.sub(rf"\b{re.escape(name)}\b", "...", words)
    return words
