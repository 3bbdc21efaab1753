"""The API's backend inside a worker: every call is a request to the kernel.

There is no reader thread, because a worker should be free to fork: whoever waits for an answer
reads the channel, and hands answers that are for others to them.
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gpunb import exceptions, serialize
from gpunb.backend import Call, Context, ObjectId, Outcome
from gpunb.objects import Segment
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.channel import Channel

BATCH = 100
"""Objects asked for at once: each may come with a descriptor, and a message takes some 250."""

_TIDY_AFTER = 0.1


class Remote:
    """Speaks to the kernel for the code that runs here."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._context = Context()
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[msg.Reply, list[Segment]]] = {}
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._changes: deque[tuple[ObjectId, int]] = deque()
        self._others: deque[tuple[msg.Message, list[int]]] = deque()
        self._expected: set[int] = set()
        self._pid = os.getpid()
        self._used = False

    # ------------------------------------------------------------------------------- for the loop

    def next_message(self) -> tuple[msg.Message, list[int]]:
        """The next thing to do, waiting for it. A thread that a task left may read it for us."""
        while not self._others:
            if self._used:
                self._tidy()
            self._read(lambda: bool(self._others))
        return self._others.popleft()

    def _tidy(self) -> None:
        """When nothing comes, let go of references in what only the collector can find."""
        self._used = False
        if not select.select([self._channel], [], [], _TIDY_AFTER)[0]:
            gc.collect()
            self.report_references()

    def enter(self, context: Context) -> None:
        self._context = context

    def leave(self) -> None:
        """The task is over: say what is held here, before the kernel lets go of its arguments. What
        is held no more may be in its results, and has to wait until these are reported."""
        if self._changes:
            self._used = True
            self.report_references(gains_only=True)

    def show(self, kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        """Have something shown where the running task was submitted."""
        task = self._context.task
        if task is not None:
            wires = tuple((each.wire(), each.segment is not None) for each in payloads)
            self._send(msg.Shown(task, kind, content, wires), payloads)

    # -------------------------------------------------------------------------------- the backend

    def submit(self, call: Call) -> list[ObjectId]:
        retry = call.retry
        facts = (call.spec, call.code, call.inputs, call.returns, retry, call.kind)
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
        def watch() -> None:
            self.wait([obj], 1, None)
            callback()

        threading.Thread(target=watch, name=f"gpunb-wait-{obj[0]}", daemon=True).start()

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
        return self._context

    def shutdown(self) -> None:
        raise exceptions.GpunbError("shutdown() is for the kernel; a task ends by returning")

    # ------------------------------------------------------------------------------------- inside

    def report_references(self, *, gains_only: bool = False) -> None:
        if not self._changes:
            return
        changes: dict[ObjectId, int] = {}
        while self._changes:
            obj, count = self._changes.popleft()
            changes[obj] = changes.get(obj, 0) + count
        # What is gained goes first, so that nothing is let go that is still wanted.
        for obj, count in sorted(changes.items(), key=lambda each: -each[1]):
            if count < 0 and gains_only:
                self._changes.append((obj, count))
            elif count:
                self._send(msg.Held(obj, count))

    def _send(self, message: msg.Message, payloads: Sequence[Payload] = ()) -> None:
        segments = [each.segment for each in payloads if each.segment is not None]
        with self._sending:
            self._channel.send(message, segments)

    def _request(
        self, verb: str, arguments: tuple[Any, ...], payloads: Sequence[Payload] = ()
    ) -> tuple[Any, list[Payload]]:
        if os.getpid() != self._pid:
            raise exceptions.GpunbError(
                "this process was forked from a task's, and gpunb does not work in forks: "
                "use gpunb.remote instead"
            )
        self._used = True
        self.report_references()
        number = next(self._numbers)
        wires = tuple((each.wire(), each.segment is not None) for each in payloads)
        context = self._context
        request = msg.Request(
            number, context.task or 0, context.attempt or 0, verb, arguments, wires
        )
        self._expected.add(number)
        try:
            self._send(request, payloads)
            reply, segments = self._answer(number)
        finally:
            self._expected.discard(number)
        taken = iter(segments)
        values = [
            Payload.from_wire(wire, next(taken) if own else None) for wire, own in reply.payloads
        ]
        if reply.failed:
            raise serialize.loads(values[0])
        return reply.value, values

    def _answer(self, number: int) -> tuple[msg.Reply, list[Segment]]:
        while True:
            found = self._answers.pop(number, None)
            if found is not None:
                return found
            self._read(lambda: number in self._answers)

    def _read(self, there: Callable[[], bool]) -> None:
        """Take one message off the channel, unless another thread does and it is there then."""
        if not self._reading.acquire(timeout=0.05):
            return
        try:
            if there():
                return
            message, descriptors = self._channel.receive()
            if not isinstance(message, msg.Reply):
                self._others.append((message, descriptors))
                return
            segments = [Segment.adopt(each) for each in descriptors]
            if message.request in self._expected:  # else whoever asked was interrupted
                self._answers[message.request] = (message, segments)
        finally:
            self._reading.release()
