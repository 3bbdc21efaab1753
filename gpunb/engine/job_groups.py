"""Knows the tasks of each placement group and the trials of each sweep.

A call of an actor is part of nothing: its actor is. So are tasks that a trial submits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpunb.engine.actors import ActorTable
from gpunb.engine.jobs import HISTORY, Job, Part, Past
from gpunb.exceptions import GpunbError
from gpunb.scheduler.tasks import TaskId

_LISTS = ("actors", "running", "waiting", "finished")


@dataclass(slots=True)
class _Group:
    """The facts about a placement group or a sweep.

    Attributes:
        place: the cell of its first task.
        open: its tasks and actors that are not over.
        ended: the number of its tasks and actors that are over, by their final state.
        last: when the last one was over, on the clock of `time.monotonic`.
    """

    part: Part
    place: tuple[int, str | None] | None
    open: set[TaskId] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    last: float = 0.0


class JobGroups:
    """The placement groups and sweeps of a session; on the loop's thread."""

    def __init__(self, jobs: Mapping[TaskId, Job], actors: ActorTable) -> None:
        self._jobs = jobs
        self._actors = actors
        self._groups: dict[str, _Group] = {}

    def submitted(self, job: Job) -> None:
        """Note a task, which may be the constructor of an actor."""
        part = job.part_of
        if part is None or job.rank is not None:  # ranks are listed with their coordinator
            return
        group = self._groups.get(part.id)
        if group is None:
            group = self._groups[part.id] = _Group(part, job.shown.place)
            if len(self._groups) > HISTORY:
                del self._groups[next(iter(self._groups))]
        group.part = part
        group.open.add(job.id)

    def over(self, past: Past) -> None:
        """Note that a task or an actor is over."""
        group = self._groups.get(past.part_of.id) if past.part_of is not None else None
        if group is not None and past.id in group.open:
            group.open.discard(past.id)
            group.ended[past.state] += 1
            group.last = past.ended

    def stop_sweep(self, name: str) -> None:
        """Ask the sweep with this id to stop its trials, and to start no more.

        Raises:
            GpunbError: no trial of such a sweep runs or waits.
        """
        group = self._groups.get(name)
        trials = group.open if group is not None and group.part.kind == "sweep" else ()
        for job in filter(None, map(self._jobs.get, trials)):
            job.shown.stop_sweep()  # all trials belong to the same sweep
            return
        raise GpunbError(f"there is no sweep {name[:60]!r} that is not over")

    def listed(self, facts: Mapping[str, Any], offset: float) -> list[dict[str, Any]]:
        """Return the groups and sweeps that have a task or an actor in the lists of a snapshot.
        `offset` is the time of day minus the time of `time.monotonic`."""
        jobs = (each for name in _LISTS for each in facts[name])
        names = dict.fromkeys(each["part_of"] for each in jobs)
        known = (self._groups.get(each) for each in names if each is not None)
        return [self._facts(each, offset) for each in known if each is not None]

    def _facts(self, group: _Group, offset: float) -> dict[str, Any]:
        part = group.part
        states = Counter(group.ended)
        for ident in list(group.open):
            if (state := self._state(ident)) is None:
                group.open.discard(ident)
            else:
                states[state] += 1
        number, name = group.place or (None, None)
        return {
            "id": part.id,
            "kind": part.kind,
            "name": part.name,
            "actor": part.group,
            "states": dict(states),
            "total": max(part.total, states.total()),
            "began": round(group.began + offset, 3),
            "ended": None if group.open else round(group.last + offset, 3),
            "cell": number,
            "cell_id": name,
        }

    def _state(self, ident: TaskId) -> str | None:
        job, actor = self._jobs.get(ident), self._actors.get(ident)
        if actor is not None and actor.since:
            return "alive"
        if job is not None:
            return "running" if job.worker is not None else "queued"
        return None if actor is None else "queued"
