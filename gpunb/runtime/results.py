"""What comes of tasks: from the reports of workers to objects in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpunb import serialize
from gpunb.backend import Outcome
from gpunb.core import events as ev
from gpunb.core import tasks
from gpunb.core.tasks import WorkerId
from gpunb.exceptions import GpunbError, ObjectLostError, OutOfMemoryError
from gpunb.objects import Segment
from gpunb.runtime.endings import error_of
from gpunb.runtime.jobs import HISTORY, Job
from gpunb.runtime.timeline import past_of
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.pool import Process

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver

_REPORTS: dict[str, tasks.Report] = {
    "ok": tasks.Succeeded(),
    "raised": tasks.Raised(),
    "retry": tasks.Raised(retry=True),
    "interrupted": tasks.Interrupted(),
    "exit": tasks.Exited(),
}


class Results:
    """Takes in what workers report, once there is room for it, and settles tasks."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def done(self, process: Process, message: msg.Done, segments: list[Segment]) -> None:
        """An attempt is over. Until there is room for its results its worker counts as busy, so
        that it cannot fill the memory while others are moved out of it."""
        driver, worker = self._driver, process.worker
        job = driver.jobs.get(message.task)
        if worker is None:
            return
        report = _REPORTS[message.report]
        if job is None:  # what was left to itself is over, and its result not wanted
            driver.feed(ev.Finished(message.task, message.attempt, worker, report))
            return
        failed = isinstance(report, tasks.Raised)
        try:
            outcomes = [Outcome(each, failed) for each in payloads(message.results, segments)]
        except ValueError as error:  # the system gave no descriptor for it
            lost = ObjectLostError(f"the result of {job.label} did not arrive: {error}")
            report, outcomes = tasks.Raised(), [Outcome(serialize.dumps(lost), failed=True)]
        if isinstance(report, tasks.Exited) and outcomes:
            report, outcomes = tasks.Exited(serialize.loads(outcomes[0].payload)), []
        if not job.streams and (failed or not any(each.payload.segment for each in outcomes)):
            self._report(job, message, worker, report, outcomes)
            return
        values = [each.payload for each in outcomes if not each.failed]
        # What the worker no longer refers to, it says right after the results.
        for payload in values:
            driver.store.hold_inner(payload)

        def there(error: OutOfMemoryError | None) -> None:
            if error is None:
                self._report(job, message, worker, report, outcomes)
                driver.store.memory.release(*values)
            else:
                failure = Outcome(serialize.dumps(error), failed=True)
                self._report(job, message, worker, tasks.Raised(), [failure])
            for payload in values:
                driver.store.drop_inner(payload)

        what = f"the result of {job.label}"
        # The end of a generator must not overtake its values.
        driver.store.memory.admit_soon(values, what, there, in_order=job.streams)

    def _report(
        self,
        job: Job,
        message: msg.Done,
        worker: WorkerId,
        report: tasks.Report,
        outcomes: list[Outcome],
    ) -> None:
        driver = self._driver
        job.reported = message.attempt, outcomes
        failure = outcomes[0] if isinstance(report, tasks.Raised) else None
        # Asked before the first that is heard of a constructor settles it.
        again = driver.actors.constructed_again(job, failure)
        driver.feed(ev.Finished(message.task, message.attempt, worker, report))
        job.reported = None
        if again:
            driver.jobs.pop(job.id, None)
            running = driver.by_worker.get(worker, [])
            if job.id in running:
                running.remove(job.id)

    def yielded(self, message: msg.Yielded, segments: list[Segment]) -> None:
        """A generator has a value."""
        driver = self._driver
        job = driver.jobs.get(message.task)
        if job is None or job.attempt != message.attempt:
            return
        obj = (job.id, message.position)
        try:
            (payload,) = payloads([message.result], segments)
        except ValueError as error:
            lost = ObjectLostError(f"a value of {job.label} did not arrive: {error}")
            driver.store.yielded(obj, Outcome(serialize.dumps(lost), failed=True))
            return
        driver.store.hold_inner(payload)

        def there(error: OutOfMemoryError | None) -> None:
            if error is None:
                driver.store.yielded(obj, Outcome(payload))
                driver.store.memory.release(payload)
            else:
                driver.store.yielded(obj, Outcome(serialize.dumps(error), failed=True))
            driver.store.drop_inner(payload)

        driver.store.memory.admit_soon([payload], f"a value of {job.label}", there, in_order=True)

    def end(self, job: Job, outcome: tasks.Outcome) -> None:
        """The task is over: its results are there, or what came in their place."""
        driver = self._driver
        if job.reported is not None and isinstance(outcome, (tasks.Succeeded, tasks.Raised)):
            outcomes = job.reported[1]
            failed = isinstance(outcome, tasks.Raised)
            if failed:
                self.settle(job, outcomes[0], "failed")
            else:
                self.settle(job, outcomes, "done")
            return
        if isinstance(outcome, tasks.UpstreamFailed):
            there = [driver.store.get(obj) for obj in job.call.inputs]
            self.settle(job, next(each for each in there if each and each.failed), "failed")
            return
        if isinstance(outcome, tasks.ActorDied):
            driver.actors.over(outcome.actor)
        error = error_of(job, outcome, driver.actors)
        own = isinstance(error, GpunbError)
        payload = (
            serialize.dumps(error)
            if own
            else serialize.dump_failure(error, task=job.label, process=job.pid)
        )
        failure = Outcome(payload, failed=True)
        killed = isinstance(outcome, tasks.ActorDied) and outcome.end == "cancelled"
        unmade = job.call.kind == "create" and killed
        cancelled = unmade or isinstance(outcome, tasks.Cancelled)
        self.settle(job, failure, "cancelled" if cancelled else "failed")

    def settle(self, job: Job, outcomes: Outcome | Sequence[Outcome], state: str) -> None:
        """The task is over, with these results or one failure for all of them."""
        driver, kind = self._driver, job.call.kind
        if kind != "create" and (end := getattr(job.sink, "end", None)) is not None:
            end()
        del driver.jobs[job.id]
        running = driver.by_worker.get(job.worker or 0)
        if running is not None and job.id in running:
            running.remove(job.id)
        failure = outcomes if isinstance(outcomes, Outcome) else None
        driver.actors.settled(job, failure)
        if job.held:
            driver.sampler.ends(job)
        peak = driver.facts.peak(job.id) if job.held else None
        past = driver.past[job.id] = past_of(job, state, peak)
        driver.timeline.settled(past)
        if len(driver.past) > HISTORY:
            del driver.past[next(iter(driver.past))]
        for index, obj in enumerate(job.results):
            each = outcomes if isinstance(outcomes, Outcome) else outcomes[index]
            driver.store.settle(obj, each)
        if job.streams:
            driver.store.end_stream(job.id, failure)
        if kind != "create" or not driver.actors.keeps(job, failure):
            self.let_inputs_go(job)

    def let_inputs_go(self, job: Job) -> None:
        """What the task took is of no use to it any more."""
        store = self._driver.store
        if job.worker is not None:
            for outcome in map(store.get, job.call.inputs):
                if outcome is not None:
                    store.memory.unpin(outcome.payload)
        for obj in job.call.needed():
            store.drop(obj)


def payloads(wires: Sequence[tuple[msg.Wire, int]], segments: Sequence[Segment]) -> list[Payload]:
    """The payloads of a message.

    Raises:
        ValueError: a segment did not arrive.
    """
    return serialize.from_wires(wires, segments)
