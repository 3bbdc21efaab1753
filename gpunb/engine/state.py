"""The state that the parts of an engine share, and the way in which they feed the scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

from gpunb.engine.actors import ActorTable
from gpunb.engine.faults import Faults, Outlets
from gpunb.engine.job_groups import JobGroups
from gpunb.engine.jobs import Job, Past
from gpunb.engine.object_store import Store
from gpunb.engine.peak_history import PeakHistory
from gpunb.engine.sent_ahead import SentAhead
from gpunb.protocol.backend import ObjectId
from gpunb.protocol.verbs import Surroundings
from gpunb.scheduler import events as ev
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import ActorId, TaskId, WorkerId
from gpunb.system.loop import Loop

if TYPE_CHECKING:
    from gpunb.processes.fork_source import ForkSource
    from gpunb.processes.pool import WorkerPool
    from gpunb.processes.spawn_source import SpawnSource
    from gpunb.processes.worker_process import WorkerProcess


class EngineState(ABC):
    """The tasks, objects, actors and workers of a session. On the loop's thread, unless a method
    says otherwise.

    Attributes:
        jobs: the tasks that are not over.
        past: the last tasks that are over.
        peaks: the device memory that earlier runs took.
        groups: the tasks that belong together.
        by_worker: the tasks that each worker runs, the newest last.
        source: where worker processes come from; None until the engine is open.
        ahead: the tasks that workers were sent ahead.
    """

    pool: WorkerPool

    def __init__(self, scheduler: Scheduler, loop: Loop, store: Store) -> None:
        self.scheduler = scheduler
        self.loop = loop
        self.store = store
        self.peaks = PeakHistory()
        self.jobs: dict[TaskId, Job] = {}
        self.past: OrderedDict[TaskId, Past] = OrderedDict()
        self.by_worker: dict[WorkerId, list[TaskId]] = {}
        self.actors = ActorTable()
        self.groups = JobGroups(self.jobs, self.actors)
        self.faults = Faults()
        self.outlets = Outlets(self.faults)
        self.ahead = SentAhead(self.feed, self.surroundings, self.read_output)
        self.source: ForkSource | SpawnSource | None = None

    @abstractmethod
    def feed(self, event: ev.Event) -> None:
        """Give the scheduler an event, now or after the events that it is handling."""

    @abstractmethod
    def surroundings(self, job: Job) -> Surroundings:
        """Return the environment, folder and path of the kernel that submitted the job, as they
        are now."""

    def read_output(self, process: WorkerProcess) -> None:
        """Hand over what a process has written."""
        self.pool.receiver.read_output(process)

    @abstractmethod
    def changed(self) -> None:
        """Note that the status of the session has changed."""

    def kill(self, ident: ActorId, *, restart: bool) -> None:
        """End the process of an actor."""
        actor = self.actors.get(ident)
        if actor is not None and not restart:
            self.actors.leave(actor)
        self.feed(ev.KillRequested(ident, restart))

    def check_force(self, obj: ObjectId, force: bool) -> None:
        """From any thread: raises ValueError if a call of an actor is to be stopped by force,
        also one that is over, if not for long."""
        if not force:
            return
        job = self.jobs.get(obj[0])
        past = self.past.get(obj[0]) if job is None else None
        if (job is not None and job.call.actor) or (past is not None and past.actor):
            label = f"#{past.id} {past.name}" if past is not None else job.label if job else ""
            raise ValueError(
                f"force=True would end the process of the actor of {label}: cancel the call "
                "without it, or end the actor with gpunb.kill"
            )
