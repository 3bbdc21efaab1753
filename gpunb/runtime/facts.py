"""What the runtime knows, as plain values for whoever asks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpunb.core.reasons import refusal
from gpunb.core.resources import GPU, UNIT, Demand, Shares
from gpunb.core.shares import hint
from gpunb.core.snapshot import VERSION, assigned, available, snapshot, unmet, why
from gpunb.core.tasks import TaskId
from gpunb.runtime import listening, origin
from gpunb.runtime.trends import Trends

if TYPE_CHECKING:
    from gpunb.core.scheduler import Scheduler
    from gpunb.runtime.actors import Actor
    from gpunb.runtime.driver import Driver
    from gpunb.runtime.jobs import Job, Past

_USAGE = ("memory_used", "memory_total", "utilization", "temperature")
_MEMORY = ("now", "peak")
_OTHER = ("pid", "user", "notebook", "job", "share", "memory", "since", "kind")
_CLIENT = ("pid", "user", "notebook", "kernel")


def _refusal(scheduler: Scheduler, demand: Demand) -> str | None:
    return refusal(demand, scheduler.machine)


_OF_SCHEDULER: Mapping[str, Callable[..., Any]] = {
    "assigned": assigned,
    "refusal": _refusal,
    "why": why,
}
"""What the scheduler alone knows."""


class Facts:
    """Answers questions; on the loop's thread, but for what says otherwise."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.notes: Sequence[str] = ()
        self.session = _session()
        self._trends = Trends()
        self._devices = {each.key: each for each in driver.scheduler.machine.devices}

    def tell(self, what: str, *arguments: Any) -> Any:
        """Facts as plain values; on the loop's thread."""
        if what == "total":
            return self._driver.scheduler.machine.totals()
        if what == "available":
            self._driver.leases.look()
            return available(self._driver.scheduler)
        if what in _OF_SCHEDULER:
            return _OF_SCHEDULER[what](self._driver.scheduler, *arguments)
        if what == "status":
            return self._status()
        if what == "timeline":
            return self._driver.timeline.facts()
        if what == "session":
            return dict(self.session)
        if what == "job":
            return self.job(*arguments)
        if what == "actor":
            actor = self._driver.actors.get(*arguments)
            if actor is None:
                return None
            return {**actor.facts(), "devices": self.devices(actor.held)}
        if what == "unmet":
            return unmet(self._driver.scheduler)
        if what == "log":
            (ident,) = arguments
            job = self._driver.jobs.get(ident) or self._driver.timeline.of(ident)
            return job.log if job is not None else None
        if what == "memory":
            return self._driver.sampler.table(None, *arguments)
        if what == "notes":
            source = self._driver.source
            found = [*self.notes, *(source.notes if source is not None else ())]
            return list(dict.fromkeys(found))
        raise ValueError(f"nobody knows {what!r}")

    def job(self, ident: TaskId) -> dict[str, Any] | None:
        """A job as plain values, from any thread; None if it is not known any more."""
        job = self._driver.jobs.get(ident)
        if job is not None:
            return {**job.facts(), "devices": self.devices(job.held)}
        past = self._driver.timeline.of(ident)
        if past is None:
            return None
        held = self.devices(past.held)
        return {**past.facts(), "devices": held, "peak": past.peak, "hint": self._hint(past)}

    def _hint(self, past: Past) -> str | None:
        """What would have been a better share for it."""
        if past.peak is None or len(past.held) != 1:
            return None
        ((key, units),) = past.held
        memory = self._devices[key].memory
        return hint(past.peak, units, memory) if memory else None

    def peak(self, ident: TaskId) -> int | None:
        """The most device memory that a job had, in bytes, as far as somebody measures it."""
        peak: int | None = self._driver.sampler.memory(ident).get("peak")
        return peak

    # ------------------------------------------------------------------------------- the snapshot

    def _status(self) -> dict[str, Any]:
        driver = self._driver
        driver.leases.look()
        facts = snapshot(driver.scheduler, time.monotonic()).as_dict()
        facts["version"] = VERSION
        facts["time"] = time.time()
        facts["session"] = dict(self.session)
        for job in itertools.chain(facts["running"], facts["waiting"]):
            self._complete(job)
        facts["finished"] = [self.past(each) for each in reversed(driver.timeline.finished)]
        facts["objects"] = driver.store.facts()
        facts["object_memory"] = driver.store.memory.facts()
        for each in facts["actors"]:
            self._complete_actor(each)
        for device in facts["devices"]:
            device.update(self._measured(device["key"]))
        self._trends.note(facts["time"], facts["devices"])
        for device in facts["devices"]:
            device["history"] = self._trends.of(device["key"])
        facts["counts"] = {
            "running": len(facts["running"]),
            "waiting": facts["queued"],
            "finished": driver.timeline.ended,
            "actors": len(facts["actors"]),
        }
        facts["totals"] = driver.timeline.totals()
        facts["preload"] = getattr(driver.source, "preloaded", None)
        facts["notes"] = self.tell("notes")
        facts["warnings"] = self._warnings()
        facts.setdefault("unmet", {})
        return facts

    def past(self, past: Past) -> dict[str, Any]:
        """A job that is over, as it stands in a snapshot."""
        return {
            **past.facts(),
            "kind": past.kind,
            "actor": past.actor,
            **_place(past.place),
            "client": _client(past.client),
            "background": past.background,
            "devices": self.devices(past.held),
            "waited": round(past.waited, 3),
            "ended": round(self._driver.timeline.unix(past.ended), 3),
            "gpu_seconds": 0.0 if past.actor is not None else round(self.gpu_seconds(past), 3),
            "memory": {"now": None, "peak": past.peak, "share": self._share(past.held)},
            "hint": self._hint(past),
            "has_log": past.log is not None,
        }

    def devices(self, shares: Shares) -> list[list[Any]]:
        """Shares of devices as triples of resource, id and part of it."""
        devices = ((self._devices[key], units) for key, units in shares)
        return [[each.resource, each.id, units / UNIT] for each, units in devices]

    def gpu_seconds(self, past: Past) -> float:
        """The GPUs that a job held, for the time that it ran."""
        held: float = sum(share for kind, _, share in self.devices(past.held) if kind == GPU)
        return past.seconds * held

    def _complete(self, facts: dict[str, Any]) -> None:
        """Add what the scheduler does not know of a job."""
        job = self._driver.jobs.get(facts["id"])
        facts["pid"] = job.pid if job is not None else None
        facts["kind"] = job.call.kind if job is not None else "call"
        facts["actor"] = (job.call.actor or None) if job is not None else None
        facts.update(_place(job.place if job is not None else None))
        facts["client"] = _client(_about(job))
        facts["background"] = job is not None and job.background
        facts["waited"] = round(job.waited, 3) if job is not None else 0.0
        facts["memory"] = self._memory(facts["id"], _held(job))
        facts["has_log"] = job is not None and job.log is not None

    def _complete_actor(self, facts: dict[str, Any]) -> None:
        actor = self._driver.actors.get(facts["id"])
        known = actor.facts() if actor is not None else {}
        facts.update({name: known.get(name) for name in ("pid", "class", "name")})
        facts["seconds"] = (
            round(time.monotonic() - actor.since, 3) if actor is not None and actor.since else None
        )
        facts["kind"] = "session" if known.get("session") else "actor"
        facts.update(_place(actor.place if actor is not None else None))
        facts["client"] = _client(_about(actor))
        facts["memory"] = self._memory(facts["id"], actor.held if actor is not None else ())

    def _memory(self, ident: TaskId, held: Shares) -> dict[str, Any]:
        known = self._driver.sampler.memory(ident) if held else {}
        return {**{name: known.get(name) for name in _MEMORY}, "share": self._share(held)}

    def _share(self, held: Shares) -> int | None:
        """What shares of devices amount to, in bytes of their memory."""
        sizes = [(self._devices[key].memory, units) for key, units in held]
        if not sizes or any(memory is None for memory, _ in sizes):
            return None
        return sum((memory or 0) * units // UNIT for memory, units in sizes)

    def _measured(self, key: str) -> dict[str, Any]:
        """What is known of a device beyond the books."""
        sampler, ledger = self._driver.sampler, self._driver.ledger
        usage = sampler.usage(key)
        leases = ledger.others(key) if ledger is not None else []
        return {
            "usage": {name: usage.get(name) for name in _USAGE},
            "others": joined(leases, sampler.others(key)),
            "health": sampler.health(key),
        }

    def _warnings(self) -> list[str]:
        desk, found = self._driver.desk, list(self._driver.sampler.warnings())
        if self._driver.source is not None:
            found += self._driver.source.notes
        if desk is not None and desk.problem is not None:
            found.append(desk.problem)
        if (problem := self._driver.leases.problem) is not None:
            found.append(problem)
        return found


def joined(
    leases: Iterable[Mapping[str, Any]], seen: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Who else is on a device: what the leases of other kernels say, and what was seen there."""
    found: dict[Any, dict[str, Any]] = {}
    for each in itertools.chain(leases, seen):
        known = found.setdefault(each.get("pid"), dict.fromkeys(_OTHER))
        known.update({name: each[name] for name in _OTHER if each.get(name) is not None})
    for each in leases:
        found[each.get("pid")]["kind"] = "kernel"
    for known in found.values():
        known["kind"] = known["kind"] or "outsider"
    return list(found.values())


def _held(job: Job | None) -> Shares:
    return job.held if job is not None else ()


def _place(place: tuple[int, str | None] | None) -> dict[str, Any]:
    number, name = place if place is not None else (None, None)
    return {"cell": number, "cell_id": name}


def _about(what: Job | Actor | None) -> Mapping[str, Any] | None:
    return what.owner.about if what is not None and what.owner is not None else None


def _client(about: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of an attached kernel as much as others need to know."""
    return None if about is None else {name: about.get(name) for name in _CLIENT}


def _session() -> dict[str, Any]:
    """What there is to say of this process; `head` is its name if it is a head process."""
    return {**origin.about(), "head": listening.serving}
