"""The status of a session as plain values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gpunb.engine import job_log
from gpunb.engine.device_status import DeviceStatus
from gpunb.engine.jobs import part_id, part_of_group
from gpunb.engine.rank_status import RankStatus
from gpunb.head import endpoint
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import Demand, Shares
from gpunb.scheduler.snapshot import VERSION, assigned, available, snapshot, unmet, why
from gpunb.scheduler.tasks import TaskId
from gpunb.system import process_info

if TYPE_CHECKING:
    from gpunb.engine.actors import ActorRecord
    from gpunb.engine.jobs import Job, Past
    from gpunb.engine.prepared import PreparedWorkers
    from gpunb.engine.share_checks import ShareChecks
    from gpunb.engine.state import EngineState
    from gpunb.engine.timeline import JobTimeline
    from gpunb.leases.leases import Leases
    from gpunb.scheduler.scheduler import Scheduler

_CLIENT = ("pid", "user", "notebook", "kernel")


def _refusal(scheduler: Scheduler, demand: Demand) -> str | None:
    return Capacity(scheduler.machine).fit(demand).refusal


_OF_SCHEDULER: Mapping[str, Callable[..., Any]] = {
    "assigned": assigned,
    "refusal": _refusal,
    "unmet": unmet,
}
"""Facts that need only the scheduler."""


class Status:
    """Answers questions about the session. On the loop's thread, unless a method says otherwise."""

    def __init__(
        self,
        engine: EngineState,
        sampler: ShareChecks,
        leases: Leases,
        timeline: JobTimeline,
        prepared: PreparedWorkers,
    ) -> None:
        self._engine = engine
        self._sampler = sampler
        self._leases = leases
        self._times = timeline
        self.notes: Sequence[str] = ()
        self.session = _session()
        machine = engine.scheduler.machine
        self._devices = DeviceStatus(machine.devices, sampler, leases, prepared)
        self._ranks = RankStatus(engine, self._devices, self._why)

    def get(self, what: str, *arguments: Any) -> Any:
        """Return facts as plain values; on the loop's thread.

        Raises:
            ValueError: there are no facts of that name.
        """
        if what in _OF_SCHEDULER:
            return _OF_SCHEDULER[what](self._engine.scheduler, *arguments)
        if what not in self._FACTS:
            raise ValueError(f"nobody knows {what!r}")
        return self._FACTS[what](self, *arguments)

    def _total(self) -> dict[str, float]:
        return self._engine.scheduler.machine.totals()

    def _available(self) -> dict[str, float]:
        self._leases.look()
        return available(self._engine.scheduler)

    def _why(self, ident: TaskId) -> str | None:
        return self._held_up(ident) or why(self._engine.scheduler, ident, time.monotonic())

    def _timeline(self) -> dict[str, Any]:
        """Return the whole history, in the order of submission."""
        known = [self._span(each) for each in self._times.spans()]
        return {
            "version": 1,
            "time": time.time(),
            "session": dict(self.session),
            "devices": [
                {"id": each.id, "name": each.name, "type": each.type, "resource": each.resource}
                for each in self._engine.scheduler.machine.devices
            ],
            "spans": sorted(known, key=lambda span: (span["submitted"], span["id"])),
            "totals": self._times.totals(),
        }

    def _span(self, past: Past) -> dict[str, Any]:
        facts = self.past(past)
        over = past.state not in ("queued", "running")
        ran = past.worker is not None
        began = facts["ended"] - past.seconds if ran else None
        return {
            "id": past.id,
            "name": past.name,
            "kind": "actor" if past.kind == "session" else past.kind,
            "state": past.state,
            "actor": past.actor,
            "cell": facts["cell"],
            "cell_id": facts["cell_id"],
            "client": facts["client"],
            "devices": facts["devices"],
            "submitted": round(facts["ended"] - past.waited - (past.seconds if ran else 0), 3),
            "started": None if began is None else round(began, 3),
            "ended": facts["ended"] if over else None,
            "waited": facts["waited"],
            "gpu_seconds": round(self._times.gpu_seconds(past), 3),
            "peak": past.peak,
        }

    def _about_session(self) -> dict[str, Any]:
        return dict(self.session)

    def _actor(self, ident: TaskId) -> dict[str, Any] | None:
        actor = self._engine.actors.get(ident)
        if actor is None:
            return None
        return {**actor.facts(), "devices": self._devices.held(actor.held)}

    def _groups(self) -> list[dict[str, Any]]:
        """Return the placement groups that have not ended."""
        scheduler, now = self._engine.scheduler, time.monotonic()
        return [
            {
                "id": each.id,
                "name": each.new.name,
                "type": each.new.type,
                "state": each.facts()["state"],
                "why": why(scheduler, each.id, now),
            }
            for each in self._engine.actors
            if each.kind == "group"
        ]

    def _group_of(self, ident: TaskId) -> tuple[TaskId, bytes] | None:
        """Return the id and the type of the placement group in which a task or an actor runs."""
        job = self._engine.jobs.get(ident)
        actor = self._engine.actors.get(job.call.actor if job is not None else ident)
        within = actor.within if actor is not None else None
        if job is not None and actor is None:
            within = job.call.spec.demand.within
        group = self._engine.actors.get(within.group) if within is not None else None
        return (group.id, group.new.type) if group is not None else None

    def _names(self) -> Any:
        return self._engine.actors.names()

    def _log(self, ident: TaskId) -> Any:
        if (job := self._engine.jobs.get(ident)) is not None:
            return job.shown.log
        past = self._times.of(ident)
        return past.log if past is not None else None

    def _table(self, *arguments: Any) -> str:
        return self._sampler.table(None, *arguments)

    def _notes(self) -> list[str]:
        source = self._engine.source
        found = [*self.notes, *(source.notes if source is not None else ())]
        return list(dict.fromkeys(found))

    def job(self, ident: TaskId) -> dict[str, Any] | None:
        """Return a job as plain values, from any thread; None if the job is no longer known."""
        job = self._engine.jobs.get(ident)
        if job is not None:
            facts = {**job.facts(), "devices": self._devices.held(job.held), "auto": _auto(job)}
            return self._ranks.complete(facts, job) if job.call.kind == "ranks" else facts
        past = self._times.of(ident)
        if past is None:
            return None
        return {
            **past.facts(),
            "devices": self._devices.held(self._ranks.held_by(past)),
            "peak": past.peak,
            "hint": self._devices.hint(past.held, past.peak),
            "auto": _auto(past),
        }

    # ------------------------------------------------------------------------------- the snapshot

    def _status(self) -> dict[str, Any]:
        engine = self._engine
        self._leases.look()
        facts = snapshot(engine.scheduler, time.monotonic()).as_dict()
        facts["version"] = VERSION
        facts["time"] = time.time()
        facts["session"] = dict(self.session)
        for job in itertools.chain(facts["running"], facts["waiting"]):
            self._complete(job)
        self._ranks.fold(facts)
        facts["finished"] = [self.past(each) for each in reversed(self._times.finished)]
        facts["objects"] = engine.store.facts()
        facts["object_memory"] = engine.store.memory.facts()
        for each in facts["actors"]:
            self._complete_actor(each)
        facts["groups"] = engine.groups.listed(facts, self._times.unix(0.0))
        self._devices.complete(facts)
        facts["counts"] = {
            "running": len(facts["running"]),
            "waiting": facts["queued"],
            "finished": self._times.ended,
            "actors": len(facts["actors"]),
        }
        facts["totals"] = self._times.totals()
        facts["preload"] = getattr(engine.source, "preloaded", None)
        facts["notes"] = self.get("notes")
        facts["warnings"] = self._warnings()
        facts.setdefault("unmet", {})
        return facts

    def past(self, past: Past) -> dict[str, Any]:
        """Return a finished job as it stands in a snapshot."""
        ranks = [self._engine.past[each] for each in past.ranks if each in self._engine.past]
        counts = () if past.actor is not None else (past, *ranks)
        gpu_seconds = sum(map(self._times.gpu_seconds, counts))
        return {
            **past.facts(),
            "kind": past.kind,
            "actor": past.actor,
            **_place(past.place),
            "client": _client(past.client),
            "part_of": part_id(past.part_of),
            "background": past.background,
            "devices": self._devices.held(self._ranks.held_by(past)),
            "ranks": [self._ranks.facts(each.id) for each in ranks],
            "waited": round(past.waited, 3),
            "ended": round(self._times.unix(past.ended), 3),
            "gpu_seconds": round(gpu_seconds, 3),
            "memory": {"now": None, "peak": past.peak, "share": self._devices.share(past.held)},
            "hint": self._devices.hint(past.held, past.peak),
            "has_log": past.log is not None,
        }

    def _complete(self, facts: dict[str, Any]) -> None:
        """Add the facts that the scheduler does not know of a job."""
        job = self._engine.jobs.get(facts["id"])
        if (reason := self._held_up(facts["id"])) is not None:
            facts["waits_for"] = reason
        facts["pid"] = job.pid if job is not None else None
        facts["kind"] = job.call.kind if job is not None else "call"
        facts["actor"] = (job.call.actor or None) if job is not None else None
        facts.update(_place(job.shown.place if job is not None else None))
        facts["client"] = _client(_about(job))
        facts["part_of"] = part_id(job.part_of if job is not None else None)
        facts["background"] = job is not None and job.shown.background
        facts["waited"] = round(job.waited, 3) if job is not None else 0.0
        facts["memory"] = self._devices.memory(facts["id"], _held(job))
        facts["hint"] = self._devices.hint(_held(job), facts["memory"]["peak"], ended=False)
        log = job.shown.log if job is not None else None
        facts["has_log"] = log is not None
        facts["progress"] = log.progress() if log is not None else None
        facts.setdefault("ranks", [])

    def _held_up(self, ident: TaskId) -> str | None:
        """Return why a job's process is missing or gets no signals, or what a parked actor lacks;
        None if nothing is known."""
        job = self._engine.jobs.get(ident)
        actor = self._engine.actors.get(job.call.actor if job is not None else ident)
        if actor is not None and actor.lacks:
            return f"waits for actor #{actor.id} to have its devices again: {actor.lacks}"
        if job is None or job.process is None:
            return None
        return self._engine.pool.held_up(job.process)

    def _complete_actor(self, facts: dict[str, Any]) -> None:
        actor = self._engine.actors.get(facts["id"])
        known = actor.facts() if actor is not None else {}
        facts.update({name: known.get(name) for name in ("pid", "class", "name")})
        facts["seconds"] = (
            round(time.monotonic() - actor.since, 3) if actor is not None and actor.since else None
        )
        facts["kind"] = actor.kind if actor is not None else "actor"
        facts.update(_place(actor.place if actor is not None else None))
        facts["client"] = _client(_about(actor))
        facts["part_of"] = part_id(part_of_group(actor.within) if actor is not None else None)
        held = actor.held if actor is not None else ()
        facts["memory"] = self._devices.memory(facts["id"], held)

    def _warnings(self) -> list[str]:
        found = self._sampler.warnings()
        if self._engine.source is not None:
            found += self._engine.source.notes
        texts = self._engine.faults.texts
        return [*found, *self._leases.problems, *texts, *job_log.problems]

    _FACTS: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "total": _total,
        "available": _available,
        "why": _why,
        "status": _status,
        "timeline": _timeline,
        "session": _about_session,
        "job": job,
        "actor": _actor,
        "names": _names,
        "groups": _groups,
        "group_of": _group_of,
        "log": _log,
        "memory": _table,
        "notes": _notes,
    }


def _auto(job: Job | Past) -> str | None:
    """Return the reason for a share that earlier runs chose, in words."""
    return job.choice.why if job.choice is not None else None


def _held(job: Job | None) -> Shares:
    return job.held if job is not None else ()


def _place(place: tuple[int, str | None] | None) -> dict[str, Any]:
    number, name = place if place is not None else (None, None)
    return {"cell": number, "cell_id": name}


def _about(what: Job | ActorRecord | None) -> Mapping[str, Any] | None:
    return what.owner.about if what is not None and what.owner is not None else None


def _client(about: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the facts about an attached kernel that other kernels may see."""
    return None if about is None else {name: about.get(name) for name in _CLIENT}


def _session() -> dict[str, Any]:
    """Return the facts about this process; `head` is its name if it is a head process."""
    return {**process_info.about(), "head": endpoint.serving}
