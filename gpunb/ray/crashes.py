"""The reasons for which processes ended before their tasks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ray._private import worker as rays

from gpunb.exceptions import WorkerCrashedError
from gpunb.ray import failures
from gpunb.ray.jobs import RayJob

LINES = 12
"""Lines of the stack of a fatal error that a message shows."""

_TAIL = 1 << 16
_FATAL = "Fatal Python error: "
_PACKAGE = re.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = re.compile(rf'File "({_PACKAGE}|.*-packages/(gpunb|ray|IPython))/')

_DIED = re.compile(
    r"A worker died or was killed while executing a task.*Worker PID: (\d+)", re.DOTALL
)
_RETRIED = re.compile(r"Task (execute|stream) failed\. There are .* retries remaining")


def account(job: RayJob) -> str:
    """The exit of a job's process in words, or the fatal error in its log, if this process can read
    the log; an empty text if nothing is known."""
    if job.exit is not None:
        return f"exited with status {job.exit}{job.error_lines()}"
    if fatal := _fatal(job.log):
        return f"ended with {fatal}{job.error_lines()}"
    return ""


def error_of(job: RayJob, error: BaseException) -> WorkerCrashedError:
    """The exception for a job whose process ended before the job."""
    tried = f" (attempt {job.attempt})" if job.attempt > 1 else ""
    process = f"process {job.pid}" if job.pid else "process"
    if known := account(job):
        return WorkerCrashedError(
            f"{job.label}: its worker {process} ended before the task did{tried}: it {known}"
        )
    text = (
        f"{job.label}: its worker {process}, or the node that it was on, ended before the task "
        f"did{tried}: {failures.plain(error)} Ray does not say how: it may have been killed, by "
        "SIGKILL for want of memory for example"
    )
    if job.log and not os.path.exists(job.log):
        text += f", or a fatal error is in {job.log} on its node"
    return WorkerCrashedError(text + job.error_lines())


def _fatal(path: str) -> str:
    """A fatal error that Python has written at the end of a process, with its stack."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.path.getsize(path) - _TAIL))
            text = log.read().decode("utf-8", "backslashreplace")
    except OSError:
        return ""
    _, marker, after = text.rpartition(_FATAL)
    if not marker:
        return ""
    what, *lines = after.partition("\nExtension modules:")[0].splitlines()
    stack = [line for line in lines if line.strip() and not _OURS.search(line)]
    return "\n".join([f"{_FATAL}{what}", *stack[:LINES]])


class CrashMessageFilter:
    """Keeps Ray from printing that a worker has died or a task is retried: Ray prints into any
    running cell, and the waiting code gets an error anyway."""

    def __init__(self, ours: Callable[[int], bool]) -> None:
        """`ours` returns whether a process has run work of this session."""
        self._ours = ours
        self._print = rays.print_to_stdstream
        self._over = False
        rays.print_to_stdstream = self._print_unless_ours

    def _print_unless_ours(self, data: Mapping[str, Any], *more: Any, **named: Any) -> None:
        text = "\n".join(map(str, data.get("lines", ()))) if data.get("pid") == "raylet" else ""
        died = _DIED.search(text)
        ours = self._ours(int(died[1])) if died is not None else _RETRIED.search(text) is not None
        if self._over or not ours:
            self._print(data, *more, **named)

    def close(self) -> None:
        """Let it print all again."""
        self._over = True
        if rays.print_to_stdstream == self._print_unless_ours:
            rays.print_to_stdstream = self._print
