"""The facts about the machine: the sessions that run, and the use of the devices."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpunb import accelerators
from gpunb.control import client
from gpunb.exceptions import GpunbError
from gpunb.scheduler.resources import Device
from gpunb.server.view import Snapshot, silent
from gpunb.system import runtime_dir


def sockets() -> dict[int, Path]:
    """The sockets of sessions by pid, also of dead ones. Fast: it only lists a folder.

    Raises:
        GpunbError, OSError: the folder cannot be used.
    """
    paths = {}
    for path in (runtime_dir.runtime_folder() / runtime_dir.KERNELS).glob("*.sock"):
        if path.stem.isdigit():
            paths[int(path.stem)] = path
    return paths


async def facts(problem: str | None = None) -> dict[str, Any]:
    """The devices and notes about them, looked up in a thread. `problem`: the reason why sessions
    cannot be listed, if there is one."""
    return {**await asyncio.to_thread(_devices), "problem": problem}


async def whole() -> dict[str, Any]:
    """The whole state: the snapshots of all sessions, or the devices if none runs; with the time on
    this machine's clock, in seconds since 1970."""
    now = {"gone": [], "whole": True, "time": time.time()}
    try:
        running = await asyncio.to_thread(client.sessions)
    except GpunbError as error:
        return {**now, "sessions": {}, "machine": await facts(str(error))}
    answers = await asyncio.gather(*(asyncio.to_thread(_snapshot, each) for each in running))
    sessions = {
        str(each.pid): answer
        for each, answer in zip(running, answers, strict=True)
        if answer is not None
    }
    machine = {} if sessions else await facts()
    return {**now, "sessions": sessions, "machine": machine}


def _snapshot(session: client.RunningSession) -> Snapshot | None:
    """The snapshot of a session; None if it has ended."""
    try:
        snapshot: Snapshot = client.ask(session.pid, {"do": "status"})
    except GpunbError:
        return silent(session.pid) if session.path.exists() else None
    return snapshot


def _devices() -> dict[str, Any]:
    devices, notes = _detect()
    usage = accelerators.measure(devices)
    return {
        "devices": [_described(each, usage.get(each.key)) for each in devices],
        "cpus": os.cpu_count(),
        "notes": list(notes),
    }


def _detect() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    simulate = os.environ.get("GPUNB_SIMULATE")
    if simulate:
        try:
            return tuple(accelerators.parse_simulate(simulate)), ()
        except ValueError as error:
            return (), (f"GPUNB_SIMULATE: {error}",)
    detected = accelerators.detect()
    return detected.devices, detected.notes


def _described(device: Device, usage: accelerators.Usage | None) -> dict[str, Any]:
    """A device in the form of a snapshot, without holders."""
    now = asdict(usage or accelerators.Usage())
    processes = now.pop("processes") or ()
    unknown = dict.fromkeys(("user", "notebook", "job", "share", "since"))
    return {
        "id": device.id,
        "key": device.key,
        "name": device.name,
        "type": device.type,
        "memory": device.memory,
        "logical": device.logical,
        "free": 1.0,
        "held": [],
        "kept": None,
        "usage": now,
        "others": [
            {**unknown, "pid": pid, "memory": memory, "kind": "outsider"}
            for pid, memory in processes
        ],
        "health": None,
    }
