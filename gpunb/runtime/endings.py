"""What a task that ended without a result of its own is said to have ended of."""

from __future__ import annotations

from gpunb.core import tasks
from gpunb.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    DeadlockError,
    GpunbError,
    InfeasibleRequestError,
    OutOfMemoryError,
    TaskCancelledError,
    WorkerCrashedError,
)
from gpunb.runtime.actors import Actors
from gpunb.runtime.jobs import Job


def error_of(job: Job, outcome: tasks.Outcome, actors: Actors) -> Exception:
    """What to raise for a task that ended without a result of its own."""
    match outcome:
        case tasks.Cancelled():
            return TaskCancelledError(f"{job.label} was cancelled")
        case tasks.TimedOut(left=True):
            return TimeoutError(
                f"{job.label} ran longer than its timeout of {outcome.seconds:g} s. Its thread "
                "goes on, because nothing can stop a thread: it can ask "
                "gpunb.get_runtime_context().is_canceled()"
            )
        case tasks.TimedOut():
            return TimeoutError(
                f"{job.label} ran longer than its timeout of {outcome.seconds:g} s and was stopped"
            )
        case tasks.Crashed() if outcome.stopped:
            return OutOfMemoryError(f"{job.label} was stopped: {outcome.reason}")
        case tasks.Crashed():
            tried = f" (attempt {job.attempt})" if job.attempt > 1 else ""
            where = f"process {job.pid}" if job.pid else "process"
            text = (
                f"{job.label}: its worker {where} ended before the task did{tried}: "
                f"{outcome.reason}{job.last_words()}"
            )
            if outcome.out_of_memory:
                return OutOfMemoryError(f"{text}\nThe machine was short of memory.")
            return WorkerCrashedError(text)
        case tasks.Refused():
            return InfeasibleRequestError(f"{job.label}: {outcome.reason}")
        case tasks.ActorDied():
            reason = actors.why(outcome.actor, outcome.reason)
            return ActorDiedError(
                f"{job.label}: the actor #{outcome.actor} is gone: {reason}{job.last_words()}"
            )
        case tasks.ActorUnavailable():
            return ActorUnavailableError(
                f"{job.label}: the process of the actor #{outcome.actor} ended, and it starts "
                f"again without its state: {outcome.reason}{job.last_words()}"
            )
        case tasks.Deadlocked():
            return DeadlockError(f"{job.label} can never run: {outcome.reason}")
        case _:
            return GpunbError(f"{job.label} ended without a report: {outcome}")


def memory_was_short(path: str = "/sys/fs/cgroup/memory.events") -> bool:
    """Whether the kernel has killed for want of memory here since this was last asked."""
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
