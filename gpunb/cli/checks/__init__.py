"""The checks of `gpunb doctor`: one module for each part of a machine.

A check is a function that takes a `Place` and yields findings. A problem of the machine is a
finding, not an exception.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from gpunb.accelerators import Detection

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """The result of a check: its subject, its level, a text, and what to do about a problem."""

    name: str
    level: Level
    text: str
    cure: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def note(name: str, text: str, cure: str = "") -> Finding:
    """A finding that is no problem, but may explain one."""
    return Finding(name, "note", text, cure)


def problem(name: str, text: str, cure: str) -> Finding:
    return Finding(name, "problem", text, cure)


@dataclass
class Place:
    """The machine as this process sees it: its files below `root`, the environment, and the
    devices `found`. Tests give another root and environment."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    detected: Detection = field(default_factory=Detection)

    def path(self, name: str) -> Path:
        return self.root / name.removeprefix("/")

    def text(self, name: str) -> str | None:
        """The text of a file without the spaces around it; None if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    @property
    def gpus(self) -> int:
        """The number of devices that are hardware."""
        return sum(not each.logical for each in self.detected.devices)


Check = Callable[[Place], Iterable[Finding]]
