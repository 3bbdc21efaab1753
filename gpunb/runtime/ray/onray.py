"""From calls to Ray's, for kernels and for workers."""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections import OrderedDict
from typing import Any, NamedTuple

import ray
from ray import exceptions as rays
from ray.experimental import internal_kv

from gpunb.backend import (
    DYNAMIC,
    HANDLE,
    SESSIONS,
    STREAM,
    STREAMING,
    Call,
    Context,
    NewActor,
    ObjectId,
)
from gpunb.core.tasks import ActorId, TaskId, TaskSpec
from gpunb.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    PendingCallsLimitExceeded,
)
from gpunb.runtime.ray import failures, hosts
from gpunb.runtime.ray.asking import Cluster
from gpunb.runtime.ray.jobs import KILLED, Actor
from gpunb.runtime.ray.objects import Objects
from gpunb.runtime.ray.parcels import Parcel, pack
from gpunb.runtime.ray.streams import Stream

INLINE_CODE = 8192
"""Bytes of a pickled function that still travel with each call."""

KEPT = 512
"""Functions and their Ray counterparts that are kept."""

_COUNTED_WITHIN = 0.1
"""Seconds for which Ray may count a call as pending whose result is there."""

_FOR_US = "gpunb"


class Head(NamedTuple):
    """What a worker is told of a call, beside its arguments.

    Attributes:
        code: the pickled function, or a Ray reference to it in a list.
        kit: key of the kernel's `Kit`, and a Ray reference to it in a list.
        sink: number of the kernel's sink for what it shows.
        new: of an actor, what it is.
        share: units of a device that frameworks are to keep to; 0 for no limit.
    """

    task: TaskId
    name: str
    kind: str
    function: str
    code: bytes | list[Any]
    returns: int
    retry: bytes | bool
    timeout: float | None
    kit: tuple[str, list[Any]]
    sink: int
    parent: TaskId | None
    actor: ActorId
    new: NewActor | None
    share: int
    gpus: bool


