"""Which functions a worker keeps: both sides reckon it from what is sent, and agree."""

from __future__ import annotations

MOST = 64


class Recent:
    """The functions that were used last."""

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def use(self, name: str) -> bool:
        """Whether it was there; now it is, and one that was not used for long may not be."""
        there = name in self._names
        if there:
            del self._names[name]
        self._names[name] = None
        if len(self._names) > MOST:
            del self._names[next(iter(self._names))]
        return there
