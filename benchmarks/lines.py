"""`Line`: one row of the report, and the statistics of the samples behind it.

Values are in base units: seconds, bytes, 1/s, or a plain count. Only the report scales them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MS = 1e-3
MB = 1e6
MIB = 1 << 20

Result = dict[str, Any]
"""What a probe printed; ``{"skipped": reason}`` if it could not measure."""


@dataclass(frozen=True, slots=True)
class Line:
    """One measure.

    Attributes:
        unit: ``"s"``, ``"1/s"`` (more is better), ``"B"``, ``""`` for a count, or ``"x"``.
        goal: the value to reach, in the same unit; None if there is none.
        goal_of_floor: how many times the floor it may be.
        goal_of_peer: name of a peer, and how many times better than that it has to be.
        floor: name and value of what the system needs for the same without gpunb.
        peers: the same measure of others, by name.
        note: what else has to be known, or why there is no value.
        detail: for the JSON file only.
    """

    name: str
    value: float | None
    unit: str
    goal: float | None = None
    goal_of_floor: float | None = None
    goal_of_peer: tuple[str, float] | None = None
    floor: tuple[str, float] | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def to_floor(self) -> float | None:
        """How many times the floor this takes: 1 is as good as can be."""
        return self._times(self.floor[1]) if self.floor else None

    @property
    def to_peers(self) -> dict[str, float]:
        """How many times better than each peer: 2 is half its time."""
        found = {name: self._times(value) for name, value in self.peers.items()}
        return {name: 1 / ratio for name, ratio in found.items() if ratio}

    @property
    def met(self) -> bool | None:
        """Whether all goals are reached; None without a goal or a value. A peer that was not
        measured has no goal."""
        if self.value is None:
            return None
        met = []
        if self.goal is not None:
            met.append(self.value >= self.goal if self.unit == "1/s" else self.value <= self.goal)
        if self.goal_of_floor is not None and (ratio := self.to_floor) is not None:
            met.append(ratio <= self.goal_of_floor)
        if self.goal_of_peer is not None and self.goal_of_peer[0] in self.to_peers:
            met.append(self.to_peers[self.goal_of_peer[0]] >= self.goal_of_peer[1])
        return all(met) if met else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {"met": self.met, "to_floor": self.to_floor, "to_peers": self.to_peers}
        return {**asdict(self), **derived}

    def _times(self, other: float) -> float | None:
        if not self.value or not other:
            return None
        return other / self.value if self.unit == "1/s" else self.value / other


def skipped(name: str, unit: str, result: Result) -> Line:
    """A line without a value, because the probe says why it has none."""
    return Line(name, None, unit, note=result["skipped"])


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of them does not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """The samples in a few numbers."""
    return {
        "n": len(samples),
        "min": min(samples),
        "p50": median(samples),
        "p90": quantile(samples, 0.9),
        "p99": quantile(samples, 0.99),
        "max": max(samples),
    }


def spread(samples: Sequence[float]) -> str:
    """The rest of the distribution, for the note beside a median."""
    if len(samples) < 20:
        return f"{scaled(min(samples), 's')} to {scaled(max(samples), 's')}, n={len(samples)}"
    tail = "" if len(samples) < 100 else f", p99 {scaled(quantile(samples, 0.99), 's')}"
    return f"p90 {scaled(quantile(samples, 0.9), 's')}{tail}, n={len(samples)}"


def scaled(value: float, unit: str) -> str:
    """The value with a readable unit, such as ``"1.31 ms"``."""
    if unit == "s":
        for size, name in ((1.0, "s"), (1e-3, "ms")):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value * 1e6:.3g} us"
    if unit == "B":
        for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.0f} B"
    if unit == "1/s":
        return f"{value:,.0f} /s" if value >= 10 else f"{value:.2g} /s"
    return f"{value:.3g} {unit}".rstrip()
