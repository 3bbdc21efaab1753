"""A head process as backend: the kernel's side of `clients`."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import socket
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpunb import linux
from gpunb.backend import DYNAMIC, HANDLE, STREAMING, Call, Context, ObjectId, Outcome
from gpunb.core.resources import Machine
from gpunb.core.tasks import ActorId, TaskId, TaskSpec
from gpunb.exceptions import GpunbError
from gpunb.runtime import heads, numbers, origin
from gpunb.runtime.connection import Connection
from gpunb.runtime.desk import Answer
from gpunb.runtime.jobs import HISTORY
from gpunb.runtime.picture import INTERVAL, Watch, Watcher
from gpunb.runtime.setup import Present
from gpunb.runtime.shown import Sinks
from gpunb.serialize import Payload
from gpunb.signals import UNDIVIDED
from gpunb.workers import messages as msg
from gpunb.workers.remote import BATCH

FAST = 0.1
"""Seconds between calls that follow each other fast."""

LEAST, MOST = 8, 256
"""Numbers that are had beforehand for such calls."""


def attach(address: str) -> Attached:
    """Attach this process to the head process of that name; to the one there is for ``"auto"``.

    Raises:
        ValueError: none of that name runs.
        GpunbError: none runs at all, several do, or it cannot be understood.
    """
    linux.check()
    there = heads.running()
    names = ", ".join(repr(each.name) for each in there)
    if address == "auto":
        if not there:
            raise GpunbError(
                "address='auto' found no head process: start one with `gpunb start --head`, or "
                "leave the address out for a scheduler in this kernel"
            )
        if len(there) > 1:
            raise GpunbError(f"address='auto' found several head processes: name one of {names}")
        address = there[0].name
    try:
        sock, pid = heads.connect(heads.check_name(address))
    except (OSError, ValueError):
        known = f"those that run are {names}" if there else "none runs"
        raise ValueError(
            f"address={address!r} is no head process of this machine ({known}): start it with "
            f"`gpunb start --head --name {address}`, or leave the address out for a scheduler in "
            "this kernel"
        ) from None
    try:
        heads.introduce(sock, origin.about())
    except (OSError, ValueError) as error:
        sock.close()
        raise GpunbError(f"the head process {address!r} (pid {pid}) gave no answer") from error
    except BaseException:
        sock.close()
        raise
    sock.setblocking(True)
    return Attached(sock, address, pid)


class Attached:
    """The backend of a kernel that is attached. All methods may be called from any thread."""

    def __init__(self, sock: socket.socket, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._logs: OrderedDict[int, Any] = OrderedDict()
        self._said: dict[tuple[Any, ...], tuple[int, bool, TaskSpec, bytes]] = {}
        self._watches: dict[int, Watch] = {}
        self._numbers = itertools.count(1)
        self._spare: deque[int] = deque()
        self._asked = 0.0
        self._most = LEAST
        self._present = Present()
        self._told = self._present.now()
        self._reached = 0, 0
        gone = f"the head process {name!r} (pid {pid}) is gone, with all that ran in it"
        self._sinks = Sinks()
        self._connection = Connection(sock, gone, self._heard)
        self._sinks.ask = self._connection.request_later
        _sessions.add(self)
        atexit.register(self.shutdown)
        arguments = (tuple(self._told), numbers.reached())
        try:
            answer, _ = self._connection.request("attach", arguments)
        except BaseException:
            self.shutdown()
            raise
        self._ident: int = answer[0]
        self.machine: Machine = pickle.loads(answer[1])

    # -------------------------------------------------------------------------------- the backend

    def submit(self, call: Call) -> list[ObjectId]:
        sink, now = call.sink, self._present.now()
        about = self._sinks.add(sink) if sink is not None else None
        news = None if now is self._told else tuple(now)
        new = None if call.new is None else pickle.dumps(call.new, 5)
        rest = (call.inputs, call.actor, new, about, news)
        try:
            objects = self._submit(call, rest)
        except BaseException:
            if about is not None:
                self._sinks.forget(about[0])
            raise
        self._told = now
        self._granted(*objects)
        if objects and (log := getattr(sink, "log", None)) is not None:
            self._keep_log(objects[0][0], log)
        return objects

    def _submit(self, call: Call, rest: tuple[Any, ...]) -> list[ObjectId]:
        """Hand in a call. What its function's calls have in common is said with the first; the
        others can only fail with their results, but for those of an actor that takes only so many,
        and need no answer if there is a number for them."""
        payloads = [call.arguments]
        common = call.kind in ("call", "method")
        key = id(call.spec), id(call.code), call.returns, call.retry, call.kind
        known = self._said.get(key) if common else None
        if known is not None:
            numbered = known[1] and call.returns != STREAMING
            ident = self._number() if numbered else None
            if ident is not None:
                self._connection.check_alive()
                arguments = (known[0], None, ident, *rest)
                self._connection.request_later("submit", arguments, payloads)
                count = 1 if call.returns == DYNAMIC else call.returns
                return [(ident, index) for index in range(count)]
            answer, _ = self._connection.request("submit", (known[0], None, None, *rest), payloads)
            return [tuple(each) for each in answer[0]]
        number = next(self._numbers) if common else 0
        spec = replace(call.spec, owner=self._ident)
        kind = pickle.dumps((spec, call.code, call.returns, call.retry, call.kind, call.held), 5)
        answer, _ = self._connection.request("submit", (number, kind, None, *rest), payloads)
        if common:
            # Only from now on, as others may be faster with theirs. The ids stay those of these.
            self._said[key] = number, answer[1], call.spec, call.code
            if len(self._said) > heads.KINDS:
                self._said.pop(next(iter(self._said)), None)
        return [tuple(each) for each in answer[0]]

    def _number(self) -> int | None:
        """A number for a call, if some were had beforehand: so it is where one call follows the
        other, while those of a user at his notebook are numbered as they come."""
        try:
            return self._spare.popleft()
        except IndexError:
            pass
        now = time.monotonic()
        fast, self._asked = now - self._asked < FAST, now
        if not fast:
            self._most = LEAST
            return None
        found, _ = self._connection.request("numbers", (self._most,))
        self._most = min(MOST, 2 * self._most)
        self._granted((found[-1], 0))
        self._spare.extend(found[1:])
        return int(found[0])

    def put(self, payload: Payload) -> ObjectId:
        answer, _ = self._connection.request("put", (payload.references,), [payload])
        self._granted(tuple(answer))
        return tuple(answer)

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        self._check_may_wait(objects, len(objects), timeout)
        if len(objects) > BATCH:
            failed, payloads = self._connection.request("fetch", (tuple(objects), timeout, False))
            if failed:
                return [Outcome(payloads[0], failed=True)]
        outcomes: list[Outcome] = []
        for start in range(0, len(objects), BATCH):
            batch = tuple(objects[start : start + BATCH])
            failed, payloads = self._connection.request("fetch", (batch, timeout))
            if failed:
                return [Outcome(payloads[0], failed=True)]
            outcomes.extend(map(Outcome, payloads))
        return outcomes

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        self._check_may_wait(objects, count, timeout)
        return self._wait(objects, count, timeout)

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        self._connection.request_soon(lambda _: callback(), "watch", (obj,))

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        self._connection.request("cancel", (obj, force, recursive))

    def interrupt(self, obj: ObjectId) -> None:
        self._connection.request("interrupt", (obj,))

    def take(self, obj: ObjectId) -> bool:
        answer, _ = self._connection.request("take", (obj,))
        return bool(answer)

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        with UNDIVIDED:
            answer, _ = self._connection.request("find_actor", (name, namespace))
        self._granted(tuple(answer[0]))
        return tuple(answer[0]), answer[1]

    def kill(self, actor: ActorId, restart: bool) -> None:
        self._connection.request("kill", (actor, restart))

    def hold(self, obj: ObjectId) -> None:
        self._connection.check_alive()
        self._connection.tell(msg.Held(obj, 1))

    def drop(self, obj: ObjectId) -> None:
        # An actor's devices are waited for, and a value's memory hardly ever.
        self._connection.tell(msg.Held(obj, -1), lazily=obj[1] != HANDLE)

    def ask(self, what: str, *arguments: Any) -> Any:
        if what == "total":
            return self.machine.totals()
        if what == "log":
            return self._logs.get(*arguments)
        if what == "job" and not self._connection.alive:
            return None  # asked of each that ends, also when all does
        answer, _ = self._connection.request("ask", (what, arguments))
        return answer

    def context(self) -> Context:
        return Context()

    def kept(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._connection.request("kept", ())[0]
        return found

    def adopt(self, job: TaskId) -> dict[str, Any]:
        with UNDIVIDED:
            facts: dict[str, Any] = self._connection.request("adopt", (job,))[0]
        self._granted((job, 0))
        return facts

    def brought_home(self, job: TaskId) -> None:
        self._connection.request_later("brought home", (job,))

    def log_of(self, job: TaskId, position: int) -> tuple[bytes, int]:
        portion, after = self._connection.request("log", (job, position))[0]
        return portion, after

    def cancel_all(self) -> None:
        self._connection.request("cancel all", ())

    def find_session(self, name: str, sink: Any) -> tuple[ActorId, bytes, dict[str, Any]] | None:
        about, found = self._sinks.add(sink), None
        try:
            found = self._connection.request("session", (name, about))[0]
        finally:
            if found is None:
                self._sinks.forget(about[0])
        return None if found is None else (found[0], found[1], found[2])

    @property
    def left(self) -> bool:
        """Whether this process has left the head process, which goes on."""
        return self._connection.closed and not self._connection.lost

    def shutdown(self) -> None:
        """Leave the head process; it goes on."""
        if self._connection.close():
            atexit.unregister(self.shutdown)
            numbers.go_on(*self._reached)

    # --------------------------------------------------------------------------- for the monitor

    def request(self, request: dict[str, Any], answer: Answer) -> None:
        """Have the desk of the head process do something; `answer` is called on the loop's thread
        with what it says."""

        def said(reply: msg.Reply | None) -> None:
            if reply is None or reply.failed:
                answer({"ok": False, "error": "the session has ended"})
            else:
                answer(reply.value)

        self._connection.request_soon(said, "desk", (request,))

    def watch(self, watcher: Watcher, interval: float = INTERVAL) -> Watch:
        """Have snapshots given to `watcher` on the loop's thread: one now, and one whenever
        something has changed, until the watch is stopped or the session ends."""
        self._connection.check_alive()
        watch = Watch(watcher, interval)
        number = next(self._numbers)
        self._watches[number] = watch
        self._connection.request_later("picture", (number, watch.interval))
        return watch

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call this on the loop's thread, unless the session ends before."""
        self._connection.loop.post((self._connection.loop.after, seconds, function))

    def _wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> set[ObjectId]:
        answer, _ = self._connection.request("wait", (tuple(objects), count, timeout))
        return {tuple(each) for each in answer}

    def _granted(self, *objects: ObjectId) -> None:
        """These numbers are in use, and mean nothing else in the next session."""
        tasks, puts = self._reached
        for task, index in objects:
            tasks, puts = max(tasks, task), puts if task else max(puts, index)
        self._reached = tasks, puts

    def _keep_log(self, task: int, log: Any) -> None:
        self._logs[task] = log
        if len(self._logs) > HISTORY:
            self._logs.popitem(last=False)

    def _check_may_wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> None:
        if timeout == 0 or not self._connection.loop.mine():
            return
        if len(self._wait(objects, count, 0)) < count:
            raise GpunbError(
                "a callback of a future must not wait for other tasks: it runs on the thread that "
                "hears of their end"
            )

    def forked(self) -> None:
        """In a child that somebody forked off the kernel: let go of what is the parent's."""
        self._connection.forked()

    # ------------------------------------------------------------------------ on the loop's thread

    def _heard(self, message: msg.Output | None, payloads: list[Payload]) -> None:
        if message is None:
            for number in list(self._watches):
                self._look(number, None)
            self._sinks.close()
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
            self._connection.request_later("unwatch", (number,))
        if not watch.stopped:
            watch.watcher(snapshot)


def _call(item: tuple[Any, ...]) -> None:
    """What is posted to the loop: a function and its arguments."""
    item[0](*item[1:])


_sessions: weakref.WeakSet[Attached] = weakref.WeakSet()


def _forked() -> None:
    for session in list(_sessions):
        session.forked()


os.register_at_fork(after_in_child=_forked)
