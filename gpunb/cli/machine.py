"""The machine as one value: its devices, the kernels that share them, and who else is there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from gpunb import accelerators
from gpunb.accelerators import Usage
from gpunb.core.resources import UNIT, Device
from gpunb.core.sightings import Seen
from gpunb.exceptions import GpunbError
from gpunb.runtime import kernels, ledger, survey
from gpunb.runtime.book import Record, digest
from gpunb.runtime.sampler import People
from gpunb.runtime.survey import Entry

VERSION = 1
"""Of the form of what `gather` returns."""

_OF_DEVICE = ("id", "key", "name", "type", "memory", "vendor", "logical", "resource")
_OF_JOB = ("id", "name", "state", "seconds", "gpus", "devices", "waits_for")
_DESK = 2.0
_WAITING = 5


def gather() -> dict[str, Any]:
    """What there is to see, as JSON knows it.

    ``devices`` have their figures, and under ``leases`` and ``outsiders`` who has a part of them;
    ``kernels`` are the sessions that were found, ``notes`` what is to be said besides.
    """
    notes: list[str] = []
    entries = _entries(notes)
    snapshots = _snapshots(notes)
    found = accelerators.detect()
    notes += found.notes
    devices = {digest(each.key): _facts(each) for each in found.devices}
    for each in _simulated(entries, snapshots):
        devices.setdefault(digest(each["key"]), each)
    usage = accelerators.measure(found.devices)
    people = People()
    pids = {each.record.pid for each in entries} | set(snapshots)
    shown = []
    for number, device in devices.items():
        measured = usage.get(device["key"], Usage())
        figures = asdict(measured)
        processes = [people.seen(each) for each in measured.processes or ()]
        figures.pop("processes")
        shown.append(
            {
                **device,
                "usage": figures,
                "leases": _leases(number, entries, processes),
                "outsiders": [_outsider(each) for each in processes if not _is_of(each, pids)],
            }
        )
    return {
        "version": VERSION,
        "devices": shown,
        "kernels": _kernels(entries, snapshots),
        "notes": list(dict.fromkeys(notes)),
    }


def _entries(notes: list[str]) -> list[Entry]:
    """The sessions in the ledger."""
    try:
        return [each for each in survey.survey(ledger.ledger_folder()) if each.alive]
    except (GpunbError, OSError) as error:
        notes.append(f"the ledger of leases cannot be read: {error}")
        return []


def _snapshots(notes: list[str]) -> dict[int, Mapping[str, Any]]:
    """What the kernels of this user say of themselves."""
    found: dict[int, Mapping[str, Any]] = {}
    try:
        running = kernels.sessions()
    except GpunbError as error:
        notes.append(str(error))
        return found
    for each in running:
        try:
            found[each.pid] = kernels.ask(each.pid, {"do": "status"}, _DESK)
        except GpunbError as error:
            notes.append(str(error))
    return found


def _simulated(
    entries: Iterable[Entry], snapshots: Mapping[int, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The devices without hardware that sessions share in this ledger."""
    for entry in entries:
        for each in snapshots.get(entry.record.pid, {}).get("devices", ()):
            if each["logical"]:
                yield {name: each.get(name) for name in _OF_DEVICE}


def _facts(device: Device) -> dict[str, Any]:
    return {name: getattr(device, name) for name in _OF_DEVICE}


def _leases(number: int, entries: Iterable[Entry], processes: list[Seen]) -> list[dict[str, Any]]:
    """What sessions hold of a device, and the memory that their processes have there."""
    found = []
    for entry in entries:
        stake = entry.record.stakes.get(number)
        if stake is None or not stake.held:
            continue
        theirs = [each.memory for each in processes if _is_of(each, {entry.record.pid})]
        known = [each for each in theirs if each is not None]
        found.append(
            {
                **_who(entry),
                "job": stake.job or None,
                "share": stake.held / UNIT,
                "memory": sum(known) if known else None,
                "since": stake.since or None,
            }
        )
    return found


def _who(entry: Entry) -> dict[str, Any]:
    about = entry.about
    user = about.get("user") or str(entry.record.uid)
    return {"pid": entry.record.pid, "user": user, "notebook": about.get("notebook")}


def _outsider(process: Seen) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "user": process.user,
        "name": process.name,
        "memory": process.memory,
        "since": process.since,
    }


def _is_of(process: Seen, pids: set[int]) -> bool:
    return not pids.isdisjoint((process.pid, *process.line))


def _kernels(
    entries: list[Entry], snapshots: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The sessions of this machine; of one of another user only what the ledger has is known. The
    simulated devices of one that has no part in the ledger are its own."""
    sharing = {entry.record.pid for entry in entries}
    found: dict[int, dict[str, Any]] = {}
    for entry in entries:
        about = {"since": entry.about.get("since"), "python": entry.about.get("python")}
        found[entry.record.pid] = {
            **_who(entry),
            **about,
            "yours": entry.record.uid == os.getuid(),
            "waits": _waits(entry.record),
        }
    for pid, snapshot in snapshots.items():
        known = found.setdefault(pid, {"waits": False})
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
    return [found[pid] for pid in sorted(found)]


def _waits(record: Record) -> bool:
    return record.listens


def _job(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: facts.get(name) for name in _OF_JOB}


def _actor(facts: Mapping[str, Any]) -> dict[str, Any]:
    names = ("class", "kind", "running", "waiting")
    return {**_job(facts), **{name: facts.get(name) for name in names}}
