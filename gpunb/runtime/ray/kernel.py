"""A kernel's session on a Ray cluster."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray._private import auto_init_hook

from gpunb import serialize
from gpunb.backend import HANDLE, Call, Context, ObjectId, Outcome
from gpunb.core.resources import UNIT, Device, Machine
from gpunb.core.tasks import ActorId, TaskId
from gpunb.exceptions import GpunbError
from gpunb.runtime import numbers
from gpunb.runtime.picture import INTERVAL, PULSE, Watch, Watcher, timeless
from gpunb.runtime.ray import crashes, failures, hosts
from gpunb.runtime.ray.asking import TYPE, shown
from gpunb.runtime.ray.hearing import Hearing
from gpunb.runtime.ray.jobs import HISTORY, RELEASED, Actor, Job, Jobs
from gpunb.runtime.ray.kits import Kit, changes
from gpunb.runtime.ray.mailbox import KERNEL, Mail, Sender, box
from gpunb.runtime.ray.onray import Head, OnRay
from gpunb.runtime.ray.status import Status
from gpunb.runtime.ray.warming import Warming
from gpunb.runtime.setup import Present
from gpunb.serialize import Payload

KERNELS = 1_000_000
"""Numbers of tasks for each kernel, so that those of two are never the same."""

LOOK = 0.5
"""Seconds after which it is looked again for tasks that ended without a word."""

_ENDS_WITHIN = 2.0
"""Seconds for a thread to end, before what it may ask is gone."""

_SAID_WITHIN = 0.2
"""Seconds that the word of a task's end may come after the end itself."""

_TOLD_WITHIN = 5.0
"""Seconds for which a result waits for the output before it."""


def start(address: str, settings: Mapping[str, Any]) -> Kernel:
    """Join a cluster, or start one."""
    own = not ray.is_initialized()
    # Else whatever asks a little late, as a destructor may, starts another cluster by that.
    auto_init_hook.enable_auto_connect = False
    if own:
        wanted = {name: value for name, value in settings.items() if value is not None}
        # Output comes by the mailbox. Who wants the dashboard starts the cluster by hand.
        quiet: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "include_dashboard": False,
        }
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(**quiet, **wanted)
        except ConnectionError as error:
            raise GpunbError(f"address={address!r} cannot be reached: {error}") from error
        except ValueError as error:
            if not wanted or "existing cluster" not in str(error):
                raise
            raise ValueError(
                f"{', '.join(wanted)} cannot be said, because a Ray cluster runs here already: "
                f"gpunb.init({address!r}) joins it as it is"
            ) from error
    elif given := [name for name, value in settings.items() if value is not None]:
        raise ValueError(
            f"{', '.join(given)} cannot be said when ray.init was called before: what the cluster "
            "has is settled"
        )
    if ray.util.client.ray.is_connected():
        raise GpunbError(
            "ray.init has connected as a Ray client, which carries no streams, callbacks and live "
            "output. Run the notebook on a node of the cluster, and use gpunb.init('ray') there"
        )
    try:
        return Kernel(own=own)
    except BaseException:
        if own:
            ray.shutdown()
        raise


