"""Objects on Ray, by their ids: what they are, when they are there, and who waits for them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import ray
from ray import exceptions as rays

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.exceptions import GetTimeoutError, GpunbError, ObjectLostError
from gpunb.protocol.backend import COMPLETED, HANDLE, STREAM, ObjectId, Outcome
from gpunb.ray import failures
from gpunb.ray.jobs import RayActor
from gpunb.ray.ref_table import RefTable
from gpunb.ray.streams import RayStream
from gpunb.ray.transport import RayPayload, ReceivedPayload, opened, pack
from gpunb.scheduler.tasks import ActorId, TaskId

DOUBT = 3.0
"""Seconds that Ray may take to know that an actor which cannot be reached is gone."""


class ObjectOwner(Protocol):
    """The parts of a backend that its objects need."""

    def new_put(self) -> int:
        """Return the number of a new object that is put."""

    def wait_for_output(self, task: TaskId) -> None:
        """Return when the output of a task has arrived; 0 for a task that could not name itself."""

    def failure_of(self, task: TaskId, error: BaseException) -> Payload:
        """Return the payload of a failure that Ray raised for a task."""

    def was_stopped(self, task: TaskId) -> bool:
        """Whether a call that Ray cancelled was only interrupted, so that its results count."""

    def released(self, obj: ObjectId) -> None:
        """Handle that nothing refers to an object any more; on the table's thread."""


