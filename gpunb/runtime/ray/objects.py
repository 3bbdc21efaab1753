"""Objects on Ray, by their ids: what they are, when they are there, and who waits for them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray import exceptions as rays

from gpunb import serialize
from gpunb.backend import HANDLE, STREAM, ObjectId, Outcome
from gpunb.core.tasks import ActorId, TaskId
from gpunb.exceptions import GetTimeoutError, GpunbError, ObjectLostError
from gpunb.runtime.ray import failures
from gpunb.runtime.ray.jobs import Actor
from gpunb.runtime.ray.parcels import Arrived, Parcel, pack
from gpunb.runtime.ray.streams import Stream
from gpunb.runtime.ray.table import Table
from gpunb.serialize import Payload

DOUBT = 3.0
"""Seconds that Ray may take to know that an actor which cannot be reached is gone."""


class Objects(ABC):
    """The objects that this process knows."""

    def __init__(self) -> None:
        self.table = Table(self._let_go)
        self._labels: OrderedDict[TaskId, tuple[str, ActorId]] = OrderedDict()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._caller: threading.Thread | None = None
        self._awaited: dict[int, Callable[[], None]] = {}
        self._waits = itertools.count()
        self._actors: dict[ActorId, Actor] = {}

    @abstractmethod
    def new_put(self) -> int:
        """The number of a new object that was put."""

    def settle(self, task: TaskId) -> None:  # noqa: B027 - workers show nothing of others
        """Return when what the task has shown is there; 0 for one that could not say which."""

    def put(self, payload: Payload) -> ObjectId:
        obj = (0, self.new_put())
        self.table.add(obj, ray.put(pack(payload, self._found)))
        return obj

    def _ref(self, obj: ObjectId) -> Any:
        ref = self.table.find(obj)
        if ref is None:
            raise ObjectLostError(
                f"the object {obj} is not known here: its session was shut down, or nothing "
                "referred to it any more"
            )
        return ref

    def _waitable(self, obj: ObjectId) -> Any:
        """What Ray waits for to have the object, which may be the next of a stream."""
        ref = self.table.find(obj)
        if ref is None and (stream := self._stream(obj)) is not None:
            return stream.waitable()
        return self._ref(obj) if ref is None else ref

    def _stream(self, obj: ObjectId) -> Stream | None:
        found = self.table.find((obj[0], STREAM))
        return found if isinstance(found, Stream) else None

    def label(self, task: TaskId) -> str:
        name, _ = self._labels.get(task, ("", 0))
        return f"{name} (#{task})" if name else f"#{task}" if task else "what was put"

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        self._check_may_wait(objects, len(objects), timeout)
        refs = [self._ref(obj) for obj in objects]
        try:
            if timeout == 0:  # what is there, but on another node, may take a moment
                ready, _ = ray.wait(_once(refs), num_returns=len(set(refs)), timeout=0)
                if len(ready) < len(set(refs)) and not self._failed_one(refs):
                    raise rays.GetTimeoutError
                values = ray.get(refs)
            else:
                values = ray.get(refs, timeout=timeout)
        except rays.GetTimeoutError:
            raise GetTimeoutError(f"not all values were there within {timeout:g} s") from None
        except (rays.RayError, failures.Failed) as error:
            return [self._failure(objects, refs, error)]
        return [self._outcome(value) for value in values]

    def _failed_one(self, refs: Sequence[Any]) -> bool:
        ready, _ = ray.wait(_once(refs), num_returns=1, timeout=0)
        for ref in ready:
            try:
                ray.get(ref)
            except (rays.RayError, failures.Failed):
                return True
        return False

    def _outcome(self, value: Any) -> Outcome:
        if not isinstance(value, Parcel):
            return Outcome(serialize.dumps(value))
        if value.told:
            self.settle(value.told)
        return Outcome(self.arrived(value))

    def _failure(
        self, objects: Sequence[ObjectId], refs: Sequence[Any], error: BaseException
    ) -> Outcome:
        """What stands for an error among these."""
        place = 0
        if len(refs) > 1:
            ready, _ = ray.wait(_once(refs), num_returns=len(set(refs)), timeout=0)
            for place, ref in enumerate(refs):  # noqa: B007 - the place is what is looked for
                if ref in ready and (found := _raised(ref)) is not None:
                    error = found
                    break
        told = failures.told(error)
        if told or isinstance(failures.root(error), rays.RayError):
            self.settle(told)
        task = objects[place][0]
        payload = self.failure_of(task, error)
        return Outcome(payload, failed=True)

    def failure_of(self, task: TaskId, error: BaseException) -> Payload:
        """What Ray raised for a task, as a payload."""
        if isinstance(failures.root(error), rays.ActorUnavailableError):
            _, actor = self._labels.get(task, ("", 0))
            if self._is_dead(actor):
                error = rays.ActorDiedError()
        return failures.outcome_of(error, self.label(task))

    def _is_dead(self, actor: ActorId) -> bool:
        """Whether an actor that cannot be reached is gone for good; Ray may not know it yet."""
        known = self._actors.get(actor)
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

    def arrived(self, parcel: Parcel) -> Payload:
        """The payload of a parcel; what it refers to is known as long as it is kept."""
        self.table.arrive(parcel.references, parcel.refs)
        return Arrived(parcel, self.table.leave)

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
            stream = self._stream(obj)
            ref = self._ref(obj) if stream is None else stream.peek()
        if self._caller is None:
            self._caller = threading.Thread(target=self._call, name="gpunb-calls", daemon=True)
            self._caller.start()
        number = next(self._waits)
        self._awaited[number] = callback
        ref._on_completed(lambda value: self._calls.put((number, value)))

    def _call(self) -> None:
        """Call back those who wait for objects, once all is there that was shown before; at the
        end those who wait in vain."""
        while (item := self._calls.get()) is not None:
            number, value = item
            callback = self._awaited.pop(number)
            try:
                task = value.told if isinstance(value, Parcel) else 0
                if isinstance(value, BaseException):
                    task = failures.told(value)
                lost = isinstance(value, rays.RayError) and not isinstance(value, rays.RayTaskError)
                del value, item
                if task or lost:
                    self.settle(task)
                callback()
            except Exception:
                traceback.print_exc()
        for callback in list(self._awaited.values()):
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
        stream = self._stream(obj)
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
        self.table.hold(obj)

    def drop(self, obj: ObjectId) -> None:
        self.table.drop(obj)

    def _found(self, obj: ObjectId) -> Any:
        found = self.table.find(obj)
        return None if isinstance(found, Stream) else found

    def _let_go(self, obj: ObjectId, ref: Any) -> None:  # noqa: B027 - nothing else to do
        """On the table's thread: nothing refers to it any more."""


def _once(refs: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(refs))


def _raised(ref: Any) -> BaseException | None:
    try:
        ray.get(ref)
    except (rays.RayError, failures.Failed) as error:
        return error
    return None
