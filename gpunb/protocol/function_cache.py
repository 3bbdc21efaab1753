"""The functions that a worker keeps. Kernel and worker compute the same list from the messages."""

from __future__ import annotations

MOST = 64


class Recent:
    """The functions that were used last, up to a limit."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def use(self, name: str) -> bool:
        """Add a function, drop the least recently used; return whether it was there."""
        there = name in self._names
        if there:
            del self._names[name]
        self._names[name] = None
        if len(self._names) > MOST:
            del self._names[next(iter(self._names))]
        return there