class RayObjects:
    """The objects that this process knows.

    Attributes:
        actors: the actors, by number.
        labels: name and actor of each of the last tasks that were submitted here.
        table: the Ray reference of each object.
    """

    def __init__(self, owner: ObjectOwner) -> None:
        self._owner = owner
        self.table = RefTable(lambda obj, _: owner.released(obj))
        self.labels: OrderedDict[TaskId, tuple[str, ActorId]] = OrderedDict()
        self.actors: dict[ActorId, RayActor] = {}
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._caller: threading.Thread | None = None
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._waits = itertools.count()

    def put(self, payload: Payload, *, failed: bool = False) -> ObjectId:
        obj = (0, self._owner.new_put())
        packed = self.pack(payload)
        packed.failed = failed
        self.table.add(obj, ray.put(packed))
        return obj

    def ref(self, obj: ObjectId) -> Any:
        """Return the Ray reference of an object.

        Raises:
            ObjectLostError: the object is not known here.
        """
        ref = self.table.find(obj)
        if ref is None:
            raise ObjectLostError(
                f"the object {obj} is not known here: its session was shut down, or nothing "
                "referred to it any more"
            )
        return ref

    def _waitable(self, obj: ObjectId) -> Any:
        """The reference that Ray waits for; for the next value of a stream, the stream's."""
        ref = self.table.find(obj)
        if ref is None and (stream := self.stream(obj)) is not None:
            return stream.waitable()
        return self.ref(obj) if ref is None else ref

    def stream(self, obj: ObjectId) -> RayStream | None:
        """Return the generator of the task that makes an object, if it has one."""
        stream = self.table.find((obj[0], STREAM))
        return stream if isinstance(stream, RayStream) else None

    def label(self, task: TaskId) -> str:
        name, _ = self.labels.get(task, ("", 0))
        return f"{name} (#{task})" if name else f"#{task}" if task else "what was put"

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        self._check_may_wait(objects, len(objects), timeout)
        refs = [self.ref(obj) for obj in objects]
        try:
            if timeout == 0:  # what is there, but on another node, may take a moment
                ready = self._ready(refs, len(set(refs)))
                if len(ready) < len(set(refs)) and not self._failed_one(refs):
                    raise rays.GetTimeoutError
                values = ray.get(refs)
            else:
                values = ray.get(refs, timeout=timeout)
        except rays.GetTimeoutError:
            raise GetTimeoutError(f"not all values were there within {timeout:g} s") from None
        except (rays.RayError, failures.Failed) as error:
            return [self._failure(objects, refs, error)]
        return [self._outcome(obj, value) for obj, value in zip(objects, values, strict=True)]

    def _ready(self, refs: Sequence[Any], count: int) -> list[Any]:
        """The refs whose values are there now, on any node; at most so many."""
        ready: list[Any]
        ready, _ = ray.wait(_once(refs), num_returns=count, timeout=0, fetch_local=False)
        return ready

    def _failed_one(self, refs: Sequence[Any]) -> bool:
        for ref in self._ready(refs, 1):
            try:
                ray.get(ref)
            except (rays.RayError, failures.Failed):
                return True
        return False

    def _outcome(self, obj: ObjectId, value: Any) -> Outcome:
        if isinstance(value, bytes):
            return Outcome(self.unpack(opened(value)))
        if not isinstance(value, RayPayload):
            return Outcome(serialize.dumps(value))
        if value.output_of:
            self._owner.wait_for_output(value.output_of)
        if value.cancelled and not self._owner.was_stopped(obj[0]):
            error = rays.TaskCancelledError()
            return Outcome(self._owner.failure_of(obj[0], error), failed=True)
        return Outcome(self.unpack(value), value.failed)

    def _failure(
        self, objects: Sequence[ObjectId], refs: Sequence[Any], error: BaseException
    ) -> Outcome:
        """The outcome for an error of one of these objects."""
        place = 0
        if len(refs) > 1:
            ready = self._ready(refs, len(set(refs)))
            for place, ref in enumerate(refs):  # noqa: B007 - the place is what is looked for
                if ref in ready and (raised := _raised(ref)) is not None:
                    error = raised
                    break
        output_of = failures.output_of(error)
        if output_of or isinstance(failures.root(error), rays.RayError):
            self._owner.wait_for_output(output_of)
        return Outcome(self._owner.failure_of(objects[place][0], error), failed=True)

    def failure_of(self, task: TaskId, error: BaseException) -> Payload:
        """The payload of an error that Ray raised for a task."""
        if isinstance(failures.root(error), rays.ActorUnavailableError):
            _, actor = self.labels.get(task, ("", 0))
            if self._is_dead(actor):
                error = rays.ActorDiedError()
        return failures.outcome_of(error, self.label(task))

    def _is_dead(self, actor: ActorId) -> bool:
        """Whether an actor that cannot be reached is gone for good; Ray may not know it yet."""
        known = self.actors.get(actor)
        if known is not None and known.ended:
            return True
        handle = self.table.find((actor, HANDLE))
        until = time.monotonic() + DOUBT
        while handle is not None:
            state = ray._private.state.actors(actor_id=handle._actor_id.hex()).get("State")
            if state == "DEAD":
                return True
            if known is None or known.new.rules.max_restarts or time.monotonic() > until:
                return False
            time.sleep(0.05)
        return False

    def unpack(self, packed: RayPayload) -> Payload:
        """Return a payload that came through Ray; the objects that it refers to are known here as
        long as it is."""
        self.table.arrive(packed.references, packed.refs)
        return ReceivedPayload(packed, self.table.leave)

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        self._check_may_wait(objects, count, timeout)
        return self._wait(objects, count, timeout)

    def _wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> set[ObjectId]:
        things = [self._waitable(obj) for obj in objects]
        unique = _once(things)
        ready, _ = ray.wait(
            unique, num_returns=min(count, len(unique)), timeout=timeout, fetch_local=False
        )
        there = set(map(id, ready)) | {each for each in ready if isinstance(each, ray.ObjectRef)}
        return {
            obj
            for obj, each in zip(objects, things, strict=True)
            if id(each) in there or (isinstance(each, ray.ObjectRef) and each in there)
        }

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        ref = self.table.find(obj)
        if ref is None:
            stream = self.stream(obj)
            ref = self.ref(obj) if stream is None else stream.peek()
        if self._caller is None:
            self._caller = threading.Thread(target=self._call, name="gpunb-calls", daemon=True)
            self._caller.start()
        number = next(self._waits)
        self._callbacks[number] = callback
        ref._on_completed(lambda value: self._calls.put((number, value)))

    def _call(self) -> None:
        """Call the callback of each complete object, after all output of its task was shown. At the
        end of the session, call the callbacks of the others too."""
        while (item := self._calls.get()) is not None:
            number, value = item
            callback = self._callbacks.pop(number)
            try:
                task = value.output_of if isinstance(value, RayPayload) else 0
                if isinstance(value, BaseException):
                    task = failures.output_of(value)
                lost = isinstance(value, rays.RayError) and not isinstance(value, rays.RayTaskError)
                del value, item
                if task or lost:
                    self._owner.wait_for_output(task)
                callback()
            except Exception:
                traceback.print_exc()
        for callback in list(self._callbacks.values()):
            try:
                callback()
            except Exception:
                traceback.print_exc()

    def _check_may_wait(
        self, objects: Sequence[ObjectId], count: int, timeout: float | None
    ) -> None:
        if timeout == 0 or threading.current_thread() is not self._caller:
            return
        if len(self._wait(objects, count, 0)) < count:
            raise GpunbError(
                "a callback of a future must not wait for other tasks: it runs on the thread that "
                "hears of their end"
            )

    def take(self, obj: ObjectId) -> bool:
        stream = self.stream(obj)
        if stream is None:
            raise ObjectLostError(f"the generator of task #{obj[0]} is not known here")
        if not stream.ready():
            return False
        ref = stream.take()
        if ref is None:
            return False
        self.table.add(obj, ref)
        return True

    def hold(self, obj: ObjectId) -> None:
        if obj[1] == COMPLETED and (stream := self.stream(obj)) is not None:
            self.table.add(obj, stream.generator.completed())
        else:
            self.table.hold(obj)

    def pack(
        self, payload: Payload, held: tuple[ObjectId, ...] = (), *, output_of: TaskId = 0
    ) -> RayPayload:
        """Return a payload with the Ray references of the objects that it refers to."""
        return pack(payload, self._ref_or_handle, held, output_of=output_of)

    def _ref_or_handle(self, obj: ObjectId) -> Any:
        ref = self.table.find(obj)
        return None if isinstance(ref, RayStream) else ref

    def end_calls(self, within: float) -> None:
        """Call back all who still wait, and end the thread that calls back."""
        self._calls.put(None)
        if self._caller is not None and self._caller is not threading.current_thread():
            self._caller.join(within)


def _once(refs: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(refs))


def _raised(ref: Any) -> BaseException | None:
    try:
        ray.get(ref)
    except (rays.RayError, failures.Failed) as error:
        return error
    return None
