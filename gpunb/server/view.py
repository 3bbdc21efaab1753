"""The last snapshots of all sessions, and the changes in them as news for listeners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Snapshot: TypeAlias = dict[str, Any]
"""The state of one session, as `gpunb.status()` returns it."""

_TIMED = ("running", "waiting")
"""Lists of jobs whose growing seconds are no news."""

_AGEING = (*_TIMED, "actors")


@dataclass(slots=True)
class News:
    """Changes: the changed parts of each session's snapshot, the pids of sessions that ended, and
    the facts about a machine on which no session runs."""

    sessions: dict[int, Snapshot] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    machine: Snapshot | None = None
    whole: bool = False
    """Whether this is the whole state, which replaces all earlier news."""

    def __bool__(self) -> bool:
        return bool(self.sessions or self.gone or self.machine is not None or self.whole)

    def add(self, later: News) -> None:
        """Merge later news into this one."""
        if later.whole:
            self.sessions, self.gone, self.machine, self.whole = {}, set(), None, True
        for pid in later.gone:
            self.sessions.pop(pid, None)
            self.gone.add(pid)
        for pid, changed in later.sessions.items():
            known = self.sessions.get(pid, {})
            if changed.get("time") is not None:  # the one time of all parts, also of earlier ones
                known = _older(known, changed["time"])
            self.sessions[pid] = {**known, **changed}
        if later.machine is not None:
            self.machine = later.machine

    def as_dict(self) -> dict[str, Any]:
        """The news as a JSON-able message."""
        message: dict[str, Any] = {
            "sessions": {str(pid): parts for pid, parts in self.sessions.items()},
            "gone": sorted(self.gone),
            "whole": self.whole,
        }
        return message if self.machine is None else {**message, "machine": self.machine}


class MachineView:
    """The last snapshot of each session."""

    def __init__(self) -> None:
        self.sessions: dict[int, Snapshot] = {}
        self.machine: Snapshot | None = None

    def whole(self, now: float) -> News:
        """The whole state at the time `now`, in seconds since 1970, for a new listener."""
        sessions = {pid: _older(each, now) for pid, each in self.sessions.items()}
        return News(sessions, set(), self.machine or {}, True)

    def update(self, pid: int, snapshot: Snapshot) -> News:
        """Store a session's snapshot. Returns the parts that have changed.

        Raises:
            ValueError: the snapshot has jobs of a wrong type.
        """
        jobs = (job for name in _AGEING for job in snapshot.get(name, ()))
        if not all(isinstance(job, dict) for job in jobs):
            raise ValueError("jobs must be objects")
        before = self.sessions.get(pid)
        self.sessions[pid] = snapshot
        changed = snapshot if before is None else _changed(before, snapshot)
        return News({pid: changed}) if changed else News()

    def remove(self, pid: int) -> News:
        """Remove a session that has ended. Returns the news of it."""
        if self.sessions.pop(pid, None) is None:
            return News()
        return News(gone={pid})

    def set_machine(self, machine: Snapshot) -> News:
        """Store the facts about the machine. Returns them if they have changed."""
        if machine == self.machine:
            return News()
        self.machine = machine
        return News(machine=machine)


def silent(pid: int) -> Snapshot:
    """A snapshot in place of that of a session that does not reply."""
    text = (
        f"process {pid} has a session of gpunb and does not answer: it may be stopped, or very busy"
    )
    return {"session": {"pid": pid, "notebook": None}, "warnings": [text]}


def _older(snapshot: Snapshot, now: float) -> Snapshot:
    """The snapshot with the seconds of its jobs at the time `now`."""
    passed = max(0.0, now - (snapshot.get("time") or now))
    later = {
        name: [
            {**each, "seconds": each["seconds"] + passed}
            if each.get("seconds") is not None
            else each
            for each in snapshot[name]
        ]
        for name in _AGEING
        if name in snapshot
    }
    return {**snapshot, **later, "time": now}


def _changed(before: Mapping[str, Any], now: Snapshot) -> Snapshot:
    """The parts of `now` that differ from `before`. Snapshots never lose a part."""
    parts = {
        name: value
        for name, value in now.items()
        if name != "time" and (name not in before or _differ(name, before[name], value))
    }
    return {**parts, "time": now.get("time")} if parts else {}


def _differ(name: str, before: Any, now: Any) -> bool:
    if name not in _TIMED:
        return bool(before != now)
    if len(before) != len(now):
        return True
    return any(
        {**one, "seconds": None} != {**other, "seconds": None}
        for one, other in zip(before, now, strict=True)
    )
