"""Standard output and standard error of a worker."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any


class InTurn(io.FileIO):
    """Standard output or standard error. They are two pipes, so a reader cannot know which text was
    written first. `turn`, if set, is called before a write to the stream that was not last, and
    `first` before the next write to any of them, once."""

    turn: Callable[[], object] | None = None
    first: Callable[[], object] | None = None
    _last: io.FileIO | None = None

    def write(self, data: Any, /) -> int:
        last, InTurn._last = InTurn._last, self
        first, InTurn.first = InTurn.first, None
        if first is not None:
            first()
        elif InTurn.turn is not None and last is not None and last is not self:
            InTurn.turn()
        return super().write(data)


def stream(descriptor: int) -> io.TextIOWrapper:
    """Text output that is written line by line: no line is lost in a crash, and what child
    processes and C code print comes in its place."""
    raw = InTurn(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True
    )


def warn(text: str) -> None:
    """Write to standard error, where the user reads what the task prints."""
    try:
        sys.stderr.write(text)
    except Exception:
        pass  # as in `flush`


def flush() -> None:
    """Flush standard output and standard error."""
    for each in (sys.stdout, sys.stderr):
        try:
            each.flush()
        except Exception:
            pass  # closed, or not a stream at all: the task may have put anything there
