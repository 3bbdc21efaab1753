"""What workers ask for: the API, called from inside a task."""

from __future__ import annotations

import functools
import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpunb import serialize
from gpunb.backend import HANDLE, Call, ObjectId, Outcome
from gpunb.core import events as ev
from gpunb.core.tasks import TaskId
from gpunb.exceptions import GetTimeoutError, OutOfMemoryError
from gpunb.objects import Segment
from gpunb.runtime.jobs import UNSURE, WATCH, Job, Owner, Wait
from gpunb.runtime.store import Entry
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.pool import Process

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver


class Requests:
    """Answers each request once, unless the worker is gone by then."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def handle(self, process: Process, request: msg.Request, segments: list[Segment]) -> None:
        try:
            self._answer(process, request, serialize.from_wires(request.payloads, segments))
        except Exception as error:
            self._fail(process, request, error)

    def _answer(self, process: Process, request: msg.Request, payloads: list[Payload]) -> None:
        match request.verb:
            case "submit":
                self._submit(process, request, payloads[0])
            case "put":
                self._put(process, request, payloads[0])
            case "fetch":
                self._fetch(process, request, *request.arguments)
            case "wait":
                self._wait(process, request, *request.arguments)
            case "watch":
                self._wait(process, request, request.arguments, 1, None, watch=True)
            case "awaits":
                self._awaits(request, request.arguments)
            case "take":
                self._take(process, request, *request.arguments)
            case "find_actor":
                self._find_actor(process, request, *request.arguments)
            case "kill":
                actor, restart = request.arguments
                self._driver.kill(actor, restart=restart)
                self._reply(process, request, None)
            case "cancel":
                obj, force, recursive = request.arguments
                self._driver.check_force(obj, force)
                self._driver.feed(ev.CancelRequested(obj[0], force, recursive))
                self._reply(process, request, None)
            case "interrupt":
                self._driver.feed(ev.InterruptRequested(request.arguments[0][0]))
                self._reply(process, request, None)
            case "input":
                self._input(process, request, *request.arguments)
            case "ask" if request.arguments[0] == "memory":
                _, arguments = request.arguments
                table = self._driver.sampler.table(process.worker, *arguments)
                self._reply(process, request, table)
            case "ask":
                what, arguments = request.arguments
                self._reply(process, request, self._driver.facts.tell(what, *arguments))
            case unknown:
                raise ValueError(f"a worker asked for {unknown!r}")

    def _reply(
        self,
        process: Process,
        request: msg.Request,
        value: Any,
        payloads: Sequence[Payload] = (),
        *,
        failed: bool = False,
    ) -> None:
        wires, segments = serialize.to_wires(payloads)
        reply = msg.Reply(request.request, value, wires, failed)
        self._driver.pool.send(process, reply, segments)

    def _fail(self, process: Process, request: msg.Request, error: Exception) -> None:
        self._reply(process, request, None, [serialize.dumps(error)], failed=True)

    def _submit(self, process: Process, request: msg.Request, arguments: Payload) -> None:
        facts = pickle.loads(request.arguments[0])
        spec, code, inputs, returns, retry, kind, actor, new, held = facts
        sink = self._driver.sink_of(process, request.task, spec.name)
        call = Call(spec, code, arguments, inputs, returns, retry, kind, sink, actor, new, held)
        self._hand_in(process, request, call, self._driver.owner_of(process, request.task))

    def _hand_in(
        self,
        process: Process,
        request: msg.Request,
        call: Call,
        owner: Owner | None,
        ident: TaskId | None = None,
    ) -> Job | None:
        """Hand in a call; no job comes of it if there is such an actor already."""
        driver, job = self._driver, None
        found = driver.admission.existing(call)
        if found is not None:
            results = [found]
            driver.store.hold(found)
        else:
            job = driver.admission.admit(call, request.task or None, owner, ident)
            driver.admission.submitted(job)
            results = job.handed_out
        assert process.worker is not None
        driver.store.granted(process.worker, results)
        self._reply(process, request, self._answer_of(call, results))
        return job

    def _answer_of(self, call: Call, results: list[ObjectId]) -> Any:
        """What its caller is told of a call that was handed in."""
        return results

    def _take(self, process: Process, request: msg.Request, obj: ObjectId) -> None:
        there = self._driver.store.take(obj)
        if there:
            assert process.worker is not None
            self._driver.store.granted(process.worker, [obj])
        self._reply(process, request, there)

    def _find_actor(
        self, process: Process, request: msg.Request, name: str, namespace: str
    ) -> None:
        record = self._driver.actors.find(name, namespace)
        obj = (record.id, HANDLE)
        self._driver.store.hold(obj)
        assert process.worker is not None
        self._driver.store.granted(process.worker, [obj])
        self._reply(process, request, (obj, record.new.type))

    def _put(self, process: Process, request: msg.Request, payload: Payload) -> None:
        driver, store = self._driver, self._driver.store

        def there(error: OutOfMemoryError | None) -> None:
            if error is not None:
                self._fail(process, request, error)
            else:
                if process.worker is not None and not process.gone:
                    obj = driver.admission.keep(payload)
                    store.hold_inner(payload)
                    store.granted(process.worker, [obj])
                    self._reply(process, request, obj)
                store.memory.release(payload)
            store.drop_inner(payload)

        store.hold_inner(payload)
        store.memory.admit_soon([payload], "the value of put", there)

    def _input(
        self, process: Process, request: msg.Request, prompt: str | None, password: bool
    ) -> None:
        """Have the user asked; nobody is without a prompt, and then the answer is whether it could
        be done."""
        driver = self._driver
        job = driver.jobs.get(request.task)
        ask = getattr(job.sink, "ask", None) if job is not None else None
        if ask is None:
            raise NotImplementedError("only a cell in the foreground can ask its user")

        def answer(value: str | None, error: Exception | None) -> None:
            if process.gone:
                return
            if error is not None:
                self._fail(process, request, error)
            else:
                self._reply(process, request, value)

        ask(prompt, password, lambda *answers: driver.loop.post((answer, *answers)))

    # ------------------------------------------------------------------------------------- waiting

    def _fetch(
        self,
        process: Process,
        request: msg.Request,
        objects: Sequence[ObjectId],
        timeout: float | None,
        values: bool = True,
    ) -> None:
        store = self._driver.store

        def finish() -> None:
            outcomes = [store.entry(obj).outcome for obj in objects]
            failed = [each for each in outcomes if each is not None and each.failed]
            chosen: list[Outcome | None] = [*failed[:1]] if failed else outcomes if values else []
            payloads = [each.payload for each in chosen if each is not None]
            for each in payloads:
                store.memory.touch(each)
            self._reply(process, request, bool(failed), payloads)

        def late() -> None:
            missing = sum(store.get(obj) is None for obj in objects)
            error = GetTimeoutError(
                f"{missing} of {len(objects)} results were not there after {timeout or 0:g} s; "
                "the tasks go on"
            )
            self._fail(process, request, error)

        count = len(set(objects))
        self._when(process, request, objects, count, timeout, finish, late, fail_fast=True)

    def _wait(
        self,
        process: Process,
        request: msg.Request,
        objects: Sequence[ObjectId],
        count: int,
        timeout: float | None,
        *,
        watch: bool = False,
    ) -> None:
        def finish() -> None:
            store = self._driver.store
            there = [obj for obj in objects if store.entry(obj).outcome is not None]
            self._reply(process, request, there)

        self._when(process, request, objects, count, timeout, finish, finish, watch=watch)

    def _awaits(self, request: msg.Request, objects: Sequence[ObjectId]) -> None:
        store = self._driver.store
        missing = [obj for obj in objects if store.get(obj) is None]
        sure = len(missing) == len(objects) > 0
        wait = _condition(missing, 1) if sure else UNSURE
        self._driver.awaits(request.task, request.attempt, wait)

    def _when(  # noqa: PLR0917 - one caller a kind of waiting, both just above
        self,
        process: Process,
        request: msg.Request,
        objects: Sequence[ObjectId],
        count: int,
        timeout: float | None,
        finish: Any,
        late: Any,
        *,
        fail_fast: bool = False,
        watch: bool = False,
    ) -> None:
        """Finish when enough is there, or be late; meanwhile the task's CPUs are lent. One who
        only watches may do other things as well, unless it says what it awaits."""
        driver = self._driver
        entries = {obj: driver.store.entry(obj) for obj in objects}
        there = [each for each in entries.values() if each.outcome is not None]
        failed = fail_fast and any(each.outcome and each.outcome.failed for each in there)
        if len(there) >= count or failed:
            finish()
            return
        if timeout == 0:
            late()
            return
        left = itertools.count(count - len(there) - 1, -1)
        waiting: list[tuple[Entry, Callable[[], None]]] = []
        over = False

        def end(answer: Any) -> None:
            nonlocal over
            if over:
                return
            over = True
            for entry, callback in waiting:
                entry.forget(callback)
            waiting.clear()
            if not process.gone:
                driver.waits_no_more(request.task, request.attempt, wait)
                try:
                    answer()
                except Exception as error:
                    self._fail(process, request, error)

        def one(entry: Entry) -> None:
            outcome = entry.outcome
            if next(left) <= 0 or (fail_fast and outcome is not None and outcome.failed):
                end(finish)

        missing = [obj for obj, entry in entries.items() if entry.outcome is None]
        wait = WATCH if watch else UNSURE
        if not watch and timeout is None:
            wait = _condition(missing, count - len(there))
        driver.waits(request.task, request.attempt, wait)
        for entry in entries.values():
            if entry.outcome is None:
                callback = functools.partial(one, entry)
                waiting.append((entry, callback))
                entry.notify(callback)
        if timeout is not None:
            driver.loop.at(time.monotonic() + timeout, lambda: end(late))


def _condition(missing: Sequence[ObjectId], count: int) -> Wait:
    """Of which tasks, and of how many of them, the end is waited for; none if it is not sure."""
    if not all(task for task, _ in missing):
        return UNSURE
    tasks = tuple(dict.fromkeys(task for task, _ in missing))
    if count >= len(missing):
        return tasks, len(tasks)
    return tasks, count if len(tasks) == len(missing) else 1
