"""Tasks, actors and values on their way in: what is refused, and what is booked for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpunb.backend import DYNAMIC, HANDLE, STREAM, STREAMING, Call, ObjectId, Outcome
from gpunb.core import events as ev
from gpunb.core.reasons import refusal
from gpunb.core.resources import Demand
from gpunb.core.tasks import ActorDied, TaskId
from gpunb.exceptions import InfeasibleRequestError, PendingCallsLimitExceeded
from gpunb.runtime import numbers
from gpunb.runtime.actors import Actor
from gpunb.runtime.jobs import Job, Owner
from gpunb.serialize import Payload

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver


class Admission:
    """Books what is handed in. `admit` and `keep` are for any thread, the rest for the loop's."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._refusals: dict[Demand, str | None] = {}

    def admit(
        self,
        call: Call,
        parent: TaskId | None,
        owner: Owner | None = None,
        ident: TaskId | None = None,
    ) -> Job:
        """Book a call, from any thread; `submitted` is to follow on the loop's. It is this
        process's own without an `owner`, and gets a new number without an `ident`.

        Raises:
            InfeasibleRequestError: the machine can never satisfy the demand.
            ObjectLostError: it takes an object that is not there.
            PendingCallsLimitExceeded: the actor has as many calls as it takes.
            ActorDiedError: the actor was never in this session.
            ValueError: the name of the actor is taken.
        """
        driver = self._driver
        demand = call.spec.demand
        if demand not in self._refusals:
            self._refusals[demand] = refusal(demand, driver.scheduler.machine)
        reason = self._refusals[demand]
        if reason:
            raise InfeasibleRequestError(f"{call.spec.name}: {reason}")
        for obj in call.inputs:
            driver.store.entry(obj)
        actor = driver.actors.target(call.actor) if call.actor else None
        if actor is not None and 0 <= actor.new.max_pending <= len(actor.pending):
            raise PendingCallsLimitExceeded(
                f"{call.spec.name}: the actor {actor.label} has {len(actor.pending)} calls that "
                f"are not over, and max_pending_calls={actor.new.max_pending}"
            )
        if owner is not None and call.spec.owner != owner.ident:
            call = replace(call, spec=replace(call.spec, owner=owner.ident))
        ident = ident or numbers.task()
        results = [
            (ident, index) for index in range(1 if call.returns == DYNAMIC else call.returns)
        ]
        given = results
        if call.new is not None:
            driver.actors.add(Actor(ident, call.spec.name, call.new, call.sink, owner))
            given = [(ident, HANDLE)]
        elif call.returns == STREAMING:
            given = [(ident, STREAM)]
        for each in results:
            driver.store.create(each)
        if given is not results:
            driver.store.create_living(given[0])
        if actor is not None:
            actor.pending.add(ident)
        job = driver.jobs[ident] = Job(ident, call, results, given, parent, owner)
        return job

    def existing(self, call: Call) -> ObjectId | None:
        """The actor that there is already, if that is what the call would rather have. One that
        an earlier run of the same cell made gives way."""
        driver, new = self._driver, call.new
        actor = driver.actors.named(new) if new is not None else None
        if new is None or actor is None:
            return None
        if new.get_if_exists:
            return (actor.id, HANDLE)
        if new.origin is not None and new.origin == actor.new.origin:
            driver.actors.leave(actor)
            driver.kill(actor.id, restart=False)
        return None

    def keep(self, payload: Payload) -> ObjectId:
        """Have an object that somebody put; from any thread, with `hold_inner` to follow."""
        obj = (0, numbers.put())
        self._driver.store.create(obj, Outcome(payload))
        return obj

    def submitted(self, job: Job) -> None:
        """Hand an admitted job to the scheduler."""
        driver, call = self._driver, job.call
        needs = []
        if call.new is not None and call.new.detached:
            driver.store.hold((job.id, HANDLE))
        for obj in call.needed():
            driver.store.hold(obj)
        for obj in call.inputs:
            outcome = driver.store.get(obj)
            if outcome is None:
                needs.append(obj[0])
            elif outcome.failed:
                driver.results.settle(job, outcome, "failed")
                if call.new is not None:
                    died = ActorDied(job.id, "its constructor failed", obj[0])
                    driver.actor_ended(job.id, died)
                return
        if call.new is not None:
            driver.feed(
                ev.ActorCreated(job.id, call.spec, call.new.rules, tuple(needs), job.parent)
            )
        elif call.actor:
            driver.feed(ev.CallSubmitted(job.id, call.actor, call.spec, tuple(needs), job.parent))
        else:
            driver.feed(ev.Submitted(job.id, call.spec, tuple(needs), job.parent))
