"""A kernel's session on a Ray cluster."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.engine import ids
from gpunb.engine.publisher import INTERVAL, StatusWatch, Watcher
from gpunb.engine.worker_setup import Present
from gpunb.exceptions import GpunbError
from gpunb.protocol.backend import HANDLE, Call, Context, ObjectId, Outcome
from gpunb.protocol.facts import Fact
from gpunb.protocol.ranks import of_coordinator
from gpunb.ray import crashes, failures, named_actors
from gpunb.ray.ended_jobs import EndedJobs
from gpunb.ray.job_env import JobEnv, changes
from gpunb.ray.jobs import HISTORY, RELEASED, RayActor, RayJob, RayJobs, remove_group
from gpunb.ray.mailbox import KERNEL, KernelReader, Sender, new_mailbox
from gpunb.ray.messages import Interrupt, Mark, ToWorker
from gpunb.ray.prewarm import Prewarmer
from gpunb.ray.resources import TYPE, available, shown
from gpunb.ray.status import RayStatus
from gpunb.ray.submission import RayBackend
from gpunb.ray.transport import INTERRUPTED, CallHeader, JobEnvRef, key_of
from gpunb.ray.watches import Watches
from gpunb.ray.worker_events import WorkerEvents
from gpunb.scheduler.resources import UNIT, Demand, Device, Machine
from gpunb.scheduler.tasks import ActorId, TaskId

KERNELS = 1_000_000
"""Numbers of tasks for each kernel, so that those of two are never the same."""

_ENDS_WITHIN = 2.0
"""Seconds for a thread to end, before Ray is shut down."""

_REPORT_WITHIN = 0.2
"""Seconds that the report of a task's end may come after the end itself."""

_OUTPUT_WITHIN = 5.0
"""Seconds for which a result waits for the output before it."""


