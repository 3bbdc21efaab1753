"""How much work the scheduler has, counted: a busy machine changes nothing about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Id(int):
    """An id whose comparisons are lines of Python: `lines_of` counts those in heaps, too."""

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other)  # type: ignore[arg-type]

    def __lt__(self, other: int) -> bool:
        return int.__lt__(self, other)

    def __hash__(self) -> int:
        return int.__hash__(self)


def lines_of(do: Callable[[], object]) -> int:
    """The number of lines of Python that this runs."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count
