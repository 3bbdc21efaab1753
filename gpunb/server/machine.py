"""What the server can say of the machine by itself: who runs, and what the devices do."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpunb import accelerators
from gpunb.core.resources import Device
from gpunb.exceptions import GpunbError
from gpunb.runtime import folder, kernels
from gpunb.server.view import Snapshot, silent


def sockets() -> dict[int, Path]:
    """The sockets of the sessions that seem to run, by pid. Looks at the folder only, so that it
    may be done often.

    Raises:
        GpunbError, OSError: the folder is of no use.
    """
    found = {}
    for path in (folder.runtime_folder() / folder.KERNELS).glob("*.sock"):
        if path.stem.isdigit():
            found[int(path.stem)] = path
    return found


async def facts(problem: str | None = None) -> dict[str, Any]:
    """The devices and what is to be said of them, looked up where nothing else waits for it.
    `problem` is why no session can be seen."""
    return {**await asyncio.to_thread(_devices), "problem": problem}


async def whole() -> dict[str, Any]:
    """Everything at one moment: all sessions, or the devices where none runs."""
    try:
        running = await asyncio.to_thread(kernels.sessions)
    except GpunbError as error:
        return {"sessions": {}, "gone": [], "whole": True, "machine": await facts(str(error))}
    answers = await asyncio.gather(*(asyncio.to_thread(_snapshot, each) for each in running))
    sessions = {
        str(each.pid): answer
        for each, answer in zip(running, answers, strict=True)
        if answer is not None
    }
    machine = {} if sessions else await facts()
    return {"sessions": sessions, "gone": [], "whole": True, "machine": machine}


def _snapshot(session: kernels.Running) -> Snapshot | None:
    """What a session says of itself; None if it has ended meanwhile."""
    try:
        said: Snapshot = kernels.ask(session.pid, {"do": "status"})
    except GpunbError:
        return silent(session.pid) if session.path.exists() else None
    return said


def _devices() -> dict[str, Any]:
    devices, notes = _found()
    usage = accelerators.measure(devices)
    return {
        "devices": [_described(each, usage.get(each.key)) for each in devices],
        "cpus": os.cpu_count(),
        "notes": list(notes),
    }


def _found() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    simulate = os.environ.get("GPUNB_SIMULATE")
    if simulate is not None:
        try:
            return tuple(accelerators.parse_simulate(simulate)), ()
        except ValueError as error:
            return (), (f"GPUNB_SIMULATE: {error}",)
    found = accelerators.detect()
    return found.devices, found.notes


def _described(device: Device, usage: accelerators.Usage | None) -> dict[str, Any]:
    """A device as in a snapshot, held by nobody."""
    now = asdict(usage or accelerators.Usage())
    processes = now.pop("processes") or ()
    return {
        "id": device.id,
        "key": device.key,
        "name": device.name,
        "type": device.type,
        "memory": device.memory,
        "logical": device.logical,
        "free": 1.0,
        "held": [],
        "usage": now,
        "others": [
            {
                "pid": pid,
                "user": None,
                "notebook": None,
                "job": None,
                "share": None,
                "memory": memory,
                "since": None,
                "kind": "outsider",
            }
            for pid, memory in processes
        ],
        "health": None,
    }
