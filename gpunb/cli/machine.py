"""Gathers the state of the machine: its devices, their kernels, and other processes on them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from gpunb import accelerators
from gpunb.accelerators import Usage
from gpunb.control import client
from gpunb.engine.sampler import People
from gpunb.exceptions import GpunbError
from gpunb.leases import ledger_file, report
from gpunb.leases.records import digest
from gpunb.leases.report import LedgerEntry
from gpunb.scheduler.resources import UNIT, Device
from gpunb.scheduler.usage_types import Seen

VERSION = 1
"""The version of the format of `gather`."""

_DEVICE_FIELDS = ("id", "key", "name", "type", "memory", "vendor", "logical", "resource")
_OUTSIDER_FIELDS = ("pid", "user", "name", "memory", "since")
_JOB_FIELDS = ("id", "name", "state", "seconds", "gpus", "devices", "waits_for")
_PATIENCE = 2.0
_WAITING = 5


def gather() -> dict[str, Any]:
    """The state of the machine as JSON-able values.

    ``devices`` are devices with their usage, the ``leases`` of sessions on them, and other
    processes as ``outsiders``; ``kernels`` are the sessions; ``notes`` are texts for the user.
    """
    notes: list[str] = []
    entries = _entries(notes)
    snapshots = _snapshots(notes)
    detected = accelerators.detect()
    notes += detected.notes
    devices = {digest(each.key): _facts(each) for each in detected.devices}
    for each in _simulated(entries, snapshots):
        devices.setdefault(digest(each["key"]), each)
    usage = accelerators.measure(detected.devices)
    people = People()
    pids = {each.record.pid for each in entries} | set(snapshots)
    shown = []
    for number, device in devices.items():
        measured = usage.get(device["key"], Usage())
        figures = asdict(measured)
        processes = [people.seen(each) for each in measured.processes or ()]
        others = [each for each in processes if not _is_of(each, pids)]
        figures.pop("processes")
        shown.append(
            {
                **device,
                "usage": figures,
                "leases": _leases(number, entries, processes),
                "outsiders": [
                    {at: getattr(each, at) for at in _OUTSIDER_FIELDS} for each in others
                ],
            }
        )
    return {
        "version": VERSION,
        "devices": shown,
        "kernels": _kernels(entries, snapshots),
        "notes": list(dict.fromkeys(notes)),
    }


def _entries(notes: list[str]) -> list[LedgerEntry]:
    """The living sessions in the ledger; a note if the ledger cannot be read."""
    try:
        return [each for each in report.read_entries(ledger_file.ledger_folder()) if each.alive]
    except (GpunbError, OSError) as error:
        notes.append(f"the ledger of leases cannot be read: {error}")
        return []


def _snapshots(notes: list[str]) -> dict[int, Mapping[str, Any]]:
    """The snapshots of the sessions of this user, by pid; a note for each that fails to reply."""
    snapshots: dict[int, Mapping[str, Any]] = {}
    try:
        running = client.sessions()
    except GpunbError as error:
        notes.append(str(error))
        return snapshots
    for each in running:
        try:
            snapshots[each.pid] = client.ask(each.pid, {"do": "status"}, _PATIENCE)
        except GpunbError as error:
            notes.append(str(error))
    return snapshots


def _simulated(
    entries: Iterable[LedgerEntry], snapshots: Mapping[int, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The logical devices that sessions share through this ledger."""
    for entry in entries:
        for each in snapshots.get(entry.record.pid, {}).get("devices", ()):
            if each["logical"]:
                yield {name: each.get(name) for name in _DEVICE_FIELDS}


def _facts(device: Device) -> dict[str, Any]:
    return {name: getattr(device, name) for name in _DEVICE_FIELDS}


def _leases(
    number: int, entries: Iterable[LedgerEntry], processes: list[Seen]
) -> list[dict[str, Any]]:
    """The leases of sessions on a device, with the memory that their processes use there."""
    leases = []
    for entry in entries:
        stake = entry.record.stakes.get(number)
        if stake is None or not stake.held:
            continue
        theirs = [each.memory for each in processes if _is_of(each, {entry.record.pid})]
        known = [each for each in theirs if each is not None]
        leases.append(
            {
                **_owner(entry),
                "job": stake.job or None,
                "share": stake.held / UNIT,
                "memory": sum(known) if known else None,
                "since": stake.since or None,
            }
        )
    return leases


def _owner(entry: LedgerEntry) -> dict[str, Any]:
    about = entry.about
    user = about.get("user") or str(entry.record.uid)
    return {"pid": entry.record.pid, "user": user, "notebook": about.get("notebook")}


def _is_of(process: Seen, pids: set[int]) -> bool:
    return not pids.isdisjoint((process.pid, *process.line))


def _kernels(
    entries: list[LedgerEntry], snapshots: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The sessions of this machine. For those of other users only the facts in the ledger are
    known. Logical devices of a session that is not in the ledger are private to it."""
    sharing = {entry.record.pid for entry in entries}
    sessions: dict[int, dict[str, Any]] = {}
    for entry in entries:
        about = {"since": entry.about.get("since"), "python": entry.about.get("python")}
        sessions[entry.record.pid] = {
            **_owner(entry),
            **about,
            "yours": entry.record.uid == os.getuid(),
            "waits": entry.record.waits,
        }
    for pid, snapshot in snapshots.items():
        known = sessions.setdefault(pid, {"waits": False})
        session = snapshot.get("session", {})
        for name in ("pid", "user", "notebook", "since", "python", "head"):
            known[name] = session.get(name, known.get(name))
        known["yours"] = True
        known["running"] = [_job(each) for each in snapshot.get("running", ())]
        known["waiting"] = [_job(each) for each in snapshot.get("waiting", ())[:_WAITING]]
        known["queued"] = snapshot.get("queued", 0)
        known["actors"] = [_actor(each) for each in snapshot.get("actors", ())]
        simulated = [each["id"] for each in snapshot["devices"] if each["logical"]]
        known["private"] = simulated if pid not in sharing else []
    return [sessions[pid] for pid in sorted(sessions)]


def _job(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: facts.get(name) for name in _JOB_FIELDS}


def _actor(facts: Mapping[str, Any]) -> dict[str, Any]:
    names = ("class", "kind", "running", "waiting")
    return {**_job(facts), **{name: facts.get(name) for name in names}}
