"""Sessions for tests: real ones, which leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import gpunb
from tests.waiting import PATIENCE, eventually

MARK = "GPUNB_TEST_MARK"
os.environ.setdefault(MARK, f"{os.getpid()}-{time.time_ns()}")
if not os.environ[MARK].endswith(part := os.environ.get("PYTEST_XDIST_WORKER", "")):
    os.environ[MARK] += part  # several processes run the tests, and each looks for its own

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def forked() -> Iterator[int]:
    """Fork this process, and wait for the child, which must end in the block. Yields as `os.fork`
    returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, on purpose
        child = os.fork()
    yield child
    os.waitpid(child, 0)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def marked() -> dict[int, str]:
    """The command lines of all processes that come from this run of the tests, by pid.

    They have inherited a variable, so those are found too that left their parents and groups.
    """
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for each in Path("/proc").iterdir():
        if not each.name.isdigit() or int(each.name) == os.getpid():
            continue
        try:
            command = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if mark in (each / "environ").read_bytes() and "resource_tracker" not in command:
                found[int(each.name)] = command
        except OSError:
            continue
    return found


def zombies() -> list[int]:
    found = []
    for each in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (each / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since
    return [pid for pid in found if not alive(pid)]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def open_files(pid: int | str = "self") -> dict[int, str]:
    """What the descriptors of a process refer to. Some are open for a moment only."""
    found = {}
    for each in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[int(each)] = os.readlink(f"/proc/{pid}/fd/{each}")
    return found


def memory_files() -> tuple[int, int]:
    """The bytes of the memory files that this process has open, and how many these are."""
    found = {}
    for each, target in open_files().items():
        if "memfd:" in target:
            with contextlib.suppress(OSError):
                facts = os.stat(each)
                found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values()), len(found)


def shared_memory() -> set[str]:
    own = ("gpunb", str(os.getpid()))
    return {each for each in os.listdir("/dev/shm") if any(part in each for part in own)}


@contextlib.contextmanager
def session(**settings: Any) -> Iterator[Any]:
    """A session, after whose end no process, descriptor or shared memory is left."""
    processes, open_before, shared = marked(), descriptors(), shared_memory()
    defaults = {"num_cpus": 2, "preload": (), "num_gpus": None if "simulate" in settings else 0}
    started = gpunb.init(**{**defaults, **settings})
    try:
        yield started
    finally:
        gpunb.shutdown()
    eventually(lambda: marked().keys() <= processes.keys(), f"processes left: {marked()}")
    left = {pid: Path(f"/proc/{pid}/stat").read_text()[:60] for pid in zombies()}
    assert not left, left
    # The pipes of trackers that have started stay.
    eventually(lambda: descriptors() <= open_before + 4, "descriptors are left open", 5)
    assert shared_memory() <= shared


both = pytest.mark.parametrize("started", ["fork", "spawn"], indirect=True)
"""For a test of a module whose session is on processes of one source: on those of either."""


def assert_idle() -> None:
    """Everything is free, nothing runs or is kept, and a task still works."""
    facts: dict[str, Any] = {}

    def idle() -> bool:
        gc.collect()
        facts.update(gpunb.status())
        return (
            not facts["running"]
            and not facts["queued"]
            and not facts["actors"]
            and facts["available"] == facts["total"]
            and facts["objects"] == {"objects": 0, "references": 0, "bytes": 0}
        )

    try:
        eventually(idle, "idle")
    except AssertionError:
        shown = {n: facts[n] for n in ("running", "queued", "actors", "available", "objects")}
        raise AssertionError(f"the session is not idle: {shown}") from None
    assert gpunb.get(gpunb.remote(len).remote("four"), timeout=PATIENCE) == 4


def script(
    text: str, *, env: dict[str, str | None] | None = None, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``__main__`` of an interpreter of its own."""
    with running(text, env=env, **settings) as process:
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def running(
    text: str,
    *,
    env: dict[str, str | None] | None = None,
    before: Sequence[str] = (),
    **settings: Any,
) -> Iterator[subprocess.Popen[str]]:
    """As `script`, while it runs; it is killed if it still does at the end. The words `before` are
    a command that runs the rest."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    for name in ("CUDA_VISIBLE_DEVICES", "GPUNB_SIMULATE", "GPUNB_NUM_GPUS", "GPUNB_NUM_CPUS"):
        if name not in (env or {}):
            variables.pop(name, None)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(textwrap.dedent(text))
        process = subprocess.Popen(
            [*before, sys.executable, "-W", "error", str(path)],
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **settings,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


def named(name: str) -> list[int]:
    """This run's processes of that name."""
    found = []
    for pid in marked():
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
        except OSError:
            continue
    return found


def begun(path: Path, times: int = 1) -> list[int]:
    """The processes that have written themselves into the file, when there are so many."""

    def pids():
        lines = path.read_text().splitlines() if path.exists() else []
        return len(lines) >= times and [int(each) for each in lines]

    return eventually(pids, "the task has begun")
