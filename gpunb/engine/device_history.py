"""The use of each device in the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

STEP = 5.0
"""Seconds between two points."""

POINTS = 60


class DeviceHistory:
    """One point every few seconds while there are watchers, in whole percent; None if unknown."""

    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[int | None, int | None, int]]] = {}
        self._last: float | None = None

    def note(self, now: float, devices: Iterable[Mapping[str, Any]]) -> None:
        """Add the devices of a snapshot as a point, unless the last point is too young. Steps
        without a watcher stay unknown."""
        steps = 1 if self._last is None else int((now - self._last) / STEP)
        if steps < 1:
            return
        self._last = now if self._last is None else self._last + steps * STEP
        for device in devices:
            points = self._points.setdefault(device["key"], deque(maxlen=POINTS))
            shared = round(100 * (1 - device["free"]))
            points.extend([(None, None, shared)] * min(steps - 1, POINTS))
            usage = device["usage"]
            points.append((_part(usage), _whole(usage["utilization"]), shared))

    def of(self, key: str) -> dict[str, Any]:
        """Return the points of a device, the newest last: memory in use, utilization, share given
        out."""
        points = self._points.get(key, ())
        return {
            "step": STEP,
            "memory": [memory for memory, _, _ in points],
            "utilization": [use for _, use, _ in points],
            "share": [share for _, _, share in points],
        }


def _part(usage: Mapping[str, Any]) -> int | None:
    used, total = usage["memory_used"], usage["memory_total"]
    return round(100 * used / total) if used is not None and total else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
