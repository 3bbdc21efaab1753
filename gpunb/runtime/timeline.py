"""What ran when, on which devices and for how long."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpunb.runtime.jobs import HISTORY, Job, Past

if TYPE_CHECKING:
    from gpunb.core.tasks import ActorId, TaskId
    from gpunb.runtime.actors import Actor
    from gpunb.runtime.driver import Driver

FINISHED = 50
"""Finished jobs in a snapshot, the last ones first."""


class Timeline:
    """The history of a session; on the loop's thread.

    GPU-seconds are the share of devices times the seconds that a job, or an actor, had it. The
    calls of an actor and the cells of a session use what that one holds, so that in the totals
    only its own life counts. Its constructor is a job of its own only if it has failed.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lives: deque[Past] = deque(maxlen=HISTORY)
        self._offset = time.time() - time.monotonic()
        self._gpu_seconds = 0.0
        self._waited = 0.0
        self._peak: int | None = None
        self.finished: deque[Past] = deque(maxlen=FINISHED)
        """What is over, the last ones at the end."""
        self.ended = 0
        """How many have been there."""
        self._made: dict[ActorId, Past] = {}
        self._lived: dict[ActorId, Past] = {}
        self._over: dict[ActorId, Past] = {}

    def unix(self, moment: float) -> float:
        """A time of `time.monotonic` in seconds since 1970."""
        return moment + self._offset

    def settled(self, past: Past) -> None:
        """A job is over."""
        self._waited += past.waited
        if _counts(past):
            self._gpu_seconds += self._driver.facts.gpu_seconds(past)
        self._peak = _most(self._peak, past.peak)
        if past.kind == "create" and past.state == "done":
            self._made[past.id] = past
        else:
            self._add(past)

    def left(self, actor: Actor) -> None:
        """The process of an actor is gone: by itself, unless `over` says something else."""
        life = self._life(actor, "failed")
        self._lives.append(life)
        self._gpu_seconds += self._driver.facts.gpu_seconds(life)
        self._peak = _most(self._peak, life.peak)
        if (before := self._lived.get(actor.id)) is not None:
            peak = _most(before.peak, life.peak)
            life = replace(life, seconds=before.seconds + life.seconds, peak=peak)
        self._lived[actor.id] = life

    def over(self, actor: Actor, state: str) -> None:
        """An actor is over for good, and has ended this way."""
        made, lived = self._made.pop(actor.id, None), self._lived.pop(actor.id, None)
        if lived is None:
            return
        if actor.process is not None:
            self._lives[-1] = replace(self._lives[-1], state=state)
        if made is not None:
            past = self._over[actor.id] = replace(lived, state=state, waited=made.waited)
            self._add(past)
            if len(self._over) > HISTORY:
                del self._over[next(iter(self._over))]

    def of(self, ident: TaskId) -> Past | None:
        """What is remembered of an actor or a job that is over; None if there is no such."""
        return self._over.get(ident) or self._driver.past.get(ident)

    def _add(self, past: Past) -> None:
        self.finished.append(past)
        self.ended += 1

    def totals(self) -> dict[str, Any]:
        """Of the session until now."""
        now = [*self._lives_now(), *self._jobs_now()]
        own = (self._driver.facts.gpu_seconds(each) for each in now if _counts(each))
        return {
            "jobs": self.ended,
            "gpu_seconds": round(self._gpu_seconds + sum(own), 3),
            "waited": round(self._waited, 3),
            "peak": self._peak,
        }

    def facts(self) -> dict[str, Any]:
        """Everything that is kept, in the order in which it was handed in."""
        driver = self._driver
        spans = [*driver.past.values(), *self._lives, *self._lives_now()]
        known = [self._span(each) for each in (*spans, *self._jobs_now(waiting=True))]
        return {
            "version": 1,
            "time": time.time(),
            "session": driver.facts.tell("session"),
            "devices": [
                {"id": each.id, "name": each.name, "type": each.type, "resource": each.resource}
                for each in driver.scheduler.machine.devices
            ],
            "spans": sorted(known, key=lambda span: (span["submitted"], span["id"])),
            "totals": self.totals(),
        }

    def _span(self, past: Past) -> dict[str, Any]:
        facts = self._driver.facts.past(past)
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
            "gpu_seconds": round(self._driver.facts.gpu_seconds(past), 3),
            "peak": past.peak,
        }

    def _life(self, actor: Actor, state: str) -> Past:
        now, about = time.monotonic(), actor.facts()
        named = actor.new.name is not None and not about["session"]
        return Past(
            actor.id,
            f"{actor.class_name} {actor.new.name}" if named else actor.class_name,
            state,
            now - actor.since,
            actor.gpus,
            about["pid"],
            getattr(actor.sink, "log", None),
            kind="session" if about["session"] else "actor",
            place=actor.place,
            client=actor.owner.about if actor.owner is not None else None,
            held=actor.held,
            ended=now,
            worker=actor.process.worker if actor.process is not None else None,
            peak=self._driver.facts.peak(actor.id) if actor.held else None,
        )

    def _lives_now(self) -> list[Past]:
        actors = self._driver.actors
        return [self._life(each, "running") for each in actors if each.process is not None]

    def _jobs_now(self, *, waiting: bool = False) -> list[Past]:
        jobs = list(self._driver.jobs.values())
        return [past_of(each, None) for each in jobs if waiting or each.worker is not None]


def past_of(job: Job, state: str | None, peak: int | None = None) -> Past:
    """What is remembered of a job that has ended this way; None if it has not."""
    now = time.monotonic()
    ran = job.worker is not None
    if state == "done" and getattr(job.sink, "failed", False):
        state = "failed"  # a cell that raised has brought its error home
    return Past(
        job.id,
        job.call.spec.name,
        state or ("running" if ran else "queued"),
        now - job.since,
        job.gpus,
        job.pid,
        job.log,
        kind=job.call.kind,
        actor=job.call.actor or None,
        place=job.place,
        client=job.owner.about if job.owner is not None else None,
        background=job.background,
        held=job.held,
        waited=job.waited if ran else now - job.since,
        ended=now,
        worker=job.worker,
        peak=peak,
    )


def _counts(past: Past) -> bool:
    """Whether what it held was its own."""
    return past.actor is None and past.kind != "create"


def _most(one: int | None, other: int | None) -> int | None:
    """The larger one, as far as they are known."""
    return max((each for each in (one, other) if each is not None), default=None)
