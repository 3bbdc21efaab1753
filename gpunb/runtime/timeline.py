"""What ran when, on which devices and for how long."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from gpunb.runtime.jobs import HISTORY, Job, Past

if TYPE_CHECKING:
    from gpunb.runtime.actors import Actor
    from gpunb.runtime.driver import Driver


class Timeline:
    """The history of a session; on the loop's thread.

    GPU-seconds are the share of devices times the seconds that a job, or an actor, had it. The
    calls of an actor and the cells of a session use what that one holds, so that in the totals
    only its own life counts.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lives: deque[Past] = deque(maxlen=HISTORY)
        self._offset = time.time() - time.monotonic()
        self._gpu_seconds = 0.0
        self._waited = 0.0
        self._peak: int | None = None
        self.ended = 0
        """Jobs that are over."""

    def unix(self, moment: float) -> float:
        """A time of `time.monotonic` in seconds since 1970."""
        return moment + self._offset

    def settled(self, past: Past) -> None:
        """A job is over."""
        self.ended += 1
        self._waited += past.waited
        if _counts(past):
            self._gpu_seconds += self._driver.facts.gpu_seconds(past)
        self._saw(past.peak)

    def left(self, actor: Actor) -> None:
        """The process of an actor is gone."""
        life = self._life(actor, "done")
        self._lives.append(life)
        self._gpu_seconds += self._driver.facts.gpu_seconds(life)
        self._saw(life.peak)

    def _saw(self, peak: int | None) -> None:
        if peak is not None:
            self._peak = max(peak, self._peak or 0)

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
            "kind": past.kind,
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
            "gpu_seconds": facts["gpu_seconds"],
            "peak": past.peak,
        }

    def _life(self, actor: Actor, state: str) -> Past:
        now = time.monotonic()
        return Past(
            actor.id,
            actor.new.name or actor.class_name,
            state,
            now - actor.since,
            actor.gpus,
            actor.process.pid if actor.process is not None else None,
            kind="actor",
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
    return past.actor is None and past.kind in ("call", "cell", "actor")
