"""What `gpunb doctor` looks at: one module for each part of a machine.

A check is a function that takes the `Place` and gives what it found. It never raises on what it
finds, only on a fault of its own.
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
    """One line: what was looked at, how it is, and for a problem what to do."""

    name: str
    level: Level
    says: str
    cure: str = ""


def ok(name: str, says: str) -> Finding:
    return Finding(name, "ok", says)


def note(name: str, says: str, cure: str = "") -> Finding:
    """Something that may explain a problem, and is none by itself."""
    return Finding(name, "note", says, cure)


def problem(name: str, says: str, cure: str) -> Finding:
    return Finding(name, "problem", says, cure)


@dataclass
class Place:
    """The machine, as this process sees it, and what was `found` on it. Another root and
    environment make another one."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    found: Detection = field(default_factory=Detection)

    def path(self, name: str) -> Path:
        return self.root / name.removeprefix("/")

    def text(self, name: str) -> str | None:
        """What a file says; None if it is not there."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    @property
    def gpus(self) -> int:
        """The devices that there really are."""
        return sum(not each.logical for each in self.found.devices)


Check = Callable[[Place], Iterable[Finding]]