class OnRay(Objects):
    """The backend's part that is the same wherever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self._codes: OrderedDict[str, tuple[bytes, Any]] = OrderedDict()
        self._functions: OrderedDict[Any, Any] = OrderedDict()

    # ------------------------------------------------------------------ what kernel and worker add

    @abstractmethod
    def new_task(self) -> TaskId:
        """The number of a new task."""

    @abstractmethod
    def kit(self) -> tuple[str, list[Any]]:
        """Of the kernel whose work this is."""

    @abstractmethod
    def sink_of(self, call: Call) -> int:
        """The number of the sink for what a call shows."""

    def parent(self) -> TaskId | None:
        """The task that calls."""
        return self.context().task

    def submitted(self, call: Call, head: Head, ref: Any) -> None:
        """A call was handed to Ray, whose reference this is; None if there is none to watch."""

    @abstractmethod
    def context(self) -> Context:
        """Where the caller runs."""

    @abstractmethod
    def say(self, worker: str, item: Any) -> None:
        """Tell a worker something."""

    # ---------------------------------------------------------------------------------- submitting

    def submit(self, call: Call) -> list[ObjectId]:
        if call.kind == "create":
            return [self._create(call)]
        if call.kind == "method" or call.actor:
            return self._method(call)
        spec = call.spec
        options = self.cluster.options(spec)
        options["max_retries"] = spec.max_retries
        if call.retry is not False:
            options["retry_exceptions"] = [failures.Again]
        head = self._head(call)
        function = self._function(spec, call.returns == STREAMING)
        ref = function.options(
            name=spec.name, num_returns=_returns(call.returns), **options
        ).remote(head, self._packed(call), *self._inputs(call))
        return self._results(call, head, ref)

    def _head(self, call: Call) -> Head:
        spec, task = call.spec, self.new_task()
        self._labels[task] = spec.name, call.actor
        if len(self._labels) > 20 * KEPT:
            self._labels.popitem(last=False)
        return Head(
            task,
            spec.name,
            call.kind,
            spec.function,
            self._code(spec.function, call.code),
            call.returns,
            call.retry,
            spec.timeout,
            self.kit(),
            self.sink_of(call),
            self.parent(),
            task if call.kind == "create" else call.actor,
            call.new,
            spec.demand.gpus if spec.caps else 0,
            bool(spec.demand.wants_device),
        )

    def _code(self, function: str, code: bytes) -> bytes | list[Any]:
        if len(code) <= INLINE_CODE:
            return code
        known = self._codes.get(function)
        if known is None or known[0] != code:
            known = self._codes[function] = code, ray.put(code)
            if len(self._codes) > KEPT:
                self._codes.popitem(last=False)
        return [known[1]]

    def _function(self, spec: TaskSpec, streams: bool) -> Any:
        """Ray's function for it; Ray counts the calls of each by itself."""
        key = spec.max_calls, streams, spec.function if spec.max_calls > 1 else ""
        known = self._functions.get(key)
        if known is None:
            body = hosts.stream if streams else hosts.execute
            known = self._functions[key] = ray.remote(max_calls=spec.max_calls)(body)
            if len(self._functions) > KEPT:
                self._functions.popitem(last=False)
        return known

    def _packed(self, call: Call) -> Parcel:
        return pack(call.arguments, self._found, call.held)

    def _inputs(self, call: Call) -> list[Any]:
        return [self._ref(obj) for obj in call.inputs]

    def _results(self, call: Call, head: Head, ref: Any) -> list[ObjectId]:
        task = head.task
        if call.returns == STREAMING:
            self.table.add((task, STREAM), Stream(ref, lambda: self.has_finished(task)))
            self.submitted(call, head, ref.completed())
            return [(task, STREAM)]
        refs = ref if isinstance(ref, list) else [ref]
        self.submitted(call, head, refs[0])
        count = 1 if call.returns == DYNAMIC else call.returns
        for index in range(count):
            self.table.add((task, index), refs[index])
        return [(task, index) for index in range(count)]

    # -------------------------------------------------------------------------------------- actors

    def _create(self, call: Call) -> ObjectId:
        new, spec = call.new, call.spec
        assert new is not None
        if new.get_if_exists and new.name is not None:
            try:
                return self.find_actor(new.name, new.namespace)[0]
            except ValueError:
                pass
        options = self.cluster.options(spec)
        head = self._head(call)
        actor = head.task
        own = new.namespace == SESSIONS
        if new.name is not None and not own:
            options.update(name=new.name, namespace=_space(new.namespace))
        if new.detached and not own:
            options["lifetime"] = "detached"
            options.setdefault("namespace", _space(new.namespace))
            options.setdefault("name", f"#{actor}")
        rules = new.rules
        options.update(
            max_restarts=rules.max_restarts,
            max_concurrency=rules.max_concurrency,
            max_pending_calls=new.max_pending,
            max_task_retries=_retries(new),
        )
        body = hosts.AsyncHost if new.concurrent else hosts.Host
        try:
            handle = (
                ray.remote(body)
                .options(**options)
                .remote(head, self._packed(call), *self._inputs(call))
            )
        except ValueError as error:
            if new.name is None or ("taken" not in str(error) and "already" not in str(error)):
                raise
            if new.get_if_exists:
                return self.find_actor(new.name, new.namespace)[0]
            raise ActorAlreadyExistsError(
                f"the name {new.name!r} is taken by another actor: have that one with "
                f"gpunb.get_actor({new.name!r}) or get_if_exists=True, or end it with gpunb.kill"
            ) from None
        if new.name is not None and not own:
            entry = actor, new, spec.name, handle._actor_id.hex()
            internal_kv._internal_kv_put(_key(new.name, new.namespace), pickle.dumps(entry))
        self.table.add((actor, HANDLE), handle)
        self._actors[actor] = Actor(actor, handle if own else None, new, spec.name, spec.demand)
        self.submitted(call, head, None)
        return (actor, HANDLE)

    def _handle(self, actor: ActorId) -> Any:
        handle = self.table.find((actor, HANDLE))
        if handle is None and (known := self._actors.get(actor)) is not None:
            handle = known.handle
        if handle is None:
            why = known.why if (known := self._actors.get(actor)) is not None else ""
            raise ActorDiedError(
                f"the actor #{actor} is not there: "
                + (why or "it belongs to a session that was shut down, or ended long ago")
            )
        return handle

    def _method(self, call: Call) -> list[ObjectId]:
        handle = self._handle(call.actor)
        head = self._head(call)
        method = handle.stream if call.returns == STREAMING else handle.call
        options: dict[str, Any] = {"max_task_retries": call.spec.max_retries}
        if call.retry is not False:
            options["retry_exceptions"] = [failures.Again]
        ready = method.options(name=call.spec.name, num_returns=_returns(call.returns), **options)
        arguments = (head, self._packed(call), *self._inputs(call))
        until = time.monotonic() + _COUNTED_WITHIN
        while True:
            try:
                ref = ready.remote(*arguments)
                break
            except rays.PendingCallsLimitExceeded as error:
                if time.monotonic() > until:
                    raise PendingCallsLimitExceeded(
                        f"{call.spec.name}: the actor #{call.actor} has as many calls as its "
                        f"max_pending_calls allows ({failures.plain(error)})"
                    ) from None
                time.sleep(0.002)
        return self._results(call, head, ref)

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        try:
            handle = ray.get_actor(name, _space(namespace))
        except ValueError:
            raise ValueError(f"no actor has the name {name!r}") from None
        until = time.monotonic() + 2
        while True:
            data = internal_kv._internal_kv_get(_key(name, namespace))
            found: tuple[Any, ...] = pickle.loads(data) if data else (0, None, "", "")
            actor, new, kind, ident = found
            if ident == handle._actor_id.hex():
                break
            if time.monotonic() > until:
                raise ValueError(f"the actor {name!r} was not made by gpunb")
            time.sleep(0.01)  # it is being made just now
        obj = (actor, HANDLE)
        self.table.add(obj, self.table.find(obj) or handle)
        if actor not in self._actors:
            from gpunb.core.resources import Demand

            self._actors[actor] = Actor(actor, None, new, kind, Demand(), own=False)
        return obj, new.type

    def kill(self, actor: ActorId, restart: bool) -> None:
        try:
            handle = self._handle(actor)
        except ActorDiedError:
            return
        ray.kill(handle, no_restart=not restart)
        if not restart:
            self.ended(actor, KILLED)

    def ended(self, actor: ActorId, why: str) -> None:
        """An actor is gone for good."""
        known = self._actors.get(actor)
        if known is not None:
            known.ended, known.handle, known.why = True, None, known.why or why

    # ------------------------------------------------------------------------------------ stopping

    def has_finished(self, task: TaskId) -> bool:
        """Whether a task that is over was not stopped, as far as that is known here."""
        return False

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        name, actor = self._labels.get(obj[0], ("", 0))
        if actor and force:
            raise ValueError(
                f"force=True would end the process of the actor #{actor}, and {name} is only one "
                "call of it: use gpunb.kill to end the actor"
            )
        if not obj[0]:
            return
        found = self.table.find((obj[0], STREAM))
        if isinstance(found, Stream):
            found.stopped = True
        ref = found.generator if isinstance(found, Stream) else self.table.find(obj)
        if ref is None:
            return
        if actor:
            self.say(hosts.key_of(actor), ("interrupt", obj[0]))
        try:
            ray.cancel(ref, force=force, recursive=recursive)
        except (ValueError, TypeError, rays.RayError):
            pass  # it is no task's, or over


def _returns(returns: int) -> int | str:
    """How many results Ray is to expect. One at least, by which it is seen that a task is over."""
    if returns == STREAMING:
        return "streaming"
    return 1 if returns == DYNAMIC else max(1, returns)


def _retries(new: NewActor) -> int:
    """The retries of an actor's calls, which say to Ray whether calls wait for its restart."""
    return int(pickle.loads(new.type)[3]) if new.type else 0


def _space(namespace: str) -> str:
    return f"{_FOR_US}:{namespace}"


def _key(name: str, namespace: str) -> bytes:
    return f"{_FOR_US}:actor:{namespace}:{name}".encode()
