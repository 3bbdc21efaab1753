"""Starts tasks on their workers, and the processes of new workers."""

from __future__ import annotations

import time
from typing import Any

import loky

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.engine.jobs import Job
from gpunb.engine.prepared import PreparedWorkers
from gpunb.engine.share_checks import ShareChecks
from gpunb.engine.state import EngineState
from gpunb.engine.worker_setup import Setups
from gpunb.leases.leases import Leases
from gpunb.processes.followed import installed
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import HandleTo, Outcome
from gpunb.protocol.zygote import Imports
from gpunb.scheduler import events as ev
from gpunb.scheduler.snapshot import devices_of_group
from gpunb.scheduler.tasks import Succeeded


class Starts:
    """Carries out the decisions to run a task. On the loop's thread."""

    def __init__(
        self,
        engine: EngineState,
        setups: Setups,
        leases: Leases,
        sampler: ShareChecks,
        prepared: PreparedWorkers,
    ) -> None:
        self._engine = engine
        self._setups = setups
        self._leases = leases
        self._sampler = sampler
        self._prepared = prepared
        self._cpus = loky.cpu_count()

    def start(self, run: ev.Run) -> None:
        """Send a task to its worker, which may have to be started first."""
        engine = self._engine
        job = engine.jobs.get(run.task)
        if job is None:  # the constructor of an actor that starts again
            actor = engine.actors.get(run.task)
            assert actor is not None
            assert actor.constructor is not None
            job = engine.jobs[run.task] = actor.constructor
        if run.allocation.bundles:
            self._place(run, job)
            return
        process = self._process_for(run, job)
        if process is None:
            return
        setup = None if run.ahead else self._setup(run, job, process)
        if run.prepared:
            fitting = None if self._differs(job) else setup
            if not self._prepared.fits(run.worker, process, fitting):
                return
        self._note_start(run, job, process)
        if run.ahead:
            engine.ahead.begins(run.worker)
        else:
            work = self._work(job, process, setup, attempt=run.attempt, last=run.last)
            process.outbox.send(*work)
        if run.allocation.shares:
            self._sampler.begins(job, run.worker, process, run.allocation.shares)

    def send_ahead(self, decision: ev.SendAhead) -> None:
        """Send tasks to a worker that runs another one."""
        engine = self._engine
        process = engine.pool.process(decision.worker)
        if process is None:
            return
        work = [
            self._work(engine.jobs[task], process, None, attempt=attempt)[0]
            for task, attempt in decision.tasks
        ]
        engine.ahead.send(engine.jobs[decision.tasks[0][0]].call.actor, process, work)

    def _place(self, run: ev.Run, job: Job) -> None:
        """Take the lease of a placement group, for which no process is started."""
        engine = self._engine
        if not self._leases.take(run, job.call.spec.name, lasting=True):
            return
        self._note_start(run, job, None)
        engine.actors.place(job)
        new = job.call.new
        assert new is not None
        job.reported = run.attempt, [Outcome(serialize.dumps(HandleTo(job.id, new.type)))]
        engine.feed(ev.Finished(run.task, run.attempt, run.worker, Succeeded()))

    def _process_for(self, run: ev.Run, job: Job) -> WorkerProcess | None:
        """Return the process of the worker, started with its lease if it is new. None if there is
        none: the scheduler is told, or an `on_exit` is on its way."""
        engine = self._engine
        leased = run.allocation.within is not None  # with the placement group
        if (run.new or run.prepared) and not leased:
            lasting = job.call.new is not None
            if not self._leases.take(run, job.call.spec.name, lasting=lasting):
                engine.pool.kill(run.worker)
                return None
        if not run.new:
            return engine.pool.process(run.worker)
        try:
            process = engine.pool.start(
                run.worker, bare=self._differs(job), imports=self._imports(job)
            )
            engine.pool.expect(cells=job.call.kind == "cell")
            return process
        except OSError as error:
            self._leases.gone(run.worker)
            reason = f"it could not be started: {error.strerror}"
            engine.feed(ev.WorkerExited(run.worker, reason))
            return None

    def _differs(self, job: Job) -> bool:
        """Whether the modules that tasks have imported, and workers have from the preload, may be
        others in this job: packages read the environment and the path when they are imported, and
        may have been installed anew."""
        followed = self._engine.source.followed if self._engine.source is not None else None
        if followed is None:
            return False
        now = self._engine.surroundings(job)
        return bool(job.call.spec.environment) or not followed.fits(
            now.environment, now.path, installed(now.path)
        )

    def _imports(self, job: Job) -> Imports | None:
        """Return what the job needs at its begin and its worker may have from the preload."""
        if not job.call.imports or job.call.spec.environment:
            return None
        now = self._engine.surroundings(job)
        path = list(now.path)
        environment, call = dict(now.environment), job.call
        return Imports(call.imports, {}, environment, path, installed(path), call.shell)

    def _note_start(self, run: ev.Run, job: Job, process: WorkerProcess | None) -> None:
        """Note in the record of the job which worker has it now."""
        engine = self._engine
        running = engine.by_worker.setdefault(run.worker, [])
        now = time.monotonic()
        if job.worker is None:
            job.waited = now - job.since
            for outcome in map(engine.store.get, job.call.inputs):
                if outcome is not None:
                    engine.store.memory.pin(outcome.payload)
        job.worker, job.attempt, job.process, job.since = run.worker, run.attempt, process, now
        # An error quotes the output of its own attempt only. If the worker began this call before
        # the kernel knew, what it wrote since may have been taken for that of the call before.
        before = engine.jobs.get(running[-1]) if run.ahead and running else None
        job.stdout = before.stdout if before is not None else None
        job.stderr = before.stderr if before is not None else None
        job.gpus, job.held = self._setups.ids(run.allocation), run.allocation.shares
        running.append(job.id)

    def _setup(self, run: ev.Run, job: Job, process: WorkerProcess) -> tuple[Any, ...] | None:
        """Return what the worker has to change in its process; None if it has all already. An
        actor keeps the setup that it was made with."""
        if job.call.kind == "method":
            return None
        spec, now = job.call.spec, self._engine.surroundings(job)
        threads = self._setups.threads(run.allocation)
        before = process.surroundings
        if before is now and process.threads == threads:
            return None
        known = before.environment if before is not None else process.environment
        process.surroundings, process.threads = now, threads
        seen = devices_of_group(self._engine.scheduler, run.allocation) if spec.sees_group else ()
        return self._setups.of(
            run.allocation,
            spec.environment,
            known,
            now,
            caps=spec.caps,
            seen=seen,
            follow=self._engine.source is not None
            and self._engine.source.follows
            and job.owner is None,
        )

    def _work(
        self,
        job: Job,
        process: WorkerProcess,
        setup: tuple[Any, ...] | None,
        *,
        attempt: int,
        last: bool = False,
    ) -> tuple[msg.Execute, list[Segment]]:
        """Return the task for the worker: its code, if the worker does not have it yet, and its
        first inputs, with their memory."""
        engine = self._engine
        call, spec = job.call, job.call.spec
        # Workers must not keep objects that a function refers to.
        kept = call.kind == "call" and not call.held
        known = call.kind == "method" or (kept and process.functions.use(spec.function))
        values = [call.arguments]
        for obj in call.inputs[: msg.BATCH]:
            outcome = engine.store.entry(obj).outcome
            assert outcome is not None
            values.append(outcome.payload)
        wires, segments = serialize.to_wires(values)
        work = msg.Execute(
            task=job.id,
            attempt=attempt,
            name=spec.name,
            kind=call.kind,
            setup=setup,
            function=spec.function if kept or call.kind == "method" else "",
            code=None if known else call.code,
            arguments=wires[0],
            inputs=wires[1:],
            late=call.inputs[msg.BATCH :],
            returns=call.returns,
            retry=call.retry,
            last=last,
            host=engine.actors.move_in(job, process) if call.new is not None else None,
            group=spec.group,
            spin=engine.scheduler.workers.running < self._cpus,  # one is for this process
        )
        return work, segments
