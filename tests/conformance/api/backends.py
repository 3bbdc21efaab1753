"""The library under test, and the little that cannot be written the same way for both.

The environment variable GPUNB_CONFORMANCE_BACKEND names it: ``gpunb`` (the default), ``ray``,
``head`` for gpunb on a head process, or ``gpunb-on-ray`` for gpunb on a Ray cluster.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE, eventually

BACKEND = os.environ.get("GPUNB_CONFORMANCE_BACKEND", "gpunb")
KNOWN = ("gpunb", "ray", "head", "gpunb-on-ray")
if BACKEND not in KNOWN:
    raise ValueError(f"GPUNB_CONFORMANCE_BACKEND={BACKEND!r} must be one of {', '.join(KNOWN)}")
ON_HEAD = BACKEND == "head"
OVER_RAY = BACKEND == "gpunb-on-ray"
"""gpunb's API over the Ray backend; `ON_RAY` is Ray itself."""
if ON_HEAD or OVER_RAY:
    BACKEND = "gpunb"
ON_RAY = BACKEND == "ray"

if ON_RAY or OVER_RAY:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

ray: Any = importlib.import_module(BACKEND)
cloudpickle: Any = importlib.import_module("ray.cloudpickle" if ON_RAY else "cloudpickle")

ROOT = Path(__file__).resolve().parents[3]
_QUIET_RAY: dict[str, Any] = {
    "address": "local",
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
    "object_store_memory": 200_000_000,
}
_QUIET: dict[str, Any] = _QUIET_RAY if ON_RAY else {} if OVER_RAY else {"preload": ()}


CLUSTERS = ("num_cpus", "num_gpus", "resources")
"""What a Ray cluster is told when it starts."""


class Errors:
    """The errors, under the names that both libraries have for them."""

    _known = importlib.import_module(f"{BACKEND}.exceptions")
    Any = _known.RayError
    Task = _known.RayTaskError
    Actor = _known.RayActorError
    GroupRemoved = _known.TaskPlacementGroupRemoved
    NameTaken = _known.ActorAlreadyExistsError
    StoreFull = _known.ObjectStoreFullError
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
    if types is not None and (ON_RAY or OVER_RAY):
        settings["resources"] = {f"accelerator_type:{types}": 1, **settings.get("resources", {})}
    elif types is not None:
        settings["simulate"] = f"{settings.pop('num_gpus')}x{types}:16GiB"
    if ON_HEAD:
        return _on_head({**_QUIET, **settings})
    if OVER_RAY:
        return _over_ray(settings)
    if ON_RAY:
        return _patient(ray.init, **{**_QUIET, **settings})
    return ray.init(**{**_QUIET, **settings})


def _patient(start: Callable[..., Any], **settings: Any) -> Any:
    """Ray gives up after half a minute, which a busy machine may need to start it."""
    for _ in range(4):
        try:
            return start(**settings)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            importlib.import_module("ray").shutdown()
    return start(**settings)


def _over_ray(settings: dict[str, Any]) -> Any:
    """Start a cluster that ends with the session, and join it. GPUNB_CONFORMANCE_CLUSTER is the
    address of one with 4 CPUs and 2 GPUs that runs already, for those who run a test often."""
    again = settings.pop("ignore_reinit_error", False)
    if ray.is_initialized():
        return ray.init("ray", ignore_reinit_error=again)
    known = {name: settings.pop(name) for name in CLUSTERS if name in settings}
    running = os.environ.get("GPUNB_CONFORMANCE_CLUSTER")
    if running and known == {"num_cpus": 4, "num_gpus": 2}:
        importlib.import_module("ray").init(running, log_to_driver=False, logging_level="ERROR")
    else:
        _patient(importlib.import_module("ray").init, **_QUIET_RAY, **known)
    session = ray.init("ray", **settings)
    importlib.import_module("gpunb.protocol.backend").existing().ends_ray = True
    return session


def _on_head(settings: dict[str, Any]) -> Any:
    """Attach to a new head process, and end the one before."""
    name = f"conformance-{os.getpid()}"
    command = importlib.import_module("gpunb.cli.start")
    again = settings.pop("ignore_reinit_error", False)
    if ray.is_initialized():
        return ray.init(name, ignore_reinit_error=again)
    _end_head(name)
    try:
        command.start_head(name, {**settings, "preload": []})
    except errors.Any as error:  # of the command's own, whatever was wrong with what it was told
        kind = TypeError if "unexpected keyword" in str(error) else ValueError
        raise kind(str(error)) from None
    atexit.register(_end_head, name)
    return ray.init(name, ignore_reinit_error=again)


def end() -> None:
    """End what outlives its sessions: the head process, which writes into its folder."""
    if ON_HEAD:
        _end_head(f"conformance-{os.getpid()}")


def _end_head(name: str) -> None:
    heads = importlib.import_module("gpunb.head.discovery")
    if heads.pid_of(name) is not None:
        importlib.import_module("gpunb.cli").main(["stop", name, "--force", "--json"])


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
    if OVER_RAY:  # the next task gets another GPU than the process that is being made ready
        session = importlib.import_module("gpunb.protocol.backend").existing()
        if session.prewarmer._making:
            return False
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
    return subprocess.run(
        _command(text),
        env=_variables(env),
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )


def script_that_shows(pattern: str, count: int, text: str, **env: str) -> str:
    """What a program prints that waits for the end of its input, which comes when so many of the
    lines that it printed have the pattern. Ray prints what its tasks print a little later."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        with out.open("wb") as printed, err.open("wb") as complaints:
            process = subprocess.Popen(
                _command(text),
                env=_variables({"PYTHONUNBUFFERED": "1", **env}),
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=complaints,
            )

        def enough() -> bool:
            found = re.findall(pattern, out.read_text(), re.MULTILINE)
            return len(found) >= count or process.poll() is not None

        try:
            eventually(enough, f"{count} lines with {pattern}", within=100)
            process.communicate(timeout=100)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        assert process.returncode == 0, err.read_text()
        return out.read_text()


def _command(text: str) -> list[str]:
    return [sys.executable, "-c", f"import {BACKEND} as ray\n" + textwrap.dedent(text)]


def _variables(env: dict[str, str]) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if not _is_reported(name)}
    return {**known, "PYTHONPATH": str(ROOT), "RAY_COLOR_PREFIX": "0", **env}


def _is_reported(name: str) -> bool:
    return name.startswith(("GPUNB_", "PYTHONWARNINGS")) or name == "CUDA_VISIBLE_DEVICES"
