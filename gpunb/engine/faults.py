"""Faults outside of tasks: each is reported once, and none of them ends the session.

A fault that a process, a sink, a log, a watcher, a timer or a socket causes is that one's own. Only
an error of the scheduler itself ends a session; its traceback is kept in a file for `gpunb doctor`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gpunb.exceptions import GpunbError
from gpunb.head import endpoint
from gpunb.system import runtime_dir

P = ParamSpec("P")
T = TypeVar("T")

MOST = 50
"""Faults that are kept."""

DAYS = 7.0
"""Days after which the report of a session that broke is removed."""

_SUFFIX = ".fault"


class Broken(BaseException):
    """An invariant of the scheduler does not hold. No guard catches it: the session ends."""


class Faults:
    """Faults of one session, each text once."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque(maxlen=MOST)

    def note(self, text: str, error: BaseException | None = None) -> None:
        """Say once that something failed, in the warnings of the session and on standard error."""
        if text in self.texts:
            return
        self.texts.append(text)
        lines = f"gpunb: {text}\n"
        if error is not None and endpoint.serving is not None:  # a head process, and its log
            lines += traced(error)
        with contextlib.suppress(Exception):
            sys.stderr.write(lines)
            sys.stderr.flush()

    def of_loop(self, error: Exception, callback: Callable[..., object]) -> None:
        """A callback of the event loop has failed, and is not called again."""
        name = getattr(callback, "__qualname__", None) or repr(callback)
        self.note(f"an internal callback failed, and is left out: {name}: {error!r}", error)


class Outlets:
    """Calls the methods of sinks. A sink that fails is not used again."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._failed: dict[int, Any] = {}

    def call(self, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """Return what a method of a sink returns; None if the sink has failed. The end is told also
        to a sink that failed: somebody may wait for it there."""
        bound: Any = method
        if self._failed and id(bound.__self__) in self._failed and bound.__name__ != "end":
            return None
        try:
            return method(*arguments, **named)
        except Exception as error:
            sink, name = bound.__self__, bound.__name__
            while len(self._failed) >= MOST:
                del self._failed[next(iter(self._failed))]
            self._failed[id(sink)] = sink  # also so that no other sink gets its id
            kind = type(sink).__name__
            self._faults.note(f"output is not shown any more: {kind}.{name}: {error!r}", error)
            return None


def traced(error: BaseException) -> str:
    """Return the traceback of an error as text, also if the error itself cannot be printed."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception as another:
        return f"{type(error).__name__}, which cannot be printed: {another!r}\n"


def ended_by(error: BaseException) -> GpunbError:
    """Return the error of all jobs of a session that broke, and keep the report for later."""
    cause = error.__cause__ if isinstance(error, Broken) and error.__cause__ else error
    text = traced(cause)
    with contextlib.suppress(Exception):
        sys.stderr.write(f"gpunb: the session ends after an internal error\n{text}")
        sys.stderr.flush()
    with contextlib.suppress(GpunbError, OSError):
        path = _folder() / f"{os.getpid()}-{time.time():.0f}{_SUFFIX}"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return GpunbError(
        f"the runtime stopped after an error: {cause!r}; call gpunb.shutdown() and gpunb.init() "
        f"to go on. This is a defect of gpunb: please report it with these lines\n{text}"
    )


def reports() -> list[tuple[Path, str]]:
    """Return the reports of sessions that broke in the last days, and remove older ones.

    Raises:
        GpunbError: the folder is of no use.
    """
    found = []
    for path in sorted(_folder().glob(f"*{_SUFFIX}")):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > DAYS * 24 * 3600:
                path.unlink()
            else:
                found.append((path, path.read_text(encoding="utf-8", errors="replace")))
    return found


def _folder() -> Path:
    return runtime_dir.runtime_folder() / runtime_dir.KERNELS
