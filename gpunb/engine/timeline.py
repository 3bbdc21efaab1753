"""Records when each job ran, on which devices and for how long."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpunb.engine.jobs import HISTORY, Job, Past, part_of_group
from gpunb.scheduler.resources import GPU, UNIT

if TYPE_CHECKING:
    from gpunb.engine.actors import ActorRecord
    from gpunb.engine.share_checks import ShareChecks
    from gpunb.engine.state import EngineState
    from gpunb.scheduler.tasks import ActorId, TaskId

FINISHED = 50
"""Finished jobs in a snapshot, the last ones first."""


class JobTimeline:
    """The history of a session; on the loop's thread.

    GPU-seconds are the share of devices times the seconds that a job, or an actor, had it. The
    calls of an actor and the cells of a session use what that one holds, so that in the totals
    only its own life counts. Its constructor is a job of its own only if it has failed.
    """

    def __init__(self, engine: EngineState, sampler: ShareChecks) -> None:
        self._engine = engine
        self._sampler = sampler
        devices = engine.scheduler.machine.devices
        self._gpus = {each.key for each in devices if each.resource == GPU}
        self._lives: deque[Past] = deque(maxlen=HISTORY)
        self._offset = time.time() - time.monotonic()
        self._gpu_seconds = 0.0
        self._waited = 0.0
        self._peak: int | None = None
        self.finished: deque[Past] = deque(maxlen=FINISHED)
        """The ended jobs, the last ones at the end."""
        self.ended = 0
        """The number of all jobs that have ended."""
        self._made: dict[ActorId, Past] = {}
        self._lived: dict[ActorId, Past] = {}
        self._over: dict[ActorId, Past] = {}

    def unix(self, moment: float) -> float:
        """Convert a time of `time.monotonic` to seconds since 1970."""
        return moment + self._offset

    def settled(self, past: Past) -> None:
        """Note that a job is over."""
        self._waited += past.waited
        if _counts(past):
            self._gpu_seconds += self.gpu_seconds(past)
        self._peak = _most(self._peak, past.peak)
        if past.kind == "create" and past.state == "done":
            self._made[past.id] = past
        else:
            self._add(past)

    def left(self, actor: ActorRecord) -> None:
        """Note that the process of an actor is gone: by itself, unless `over` says otherwise."""
        life = self._life(actor, "done" if actor.kind == "group" else "failed")
        self._lives.append(life)
        self._gpu_seconds += self.gpu_seconds(life)
        self._peak = _most(self._peak, life.peak)
        if (before := self._lived.get(actor.id)) is not None:
            peak = _most(before.peak, life.peak)
            life = replace(life, seconds=before.seconds + life.seconds, peak=peak)
        self._lived[actor.id] = life

    def over(self, actor: ActorRecord, state: str) -> None:
        """Note that an actor is over for good, with this final state."""
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
        """Return the record of a finished actor or job; None if there is none."""
        return self._over.get(ident) or self._engine.past.get(ident)

    def _add(self, past: Past) -> None:
        if past.rank is None:
            self.finished.append(past)
            self.ended += 1
            self._engine.groups.over(past)

    def totals(self) -> dict[str, Any]:
        """Return the totals of the session until now."""
        now = [*self._lives_now(), *self._jobs_now()]
        own = (self.gpu_seconds(each) for each in now if _counts(each))
        return {
            "jobs": self.ended,
            "gpu_seconds": round(self._gpu_seconds + sum(own), 3),
            "waited": round(self._waited, 3),
            "peak": self._peak,
        }

    def spans(self) -> list[Past]:
        """Return the records of all jobs and actors, also of those that are not over."""
        past = [*self._engine.past.values(), *self._lives]
        return [*past, *self._lives_now(), *self._jobs_now(waiting=True)]

    def gpu_seconds(self, past: Past) -> float:
        """Return the GPUs that a job held, times the seconds that it ran."""
        units = sum(units for key, units in past.held if key in self._gpus)
        return past.seconds * (units / UNIT)

    def _life(self, actor: ActorRecord, state: str) -> Past:
        now, about, kind = time.monotonic(), actor.facts(), actor.kind
        named = actor.new.name is not None and kind != "session"
        # What a placement group holds counts while tasks in it have it.
        held = actor.held if kind != "group" else ()
        return Past(
            actor.id,
            f"{actor.class_name} {actor.new.name}" if named else actor.class_name,
            state,
            now - actor.since,
            actor.gpus if held else (),
            about["pid"],
            actor.sink.log if actor.sink is not None else None,
            kind=kind,
            place=actor.place,
            client=actor.owner.about if actor.owner is not None else None,
            held=held,
            ended=now,
            worker=actor.process.worker if actor.process is not None else None,
            peak=self._sampler.peak(actor.id) if held else None,
            rank=-1 if actor.of_ranks else None,
            part_of=part_of_group(actor.within),
        )

    def _lives_now(self) -> list[Past]:
        actors = self._engine.actors
        return [self._life(each, "running") for each in actors if each.since]

    def _jobs_now(self, *, waiting: bool = False) -> list[Past]:
        jobs = list(self._engine.jobs.values())
        return [past_of(each, None) for each in jobs if waiting or each.worker is not None]


def past_of(job: Job, state: str | None, peak: int | None = None) -> Past:
    """Return the record of a job with this final state; None if the job is not over."""
    now = time.monotonic()
    ran, shown = job.worker is not None, job.shown
    if state == "done" and shown.failed:  # a cell that raised has brought its error home
        timed = now - job.since >= (job.call.spec.timeout or math.inf)
        state = "cancelled" if job.ename == "KeyboardInterrupt" and not timed else "failed"
    return Past(
        job.id,
        job.call.spec.name,
        state or ("running" if ran else "queued"),
        now - job.since,
        job.gpus,
        job.pid,
        shown.log,
        kind=job.call.kind,
        actor=job.call.actor or None,
        place=shown.place,
        client=job.owner.about if job.owner is not None else None,
        background=shown.background,
        held=job.held,
        waited=job.waited if ran else now - job.since,
        ended=now,
        worker=job.worker,
        peak=peak,
        ranks=job.ranks,
        rank=job.rank,
        choice=job.choice,
        part_of=job.part_of,
    )


def _counts(past: Past) -> bool:
    """Return whether the job held devices of its own."""
    return past.actor is None and past.kind != "create"


def _most(one: int | None, other: int | None) -> int | None:
    """Return the larger number, as far as the numbers are known."""
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
