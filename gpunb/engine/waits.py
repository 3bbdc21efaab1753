"""The waits of requests for objects, and what the scheduler has to know of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpunb.engine.jobs import Job, Wait
from gpunb.engine.object_store import Entry
from gpunb.engine.state import EngineState
from gpunb.processes.outbox import Outbox
from gpunb.protocol.backend import ObjectId
from gpunb.scheduler import events as ev
from gpunb.scheduler.tasks import TaskId


class Client(Protocol):
    """A sender of requests: a worker process, or a kernel that is attached to this process.

    Attributes:
        gone: whether nothing reaches the sender any more.
        outbox: sends messages to it.
        holder: the number under which the store counts its references.
    """

    gone: bool
    outbox: Outbox

    @property
    def holder(self) -> int: ...


class Asker(NamedTuple):
    """The sender of a request, and the number that the reply has to have."""

    client: Client
    holder: int
    number: int
    task: TaskId
    attempt: int


class Waits:
    """Tells the scheduler which tasks wait, and for which other tasks."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self.loop = engine.loop

    def add(self, asker: Asker, wait: Wait) -> None:
        """Note that a task began to wait; with several threads it may wait for more."""
        job = self._job(asker)
        if job is not None:
            job.waits = (*job.waits, wait)
            self._feed(job, wait)

    def remove(self, asker: Asker, wait: Wait) -> None:
        """Note that a wait of a task is over."""
        job = self._job(asker)
        if job is None or wait not in job.waits:
            return
        before = job.waits_for()
        at = job.waits.index(wait)
        job.waits = job.waits[:at] + job.waits[at + 1 :]
        if not job.waits:
            self._engine.feed(ev.Unblocked(job.id, job.attempt))
        elif job.waits_for() != before:
            self._feed(job, job.waits_for())

    def _job(self, asker: Asker) -> Job | None:
        job = self._engine.jobs.get(asker.task)
        return job if job is not None and job.attempt == asker.attempt else None

    def _feed(self, job: Job, last: Wait) -> None:
        """Tell the scheduler what a task waits for; of waits that are not sure, only the last."""
        wait = job.waits_for()
        if not wait.sure:
            wait = Wait(last.tasks)
        self._engine.feed(ev.Blocked(job.id, job.attempt, wait.tasks, wait.number, wait.sure))


class Waiting:
    """A request that waits for objects. Meanwhile the CPUs of its task are lent.

    1. `begin` tells the engine that the task waits. The lent CPUs may start other tasks, which may
       fail at once: so an object that was missing may be there before the next step.
    2. Each missing object calls `_came`, at once if it is there by now.
    3. The last object that is needed, the first failure or the timer calls `_end`. Only the first
       of these calls counts.
    """

    def __init__(
        self,
        waits: Waits,
        asker: Asker,
        finish: Callable[[], None],
        late: Callable[[], None],
        fail: Callable[[Asker, Exception], None],
        *,
        fail_fast: bool = False,
        watch: bool = False,
    ) -> None:
        """`finish` replies when enough objects are there, `late` when time is up, and `fail` if
        these cannot. A task that only watches may do other things as well."""
        self._waits = waits
        self._asker = asker
        self._finish = finish
        self._late = late
        self._fail = fail
        self._fail_fast = fail_fast
        self._watch = watch

    def begin(self, entries: Mapping[ObjectId, Entry], count: int, timeout: float | None) -> None:
        """Wait for `count` of these objects, for `timeout` seconds at most."""
        missing = {obj: entry for obj, entry in entries.items() if entry.outcome is None}
        self._left = count - (len(entries) - len(missing))
        self._over = False
        self._callbacks: list[tuple[Entry, Callable[[], None]]] = []
        self._wait = condition(list(missing), self._left)
        if self._watch or timeout is not None:
            self._wait = Wait(self._wait.tasks, watch=self._watch)
        self._waits.add(self._asker, self._wait)
        self._notify(missing.values())
        if timeout is not None and not self._over:
            self._waits.loop.at(time.monotonic() + timeout, lambda: self._end(self._late))

    def _notify(self, missing: Iterable[Entry]) -> None:
        """Call `_came` for each missing object when it is there."""
        for entry in missing:
            if self._over:
                return
            callback = functools.partial(self._came, entry)
            self._callbacks.append((entry, callback))
            entry.notify(callback)

    def _came(self, entry: Entry) -> None:
        """An object is there."""
        outcome = entry.outcome
        self._left -= 1
        if self._left <= 0 or (self._fail_fast and outcome is not None and outcome.failed):
            self._end(self._finish)

    def _end(self, reply: Callable[[], None]) -> None:
        """Send the reply, unless the wait is over or the sender is gone."""
        if self._over:
            return
        self._over = True
        for entry, callback in self._callbacks:
            entry.forget(callback)
        self._callbacks.clear()
        asker = self._asker
        if asker.client.gone:
            return
        self._waits.remove(asker, self._wait)
        try:
            reply()
        except Exception as error:
            self._fail(asker, error)


def enough(entries: Iterable[Entry], count: int, *, fail_fast: bool = False) -> bool:
    """Whether `count` objects are there, or one has failed and that is enough."""
    for entry in entries:
        outcome = entry.outcome
        if outcome is not None:
            count -= 1
            if fail_fast and outcome.failed:
                return True
    return count <= 0


def condition(missing: Sequence[ObjectId], count: int) -> Wait:
    """Return the tasks that make the missing objects, and how many of them must end before `count`
    objects are there."""
    tasks = tuple(dict.fromkeys(task for task, _ in missing if task))
    if not all(task for task, _ in missing):
        return Wait(tasks)
    if count >= len(missing):
        return Wait(tasks, len(tasks), sure=True)
    return Wait(tasks, count if len(tasks) == len(missing) else 1, sure=True)