class Kernel(OnRay):
    """The backend of a kernel. All methods may be called from any thread."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.ends_ray = own
        self._pid = os.getpid()
        self.closed = False
        context = ray.get_runtime_context()
        job = int.from_bytes(bytes.fromhex(context.get_job_id()), "little")
        self._base = max(0, job - 1) * KERNELS
        self.jobs = Jobs()
        self.jobs.actors = self._actors
        self.sinks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self.told: dict[str, Any] = {}
        self._logs: OrderedDict[TaskId, Any] = OrderedDict()
        self._watches: list[Watch] = []
        self._present = Present()
        self._before = dict(os.environ)
        self._said: tuple[Any, tuple[str, list[Any]]] = (None, ("", []))
        self.changed = threading.Event()
        self.status = Status(self)
        self.warming = Warming(self)
        self.box = box(context.get_node_id())
        self._sender = Sender()
        self.marks: dict[int, threading.Event] = {}
        self._hush = crashes.Hush(self._is_ours)
        self._mail = Mail(self.box, KERNEL, Hearing(self).hear)
        self._over = threading.Event()
        self._looker = threading.Thread(target=self._look, name="gpunb-look", daemon=True)
        self._looker.start()
        atexit.register(self.shutdown)
        self.machine = self._machine()
        self.warming.begin(context.get_node_id())

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
        return self._base + numbers.task()

    def new_put(self) -> int:
        return self._base + numbers.put()

    def context(self) -> Context:
        return Context()

    def kit(self) -> tuple[str, list[Any]]:
        now = self._present.now()
        if self._said[0] is not now:
            kit = Kit(
                self.box,
                changes(self._before, now.environment),
                now.directory,
                tuple(now.path),
                tuple(now.argv),
            )
            key = f"{self._base}/{next(self._numbers)}"
            self._said = now, (key, [ray.put(kit)])
        return self._said[1]

    def sink_of(self, call: Call) -> int:
        if call.sink is None:
            return 0
        number = next(self._numbers)
        self.sinks[number] = call.sink
        return number

    def say(self, worker: str, item: Any) -> None:
        self._sender.send(self.box, worker, [item])

    def submit(self, call: Call) -> list[ObjectId]:
        self._check_alive()
        placed = call.spec.demand.wants_device and not call.actor
        with self.warming.aside() if placed else contextlib.nullcontext():
            objects = super().submit(call)
        log = getattr(call.sink, "log", None)
        if objects and log is not None:
            self._logs[objects[0][0]] = log
            if len(self._logs) > HISTORY:
                self._logs.popitem(last=False)
        return objects

    def submitted(self, call: Call, head: Head, ref: Any) -> None:
        job = Job(
            head.task,
            head.name,
            head.kind,
            call.spec.demand,
            call.sink,
            ref,
            head.actor,
            head.parent,
        )
        self.jobs.add(job)
        if call.kind == "create":
            self._actors[head.task].job = job
        self.changed.set()

    def put(self, payload: Payload) -> ObjectId:
        self._check_alive()
        return super().put(payload)

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
            actor = self._actors.get(job.actor)
            cause = failures.root(error)
            if actor is not None and isinstance(cause, ray.exceptions.ActorDiedError):
                known = crashes.account(job)
                if why := f"its process {known}" if known else actor.why:
                    kind = type(failures.ours_of(cause, job.label))
                    return serialize.dumps(kind(f"{job.label}: the actor is gone: {why}"))
            if isinstance(cause, ray.exceptions.WorkerCrashedError):
                return serialize.dumps(crashes.error_of(job, cause))
        return payload

    def settle(self, task: TaskId) -> None:
        job = self.jobs.get(task)
        if self._mail.mine() or self.closed:
            return
        if job is not None:
            job.told.wait(_TOLD_WITHIN)
        elif not task:
            number = next(self._numbers)
            heard = self.marks[number] = threading.Event()
            self._sender.send(self.box, KERNEL, [("mark", number)])
            heard.wait(_TOLD_WITHIN)

    def _is_ours(self, pid: int) -> bool:
        """Whether a process has run something of this session."""
        if self.ends_ray:
            return True
        return any(job.pid == pid for job in [*self.jobs.open.values(), *self.jobs.past.values()])

    def has_finished(self, task: TaskId) -> bool:
        job = self.jobs.get(task)
        return job is not None and job.told.wait(_SAID_WITHIN) and job.state == "done"

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
        if job.began is not None and job.worker and (job.kind == "cell" or job.actor):
            self.say(job.worker, ("interrupt", job.id))
        else:
            self.cancel(obj, False, False)

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

    def ask(self, what: str, *arguments: Any) -> Any:
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
                there, total = ray.available_resources(), self.ask("total")
                there["GPU"] = there.get("GPU", 0.0) + self.warming.holds
                free = _plain(there)
                return {name: min(free.get(name, 0.0), most) for name, most in total.items()}
            case "actor":
                known = self._actors.get(*arguments)
                return None if known is None or self.is_over(known) else known.facts()
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
        self._over.set()
        atexit.unregister(self.shutdown)
        self._mail.close()
        self._hush.close()
        for watch in self._watches:
            if not watch.stopped:
                watch.watcher(None)
        self.changed.set()
        for job in list(self.jobs.open.values()):
            if job.kind != "create":
                if ray.is_initialized():
                    self.stop(job)
                self.jobs.end(job, "failed")
        self._calls.put(None)
        if self._caller is not None and self._caller is not threading.current_thread():
            self._caller.join(_ENDS_WITHIN)
        self.table.close()
        self._actors.clear()
        if ray.is_initialized():
            try:
                ray.kill(self.box)
            except Exception:
                pass  # it is gone
            if threading.current_thread() is not self._looker:
                self._looker.join(_ENDS_WITHIN)
            self._mail.join(_ENDS_WITHIN)
            if self.ends_ray:
                ray.shutdown()

    def stop(self, job: Job) -> None:
        try:
            ray.cancel(job.ref, force=not job.actor)
        except Exception:
            pass  # over, or the cluster is gone

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
        """Do what somebody asks for, as the desk of a session of one machine does."""

        def do() -> None:
            try:
                answer({"ok": True, "value": self.status.carry_out(request)})
            except Exception as error:
                known = isinstance(error, GpunbError | ValueError)
                answer({"ok": False, "error": str(error) if known else repr(error)})

        threading.Thread(target=do, name="gpunb-request", daemon=True).start()

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> Watch:
        """Have snapshots given to `watcher` on a thread: one now, and one whenever something has
        changed, until the watch is stopped or the session ends."""
        self._check_alive()
        watch = Watch(watcher, interval)
        self._watches.append(watch)
        threading.Thread(target=self._show, args=(watch,), name="gpunb-watch", daemon=True).start()
        return watch

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call this on a thread, unless the session ends before."""
        timer = threading.Timer(seconds, lambda: None if self.closed else function())
        timer.daemon = True
        timer.start()

    def _show(self, watch: Watch) -> None:
        while not (watch.stopped or self.closed):
            try:
                snapshot = self.status.status()
                seen = timeless(snapshot)
                if seen != watch.seen and watch.watcher(snapshot):
                    watch.seen = seen
            except Exception:
                if self.closed:
                    return
            self.changed.wait(max(PULSE, watch.interval))
            time.sleep(watch.interval)
            self.changed.clear()

    def is_over(self, actor: Actor) -> bool:
        """Whether an actor is gone for good, as Ray knows it now."""
        handle = actor.handle or self.table.find((actor.id, HANDLE))
        if not actor.ended and handle is not None:
            found = ray._private.state.actors(actor_id=handle._actor_id.hex())
            if found.get("State") == "DEAD":
                self.ended(actor.id, "its process has ended")
        return actor.ended

    def ended(self, actor: ActorId, why: str) -> None:
        super().ended(actor, why)
        self.told.pop(hosts.key_of(actor), None)
        self.jobs.leave(actor, why)

    def _let_go(self, obj: ObjectId, ref: Any) -> None:
        if obj[1] == HANDLE:
            known = self._actors.get(obj[0])
            if known is not None and known.handle is None and known.new.name is None:
                self.ended(obj[0], RELEASED)

    def _look(self) -> None:
        """Find what ended without a word: crashed, cancelled in the queue, lost with its node."""
        while not self._over.wait(LOOK):
            try:
                self.look()
            except Exception:
                if self.closed or not ray.is_initialized():
                    return

    def look(self) -> None:
        """Book what has ended."""
        jobs = [job for job in list(self.jobs.open.values()) if job.ref is not None]
        if not jobs:
            return
        refs = list({job.ref: job for job in jobs})
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        there = set(ready)
        for job in jobs:
            if job.ref in there:
                if job.kind == "cell" or job.began is not None:
                    job.told.wait(LOOK)  # its own word may be on its way
                if not job.over:
                    self.jobs.end(job, self._state(job))
                    job.told.set()
                    self.warming.over()

    def _state(self, job: Job) -> str:
        try:
            ray.get(job.ref, timeout=1)
        except ray.exceptions.TaskCancelledError:
            return "cancelled"
        except Exception:
            return "failed"
        return "done"


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources by the names that users know; a type counts the devices of it."""
    found = {name: round(x, 4) for name, x in shown(resources).items()}
    return {name: x for name, x in found.items() if not name.startswith(TYPE) or x}


__all__ = ["Kernel", "hosts", "start"]
