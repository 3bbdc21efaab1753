"""The backend of a kernel that is attached to a head process; `peer` is the other side."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from gpunb.control.server import Answer
from gpunb.data import arenas
from gpunb.data.serialize import Payload
from gpunb.engine import ids
from gpunb.engine.faults import Faults
from gpunb.engine.jobs import HISTORY
from gpunb.engine.publisher import INTERVAL, StatusWatch, Watcher
from gpunb.engine.worker_setup import Present
from gpunb.exceptions import GpunbError
from gpunb.head import discovery
from gpunb.head.connection import Connection
from gpunb.head.output_client import KernelSinks
from gpunb.protocol import messages as msg
from gpunb.protocol import records, verbs
from gpunb.protocol.backend import DYNAMIC, HANDLE, STREAMING, Call, Context, ObjectId, Outcome
from gpunb.protocol.facts import Fact
from gpunb.protocol.rpc import Arrived
from gpunb.protocol.sink import Sink
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import Machine
from gpunb.scheduler.tasks import ActorId, TaskId, TaskSpec
from gpunb.system import linux
from gpunb.system.signals import UNDIVIDED, Divisible

FAST = 0.1
"""Seconds between calls that follow each other fast."""

LEAST, MOST = 8, verbs.NUMBERS_AT_ONCE
"""Task numbers that are requested in advance for such calls: at first, and at most."""


def attach(address: str) -> HeadBackend:
    """Attach this process to the head process of that name; ``"auto"`` means the only one.

    Raises:
        ValueError: no head process of that name runs.
        GpunbError: `address` is ``"auto"`` and none or several run, or the connection failed.
    """
    linux.check()
    return HeadBackend(*discovery.open_connection(address))


class HeadBackend:
    """The backend of an attached kernel. All methods may be called from any thread."""

    def __init__(self, sock: socket.socket, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._logs: OrderedDict[int, Any] = OrderedDict()
        self._functions: dict[tuple[Any, ...], tuple[int, bool, TaskSpec, bytes]] = {}
        self._watches: dict[int, StatusWatch] = {}
        self._numbers = itertools.count(1)
        self._spare: deque[int] = deque()
        self._asked = 0.0
        self._most = LEAST
        self._present = Present()
        self._sent = self._present.now()
        self._reached = 0, 0
        gone = f"the head process {name!r} (pid {pid}) is gone, with all that ran in it"
        self._faults = Faults()
        self._sinks = KernelSinks(self._faults)
        self.connection = Connection(sock, gone, self._on_output, self._faults)
        self._arenas = arenas.use(arenas.Arenas())  # for arguments of calls that wait to be sent
        self._sinks.ask = self.connection.request_later
        _sessions.add(self)
        atexit.register(self.shutdown)
        try:
            with Divisible():
                attach = verbs.Attach(self._sent, ids.reached())
                answer, _ = self.connection.request(attach)
        except BaseException:
            self.shutdown()
            raise
        self._ident: int = answer[0]
        self.machine: Machine = records.read(Machine, answer[1])

    # -------------------------------------------------------------------------------- the backend

    def submit(self, call: Call) -> list[ObjectId]:
        sink, now = call.sink, self._present.now()
        info = self._sinks.add(sink) if sink is not None else None
        news = None if now is self._sent else now
        try:
            objects = self._submit(call, info, news)
        except BaseException:
            if info is not None:
                self._sinks.forget(info.number)
            raise
        self._sent = now
        self._granted(*objects)
        if objects and sink is not None and (log := sink.log) is not None:
            self._keep_log(objects[0][0], log)
        return objects

    def _submit(
        self, call: Call, sink: verbs.SinkInfo | None, news: verbs.Surroundings | None
    ) -> list[ObjectId]:
        """Submit a call.

        The first call of a function sends the part that is equal in all its calls; later calls
        refer to it. A later call fails only through its results, so it needs no reply if there is
        a number for it in advance. A call of an actor with a limit of calls always gets a reply.
        """
        payloads = [call.arguments]
        rest = call.inputs, call.actor, call.new, sink, news
        common = call.kind in ("call", "method")
        key = id(call.spec), id(call.code), call.returns, call.retry, call.kind
        known = self._functions.get(key) if common else None
        if known is not None:
            numbered = known[1] and call.returns != STREAMING
            ident = self._number() if numbered else None
            if ident is not None:
                self.connection.check_alive()
                verb = verbs.SubmitNumbered(known[0], None, ident, *rest)
                self.connection.request_later(verb, payloads)
                count = 1 if call.returns == DYNAMIC else call.returns
                return [(ident, index) for index in range(count)]
            verb = verbs.SubmitNumbered(known[0], None, None, *rest)
            (objects, _), _ = self.connection.request(verb, payloads)
            return objects
        number = next(self._numbers) if common else 0
        function = records.Function.of(call, self._ident)
        verb = verbs.SubmitNumbered(number, function, None, *rest)
        (objects, free), _ = self.connection.request(verb, payloads)
        if common:
            # Not earlier: a call of another thread could reach the head process first. The
            # record keeps `spec` and `code` alive, so that their ids stay theirs.
            self._functions[key] = number, free, call.spec, call.code
            if len(self._functions) > discovery.KINDS:
                self._functions.pop(next(iter(self._functions)), None)
        return objects

    def _number(self) -> int | None:
        """A number for a call, from numbers that were requested in advance; None if there is none.

        Numbers are requested in advance when calls follow each other fast. The single calls of a
        user in a notebook get their numbers from the head process.
        """
        try:
            return self._spare.popleft()
        except IndexError:
            pass
        now = time.monotonic()
        fast, self._asked = now - self._asked < FAST, now
        if not fast:
            self._most = LEAST
            return None
        numbers, _ = self.connection.request(verbs.Numbers(self._most))
        self._most = min(MOST, 2 * self._most)
        self._granted((numbers[-1], 0))
        self._spare.extend(numbers[1:])
        return numbers[0]

    def put(self, payload: Payload) -> ObjectId:
        obj, _ = self.connection.request(verbs.Put(False), [payload])
        self._granted(obj)
        return obj

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        self._check_may_wait(objects, len(objects), timeout)
        timeout = verbs.seconds(timeout)
        if len(objects) > msg.BATCH:
            failed, payloads = self.connection.request(verbs.Fetch(tuple(objects), timeout, False))
            if failed:
                return [Outcome(payloads[0], failed=True)]
        outcomes: list[Outcome] = []
        for start in range(0, len(objects), msg.BATCH):
            batch = tuple(objects[start : start + msg.BATCH])
            failed, payloads = self.connection.request(verbs.Fetch(batch, timeout, True))
            if failed:
                return [Outcome(payloads[0], failed=True)]
            outcomes.extend(map(Outcome, payloads))
        return outcomes

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        self._check_may_wait(objects, count, timeout)
        return self._wait(objects, count, timeout)

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        self.connection.request_soon(lambda _: callback(), verbs.Watch(obj))

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        self.connection.request(verbs.Cancel(obj, force, recursive))

    def interrupt(self, obj: ObjectId) -> None:
        self.connection.request(verbs.Interrupt(obj))

    def take(self, obj: ObjectId) -> bool:
        return self.connection.request(verbs.Take(obj))[0]

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        with UNDIVIDED:
            (obj, kind), _ = self.connection.request(verbs.FindActor(name, namespace))
        self._granted(obj)
        return obj, kind

    def kill(self, actor: ActorId, restart: bool) -> None:
        self.connection.request(verbs.Kill(actor, restart))

    def hold(self, obj: ObjectId) -> None:
        self.connection.check_alive()
        self.connection.send(msg.Held(obj, 1))

    def drop(self, obj: ObjectId) -> None:
        # Other tasks may wait for the devices of an actor; nothing waits for a value's memory.
        self.connection.send(msg.Held(obj, -1), lazily=obj[1] != HANDLE)

    def ask(self, what: Fact, *arguments: Any) -> Any:
        if what == "total":
            return self.machine.totals()
        if what == "refusal":
            return Capacity(self.machine).fit(arguments[0]).refusal
        if what == "log":
            return self._logs.get(*arguments)
        if what == "job" and not self.connection.alive:
            return None  # asked about each job that ends, also when the session ends
        answer, _ = self.connection.request(verbs.Ask(what, arguments))
        if what == "status":
            answer["warnings"] += self._faults.texts
        return answer

    def context(self) -> Context:
        return Context()

    def retained(self) -> list[dict[str, Any]]:
        return self.connection.request(verbs.ListRetained())[0]

    def adopt(self, job: TaskId) -> dict[str, Any]:
        with UNDIVIDED:
            facts, _ = self.connection.request(verbs.Adopt(job))
        self._granted((job, 0))
        return facts

    def brought_home(self, job: TaskId) -> None:
        self.connection.request_later(verbs.BroughtHome(job))

    def log_of(self, job: TaskId, position: int) -> tuple[bytes, int]:
        return self.connection.request(verbs.ReadLog(job, position))[0]

    def cancel_all(self) -> None:
        self.connection.request(verbs.CancelAll())

    def find_session(self, name: str, sink: Sink) -> tuple[ActorId, bytes, dict[str, Any]] | None:
        info, session = self._sinks.add(sink), None
        try:
            session, _ = self.connection.request(verbs.FindSession(name, info))
        finally:
            if session is None:
                self._sinks.forget(info.number)
        return session

    @property
    def left(self) -> bool:
        """Whether this process has left the head process, which goes on."""
        return self.connection.closed and not self.connection.lost

    def shutdown(self) -> None:
        """Leave the head process; it goes on."""
        arenas.stop(self._arenas)
        if self.connection.hang_up():
            atexit.unregister(self.shutdown)
            ids.go_on(*self._reached)
        with Divisible():
            self.connection.join()

    # --------------------------------------------------------------------------- for the monitor

    def request(self, request: dict[str, Any], answer: Answer) -> None:
        """Send a request to the control server of the head process; `answer` is called with the
        reply on the loop's thread."""

        def replied(arrived: Arrived | None) -> None:
            if arrived is None or arrived[0].failed:
                answer({"ok": False, "error": "the session has ended"})
            else:
                answer(arrived[0].value)

        self.connection.request_soon(replied, verbs.Control(request))

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> StatusWatch:
        """Call `watcher` with a snapshot on the loop's thread: now and after each change, until the
        watch is stopped or the session ends."""
        self.connection.check_alive()
        watch = StatusWatch(watcher, interval)
        number = next(self._numbers)
        self._watches[number] = watch
        self.connection.request_later(verbs.WatchStatus(number, watch.interval))
        return watch

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call this on the loop's thread, unless the session ends before."""
        self.connection.loop.post((self.connection.loop.after, seconds, function))

    def _wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> set[ObjectId]:
        verb = verbs.Wait(tuple(objects), int(count), verbs.seconds(timeout))
        return set(self.connection.request(verb)[0])

    def _granted(self, *objects: ObjectId) -> None:
        """Note the highest numbers in use, so that the next session uses other ones."""
        tasks, puts = self._reached
        for task, index in objects:
            if task > tasks:
                tasks = task
            elif not task and index > puts:
                puts = index
        self._reached = tasks, puts

    def _keep_log(self, task: int, log: Any) -> None:
        self._logs[task] = log
        if len(self._logs) > HISTORY:
            self._logs.popitem(last=False)

    def _check_may_wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> None:
        if timeout == 0 or not self.connection.loop.mine():
            return
        if len(self._wait(objects, count, 0)) < count:
            raise GpunbError(
                "a callback of a future must not wait for other tasks: it runs on the thread that "
                "hears of their end"
            )

    def forked(self) -> None:
        """Give up the parent's descriptors, in a child process that was forked from the kernel."""
        self.connection.forked()
        self._arenas.forked()

    # ------------------------------------------------------------------------ on the loop's thread

    def _on_output(self, message: msg.Output | None, payloads: list[Payload]) -> None:
        if message is None:
            for number in list(self._watches):
                self._look(number, None)
            self._sinks.close()
        elif message.kind == "dismissed":
            why = message.content["why"]
            self.connection.end(f"the head process {self.name!r} ended the connection: {why}")
        elif message.kind == "snapshot":
            self._look(message.sink, message.content["snapshot"])
        else:
            self._sinks.output(message, payloads)

    def _look(self, number: int, snapshot: dict[str, Any] | None) -> None:
        watch = self._watches.get(number)
        if watch is None:
            return
        if watch.stopped or snapshot is None:
            del self._watches[number]
            self.connection.request_later(verbs.Unwatch(number))
        if not watch.stopped:
            try:
                watch.watcher(snapshot)
            except Exception as error:
                watch.stop()
                self._faults.note(f"a live view is not drawn any more: {error!r}", error)


_sessions: weakref.WeakSet[HeadBackend] = weakref.WeakSet()


def _forked() -> None:
    """Give up the descriptors of the parent's sessions, and forget the sessions: in a child of this
    child, the same descriptor numbers may belong to other files."""
    while _sessions:
        _sessions.pop().forked()


os.register_at_fork(after_in_child=_forked)
