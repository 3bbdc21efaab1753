"""Reads the ledger for snapshots, texts and the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunb.leases import ledger_file, liveness
from gpunb.leases import records as leases_records
from gpunb.leases.records import LEDGER_FILE, SessionRecord, Stake
from gpunb.scheduler.resources import UNIT

_SHOWN = 3

About = Callable[[SessionRecord], Mapping[str, Any]]
"""Returns the facts that a session has published about itself."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A session in the ledger. `alive` is False for the record of a dead session."""

    record: SessionRecord
    about: Mapping[str, Any]
    alive: bool


def read_entries(path: Path) -> list[LedgerEntry]:
    """Return all sessions in the ledger of a folder.

    Raises:
        OSError: the ledger cannot be read.
    """
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = liveness.is_regular(os.open(path / LEDGER_FILE, flags))
    except FileNotFoundError:
        return []
    try:
        size = min(os.fstat(descriptor).st_size, leases_records.LONGEST)
        data = ledger_file.read(descriptor, size)
    finally:
        os.close(descriptor)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return [_entry(folder, each) for _, each in leases_records.records(data)]
    finally:
        os.close(folder)


def _entry(folder: int, record: SessionRecord) -> LedgerEntry:
    about = liveness.about(folder, record.id)
    record.uid = about.get("uid", record.uid)
    return LedgerEntry(record, about, liveness.is_alive(folder, record.id, record.pid))


def as_dict(record: SessionRecord, stake: Stake, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's lease of a device, as in a snapshot."""
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


def owners_text(
    others: Sequence[SessionRecord], device: int, about: About, *, reserved: bool
) -> str:
    """Return a text that names the sessions for which units of a device are not
    available. `reserved` if some of these units are not held, but left to sessions that wait."""
    holders = [each for each in others if each.held(device)]
    if holders:
        return f"held by {_kernels(holders, about)}"
    waiting = [each for each in others if each.wanted(device)] if reserved else []
    return f"kept for {_kernels(waiting or others, about)}, which waited for it before"


def circle_text(others: Sequence[SessionRecord], about: About) -> str:
    """Return a text on sessions that wait in a circle with this one; empty if there are none."""
    if not others:
        return ""
    they = "it waits" if len(others) == 1 else "they wait"
    return (
        f"a deadlock: this one waits for {_kernels(others, about)}, and {they} for what this one "
        "keeps, so end an actor, a session or a task in one of them (%gpu ps shows them)"
    )


def _kernels(records: Sequence[SessionRecord], about: About) -> str:
    names = [_name(each, about(each)) for each in records[:_SHOWN]]
    more = f"; {len(records) - _SHOWN} more" if len(records) > _SHOWN else ""
    kind = "another kernel" if len(records) == 1 else "other kernels"
    return f"{kind} ({'; '.join(names)}{more})"


def _name(record: SessionRecord, about: Mapping[str, Any]) -> str:
    user = about.get("user") if about.get("uid", record.uid) != os.getuid() else None
    parts = [f"pid {record.pid}", user and f"user {user}", about.get("notebook")]
    return ", ".join(str(part) for part in parts if part)
