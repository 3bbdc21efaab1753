"""Tasks that workers are sent ahead, before their turn.

While many short tasks of one kind wait, a worker without devices is sent some of them, and begins
them by itself: it need not wait for the next one, and no other place is looked for. Such a task
waits, but is in no line any more. It stays with its worker until it has begun or is taken back,
which it is before anything that it should not begin after, and at the latest after a short time:
the task before it may take long.
"""

from __future__ import annotations

from gpunb.scheduler import events as ev
from gpunb.scheduler.actor_queue import AHEAD, FEW, alike
from gpunb.scheduler.line import key_of
from gpunb.scheduler.loans import Loans
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.starts import Starts
from gpunb.scheduler.state import State, Task, Worker
from gpunb.scheduler.timers import Timers

MANY = 32
"""Tasks that must wait in the line for more to be sent ahead: the last ones start where there is
room first."""


class TasksAhead:
    """Sends tasks ahead, and starts those that have begun."""

    def __init__(
        self, state: State, queue: Queue, timers: Timers, loans: Loans, starts: Starts
    ) -> None:
        self._state = state
        self._queue = queue
        self._timers = timers
        self._loans = loans
        self._starts = starts
        self.steady: Worker | None = None
        """The worker that has just ended a short task, with no output."""

    def begin_next(self, worker: Worker, now: float) -> None:
        """The worker has begun the first task that it was sent ahead."""
        task = worker.ahead.popleft()
        task.set_state("running")
        task.queued_since = task.since
        worker.since = now
        self._starts.launch(task, worker, now, new=False, ahead=True)

    def take_back(self, worker: Worker, count: int) -> None:
        """Put the last `count` of the tasks that the worker was sent back into their line."""
        for _ in range(min(count, len(worker.ahead))):
            self._queue.push(worker.ahead.pop())

    def taken_back(self, worker: Worker, count: int, now: float) -> None:
        """The tasks that the worker was sent have begun, except for the last `count`."""
        self.take_back(worker, count)
        while worker.ahead:
            self.begin_next(worker, now)

    def send(self, now: float) -> None:
        """At the end of an event, when no room is left: send the steady worker more tasks."""
        worker, self.steady = self.steady, None
        if worker is None or worker.key is None or len(worker.tasks) != 1 or self._loans.kept:
            return
        if len(worker.ahead) > FEW or worker.allocation.shares:
            return
        task = self._state.tasks[next(iter(worker.tasks))]
        line = self._queue.lines.get(key_of(task))
        # No other task waits that may have to start before these.
        if line is None or len(self._queue.lines) > 1 or line.count < MANY or not line.stuck:
            return
        sent = []
        while len(worker.ahead) < AHEAD and _may_follow(line.tasks[0], task):
            other = line.tasks[0]
            other.set_state("waiting")
            self._queue.take(line, other)
            worker.ahead.append(other)
            sent.append((other.id, other.attempt + 1))
        if sent:
            self._state.decisions.append(ev.SendAhead(worker.id, tuple(sent)))
        if worker.ahead and self._timers.ahead_end is None:
            self._timers.set_ahead_end(now)
        self._starts.start_queued(now)  # looks at the next one of the line


def _may_follow(task: Task, other: Task) -> bool:
    """Whether a worker that runs the other task may be sent this one."""
    spec = task.spec
    return (
        alike(task, other)
        and spec.function == other.spec.function
        and spec.reuse_key == other.spec.reuse_key
        and not (spec.max_calls or task.depth or task.attempt)
        and spec.demand.within is None
    )
