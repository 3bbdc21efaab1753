"""The scheduler's own process as backend: its public face, for any thread, and the thread behind.

The thread runs a loop; the others post to it. What happens on it is the driver's.
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
from gpunb.backend import HANDLE, Call, Context, ObjectId, Outcome
from gpunb.core import events as ev
from gpunb.core.resources import Machine
from gpunb.core.scheduler import Policy, Scheduler
from gpunb.core.tasks import ActorId
from gpunb.exceptions import GpunbError
from gpunb.runtime import shares
from gpunb.runtime.desk import Answer, Desk, end_of
from gpunb.runtime.driver import Driver
from gpunb.runtime.memory import Memory
from gpunb.runtime.picture import INTERVAL, Watch, Watcher
from gpunb.runtime.setup import Setups, others
from gpunb.runtime.store import Store
from gpunb.serialize import Payload
from gpunb.signals import UNDIVIDED
from gpunb.workers import system
from gpunb.workers.forking import ForkSource
from gpunb.workers.launching import Launched
from gpunb.workers.loop import Loop
from gpunb.workers.spawning import SpawnSource

T = TypeVar("T")

_DESCRIPTORS = 8192
"""Open files that this process should be allowed: a worker takes four, a large object one."""


class Local:
    """The backend of a kernel. All methods may be called from any thread."""

    def __init__(
        self,
        machine: Machine,
        *,
        preload: Sequence[str] = (),
        method: str = "fork",
        launched: Launched | None = None,
        vendors: Sequence[str] = (),
        notes: Sequence[str] = (),
        object_memory: int,
        spill: str | None = None,
        share: str = "warn",
        caps: bool = True,
        mps: Mps | None = None,
        standbys: int = 2,
        policy: Policy | None = None,
    ) -> None:
        self.machine = machine
        self.loop = Loop()
        self.memory = Memory(object_memory, spill, self.loop.post)
        self.store = Store(self.memory)
        descriptors = system.allow_descriptors(_DESCRIPTORS)
        if policy is None:
            policy = Policy(max_workers=min(Policy().max_workers, descriptors // 8))
        # Where devices do not tell what a process has, the workers do.
        reports = shares.PERIOD if shares.told(machine.devices, share) else 0.0
        setups = Setups(
            machine,
            functools.partial(pin_environment, vendors=tuple(vendors)),
            caps=caps,
            reports=reports,
            sharing=mps.environment if mps is not None else None,
        )
        self._mps = mps
        self.driver = Driver(
            Scheduler(machine, policy),
            self.loop,
            self.store,
            setups,
            standbys=standbys,
            share=share,
        )
        self.driver.facts.notes = tuple(notes)
        self.driver.leases.enter(machine)
        self.desk = self.driver.desk = Desk(self.driver, end_of(self))
        # Processes that are spawned there would end with the thread that spawned them.
        self._assists = method == "fork"
        self._main = threading.main_thread().ident
        self._closed = False
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self.end = "the session was shut down"
        """What those are told who wait when it is."""
        self._thread = threading.Thread(
            target=self._run, args=(method, tuple(preload), launched), name="gpunb", daemon=True
        )
        self._thread.start()
        atexit.register(self.shutdown)
        _sessions.add(self)

    def submit(self, call: Call) -> list[ObjectId]:
        self._check_alive()
        if call.new is not None and call.new.name is not None:
            # There, so that handles which were let go before this are gone, and names free.
            return self._on_loop(functools.partial(self._submit_named, call))
        with UNDIVIDED:
            job = self.driver.admission.admit(call, None)
            self._do(self.driver.admission.submitted, job)
        return job.handed_out

    def put(self, payload: Payload) -> ObjectId:
        self._check_alive()
        self.memory.admit(payload, "the value of put")
        try:
            obj = self.driver.admission.keep(payload)
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
        if obj[0] not in self.driver.jobs:
            self.store.entry(obj)
        self.driver.check_force(obj, force)
        if obj[0]:
            self.loop.post((self.driver.feed, ev.CancelRequested(obj[0], force, recursive)))

    def interrupt(self, obj: ObjectId) -> None:
        self._check_alive()
        self.loop.post((self.driver.feed, ev.InterruptRequested(obj[0])))

    def take(self, obj: ObjectId) -> bool:
        self._check_alive()
        return self.store.take(obj)

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        self._check_alive()

        def find() -> tuple[ObjectId, bytes]:
            actor = self.driver.actors.find(name, namespace)
            obj = (actor.id, HANDLE)
            self.store.hold(obj)
            return obj, actor.new.type

        return self._on_loop(find)

    def kill(self, actor: ActorId, restart: bool) -> None:
        self._check_alive()
        self.loop.post((functools.partial(self.driver.kill, actor, restart=restart),))

    def hold(self, obj: ObjectId) -> None:
        self._check_alive()
        self.loop.post((self.store.hold, obj))

    def drop(self, obj: ObjectId) -> None:
        if not self._closed and os.getpid() == self._pid:
            # An actor's devices are waited for, and a value's memory hardly ever.
            post = self.loop.post if obj[1] == HANDLE else self.loop.post_lazily
            post((self.store.drop, obj))

    def ask(self, what: str, *arguments: Any) -> Any:
        if what == "total":
            return self.machine.totals()
        if what == "job":
            return self.driver.facts.job(*arguments)
        self._check_alive()
        if what == "status" and threading.get_ident() != self._thread.ident:
            self.driver.sampler.fresh()
        return self._on_loop(functools.partial(self.driver.facts.tell, what, *arguments))

    def request(self, request: dict[str, Any], answer: Answer) -> None:
        """Have the desk do something, which does not wait; `answer` is called on the loop's
        thread with what the desk says."""
        self._check_alive()
        self.loop.post((self.desk.carry_out, request, answer))

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> Watch:
        """Have snapshots given to `watcher` on the loop's thread: one now, and one whenever
        something has changed, until the watch is stopped or the session ends."""
        self._check_alive()
        watch = Watch(watcher, interval)
        self.loop.post((self.driver.picture.begin, watch))
        return watch

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call this on the loop's thread, unless the session ends before."""
        self.loop.post((self.loop.after, seconds, function))

    def context(self) -> Context:
        return Context(others=tuple((kind, ()) for kind in others(self.machine)))

    def shutdown(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        self.loop.post((self._stop,))
        self._thread.join(10)

    def join(self) -> None:
        """Wait until the session has ended."""
        self._thread.join()

    def _do(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the loop do something: at once, if this is the main thread and the loop sleeps."""
        if self._assists and threading.get_ident() == self._main:
            self.loop.do((function, *arguments))
        else:
            self.loop.post((function, *arguments))

    def _call_back(self, callback: Callable[[], None]) -> None:
        """At once if the object is there already; on the loop's own thread when it comes."""
        if self.loop.mine():
            self.loop.tell(callback)
        else:
            callback()

    def _submit_named(self, call: Call) -> list[ObjectId]:
        found = self.driver.admission.existing(call)
        if found is not None:
            self.store.hold(found)
            return [found]
        job = self.driver.admission.admit(call, None)
        self.driver.admission.submitted(job)
        return job.handed_out

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise GpunbError(
                "this process was forked from one that uses gpunb, and gpunb does not work in "
                "forks: call gpunb.shutdown() and gpunb.init() here, or use gpunb.remote instead"
            )
        if self._failure is not None:
            raise GpunbError(
                f"the runtime stopped after an error: {self._failure!r}; call gpunb.shutdown() "
                "and gpunb.init() to go on"
            ) from self._failure
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
        """In a child that somebody forked off the kernel: let go of what is the parent's."""
        self.desk.forked()
        self.driver.leases.forked()
        for process in self.driver.pool.processes():
            process.channel.close()
            os.close(process.interrupts)

    def _on_loop(self, function: Callable[[], T]) -> T:
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

    def _run(self, method: str, preload: Sequence[str], launched: Launched | None) -> None:
        pool = self.driver.pool
        kept = self.driver.leases.kept
        try:
            self.driver.leases.open()
            if method == "fork":
                self.driver.open(ForkSource(self.loop, pool, preload, launched, kept))
            else:
                self.driver.open(SpawnSource(self.loop, pool, kept))
            self.desk.open()
            self.loop.run(_call)
        except BaseException as error:
            self._failure = error
            self.driver.close(GpunbError(f"the runtime stopped after an error: {error!r}"))
        finally:
            self.desk.close()
            self.loop.close()
            if self._mps is not None:
                self._mps.stop()
            self.memory.close()
            self.store.clear()

    def _stop(self) -> None:
        self.driver.close(GpunbError(self.end))
        self.loop.stop()


def _call(item: tuple[Any, ...]) -> None:
    """What is posted to the loop: a function and its arguments."""
    item[0](*item[1:])


_sessions: weakref.WeakSet[Local] = weakref.WeakSet()


def _forked() -> None:
    for session in list(_sessions):
        session.forked()


os.register_at_fork(after_in_child=_forked)
