"""The ranks of jobs in the status of a session: each is listed with its coordinator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpunb.scheduler.resources import Shares, merged
from gpunb.scheduler.tasks import TaskId

if TYPE_CHECKING:
    from gpunb.engine.device_status import DeviceStatus
    from gpunb.engine.jobs import Job, Past
    from gpunb.engine.state import EngineState

_OF_JOB = ("id", "state", "seconds", "pid")


class RankStatus:
    """Completes the facts about coordinators; on the loop's thread."""

    def __init__(
        self, engine: EngineState, devices: DeviceStatus, why: Callable[[TaskId], str | None]
    ) -> None:
        """`why` returns the reason for which a task or a placement group waits."""
        self._engine = engine
        self._devices = devices
        self._why = why

    def fold(self, facts: dict[str, Any]) -> None:
        """Leave out the ranks among the jobs of a snapshot, and complete their coordinators."""
        found: dict[str, list[dict[str, Any]]] = {"running": [], "waiting": []}
        for each in itertools.chain(facts["running"], facts["waiting"]):
            job, waited = self._engine.jobs.get(each["id"]), each["state"] == "queued"
            if job is not None and job.rank is not None:
                facts["queued"] -= waited
                continue
            if job is not None and job.call.kind == "ranks":
                each.update(self.complete(each, job))
                facts["queued"] += (each["state"] == "queued") - waited
            found["waiting" if each["state"] == "queued" else "running"].append(each)
        facts.update(found)
        groups = {actor.id for actor in self._engine.actors if actor.of_ranks}
        facts["actors"] = [each for each in facts["actors"] if each["id"] not in groups]
        for device in facts["devices"]:
            device["held"] = self._held_together(device["held"])

    def complete(self, facts: Mapping[str, Any], job: Job) -> dict[str, Any]:
        """Return the facts about a coordinator, with those about its ranks. It is queued as long as
        its ranks are."""
        ranks = [self.facts(each) for each in job.ranks]
        devices = merged(device for each in ranks for device in each["devices"])
        memory = _together([each["memory"] for each in ranks])
        found = {**facts, "ranks": ranks, "devices": devices, "memory": memory}
        if facts["state"] == "running" and not any(each["pid"] for each in ranks):
            why = self._why(job.group) if job.group is not None else None
            found.update(state="queued", waits_for=why)
        return found

    def facts(self, ident: TaskId) -> dict[str, Any]:
        """Return the facts about a rank."""
        known = self._engine.jobs.get(ident) or self._engine.past[ident]
        facts = known.facts()
        return {
            "rank": known.rank,
            **{name: facts[name] for name in _OF_JOB},
            "devices": self._devices.held(known.held),
            "memory": self._devices.memory(ident, known.held),
        }

    def held_by(self, past: Past) -> Shares:
        """Return the shares of devices that a finished job had, or its ranks together."""
        ranks = [self._engine.past[each] for each in past.ranks if each in self._engine.past]
        return past.held + tuple(share for each in ranks for share in each.held)

    def _held_together(self, held: Iterable[Sequence[Any]]) -> list[list[Any]]:
        """Return the holders of a device, with a coordinator in place of its ranks and their
        placement group."""
        found: dict[TaskId, float] = {}
        for ident, share in held:
            job, group = self._engine.jobs.get(ident), self._engine.actors.get(ident)
            of_ranks = group is not None and group.of_ranks
            parent = job.parent if job is not None and job.rank is not None else None
            own = parent or (group.parent if group is not None and of_ranks else None) or ident
            found[own] = round(found.get(own, 0.0) + share, 4)
        return [list(each) for each in found.items()]


def _together(memory: Sequence[Mapping[str, int | None]]) -> dict[str, int | None]:
    """Return the memory of some ranks together; None where nothing is known."""
    found: dict[str, int | None] = {}
    for name in ("now", "peak", "share"):
        known = [size for each in memory if (size := each[name]) is not None]
        found[name] = sum(known) if known else None
    return found
