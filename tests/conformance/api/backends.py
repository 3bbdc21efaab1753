"""The library under test, and the little that cannot be written the same way for both.

The environment variable GPUNB_CONFORMANCE_BACKEND names it: ``gpunb`` (the default), ``ray``, or
``head`` for gpunb on a head process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE

BACKEND = os.environ.get("GPUNB_CONFORMANCE_BACKEND", "gpunb")
if BACKEND not in ("gpunb", "ray", "head"):
    raise ValueError(f"GPUNB_CONFORMANCE_BACKEND={BACKEND!r} must be 'gpunb', 'ray' or 'head'")
ON_HEAD = BACKEND == "head"
if ON_HEAD:
    BACKEND = "gpunb"
ON_RAY = BACKEND == "ray"

if ON_RAY:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

ray: Any = importlib.import_module(BACKEND)
cloudpickle: Any = importlib.import_module("ray.cloudpickle" if ON_RAY else "cloudpickle")

ROOT = Path(__file__).resolve().parents[3]
_QUIET: dict[str, Any] = (
    {
        "address": "local",
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "object_store_memory": 200_000_000,
    }
    if ON_RAY
    else {"preload": ()}
)


class Errors:
    """The errors under one name each; gpunb calls three of them by its own."""

    _known = importlib.import_module(f"{BACKEND}.exceptions")
    Any = _known.RayError if ON_RAY else _known.GpunbError
    Task = _known.RayTaskError if ON_RAY else _known.TaskError
    Actor = _known.RayActorError if ON_RAY else _known.ActorError
    ActorDied = _known.ActorDiedError
    ActorUnavailable = _known.ActorUnavailableError
    Cancelled = _known.TaskCancelledError
    Crashed = _known.WorkerCrashedError
    Timeout = _known.GetTimeoutError
    OutOfMemory = _known.OutOfMemoryError
    ObjectLost = _known.ObjectLostError
    TooManyPending = _known.PendingCallsLimitExceeded


errors = Errors


def start(*, types: str | None = None, **settings: Any) -> Any:
    """Start a session; `types` is the type of all its devices, which are not real."""
    if types is not None and ON_RAY:
        settings["resources"] = {f"accelerator_type:{types}": 1, **settings.get("resources", {})}
    elif types is not None:
        settings["simulate"] = f"{settings.pop('num_gpus')}x{types}:16GiB"
    if ON_HEAD:
        return _on_head({**_QUIET, **settings})
    return ray.init(**{**_QUIET, **settings})


def _on_head(settings: dict[str, Any]) -> Any:
    """Attach to a new head process, and end the one before."""
    name = f"conformance-{os.getpid()}"
    command = importlib.import_module("gpunb.cli.start")
    again = settings.pop("ignore_reinit_error", False)
    if ray.is_initialized():
        return ray.init(name, ignore_reinit_error=again)
    _end_head(name)
    try:
        command.started(name, {**settings, "preload": []})
    except errors.Any as error:  # of the command's own, whatever was wrong with what it was told
        kind = TypeError if "unexpected keyword" in str(error) else ValueError
        raise kind(str(error)) from None
    atexit.register(_end_head, name)
    return ray.init(name, ignore_reinit_error=again)


def _end_head(name: str) -> None:
    heads = importlib.import_module("gpunb.runtime.heads")
    if heads.pid_of(name) is not None:
        importlib.import_module("gpunb.cli").main(["stop", name, "--json"])


def here(*, ray: Any, gpunb: Any) -> Any:
    """What is expected on the backend under test. Only in tests that are marked `differs`."""
    return ray if ON_RAY else gpunb


def get(refs: Any, timeout: float = PATIENCE) -> Any:
    """`ray.get`, which gives up rather than wait for ever."""
    return ray.get(refs, timeout=timeout)


def free() -> dict[str, float]:
    """What is free of CPUs, devices, types and custom resources."""
    return _plain(ray.available_resources())


def total() -> dict[str, float]:
    """All that there is of them."""
    return _plain(ray.cluster_resources())


def _plain(resources: dict[str, float]) -> dict[str, float]:
    """Ray lists its node and its memory as well, and leaves out what is used up."""
    own = ("node:", "memory", "object_store_memory")
    return {n: round(x, 4) for n, x in resources.items() if x and not n.startswith(own)}


def idle() -> bool:
    """Whether nothing is held; objects that nobody refers to are collected first."""
    gc.collect()
    return free() == total()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def script(text: str, **env: str) -> str:
    """What a program prints, run as ``__main__`` with the library as ``ray``."""
    done = run(text, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program that may fail."""
    variables = {name: value for name, value in os.environ.items() if not _told(name)}
    variables |= {"PYTHONPATH": str(ROOT), "RAY_COLOR_PREFIX": "0", **env}
    head = f"import {BACKEND} as ray\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(text)],
        env=variables,
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )


def _told(name: str) -> bool:
    return name.startswith(("GPUNB_", "PYTHONWARNINGS")) or name == "CUDA_VISIBLE_DEVICES"
