"""Tasks, and calls of actors, that workers are sent ahead, so that they need not wait for the next.

The scheduler decides what is sent ahead. Here is decided when that is worth it, and it is taken
back before something happens that may end a waiting task. On the loop's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpunb.engine.jobs import Job
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.permits import Permits
from gpunb.scheduler import events as ev
from gpunb.scheduler.tasks import ActorId, WorkerId

SHORT = 0.05
"""Seconds of a call after which an actor is sent others ahead: for longer ones it gains nothing."""

SHORT_TASK = 0.002
"""The same for a task, which another worker could run meanwhile."""

QUIET = 8
"""Tasks without output after which a worker is sent others ahead. What a process writes has no
sign of the task, so it is taken for that of the last task that the kernel knows to run."""


@dataclass(slots=True)
class _Sent:
    """The tasks that a worker was sent, and has not begun as far as is known; `last` is the one
    before, which it begins next if it has not yet."""

    actor: ActorId
    process: WorkerProcess
    calls: deque[msg.Execute] = field(default_factory=deque)
    last: msg.Execute | None = None


class SentAhead:
    """Knows which tasks workers were sent ahead."""

    def __init__(
        self,
        feed: Callable[[ev.Event], object],
        surroundings: Callable[[Job], object],
        read_output: Callable[[WorkerProcess], object],
    ) -> None:
        """`surroundings` returns what the worker of a job has to have, and `read_output` hands over
        what a process has written."""
        self._feed = feed
        self._surroundings = surroundings
        self._read_output = read_output
        self._sent: dict[WorkerId, _Sent] = {}

    def __bool__(self) -> bool:
        """Whether any worker was sent tasks ahead, which it may have begun."""
        return bool(self._sent)

    def is_steady(self, job: Job) -> bool:
        """Note the end of a task. Return whether its worker may be sent others ahead."""
        process = job.process
        if job.alike is None or process is None:
            return False
        # Only a task that is sure to begin may change the process. An actor keeps what it has.
        if not job.call.actor and process.surroundings is not self._surroundings(job):
            return False
        process.quiet += 1
        short = SHORT if job.call.actor else SHORT_TASK
        if process.quiet <= QUIET or time.monotonic() - job.since > short:
            return False
        if process.permits is None:
            try:
                process.permits = Permits()
            except OSError:  # no descriptor is left
                return False
            process.outbox.send(msg.Permits(), [process.permits])
        return process.permits.agreed

    def agreed(self, process: WorkerProcess) -> None:
        """Note that a worker has got the pipe of its permits."""
        if process.permits is not None:
            process.permits.agreed = True

    def send(self, actor: ActorId, process: WorkerProcess, calls: Sequence[msg.Execute]) -> None:
        """Send tasks, with a permit for each; `actor` is 0 if they are no calls of one."""
        assert process.permits is not None
        sent = self._sent.get(process.holder)
        if sent is None:
            sent = self._sent[process.holder] = _Sent(actor, process)
        sent.calls.extend(calls)
        first = process.permits.grant(len(calls))
        process.outbox.send(msg.ExecuteAhead(first, tuple(call[:-1] for call in calls)))

    def begins(self, worker: WorkerId) -> None:
        """Note that a worker begins the next of its tasks, or has begun it."""
        if (sent := self._sent.get(worker)) is not None:
            sent.last = sent.calls.popleft()

    def heard(self, process: WorkerProcess) -> None:
        """Note output of a process."""
        process.quiet = 0
        if self._sent and process.worker is not None:
            self.take_back(process.worker)

    def take_back(self, worker: WorkerId) -> None:
        """Take back what a worker has not begun."""
        for event in self._taken_back([worker]):
            self._feed(event)

    def before(self, event: ev.Event) -> list[ev.TakenBack]:
        """Take back what must not begin any more before this event. Return the events for it."""
        if isinstance(event, ev.WorkerExited):
            return self._taken_back([event.worker])
        if isinstance(event, ev.Blocked):
            return self._taken_back([at for at, sent in self._sent.items() if not sent.actor])
        return self._taken_back(list(self._sent)) if isinstance(event, ev.DISTURBING) else []

    def _taken_back(self, workers: list[WorkerId]) -> list[ev.TakenBack]:
        found = [(each, self._sent.pop(each)) for each in workers if each in self._sent]
        return [ev.TakenBack(worker, self._left(sent)) for worker, sent in found]

    def _left(self, sent: _Sent) -> int:
        """Take back the tasks that a worker has not begun. Return how many these are. If it has not
        begun the one before these either, that one is sent again, and needs no permit."""
        process = sent.process
        assert process.permits is not None
        count = process.permits.take_back()
        if not process.gone and count < len(sent.calls):
            self._read_output(process)  # it belongs to the task before those that have begun
        if not process.gone and count > len(sent.calls) and sent.last is not None:
            process.outbox.send(sent.last)
        return min(count, len(sent.calls))
