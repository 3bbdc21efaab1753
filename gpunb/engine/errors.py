"""The error of a task that ended without a result of its own."""

from __future__ import annotations

from gpunb.engine.actors import ActorTable
from gpunb.engine.jobs import Job
from gpunb.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    DeadlockError,
    GpunbError,
    InfeasibleRequestError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskPlacementGroupRemoved,
    WorkerCrashedError,
)
from gpunb.scheduler import tasks


def error_of(  # noqa: C901 - one case for each outcome
    job: Job, outcome: tasks.Outcome, actors: ActorTable
) -> Exception:
    """Return the error of a task that ended without a result of its own."""
    label = actors.label(job)
    within = job.call.spec.demand.within
    if within is not None and isinstance(outcome, (tasks.ActorDied, tasks.Crashed)):
        group = actors.get(within.group)
        if group is None or group.leaving:
            reason = outcome.reason
            if isinstance(outcome, tasks.ActorDied):
                reason = f"placement group #{within.group} is gone: {reason}"
            return TaskPlacementGroupRemoved(f"{label}: {reason}{job.last_words()}")
    match outcome:
        case tasks.Cancelled():
            return TaskCancelledError(f"{label} was cancelled")
        case tasks.TimedOut(left=True):
            return TimeoutError(
                f"{label} ran longer than its timeout of {outcome.seconds:g} s. Its thread "
                "goes on, because nothing can stop a thread: it can ask "
                "gpunb.get_runtime_context().is_canceled()"
            )
        case tasks.TimedOut():
            return TimeoutError(
                f"{label} ran longer than its timeout of {outcome.seconds:g} s and was stopped"
            )
        case tasks.Crashed() if outcome.stopped:
            return OutOfMemoryError(f"{label} was stopped: {outcome.reason}")
        case tasks.Crashed():
            tried = f" (attempt {job.attempt})" if job.attempt > 1 else ""
            where = f"process {job.pid}" if job.pid else "process"
            text = (
                f"{label}: its worker {where} ended before the task did{tried}: "
                f"{outcome.reason}{job.last_words()}"
            )
            if outcome.out_of_memory:
                return OutOfMemoryError(f"{text}\nThe machine was short of memory.")
            return WorkerCrashedError(text)
        case tasks.Refused():
            return InfeasibleRequestError(f"{label}: {outcome.reason}")
        case tasks.ActorDied() if job.call.new is not None and job.call.new.rules.bundles:
            return TaskPlacementGroupRemoved(f"{label} is gone: {outcome.reason}")
        case tasks.ActorDied():
            reason = actors.why(outcome.actor, outcome.reason)
            return ActorDiedError(
                f"{label}: the actor #{outcome.actor} is gone: {reason}{job.last_words()}"
            )
        case tasks.ActorUnavailable():
            return ActorUnavailableError(
                f"{label}: the process of the actor #{outcome.actor} ended, and it starts "
                f"again without its state: {outcome.reason}{job.last_words()}"
            )
        case tasks.Deadlocked():
            return DeadlockError(f"{label} can never run: {outcome.reason}")
        case _:
            return GpunbError(f"{label} ended without a report: {outcome}")


def memory_was_short(path: str = "/sys/fs/cgroup/memory.events") -> bool:
    """Return whether the system has killed a process for lack of memory since the last call."""
    global _oom_kills
    before, _oom_kills = _oom_kills, _count_oom_kills(path)
    return _oom_kills > before


def _count_oom_kills(path: str = "/sys/fs/cgroup/memory.events") -> int:
    try:
        with open(path) as events:
            counts = dict(line.split() for line in events)
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


_oom_kills = _count_oom_kills()
