"""The settings of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's settings; times in seconds.

    Attributes:
        age: a request that waited this long gets a reservation. A line of tasks that was held back
            so long, because CPUs are kept for deeper tasks, may start one; the next one after a
            pause twice as long.
        idle_part, idle_free: the time for which kept devices may be idle while others wait: this
            part of the device time that was used, and so many seconds for each device beyond that.
        priority_step: one step of priority counts as so much waiting. So a task of a high priority
            goes first, and one of a low priority does not wait for ever.
        short_first: a task counts as submitted later by so many times the time that it is expected
            to run, so that short ones go first; one without a known time by the mean of all known
            times, and one with a priority above 0 not at all.
        stop_grace: time between the interrupt of a timed-out task and the kill of its process.
        exit_grace: time that a worker has to end after its last task.
        idle_limit: an idle worker ends after this time.
        max_workers: workers that may run tasks at once, without the blocked ones.
        deadlock_after: time that tasks wait for other tasks, and other tasks for room, before the
            scheduler looks for a deadlock.
        lend_after: time for which lent CPUs that are kept for deeper tasks may be idle. It doubles
            with each lender whose CPUs are no longer kept, up to `lend_limit`.
        restart_after: pause before an actor starts again if its process ended in the constructor.
            The pause doubles with each further time in a row, up to `restart_limit`.
        park_after: idle actors are parked after this time; None for never.
        prepare: keys of the devices on which a prepared worker waits for a task.
    """

    age: float = 10.0
    idle_part: float = 0.02
    idle_free: float = 600.0
    priority_step: float = 600.0
    short_first: float = 5.0
    stop_grace: float = 5.0
    exit_grace: float = 5.0
    idle_limit: float = 60.0
    max_workers: int = 256
    deadlock_after: float = 0.25
    lend_after: float = 0.1
    lend_limit: float = 10.0
    restart_after: float = 0.1
    restart_limit: float = 10.0
    park_after: float | None = None
    prepare: tuple[str, ...] = ()
