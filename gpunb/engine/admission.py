"""Checks submitted tasks, actors and values, and makes records of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from gpunb.data.serialize import Payload
from gpunb.engine import ids
from gpunb.engine.actors import ActorRecord
from gpunb.engine.jobs import Job, Owner
from gpunb.engine.results import Results, choose_share
from gpunb.engine.state import EngineState
from gpunb.exceptions import InfeasibleRequestError, PendingCallsLimitExceeded
from gpunb.protocol.backend import DYNAMIC, HANDLE, STREAM, STREAMING, Call, ObjectId, Outcome
from gpunb.scheduler import events as ev
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import Demand, Gang
from gpunb.scheduler.tasks import ActorDied, TaskId, WorkerId


class Admission:
    """Makes records of new jobs. `admit` and `keep` are for any thread, the rest for the loop's."""

    def __init__(self, engine: EngineState, results: Results) -> None:
        self._engine = engine
        self._results = results
        self._refusals: dict[Demand, str | None] = {}

    def admit(
        self,
        call: Call,
        parent: TaskId | None,
        owner: Owner | None = None,
        ident: TaskId | None = None,
        caller: WorkerId = 0,
    ) -> Job:
        """Book a call, from any thread; call `submitted` afterwards, on the loop's thread.

        Args:
            call: the call.
            parent: the task that makes the call.
            owner: the attached kernel that makes the call; None for this process.
            ident: the number of the call; None for a new one.
            caller: the worker that makes the call; 0 for this process.

        Raises:
            InfeasibleRequestError: the machine can never satisfy the demand.
            ObjectLostError: it takes an object that is not there.
            PendingCallsLimitExceeded: the actor has as many calls as it takes.
            ActorDiedError: the actor was never in this session.
            ValueError: the name of the actor is taken.
        """
        engine = self._engine
        if parent is not None and call.kind != "method":
            call = self._inheriting(call, parent)
        choice = None
        if call.spec.auto is not None:
            choice = choose_share(engine, call, engine.peaks.runs(call.spec.auto.code))
            call = replace(call, spec=choice.applied(call.spec))
        self._check_feasible(call)
        for obj in call.inputs:
            engine.store.entry(obj)
        actor = engine.actors.target(call.actor) if call.actor else None
        if actor is not None and 0 <= actor.new.max_pending <= len(actor.pending):
            _check_pending(actor, call, caller)
        if owner is not None and call.spec.owner != owner.ident:
            call = replace(call, spec=replace(call.spec, owner=owner.ident))
        ident = ident or ids.task()
        count = 1 if call.returns == DYNAMIC else call.returns
        results = tuple([(ident, index) for index in range(count)])
        for each in results:
            engine.store.create(each)
        given = results
        if call.new is not None:
            made = ActorRecord(ident, call.spec.name, call.new, call.sink, owner)
            made.environment, made.within = call.spec.environment, call.spec.demand.within
            made.parent = parent
            engine.actors.add(made)
            given = (engine.store.create_living((ident, HANDLE)),)
        elif call.returns == STREAMING:
            given = (engine.store.create_living((ident, STREAM)),)
        if actor is not None:
            actor.pending[ident] = caller
        job = engine.jobs[ident] = Job(ident, call, results, given, parent, owner, choice=choice)
        above = engine.jobs.get(parent) if parent is not None else None
        if above is not None and above.call.kind == "ranks":
            above.add_rank(job)
            if call.new is not None:
                made.of_ranks = True
        return job

    def _check_feasible(self, call: Call) -> None:
        """Raises InfeasibleRequestError if the machine can never satisfy the demand of a call."""
        demand, bundles = call.spec.demand, call.new.rules.bundles if call.new is not None else ()
        if demand.within is not None:
            demand = replace(demand, within=None)
        if bundles:
            demand = Gang.of(bundles)
        try:
            reason = self._refusals[demand]
        except KeyError:
            capacity = Capacity(self._engine.scheduler.machine)
            reason = self._refusals[demand] = capacity.fit(demand).refusal
        if reason:
            raise InfeasibleRequestError(f"{call.spec.name}: {reason}")

    def _inheriting(self, call: Call, parent: TaskId) -> Call:
        """Return the call with its parent's environment variables, unless it sets others, and in
        its parent's placement group, if that captures it."""
        job = self._engine.jobs.get(parent)
        if job is None:
            return call
        actor = self._engine.actors.get(job.call.actor) if job.call.actor else None
        within = job.call.spec.demand.within if actor is None else actor.within
        if within is not None and within.capture and call.spec.capturable:
            demand = replace(call.spec.demand, within=replace(within, bundle=-1))
            call = replace(call, spec=replace(call.spec, demand=demand))
        inherited = job.call.spec.environment if actor is None else actor.environment
        if not inherited:
            return call
        environment = tuple(sorted({**dict(inherited), **dict(call.spec.environment)}.items()))
        if environment == call.spec.environment:
            return call
        return replace(call, spec=replace(call.spec, environment=environment))

    def existing(self, call: Call) -> ObjectId | None:
        """Return the handle of an existing actor with this name, if the call accepts it. An actor
        that an earlier run of the same cell made is ended."""
        engine, new = self._engine, call.new
        actor = engine.actors.named(new) if new is not None else None
        if new is None or actor is None:
            return None
        if new.get_if_exists:
            return (actor.id, HANDLE)
        if new.origin is not None and new.origin == actor.new.origin:
            engine.actors.leave(actor)
            engine.kill(actor.id, restart=False)
        return None

    def keep(self, payload: Payload, *, failed: bool = False) -> ObjectId:
        """Store a value that was put. From any thread; `hold_inner` follows on the loop's."""
        obj = (0, ids.put())
        self._engine.store.create(obj, Outcome(payload, failed))
        return obj

    def submitted(self, job: Job, *, cleanup: bool = False) -> None:
        """Hand an admitted job to the scheduler; `cleanup` as of `Submitted`."""
        engine, call, above = self._engine, job.call, job.parent
        engine.groups.submitted(job)
        needs = []
        if call.new is not None and call.new.detached:
            engine.store.hold((job.id, HANDLE))
        if call.new is not None and (within := call.spec.demand.within) is not None:
            engine.store.hold((within.group, HANDLE))
        for obj in call.needed():
            engine.store.hold(obj)
        for obj in call.inputs:
            outcome = engine.store.get(obj)
            if outcome is None:
                needs.append(obj[0])
            elif outcome.failed:
                self._results.settle(job, outcome, "failed")
                if call.new is not None:
                    died = ActorDied(job.id, "its constructor failed", obj[0])
                    self._results.actor_ended(job.id, died)
                return
        if call.new is not None:
            rules = call.new.rules
            engine.feed(ev.ActorCreated(job.id, call.spec, rules, tuple(needs), above, cleanup))
            return
        alike = job.alike = self._alike(job)
        if call.actor:
            engine.feed(
                ev.CallSubmitted(job.id, call.actor, call.spec, tuple(needs), above, cleanup, alike)
            )
        else:
            engine.feed(ev.Submitted(job.id, call.spec, tuple(needs), above, cleanup, alike))

    def _alike(self, job: Job) -> Hashable:
        """Return what tasks have in common that may be sent ahead together: above all the place of
        their output. None for a task that is not sent ahead."""
        call, actor = job.call, self._engine.actors.get(job.call.actor)
        if call.kind == "method":
            if actor is None or not actor.one_by_one:
                return None
        elif call.kind != "call" or call.spec.demand.wants_device:
            return None
        if job.streams or call.inputs or call.arguments.segment is not None:
            return None
        return call.spec.name, call.spec.owner, type(job.sink), job.shown.place


def _check_pending(actor: ActorRecord, call: Call, caller: WorkerId) -> None:
    """Raises PendingCallsLimitExceeded if the caller has too many calls; others do not count."""
    own = list(actor.pending.values()).count(caller)
    if own >= actor.new.max_pending:
        raise PendingCallsLimitExceeded(
            f"{call.spec.name}: the actor {actor.label} has {own} calls from this process that are "
            f"not over, and max_pending_calls={actor.new.max_pending}"
        )
