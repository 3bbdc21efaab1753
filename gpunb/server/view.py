"""What is known of all sessions, and what is news of it to whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Snapshot: TypeAlias = dict[str, Any]
"""Of one session; as `gpunb.status()`."""

_TIMED = ("running", "waiting")
"""Lists of jobs whose seconds pass without being news."""

_AGEING = (*_TIMED, "actors")


@dataclass(slots=True)
class News:
    """What has changed: of each session the parts to be replaced, who is gone, and what is to be
    said of a machine on which no session runs."""

    sessions: dict[int, Snapshot] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    machine: Snapshot | None = None
    whole: bool = False
    """Whether this is everything, and what was known before is void."""

    def __bool__(self) -> bool:
        return bool(self.sessions or self.gone or self.machine is not None or self.whole)

    def add(self, later: News) -> None:
        """Make of two pieces of news one."""
        if later.whole:
            self.sessions, self.gone, self.machine, self.whole = {}, set(), None, True
        for pid in later.gone:
            self.sessions.pop(pid, None)
            self.gone.add(pid)
        for pid, changed in later.sessions.items():
            self.sessions[pid] = {**self.sessions.get(pid, {}), **changed}
        if later.machine is not None:
            self.machine = later.machine

    def as_dict(self) -> dict[str, Any]:
        """The same as a JSON-able message."""
        said: dict[str, Any] = {
            "sessions": {str(pid): parts for pid, parts in self.sessions.items()},
            "gone": sorted(self.gone),
            "whole": self.whole,
        }
        return said if self.machine is None else {**said, "machine": self.machine}


class View:
    """The last snapshot of each session."""

    def __init__(self) -> None:
        self.sessions: dict[int, Snapshot] = {}
        self.machine: Snapshot | None = None

    def whole(self, now: float) -> News:
        """All of it for somebody new, at a time in seconds since 1970."""
        sessions = {pid: _older(each, now) for pid, each in self.sessions.items()}
        return News(sessions, set(), self.machine or {}, True)

    def told(self, pid: int, snapshot: Snapshot) -> News:
        """A session has sent a snapshot: what is new in it.

        Raises:
            ValueError: it is no snapshot.
        """
        jobs = (job for name in _AGEING for job in snapshot.get(name, ()))
        if not all(isinstance(job, dict) for job in jobs):
            raise ValueError("jobs must be objects")
        before = self.sessions.get(pid)
        self.sessions[pid] = snapshot
        changed = snapshot if before is None else _changed(before, snapshot)
        return News({pid: changed}) if changed else News()

    def left(self, pid: int) -> News:
        """A session has ended."""
        if self.sessions.pop(pid, None) is None:
            return News()
        return News(gone={pid})

    def measured(self, machine: Snapshot) -> News:
        """What the machine has, looked up by ourselves."""
        if machine == self.machine:
            return News()
        self.machine = machine
        return News(machine=machine)


def silent(pid: int) -> Snapshot:
    """Of a session that does not answer."""
    text = (
        f"process {pid} has a session of gpunb and does not answer: it may be stopped, or very busy"
    )
    return {"session": {"pid": pid, "notebook": None}, "warnings": [text]}


def _older(snapshot: Snapshot, now: float) -> Snapshot:
    """A session in which nothing has happened since but that time has passed."""
    passed = max(0.0, now - snapshot.get("time", now))
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
    """The parts that are not as they were. What is left out of `now` does not occur."""
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