class RayKernel(RayBackend):
    """The backend of a kernel. All methods may be called from any thread."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.ends_ray = own
        self._pid = os.getpid()
        self.closed = False
        context = ray.get_runtime_context()
        job = int.from_bytes(bytes.fromhex(context.get_job_id()), "little")
        self._base = max(0, job - 1) * KERNELS
        self.jobs = RayJobs()
        self.jobs.actors = self.objects.actors
        self.sinks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self.session_sinks: dict[str, Any] = {}
        self._logs: OrderedDict[TaskId, Any] = OrderedDict()
        self._present = Present()
        self._before = dict(os.environ)
        self._sent: tuple[Any, Any, JobEnvRef] = None, None, JobEnvRef("", b"")
        self.changed = threading.Event()
        self.status = RayStatus(self)
        self._watches = Watches(self.status, self.changed)
        self.prewarmer = Prewarmer(self.cluster, self.jobs, self.later)
        self.mailbox = new_mailbox(context.get_node_id())
        self._sender = Sender()
        self.marks: dict[int, threading.Event] = {}
        self._crash_messages = crashes.CrashMessageFilter(self._is_ours)
        self._reader = KernelReader(self.mailbox, KERNEL, WorkerEvents(self).handle)
        self.ended_jobs = EndedJobs(self.jobs, self.prewarmer, self.is_over)
        atexit.register(self.shutdown)
        self.machine = self._machine()
        self.prewarmer.begin(context.get_node_id())

    def _machine(self) -> Machine:
        """The cluster as one machine, for the session's representation."""
        devices: list[Device] = []
        for node in self.cluster.nodes(fresh=True):
            kind = node.types[0] if node.types else None
            for index in range(int(node.total.get("GPU", 0))):
                key = f"{node.id}:{index}"
                name = f"{kind or 'GPU'} of {node.address}"
                devices.append(Device(key, len(devices), name, kind))
        cpus = sum(each.total.get("CPU", 0) for each in self.cluster.nodes())
        return Machine(tuple(devices), int(cpus * UNIT))

    # ------------------------------------------------------------------------- what the API sees

    def new_task(self) -> TaskId:
        return self._base + ids.task()

    def new_put(self) -> int:
        return self._base + ids.put()

    def context(self) -> Context:
        return Context()

    def job_env(self) -> JobEnvRef:
        now = self._present.now()
        if self._sent[0] is not now:
            env = JobEnv(
                self.mailbox,
                changes(self._before, now.environment),
                now.directory,
                tuple(now.path),
                tuple(now.argv),
            )
            key = f"{self._base}/{next(self._numbers)}"
            ref = ray.put(env)
            try:
                sent: bytes | list[Any] = ray.cloudpickle.dumps(ref)
            except ray.exceptions.RayError:  # Ray was told to forbid this
                sent = [ref]
            self._sent = now, ref, JobEnvRef(key, sent)
        return self._sent[2]

    def sink_of(self, call: Call) -> int:
        if call.sink is None:
            return 0
        number = next(self._numbers)
        self.sinks[number] = call.sink
        return number

    def send_to_worker(self, worker: str, message: ToWorker) -> None:
        self._sender.send(self.mailbox, worker, [message])

    def submit(self, call: Call) -> list[ObjectId]:
        self._check_alive()
        placed = call.spec.demand.wants_device and not call.actor
        with self.prewarmer.aside() if placed else contextlib.nullcontext():
            objects = super().submit(call)
        log = call.sink.log if call.sink is not None else None
        if objects and log is not None:
            self._logs[objects[0][0]] = log
            if len(self._logs) > HISTORY:
                self._logs.popitem(last=False)
        return objects

    def submitted(self, call: Call, header: CallHeader, ref: Any) -> None:
        job = RayJob(
            header.task,
            header.name,
            header.kind,
            _demand_of(call),
            call.sink,
            ref,
            header.actor,
            header.parent,
        )
        self.jobs.add(job)
        if call.kind == "create":
            self.objects.actors[header.task].job = job
        self.changed.set()

    def put(self, payload: Payload, *, failed: bool = False) -> ObjectId:
        self._check_alive()
        return super().put(payload, failed=failed)

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        self._check_alive()
        return super().fetch(objects, timeout)

    def failure_of(self, task: TaskId, error: BaseException) -> Payload:
        job = self.jobs.get(task)
        if job is not None and job.late is not None:
            text = f"{job.label} ran longer than its timeout of {job.late:g} s and was stopped"
            return serialize.dump_failure(TimeoutError(text), task=job.label)
        payload = super().failure_of(task, error)
        if job is not None:
            actor = self.objects.actors.get(job.actor)
            cause = failures.root(error)
            if actor is not None and isinstance(cause, ray.exceptions.ActorDiedError):
                known = crashes.account(job)
                if why := f"its process {known}" if known else actor.why:
                    kind = type(failures.ours_of(cause, job.label))
                    return serialize.dumps(kind(f"{job.label}: the actor is gone: {why}"))
            if isinstance(cause, ray.exceptions.WorkerCrashedError):
                return serialize.dumps(crashes.error_of(job, cause))
        return payload

    def wait_for_output(self, task: TaskId) -> None:
        job = self.jobs.get(task)
        if self._reader.is_current_thread() or self.closed:
            return
        if job is not None:
            job.reported.wait(_OUTPUT_WITHIN)
        elif not task:
            number = next(self._numbers)
            arrived = self.marks[number] = threading.Event()
            self._sender.send(self.mailbox, KERNEL, [Mark(number)])
            arrived.wait(_OUTPUT_WITHIN)

    def _is_ours(self, pid: int) -> bool:
        """Whether a process has run something of this session."""
        if self.ends_ray:
            return True
        return any(job.pid == pid for job in [*self.jobs.open.values(), *self.jobs.past.values()])

    def has_finished(self, task: TaskId) -> bool:
        job = self.jobs.get(task)
        return job is not None and job.reported.wait(_REPORT_WITHIN) and job.state == "done"

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        self._check_alive()
        job = self.jobs.get(obj[0])
        if job is not None:
            job.cancelled = True
        super().cancel(obj, force, recursive)

    def interrupt(self, obj: ObjectId) -> None:
        self._check_alive()
        job = self.jobs.get(obj[0])
        if job is None or job.over:
            return
        if job.began is not None and job.worker and (job.kind in INTERRUPTED or job.actor):
            self.send_to_worker(job.worker, Interrupt(job.id))
        else:  # it waits, or the report of its beginning is on its way
            job.stopped = job.stopped or not job.cancelled
            self.cancel(obj, False, False)

    def was_stopped(self, task: TaskId) -> bool:
        job = self.jobs.get(task)
        return job is not None and job.stopped

    def kill(self, actor: ActorId, restart: bool) -> None:
        self._check_alive()
        super().kill(actor, restart)
        self.changed.set()

    def hold(self, obj: ObjectId) -> None:
        self._check_alive()
        super().hold(obj)

    def drop(self, obj: ObjectId) -> None:
        if not self.closed and os.getpid() == self._pid:
            super().drop(obj)

    def ask(self, what: Fact, *arguments: Any) -> Any:
        if what == "job":
            job = self.jobs.get(*arguments)
            return job.facts() if job is not None else None
        if what == "log":
            return self._logs.get(*arguments)
        self._check_alive()
        match what:
            case "total":
                return _plain(ray.cluster_resources())
            case "available":
                free, total = _plain(available()), self.ask("total")
                return {name: min(free.get(name, 0.0), most) for name, most in total.items()}
            case "actor":
                known = self.objects.actors.get(*arguments)
                return None if known is None or self.is_over(known) else known.facts()
            case "names":
                return named_actors.listed()
            case "refusal":
                return self.cluster.refusal(*arguments)
            case "status" | "timeline" | "session" | "why" | "notes" | "memory":
                return getattr(self.status, what)(*arguments)
            case _:
                raise ValueError(f"nobody knows {what!r}")

    def shutdown(self) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        atexit.unregister(self.shutdown)
        self.ended_jobs.close()
        self._reader.close()
        self._crash_messages.close()
        self._watches.close()
        for job in list(self.jobs.open.values()):
            if job.kind != "create":
                if ray.is_initialized():
                    self.stop(job)
                self.jobs.end(job, "failed")
        self.objects.end_calls(_ENDS_WITHIN)
        self.objects.table.close()
        self.objects.actors.clear()
        if ray.is_initialized():
            for group in list(self.jobs.groups.values()):
                remove_group(group)
            try:
                ray.kill(self.mailbox)
            except Exception:
                pass  # it is gone
            self.ended_jobs.join(_ENDS_WITHIN)
            self._reader.join(_ENDS_WITHIN)
            if self.ends_ray:
                ray.shutdown()

    def stop(self, job: RayJob) -> None:
        self.canceller.cancel(job.ref, force=not job.actor)

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise GpunbError(
                "this process was forked from one that uses gpunb, and gpunb does not work in "
                "forks: use gpunb.remote instead"
            )
        if self.closed:
            raise GpunbError("this session was shut down: call gpunb.init() for a new one")

    # --------------------------------------------------------------------------- for the monitor

    def request(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], object]) -> None:
        """Carry out a request of the monitor, as the control server of one machine does."""
        self._watches.request(request, answer)

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> StatusWatch:
        """Call `watcher` with a snapshot on a thread: now and after each change, until the watch is
        stopped or the session ends."""
        self._check_alive()
        return self._watches.add(watcher, interval)

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call this on a thread, unless the session ends before."""
        timer = threading.Timer(seconds, lambda: None if self.closed else function())
        timer.daemon = True
        timer.start()

    def is_over(self, actor: RayActor) -> bool:
        """Whether an actor is gone for good, as Ray knows it now."""
        handle = actor.handle or self.objects.table.find((actor.id, HANDLE))
        if not actor.ended and handle is not None:
            state = ray._private.state.actors(actor_id=handle._actor_id.hex())
            if state.get("State") == "DEAD":
                self.ended(actor.id, "its process has ended")
        return actor.ended

    def ended(self, actor: ActorId, why: str) -> None:
        super().ended(actor, why)
        self.session_sinks.pop(key_of(actor), None)
        self.jobs.leave(actor, why)

    def released(self, obj: ObjectId) -> None:
        if obj[1] == HANDLE:
            known = self.objects.actors.get(obj[0])
            if known is not None and known.handle is None and known.new.name is None:
                self.ended(obj[0], RELEASED)


def _demand_of(call: Call) -> Demand:
    """The demand of a call; for a call in several ranks, the demand of each rank."""
    if call.kind == "ranks":
        call, _ = of_coordinator(call.code, call.arguments)
    return call.spec.demand


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources by the names that users know; a type counts the devices of it."""
    amounts = {name: round(x, 4) for name, x in shown(resources).items()}
    return {name: x for name, x in amounts.items() if not name.startswith(TYPE) or x}
