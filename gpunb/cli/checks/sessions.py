"""The running sessions: their folder, their leases, and what some may have left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpunb.cli.checks import Finding, Place, note, ok, problem
from gpunb.exceptions import GpunbError
from gpunb.runtime import folder, kernels, ledger, survey

NAMES = ("gpunb-zygote", "gpunb-preload", "gpunb-worker")
_LONG = 600.0
_TAKES_ORPHANS = ("init", "systemd", "tini", "dumb-init", "docker-init")


def runtime(place: Place) -> Iterator[Finding]:
    """The folder where sessions meet, and who is there."""
    try:
        path = folder.runtime_folder()
    except GpunbError as error:
        yield problem("runtime folder", str(error), "as it says")
        return
    before = {each.stem for each in (path / folder.KERNELS).glob("*.sock")}
    running = kernels.sessions()
    stale = sorted(before - {str(each.pid) for each in running})
    count = len(running)
    yield ok(
        "sessions", f"{count or 'none'} of yours {'runs' if count == 1 else 'run'} now; {path}"
    )
    if stale:
        yield note("leftovers", f"sockets of sessions that have ended: {', '.join(stale)}; removed")
    for each in running:
        yield from _session(each.pid)


def _session(pid: int) -> Iterator[Finding]:
    try:
        facts = kernels.ask(pid, {"do": "status"})
    except GpunbError as error:
        yield problem(f"session {pid}", str(error), f"if it is stuck: kill {pid}")
        return
    for text in (*facts.get("notes", ()), *facts.get("warnings", ())):
        yield note(f"session {pid}", text)
    failed = {name: why for name, why in (facts.get("preload") or {}).items() if why}
    for name, why in failed.items():
        cure = f"see whether `python -c 'import {name}'` works"
        yield problem(f"session {pid}", f"preload of {name} failed: {why}", cure)


def leases(place: Place) -> Iterator[Finding]:
    """The ledger of who holds what of each device."""
    try:
        path = ledger.ledger_folder()
        entries = survey.survey(path)
    except (GpunbError, OSError) as error:
        yield problem("leases", str(error), "sessions that use the same devices do not see another")
        return
    living = [each for each in entries if each.alive]
    held = sum(bool(stake.held) for each in living for stake in each.record.stakes.values())
    where = f"{path}" + (" (GPUNB_LEDGER_DIR)" if place.environ.get(ledger.VARIABLE) else "")
    kernels_ = f"{len(living)} kernel{'' if len(living) == 1 else 's'}"
    yield ok("leases", f"{held} held by {kernels_}; {where}")
    dead = len(entries) - len(living)
    if dead:
        says = f"{dead} of sessions that were killed; the next session removes them"
        yield note("leases", says)
    now = time.monotonic()
    for each in living:
        waited = now - each.record.asked
        if each.record.listens and waited > _LONG:
            yield note(
                "leases",
                f"process {each.record.pid} has waited {waited / 60:.0f} minutes for devices",
                "`gpunb status` says who holds them; `gpunb release PID` asks one to let go",
            )


def orphans(place: Place) -> Iterator[Finding]:
    """Processes of sessions whose kernel is gone."""
    processes = (path for path in place.path("/proc").iterdir() if path.name.isdigit())
    found = [path.name for path in processes if _is_orphan(place, path)]
    if found:
        yield problem(
            "leftovers",
            f"processes of sessions whose kernel is gone: {', '.join(sorted(found, key=int))}",
            f"kill -9 {' '.join(sorted(found, key=int))}",
        )
    else:
        yield ok("leftovers", "no process of a session that has ended")


def _is_orphan(place: Place, path: Path) -> bool:
    try:
        name = (path / "comm").read_text().strip()
        if name not in NAMES or path.stat().st_uid != os.getuid():
            return False
        state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        if state == "Z":
            return False
        above = (place.path("/proc") / parent / "comm").read_text().strip()
    except OSError:
        return False
    # The parent is the kernel, or a zygote. In a container a kernel may be process 1 itself.
    return above in _TAKES_ORPHANS or (parent == "1" and "python" not in above)
