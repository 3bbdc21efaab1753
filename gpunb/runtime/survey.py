"""The ledger as people and programs see it, who have no part in it themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunb.core.resources import UNIT
from gpunb.runtime import bells, book
from gpunb.runtime.book import BOOK, Record, Stake

_SHOWN = 3

About = Callable[[Record], Mapping[str, Any]]
"""What a session tells of itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A session in the book. `alive` is False for one that left its record behind."""

    record: Record
    about: Mapping[str, Any]
    alive: bool


def survey(path: Path) -> list[Entry]:
    """All sessions in the book of a folder.

    Raises:
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path / BOOK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = [each for _, each in book.records(os.pread(descriptor, 1 << 24, 0))]
        return [
            Entry(each, bells.about(place, each.id), bells.is_alive(place, each.id))
            for each in found
        ]
    finally:
        os.close(descriptor)
        os.close(place)


def as_dict(record: Record, stake: Stake, about: Mapping[str, Any]) -> dict[str, Any]:
    """What a session holds of a device, as in a snapshot."""
    return {
        "pid": record.pid,
        "user": about.get("user"),
        "notebook": about.get("notebook"),
        "job": stake.job or None,
        "share": stake.held / UNIT,
        "memory": None,
        "since": stake.since or None,
        "kind": "kernel",
    }


def whose(others: Sequence[Record], device: int, about: About, *, kept: bool) -> str:
    """Whose the units of a device are that a session cannot have, in words. They are `kept` if
    more of them than are held are to be left to those who wait."""
    holders = [each for each in others if each.held(device)]
    if holders:
        return f"held by {_kernels(holders, about)}"
    waiting = [each for each in others if each.wanted(device)] if kept else []
    return f"kept for {_kernels(waiting or others, about)}, which waited for it before"


def in_a_circle(others: Sequence[Record], about: About) -> str:
    """That a session and these wait for each other, in words; empty if there are none."""
    if not others:
        return ""
    they = "it waits" if len(others) == 1 else "they wait"
    return (
        f"a deadlock: this one waits for {_kernels(others, about)}, and {they} for what this one "
        "keeps, so end an actor, a session or a task in one of them (%gpu ps shows them)"
    )


def _kernels(records: Sequence[Record], about: About) -> str:
    names = [_name(each, about(each)) for each in records[:_SHOWN]]
    more = f"; {len(records) - _SHOWN} more" if len(records) > _SHOWN else ""
    kind = "another kernel" if len(records) == 1 else "other kernels"
    return f"{kind} ({'; '.join(names)}{more})"


def _name(record: Record, about: Mapping[str, Any]) -> str:
    user = about.get("user") if record.uid != os.getuid() else None
    parts = [f"pid {record.pid}", user and f"user {user}", about.get("notebook")]
    return ", ".join(str(part) for part in parts if part)
