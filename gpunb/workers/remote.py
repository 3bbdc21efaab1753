"""The API's backend inside a worker: every call is a request to the kernel.

Usually there is no reader thread, because a worker should be free to fork: whoever waits for an
answer reads the channel, and hands what is for others to them.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import itertools
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpunb import exceptions, serialize
from gpunb.backend import HOLDERS, Call, Context, ObjectId, Outcome
from gpunb.core.tasks import ActorId
from gpunb.objects import Segment
from gpunb.serialize import Payload
from gpunb.signals import UNDIVIDED
from gpunb.workers import messages as msg
from gpunb.workers.channel import Channel, ChannelClosed

BATCH = 100
"""Objects asked for at once: each may come with a descriptor, and a message takes some 250."""

TIDY_AFTER = 0.1
"""Seconds without work after which references are looked for that only the collector can find."""

LOOK_AFTER = 5.0
"""The same, at most, while threads go on that tasks have left."""

_LOOK_AGAIN = 0.05
"""Seconds after which who waits for an answer sees for itself whether anybody reads."""

_within: contextvars.ContextVar[Context | None] = contextvars.ContextVar("gpunb", default=None)


class Remote:
    """Speaks to the kernel for the code that runs here.

    Attributes:
        beside: is called, by any thread, when it has read a message that is not for it, where the
            main thread does not wait for these but looks when it is told.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._context = Context()
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[msg.Reply, list[Segment]]] = {}
        self._gates: dict[int, threading.Lock] = {}
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._reading = threading.Lock()
        self._reader: int | None = None
        self._sending = threading.Lock()
        self._reporting = threading.Lock()
        self._listening = threading.Lock()
        self._changes: deque[tuple[ObjectId, int]] = deque()
        self._others: deque[tuple[msg.Message, list[int]]] = deque()
        self._listener: threading.Thread | None = None
        self._told: Callable[[msg.Told, Sequence[Payload]], None] | None = None
        self._ear: threading.Thread | None = None
        self._heard: deque[tuple[msg.Told, list[int]]] = deque()
        self._pid = os.getpid()
        self._used = False
        self.beside: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------- for the loop

    def next_message(self) -> tuple[msg.Message, list[int]]:
        """The next thing to do, waiting for it. A thread that a task left may read it for us."""
        patience = TIDY_AFTER
        while not self._others:
            if self._used and not select.select([self._channel], [], [], patience)[0]:
                # A thread that a task left may let go of something at any time, and says nothing.
                self._used = _threads_of_tasks()  # and not before: the next task may use nothing
                self.tidy()
                patience = min(2 * patience, LOOK_AFTER)
                continue
            if self._reads(_LOOK_AGAIN):
                self._read(lambda: bool(self._others))
        return self._others.popleft()

    def messages_now(self) -> Iterator[tuple[msg.Message, list[int]]]:
        """The next things to do, as far as they are there.

        Raises:
            ChannelClosed: the kernel is gone.
        """
        while True:
            while self._others:
                yield self._others.popleft()
            if not self._reads():
                return  # whoever reads will tell
            try:
                self._read(lambda: bool(self._others), wait=False)
            except BlockingIOError:
                return

    def tidy(self) -> None:
        """Let go of references in what only the collector can find."""
        gc.collect()
        self.report_references()

    def take_stock(self) -> None:
        """After an interrupt of the main thread: it may have hit just when the kernel had given
        something, or before what was let go was noted, so say what is held here."""
        if threading.active_count() > 1:
            self.report_references()  # others go on meanwhile
            return
        gc.collect()
        self._changes.clear()
        held: dict[ObjectId, int] = {}
        for each in gc.get_objects():
            if (refers := HOLDERS.get(type(each))) is not None:
                try:
                    obj = refers(each)
                except AttributeError:
                    continue  # it was interrupted before it was one
                held[obj] = held.get(obj, 0) + 1
        self.send(msg.Stock(tuple(held.items())))

    def enter(self, context: Context) -> None:
        """From now on this is what runs here."""
        self._context = context

    @contextlib.contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """This is what runs in this thread or coroutine, among others."""
        token = _within.set(context)
        try:
            yield
        finally:
            _within.reset(token)

    def leave(self) -> None:
        """The task is over: say what is held here, before the kernel lets go of its arguments. What
        is held no more may be in its results, and has to wait until these are reported."""
        if self._changes:
            self._used = True
            self.report_references(gains_only=True)

    def show(self, kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        """Have something shown where the running task was submitted."""
        task = self.context().task
        if task is not None:
            wires, _ = serialize.to_wires(payloads)
            self.send(msg.Shown(task, kind, content, wires), payloads)

    def question(self, prompt: str | None, password: bool = False) -> Any:
        """What the user answers; without a prompt, nothing if there is somebody to be asked.

        Raises:
            NotImplementedError: there is not.
        """
        return self._request("input", (prompt, password))[0]

    # -------------------------------------------------------------------------------- the backend

    def submit(self, call: Call) -> list[ObjectId]:
        facts = (
            call.spec,
            call.code,
            call.inputs,
            call.returns,
            call.retry,
            call.kind,
            call.actor,
            call.new,
            call.held,
        )
        answer, _ = self._request("submit", (pickle.dumps(facts, 5),), [call.arguments])
        return [tuple(each) for each in answer]

    def put(self, payload: Payload) -> ObjectId:
        answer, _ = self._request("put", (payload.references,), [payload])
        return tuple(answer)

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        outcomes: list[Outcome] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        for start in range(0, len(objects), BATCH):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            batch = tuple(objects[start : start + BATCH])
            failed, payloads = self._request("fetch", (batch, left))
            if failed:
                return [Outcome(payloads[0], failed=True)]
            outcomes.extend(map(Outcome, payloads))
        return outcomes

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        answer, _ = self._request("wait", (tuple(objects), count, timeout))
        return {tuple(each) for each in answer}

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._callbacks[number] = callback
        self._ask(number, "watch", (obj,), ())
        if self.beside is None:
            self._listen()

    def awaits(self, task: int, attempt: int, objects: tuple[ObjectId, ...]) -> None:
        """One of these has to come before the task goes on, which has asked to be notified of
        them; it is not sure if there are none. There is no answer."""
        if os.getpid() == self._pid:
            self.send(msg.Request(0, task, attempt, "awaits", objects))

    def take(self, obj: ObjectId) -> bool:
        answer, _ = self._request("take", (obj,))
        return bool(answer)

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        answer, _ = self._request("find_actor", (name, namespace))
        return tuple(answer[0]), answer[1]

    def kill(self, actor: ActorId, restart: bool) -> None:
        self._request("kill", (actor, restart))

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        self._request("cancel", (obj, force, recursive))

    def interrupt(self, obj: ObjectId) -> None:
        self._request("interrupt", (obj,))

    def hold(self, obj: ObjectId) -> None:
        self._changes.append((obj, 1))

    def drop(self, obj: ObjectId) -> None:
        self._changes.append((obj, -1))

    def ask(self, what: str, *arguments: Any) -> Any:
        answer, _ = self._request("ask", (what, arguments))
        return answer

    def context(self) -> Context:
        return _within.get() or self._context

    def shutdown(self) -> None:
        raise exceptions.GpunbError("shutdown() is for the kernel; a task ends by returning")

    # ------------------------------------------------------------------------------------ sending

    def send(self, message: msg.Message, payloads: Sequence[Payload] = ()) -> None:
        """Send a message and the memory that belongs to it."""
        segments = [segment for each in payloads for segment in each.segments]
        with self._sending:
            self._channel.send(message, segments)

    def report_references(self, *, gains_only: bool = False) -> None:
        """Tell the kernel what is held here, and what no more."""
        # What another thread is about to say comes before what this one says next.
        if not self._changes and not self._reporting.locked():
            return
        with self._reporting:
            changes: dict[ObjectId, int] = {}
            while self._changes:
                obj, count = self._changes.popleft()
                changes[obj] = changes.get(obj, 0) + count
            # What is gained goes first, so that nothing is let go that is still wanted.
            for obj, count in sorted(changes.items(), key=lambda each: -each[1]):
                if count < 0 and gains_only:
                    self._changes.append((obj, count))
                elif count:
                    self.send(msg.Held(obj, count))

    def _ask(
        self, number: int, verb: str, arguments: tuple[Any, ...], payloads: Sequence[Payload]
    ) -> None:
        if os.getpid() != self._pid:
            raise exceptions.GpunbError(
                "this process was forked from a task's, and gpunb does not work in forks: "
                "use gpunb.remote instead"
            )
        self._used = True
        self.report_references()
        wires, _ = serialize.to_wires(payloads)
        context = self.context()
        task, attempt = context.task or 0, context.attempt or 0
        self.send(msg.Request(number, task, attempt, verb, arguments, wires), payloads)

    def _request(
        self, verb: str, arguments: tuple[Any, ...], payloads: Sequence[Payload] = ()
    ) -> tuple[Any, list[Payload]]:
        number = next(self._numbers)
        gate = self._gates[number] = threading.Lock()
        gate.acquire()
        try:
            self._ask(number, verb, arguments, payloads)
            reply, segments = self._answer(number, gate)
        finally:
            self._gates.pop(number, None)
            self._answers.pop(number, None)
        values = serialize.from_wires(reply.payloads, segments)
        if reply.failed:
            raise serialize.loads(values[0])
        return reply.value, values

    # ------------------------------------------------------------------------------------ reading

    def _answer(self, number: int, gate: threading.Lock) -> tuple[msg.Reply, list[Segment]]:
        while True:
            found = self._answers.pop(number, None)
            if found is not None:
                return found
            if self._reads():
                self._read_whole(lambda: number in self._answers)
            else:
                gate.acquire(timeout=_LOOK_AGAIN)

    def _reads(self, patience: float = 0.0) -> bool:
        """Acquire `_reading`. A thread that comes here and has it was interrupted before it read,
        or before it gave it back."""
        me = threading.get_ident()
        if self._reader != me:
            with UNDIVIDED:
                if not self._reading.acquire(timeout=patience):
                    return False
                self._reader = me
        return True

    def _read(self, there: Callable[[], bool], *, wait: bool = True) -> None:
        """Take one message off the channel, unless what is wanted is there. Who calls this has
        acquired `_reading`, which is given back here. An interrupt loses the message."""
        ready: Callable[[], None] | None = None
        try:
            if not there():
                ready = self._sort(*self._channel.receive(wait=wait))
        finally:
            self._read_enough()
        if ready is not None:
            ready()

    def _read_whole(self, there: Callable[[], bool]) -> None:
        """As `_read`; an interrupt may come at any time, and loses nothing."""
        try:
            if not there():
                self._channel.await_message()
            with UNDIVIDED:
                self._read(there, wait=False)
        except BaseException:
            if self._reader == threading.get_ident():
                self._read_enough()
            raise

    def _read_enough(self) -> None:
        with UNDIVIDED:
            self._reader = None
            self._reading.release()
        # Somebody else should read, if anybody is left who waits.
        for gate in list(self._gates.values()):
            if gate.locked():
                _open(gate)
                break

    def _sort(self, message: msg.Message, descriptors: list[int]) -> Callable[[], None] | None:
        """Put a message where it belongs; what is to be called for it when nobody reads."""
        if isinstance(message, msg.Told) and self._told is not None:
            self._heard.append((message, descriptors))
            return None
        if not isinstance(message, msg.Reply):
            self._others.append((message, descriptors))
            return self.beside
        segments = [Segment.adopt(each) for each in descriptors]
        gate = self._gates.get(message.request)
        if gate is not None:  # else whoever asked was interrupted
            self._answers[message.request] = (message, segments)
            _open(gate)
            return None
        return self._callbacks.pop(message.request, None)

    def _listen(self) -> None:
        """Have somebody read as long as callbacks are waited for."""
        with self._listening:
            if self._listener is None:
                self._listener = threading.Thread(
                    target=self._hear, name="gpunb-listener", daemon=True
                )
                self._listener.start()

    def listen_to(self, told: Callable[[msg.Told, Sequence[Payload]], None] | None) -> None:
        """While a task runs, have a thread call this with whatever is told here; with None no more,
        so that it is among the next messages."""
        with self._listening:
            self._told = told
            if told is None:
                self._others.extend(self._heard_now())
            elif self._ear is None or not self._ear.is_alive():
                if self._ear is None:  # a fork of a task must not wait for what the thread has
                    os.register_at_fork(after_in_child=lambda: _open(self._sending))
                self._ear = threading.Thread(target=self._attend, name="gpunb-ear", daemon=True)
                self._ear.start()

    def _attend(self) -> None:
        """Call what is told as long as somebody wants it. Whoever else reads is not kept from it,
        because this thread waits without the right to."""
        try:
            while (told := self._told) is not None:
                for message, descriptors in self._heard_now():
                    told(message, arrived(message.payloads, descriptors))
                if select.select([self._channel], [], [], _LOOK_AGAIN)[0] and self._reads(
                    _LOOK_AGAIN
                ):
                    with contextlib.suppress(BlockingIOError):
                        self._read(lambda: bool(self._heard), wait=False)
        except (ChannelClosed, OSError, ValueError):
            pass  # the main thread finds out by itself

    def _heard_now(self) -> Iterator[tuple[msg.Told, list[int]]]:
        while True:
            try:
                yield self._heard.popleft()
            except IndexError:
                return

    def _hear(self) -> None:
        try:
            while True:
                with self._listening:
                    if not self._callbacks:
                        self._listener = None
                        return
                if self._reads(_LOOK_AGAIN):
                    self._read(lambda: not self._callbacks)
        except (ChannelClosed, OSError):
            pass  # the main thread finds out by itself

    def recover(self) -> None:
        """After an interrupt of the main thread, which may have hit between taking a lock and the
        block that gives it back, or before it had cleared up."""
        if self._ear is not None:
            self._ear.join(2 * _LOOK_AGAIN)
        if threading.active_count() == 1:
            self._reader = None
            self._gates.clear()
            self._answers.clear()
            for lock in (self._reading, self._sending, self._reporting, self._listening):
                _open(lock)


def arrived(wires: Sequence[tuple[msg.Wire, int]], descriptors: Sequence[int]) -> list[Payload]:
    """The payloads of a message, with the segments that came beside it."""
    return serialize.from_wires(wires, [Segment.adopt(each) for each in descriptors])


def _threads_of_tasks() -> bool:
    own = sum(each.name.startswith("gpunb-") for each in threading.enumerate())
    return threading.active_count() > 1 + own


def _open(gate: threading.Lock) -> None:
    try:
        gate.release()
    except RuntimeError:
        pass  # it is open already
