"""Checks the running sessions, their folder and leases, and the leftovers of ended sessions."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpunb.cli.checks import Finding, Place, note, ok, problem
from gpunb.control import client
from gpunb.engine import faults
from gpunb.exceptions import GpunbError
from gpunb.leases import ledger_file, report
from gpunb.system import runtime_dir

NAMES = ("gpunb-zygote", "gpunb-preload", "gpunb-follow", "gpunb-worker")
_LONG = 600.0
_SHOWN = 5
_TAKES_ORPHANS = ("init", "systemd", "tini", "dumb-init", "docker-init")


def runtime(place: Place) -> Iterator[Finding]:
    """The folder of the sessions' sockets, and the sessions that run."""
    try:
        path = runtime_dir.runtime_folder()
    except GpunbError as error:
        yield problem("runtime folder", str(error), "as it says")
        return
    before = {each.stem for each in (path / runtime_dir.KERNELS).glob("*.sock")}
    running = client.sessions()
    stale = sorted(before - {str(each.pid) for each in running}, key=lambda pid: (len(pid), pid))
    count = len(running)
    yield ok(
        "sessions", f"{count or 'none'} of yours {'runs' if count == 1 else 'run'} now; {path}"
    )
    if stale:
        sockets = f"{len(stale)} socket{'s' if len(stale) > 1 else ''}"
        yield note("leftovers", f"{sockets} of sessions that have ended: {_some(stale)}; removed")
    for each in running:
        yield from _session(each.pid)


def broken(place: Place) -> Iterator[Finding]:
    """Sessions that ended by an internal error."""
    for path, text in faults.reports():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        what = (
            f"an internal error ended the session of process {path.stem.partition('-')[0]}, {when}"
        )
        yield problem(
            "defect", f"{what}\n{text.rstrip()}", f"report it with {path}; then remove it"
        )


def _some(names: Sequence[str]) -> str:
    """The first few of many."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _session(pid: int) -> Iterator[Finding]:
    try:
        facts = client.ask(pid, {"do": "status"})
    except GpunbError as error:
        yield problem(f"session {pid}", str(error), f"if it is stuck: kill {pid}")
        return
    for text in (*facts.get("notes", ()), *facts.get("warnings", ())):
        yield note(f"session {pid}", text)
    failed = {name: why for name, why in (facts.get("preload") or {}).items() if why}
    for name, why in failed.items():
        cure = f"see whether `python -c 'import {name}'` works"
        yield problem(f"session {pid}", f"preload of {name} failed: {why}", cure)
    preloaded = [name for name, why in (facts.get("preload") or {}).items() if not why]
    if preloaded:
        yield ok(f"session {pid}", f"preloaded: {_some(preloaded)}")


def leases(place: Place) -> Iterator[Finding]:
    """The ledger of the leases of devices."""
    try:
        path = ledger_file.ledger_folder()
        entries = report.read_entries(path)
    except (GpunbError, OSError) as error:
        yield problem("leases", str(error), "sessions that use the same devices do not see another")
        return
    living = [each for each in entries if each.alive]
    held = sum(bool(stake.held) for each in living for stake in each.record.stakes.values())
    where = f"{path}" + (" (GPUNB_LEDGER_DIR)" if place.environ.get(ledger_file.VARIABLE) else "")
    kernels_ = f"{len(living)} kernel{'' if len(living) == 1 else 's'}"
    yield ok("leases", f"{held} held by {kernels_}; {where}")
    dead = len(entries) - len(living)
    if dead:
        text = f"{dead} of sessions that were killed; the next session removes them"
        yield note("leases", text)
    now = time.monotonic()
    for each in living:
        waited = now - each.record.asked
        if each.record.waits and waited > _LONG:
            yield note(
                "leases",
                f"process {each.record.pid} has waited {waited / 60:.0f} minutes for devices",
                "`gpunb status` says who holds them; `gpunb release PID` asks one to let go",
            )


def orphans(place: Place) -> Iterator[Finding]:
    """Processes of sessions whose kernel is gone."""
    processes = (path for path in place.path("/proc").iterdir() if path.name.isdigit())
    pids = [path.name for path in processes if _is_orphan(place, path)]
    if pids:
        yield problem(
            "leftovers",
            f"processes of sessions whose kernel is gone: {_some(sorted(pids, key=int))}",
            f"kill -9 {' '.join(sorted(pids, key=int))}",
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
