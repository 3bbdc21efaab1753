"""The backend inside a worker: every call is a request to the kernel.

`transport` sends and receives for all threads; `references` counts what they refer to.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from gpunb import exceptions
from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.protocol import messages as msg
from gpunb.protocol import plain, records, verbs
from gpunb.protocol.backend import Call, Context, ObjectId, Outcome
from gpunb.protocol.channel import Channel
from gpunb.protocol.facts import Fact
from gpunb.protocol.rpc import result
from gpunb.protocol.verbs import Verb
from gpunb.scheduler.tasks import ActorId
from gpunb.worker.references import References
from gpunb.worker.transport import Received, Transport

R = TypeVar("R")

TIDY_AFTER = 0.1
"""Seconds without work until garbage is collected, which may hold references."""

LOOK_AFTER = 5.0
"""The longest time between two such collections, while threads of finished tasks go on."""

_within: contextvars.ContextVar[Context | None] = contextvars.ContextVar("gpunb", default=None)


class KernelClient:
    """The backend of the code that runs in this worker."""

    def __init__(self, channel: Channel) -> None:
        self.transport = Transport(channel)
        self._references = References(self.transport.send)
        self._context = Context()
        self._pid = os.getpid()
        self._used = False
        self.send = self.transport.send
        self.listen_to = self.transport.listen_to
        self.hold = self._references.hold
        self.drop = self._references.drop
        self.report_references = self._references.report
        self.take_stock = self._references.take_stock
        self.tidy = self._references.tidy

    # ------------------------------------------------------------------------------- for the loop

    def next_message(self) -> Received:
        """Return the next message to act on, and wait for it. Meanwhile garbage is collected: a
        thread that a task has left may let go of references at any time."""
        patience = TIDY_AFTER
        self.transport.idle = True
        while (work := self.transport.next_work(patience if self._used else None)) is None:
            self._used = _threads_of_tasks()  # and not before: the next task may use nothing
            self.tidy()
            patience = min(2 * patience, LOOK_AFTER)
        self.transport.idle = False
        return work

    def recover(self) -> None:
        """Clear up after an interrupt of the main thread, which may have hit between taking a lock
        and the block that gives it back, or before it had cleared up."""
        if self.transport.recover():
            self._references.recover()

    def enter(self, context: Context) -> None:
        """Set the context of the code that runs from now on."""
        self._context = context

    @contextlib.contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """Set the context of this thread or coroutine; others have their own."""
        token = _within.set(context)
        try:
            yield
        finally:
            _within.reset(token)

    def leave(self) -> None:
        """At the end of a task, report new references before the kernel lets go of the arguments.
        Dropped references may be in the results, and wait until these are reported."""
        if self._references:
            self._used = True
            self.report_references(gains_only=True)

    def show(self, kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        """Show something where the running task was submitted.

        Raises:
            TypeError: a part of the content is no kind of JSON value or bytes.
        """
        task = self.context().task
        if task is not None:
            wires, segments = serialize.to_wires(payloads)
            self.send(msg.Shown(task, kind, _shown(content), wires), segments)

    def question(self, prompt: str | None, password: bool = False) -> Any:
        """Return the user's answer; without a prompt, only check that the user can be asked.

        Raises:
            NotImplementedError: the user cannot be asked.
        """
        return self._request(verbs.Input(prompt, password))[0]

    # -------------------------------------------------------------------------------- the backend

    def submit(self, call: Call) -> list[ObjectId]:
        cancelled = self.context().cancelled
        cleanup = cancelled is not None and cancelled()  # the task knows that it was cancelled
        verb = verbs.Submit(records.Submission.of(call), cleanup)
        return self._request(verb, [call.arguments])[0]

    def put(self, payload: Payload, *, failed: bool = False) -> ObjectId:
        return self._request(verbs.Put(failed), [payload])[0]

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        outcomes: list[Outcome] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        for start in range(0, len(objects), msg.BATCH):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            batch = tuple(objects[start : start + msg.BATCH])
            failed, payloads = self._request(verbs.Fetch(batch, verbs.seconds(left), True))
            if failed:
                return [Outcome(payloads[0], failed=True)]
            outcomes.extend(map(Outcome, payloads))
        return outcomes

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        verb = verbs.Wait(tuple(objects), int(count), verbs.seconds(timeout))
        return set(self._request(verb)[0])

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        number = self.transport.pending.call_back(lambda _: callback())
        self._ask(number, verbs.Watch(obj), ())
        if self.transport.beside is None:
            self.transport.read_for_callbacks()

    def take(self, obj: ObjectId) -> bool:
        return self._request(verbs.Take(obj))[0]

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        return self._request(verbs.FindActor(name, namespace))[0]

    def kill(self, actor: ActorId, restart: bool) -> None:
        self._request(verbs.Kill(actor, restart))

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        self._request(verbs.Cancel(obj, force, recursive))

    def interrupt(self, obj: ObjectId) -> None:
        self._request(verbs.Interrupt(obj))

    def ask(self, what: Fact, *arguments: Any) -> Any:
        return self._request(verbs.Ask(what, arguments))[0]

    def catch_up(self) -> None:
        """Wait until the kernel has read what this process has sent and written."""
        # Code that runs in the middle of a request, such as a finalizer, must not make another.
        with contextlib.suppress(Exception):  # only the place of the text is at stake
            if os.getpid() == self._pid and not self.transport.busy:
                self.ask("total")

    def context(self) -> Context:
        return _within.get() or self._context

    def shutdown(self) -> None:
        raise exceptions.GpunbError("shutdown() is for the kernel; a task ends by returning")

    def _ask(self, number: int, verb: Verb[Any], payloads: Sequence[Payload]) -> None:
        if os.getpid() != self._pid:
            raise exceptions.GpunbError(
                "this process was forked from a task's, and gpunb does not work in forks: "
                "use gpunb.remote instead"
            )
        self._used = True
        self.report_references()
        wires, segments = serialize.to_wires(payloads) if payloads else ((), [])
        context = self.context()
        task, attempt = context.task or 0, context.attempt or 0
        self.send(msg.Request(number, task, attempt, *verbs.encode(verb), wires), segments)

    def _request(self, verb: Verb[R], payloads: Sequence[Payload] = ()) -> tuple[R, list[Payload]]:
        transport = self.transport
        waiter = transport.pending.expect()
        try:
            self._ask(waiter.number, verb, payloads)
            arrived = transport.wait_for(waiter)
        finally:
            transport.pending.forget(waiter.number)
        return result(arrived)


def _shown(content: Any) -> Any:
    try:
        return plain.made(content)
    except (TypeError, ValueError) as error:
        raise TypeError(f"this cannot be displayed: {error}") from error


def _threads_of_tasks() -> bool:
    own = sum(each.name.startswith("gpunb-") for each in threading.enumerate())
    return threading.active_count() > 1 + own
