"""The scheduler's own process as backend: its public face, for any thread, and the thread behind.

The thread runs a loop; the others post to it. What happens on it is the engine's.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from gpunb.accelerators import pin_environment
from gpunb.accelerators.mps import Mps
from gpunb.control.server import Answer, ControlServer, end_of
from gpunb.data import arenas
from gpunb.data.serialize import Payload
from gpunb.engine import share_checks
from gpunb.engine.engine import Engine
from gpunb.engine.faults import ended_by
from gpunb.engine.object_memory import Memory
from gpunb.engine.object_store import Store
from gpunb.engine.publisher import INTERVAL, StatusWatch, Watcher
from gpunb.engine.settings import EngineSettings
from gpunb.engine.worker_setup import Setups, others
from gpunb.exceptions import GpunbError
from gpunb.processes import trackers
from gpunb.processes.fork_source import ForkSource
from gpunb.processes.launcher import Launched
from gpunb.processes.spawn_source import SpawnSource
from gpunb.protocol.backend import HANDLE, Call, Context, ObjectId, Outcome
from gpunb.protocol.facts import Fact
from gpunb.scheduler import events as ev
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import ActorId
from gpunb.system import process_control
from gpunb.system.loop import Loop
from gpunb.system.signals import UNDIVIDED, Divisible

T = TypeVar("T")

_DESCRIPTORS = 8192
"""Open files that this process should be allowed: a worker takes four, a large object one; small
objects share the files of arenas."""

_SLICE = 1.0
"""Seconds of one wait for the end of the session; longer waits would delay a signal."""


class EngineBackend:
    """The backend of a kernel. All methods may be called from any thread."""

    def __init__(
        self, settings: EngineSettings, launched: Launched | None = None, mps: Mps | None = None
    ) -> None:
        """Start the engine's thread.

        Args:
            launched: the zygote that `settings.method` needs, if one was launched already.
            mps: the server of NVIDIA's Multi-Process Service; the backend stops it at its end.
        """
        machine = self.machine = settings.machine
        self.loop = Loop()
        self.memory = Memory(settings.object_memory, settings.spill, self.loop.post, self.later)
        self.store = Store(self.memory)
        descriptors = process_control.allow_descriptors(_DESCRIPTORS)
        workers = min(Policy().max_workers, descriptors // 8)
        policy = Policy(
            max_workers=workers, park_after=settings.park_after, prepare=settings.prepare
        )
        # Where devices do not tell what a process has, the workers do.
        reports = share_checks.workers_report(machine.devices, settings.share)
        setups = Setups(
            machine,
            functools.partial(pin_environment, vendors=settings.vendors),
            caps=settings.caps,
            reports=share_checks.PERIOD if reports else 0.0,
            sharing=mps.environment if mps is not None else None,
        )
        self._mps = mps
        self.engine = Engine(
            Scheduler(machine, policy),
            self.loop,
            self.store,
            setups,
            share=settings.share,
        )
        self.engine.facts.notes = settings.notes
        self.loop.failed = self.engine.faults.of_loop
        self.engine.leases.enter(machine)
        self.control_server = self.engine.control_server = ControlServer(
            self.engine, self.engine.facts, self.engine.publisher, end_of(self)
        )
        # Processes that are spawned there would end with the thread that spawned them.
        self._assists = settings.method == "fork"
        self._main = threading.main_thread().ident
        self._closed = False
        self._pid = os.getpid()
        self._failure: GpunbError | None = None
        self.end = "the session was shut down"
        """The error text of calls that wait when the session ends."""
        self._thread = threading.Thread(
            target=self._run, args=(settings, launched), name="gpunb", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:
            self.engine.leases.close()
            raise
        arenas.use(self.memory.arenas)
        atexit.register(self.shutdown)
        _sessions.add(self)

    def submit(self, call: Call) -> Sequence[ObjectId]:
        self._check_alive()
        if call.new is not None and call.new.name is not None:
            # There, so that handles which were let go before this are gone, and names free.
            return self.on_loop(functools.partial(self._submit_named, call))
        with UNDIVIDED:
            job = self.engine.admission.admit(call, None)
            self._do(self.engine.admission.submitted, job)
        return job.handed_out

    def put(self, payload: Payload) -> ObjectId:
        self._check_alive()
        self.memory.admit(payload, "the value of put")
        try:
            obj = self.engine.admission.keep(payload)
        finally:
            self.memory.release(payload)
        if payload.references:
            self.loop.post((self.store.hold_inner, payload))
        return obj

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        self._check_alive()
        self._check_may_wait(objects, len(objects), timeout)
        return self.store.fetch(objects, timeout)

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        self._check_alive()
        self._check_may_wait(objects, count, timeout)
        return self.store.wait(objects, count, timeout)

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        self._check_alive()
        self.store.notify(obj, functools.partial(self._call_back, callback))

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        self._check_alive()
        if obj[0] not in self.engine.jobs:
            self.store.entry(obj)
        self.engine.check_force(obj, force)
        if obj[0]:
            self.loop.post((self.engine.feed, ev.CancelRequested(obj[0], force, recursive)))

    def interrupt(self, obj: ObjectId) -> None:
        self._check_alive()
        self.loop.post((self.engine.feed, ev.InterruptRequested(obj[0])))

    def take(self, obj: ObjectId) -> bool:
        self._check_alive()
        return self.store.take(obj)

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        self._check_alive()

        def find() -> tuple[ObjectId, bytes]:
            actor = self.engine.actors.find(name, namespace)
            obj = (actor.id, HANDLE)
            self.store.hold(obj)
            return obj, actor.new.type

        return self.on_loop(find)

    def kill(self, actor: ActorId, restart: bool) -> None:
        self._check_alive()
        self.loop.post((functools.partial(self.engine.kill, actor, restart=restart),))

    def park(self, actor: ActorId) -> str:
        """Park an actor, and wait for its worker. Returns why it cannot be parked, or ''."""
        self._check_alive()
        reply: Future[str] = Future()
        self.loop.post((self.engine.parked.request, actor, reply.set_result))
        while True:
            try:
                return reply.result(1.0)
            except TimeoutError:
                self._check_alive()

    def hold(self, obj: ObjectId) -> None:
        self._check_alive()
        self.loop.post((self.store.hold, obj))

    def drop(self, obj: ObjectId) -> None:
        if not self._closed and os.getpid() == self._pid:
            # An actor's devices are waited for, and a value's memory hardly ever.
            post = self.loop.post if obj[1] == HANDLE else self.loop.post_lazily
            post((self.store.drop, obj))

    def ask(self, what: Fact, *arguments: Any) -> Any:
        if what == "total":
            return self.machine.totals()
        if what == "job":
            return self.engine.facts.job(*arguments)
        self._check_alive()
        if what == "status" and threading.get_ident() != self._thread.ident:
            self.engine.sampler.fresh()
        return self.on_loop(functools.partial(self.engine.facts.get, what, *arguments))

    def request(self, request: dict[str, Any], answer: Answer) -> None:
        """Pass a request to the control server without waiting. `answer` is called on the loop's
        thread with the reply."""
        self._check_alive()
        self.loop.post((self.control_server.carry_out, request, answer))

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> StatusWatch:
        """Call `watcher` with snapshots on the loop's thread: one now, and one after each change,
        until the watch is stopped or the session ends."""
        self._check_alive()
        watch = StatusWatch(watcher, interval)
        self.loop.post((self.engine.publisher.begin, watch))
        return watch

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function on the loop's thread after so many seconds, unless the session ends."""
        self.loop.post((self.loop.after, seconds, function))

    def context(self) -> Context:
        return Context(others=tuple((kind, ()) for kind in others(self.machine)))

    def shutdown(self) -> None:
        """End the session, and wait for its end, unless an interrupt comes."""
        if os.getpid() != self._pid:
            return
        if not self._closed:
            self._closed = True
            atexit.unregister(self.shutdown)
            self.loop.post((self._stop,))
        with Divisible():
            self._thread.join(10)

    def join(self) -> None:
        """Wait until the session has ended.

        In slices: a signal that comes as the main thread begins to wait does not end the wait.
        """
        while self._thread.is_alive():
            self._thread.join(_SLICE)

    def _do(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop: at once if this is the main thread and the loop sleeps."""
        if self._assists and threading.get_ident() == self._main:
            self.loop.do((function, *arguments))
        else:
            self.loop.post((function, *arguments))

    def _call_back(self, callback: Callable[[], None]) -> None:
        """Call a callback of an object: at once, or later if this is the loop's own thread."""
        if self.loop.mine():
            self.loop.call_user(callback)
        else:
            callback()

    def _submit_named(self, call: Call) -> Sequence[ObjectId]:
        found = self.engine.admission.existing(call)
        if found is not None:
            self.store.hold(found)
            return [found]
        job = self.engine.admission.admit(call, None)
        self.engine.admission.submitted(job)
        return job.handed_out

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise GpunbError(
                "this process was forked from one that uses gpunb, and gpunb does not work in "
                "forks: call gpunb.shutdown() and gpunb.init() here, or use gpunb.remote instead"
            )
        if self._failure is not None:
            raise GpunbError(str(self._failure))
        if self._closed:
            raise GpunbError("this session was shut down: call gpunb.init() for a new one")

    def _check_may_wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> None:
        if timeout == 0 or not self.loop.mine():
            return
        if len(self.store.wait(objects, count, 0)) < count:
            raise GpunbError(
                "a callback of a future must not wait for other tasks: it runs on the thread that "
                "hears of their end"
            )

    def forked(self) -> None:
        """Close the parent's descriptors, in a child that was forked off the kernel."""
        for owner in (
            self.control_server,
            self.engine.leases,
            self.engine.pool,
            self.loop,
            self.store,
        ):
            owner.forked()

    def on_loop(self, function: Callable[[], T]) -> T:
        if self.loop.mine():
            return function()
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.loop.post((call,))
        while True:
            try:
                return future.result(1.0)
            except TimeoutError:
                if future.done():
                    raise
                self._check_alive()

    # ------------------------------------------------------------------------ on the loop's thread

    def _run(self, settings: EngineSettings, launched: Launched | None) -> None:
        pool = self.engine.pool
        inherited = self.engine.leases.inherited
        try:
            self.engine.leases.open()
            if settings.method == "fork":
                source: ForkSource | SpawnSource = ForkSource(
                    self.loop,
                    pool,
                    settings.preload,
                    launched,
                    inherited,
                    own_preload=settings.own_preload,
                    follow=settings.follow,
                )
            else:
                source = SpawnSource(self.loop, pool, inherited)
            self.engine.open(source)
            self.control_server.open()
            self.loop.run(_call)
        except BaseException as error:
            self._failure = failure = ended_by(error)
            self.engine.close(failure)
        finally:
            self.control_server.close()
            self.loop.close()
            if self._mps is not None:
                self._mps.stop()
            arenas.stop(self.memory.arenas)
            self.memory.close()
            self.store.clear()
            trackers.withdraw()

    def _stop(self) -> None:
        try:
            self.engine.close(GpunbError(self.end))
        finally:
            self.loop.stop()


def _call(item: tuple[Any, ...]) -> None:
    """Call an item that was posted to the loop: a function and its arguments."""
    item[0](*item[1:])


_sessions: weakref.WeakSet[EngineBackend] = weakref.WeakSet()


def _forked() -> None:
    """Close the descriptors of the parent's sessions, in a child. Only the first child has them: in
    a child of that child, the same numbers may belong to the user's own files."""
    while _sessions:
        _sessions.pop().forked()


os.register_at_fork(after_in_child=_forked)
