"""Submits calls to Ray, and stops them: the same for kernels and for workers."""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import exceptions as rays

from gpunb.data.serialize import Payload
from gpunb.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    PendingCallsLimitExceeded,
)
from gpunb.protocol.backend import (
    DYNAMIC,
    HANDLE,
    SESSIONS,
    STREAM,
    STREAMING,
    Call,
    Context,
    NewActor,
    ObjectId,
    Outcome,
)
from gpunb.ray import entry_points, failures, named_actors
from gpunb.ray.cancelling import Canceller
from gpunb.ray.jobs import KILLED, RayActor
from gpunb.ray.messages import Interrupt, ToWorker
from gpunb.ray.named_actors import NamedActor
from gpunb.ray.objects import RayObjects
from gpunb.ray.resources import Cluster
from gpunb.ray.streams import RayStream
from gpunb.ray.transport import CallHeader, JobEnvRef, joined, key_of
from gpunb.scheduler.resources import Demand
from gpunb.scheduler.tasks import ActorId, TaskId

INLINE_CODE = 8192
"""Bytes of a pickled function that still travel with each call."""

MOST_FUNCTIONS = 512
"""Functions whose Ray counterparts stay in memory."""

_COUNTED_WITHIN = 0.1
"""Seconds for which Ray may count a call as pending whose result is there."""


class RayBackend(ABC):
    """The part of the backend that kernels and workers share.

    Attributes:
        objects: the objects and actors that this process knows.
        canceller: cancels tasks.
    """

    def __init__(self) -> None:
        self.objects = RayObjects(self)
        self.cluster = Cluster()
        self.canceller = Canceller(lambda: self.job_env().open())
        self._codes: OrderedDict[str, tuple[bytes, Any]] = OrderedDict()
        self._functions: OrderedDict[Any, Any] = OrderedDict()
        self._last: tuple[Any, Any] = None, None
        """What Ray's function of the last task was made of, and the function. To put one and its
        options together takes Ray 0.1 ms."""

    # ------------------------------------------------------------------ what kernel and worker add

    @abstractmethod
    def new_task(self) -> TaskId:
        """The number of a new task."""

    @abstractmethod
    def new_put(self) -> int:
        """Return the number of a new object that is put."""

    @abstractmethod
    def job_env(self) -> JobEnvRef:
        """Return where the `JobEnv` of the kernel is that this work is for."""

    @abstractmethod
    def sink_of(self, call: Call) -> int:
        """The number of the sink for what a call shows."""

    def parent(self) -> TaskId | None:
        """The task that calls."""
        return self.context().task

    def submitted(  # noqa: B027 - a worker does not watch the calls that it submits
        self, call: Call, header: CallHeader, ref: Any
    ) -> None:
        """A call was handed to Ray, whose reference this is; None if there is none to watch."""

    @abstractmethod
    def context(self) -> Context:
        """Where the caller runs."""

    @abstractmethod
    def send_to_worker(self, worker: str, message: ToWorker) -> None:
        """Send a message to a worker."""

    def wait_for_output(self, task: TaskId) -> None:  # noqa: B027 - workers show no output
        """Return when the output of a task has arrived; 0 for a task that could not name itself."""

    def failure_of(self, task: TaskId, error: BaseException) -> Payload:
        """Return the payload of a failure that Ray raised for a task."""
        return self.objects.failure_of(task, error)

    def was_stopped(self, task: TaskId) -> bool:
        """Whether a call that Ray cancelled was only interrupted, so that its results count."""
        return False  # only the kernel stops cells

    def released(self, obj: ObjectId) -> None:  # noqa: B027 - nothing else to do
        """Handle that nothing refers to an object any more; on the table's thread."""

    # ------------------------------------------------------------------------------------- objects

    def put(self, payload: Payload, *, failed: bool = False) -> ObjectId:
        return self.objects.put(payload, failed=failed)

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        return self.objects.fetch(objects, timeout)

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        return self.objects.wait(objects, count, timeout)

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        self.objects.notify(obj, callback)

    def take(self, obj: ObjectId) -> bool:
        return self.objects.take(obj)

    def hold(self, obj: ObjectId) -> None:
        self.objects.hold(obj)

    def drop(self, obj: ObjectId) -> None:
        self.objects.table.drop(obj)

    # ---------------------------------------------------------------------------------- submitting

    def submit(self, call: Call) -> list[ObjectId]:
        if call.kind == "create":
            return [self._create(call)]
        if call.kind == "method" or call.actor:
            return self._method(call)
        spec = call.spec
        if call.kind == "ranks" and (more := (spec.ray or {}).keys() - {"runtime_env"}):
            raise ValueError(
                f"ray={{{min(more)!r}: ...}} does not go with several ranks, which have a "
                "placement group of their own: only 'runtime_env' does"
            )
        function = self._function(call)
        header = self._header(call)
        ref = function.remote(self._joined(header, call), *self._inputs(call))
        return self._results(call, header, ref)

    def _header(self, call: Call) -> CallHeader:
        spec, task = call.spec, self.new_task()
        self.objects.labels[task] = spec.name, call.actor
        if len(self.objects.labels) > 20 * MOST_FUNCTIONS:
            self.objects.labels.popitem(last=False)
        return CallHeader(
            task,
            spec.name,
            call.kind,
            spec.function,
            self._code(spec.function, call.code),
            call.returns,
            call.retry,
            spec.timeout,
            self.job_env(),
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
            if len(self._codes) > MOST_FUNCTIONS:
                self._codes.popitem(last=False)
        return [known[1]]

    def _function(self, call: Call) -> Any:
        """Ray's function for a task, with its options; that of the task before, if all that it is
        made of is the same. Ray counts the calls of each function by itself."""
        spec = call.spec
        made_of = spec, call.returns, call.retry is not False, self.cluster.nodes()
        last, function = self._last
        if made_of == last:
            return function
        options = self.cluster.options(spec)
        options |= {
            "name": spec.name,
            "num_returns": _returns(call.returns),
            "max_retries": spec.max_retries,
        }
        if call.retry is not False:
            options["retry_exceptions"] = [failures.Again]
        streams = options["num_returns"] == "streaming"
        key = spec.max_calls, streams, spec.function if spec.max_calls > 1 else ""
        function = self._functions.get(key)
        if function is None:
            body = entry_points.stream if streams else entry_points.execute
            function = self._functions[key] = ray.remote(max_calls=spec.max_calls)(body)
            if len(self._functions) > MOST_FUNCTIONS:
                self._functions.popitem(last=False)
        function = function.options(**options)
        self._last = made_of, function
        return function

    def _joined(self, header: CallHeader, call: Call) -> Any:
        return joined(header, self.objects.pack(call.arguments, call.held))

    def _inputs(self, call: Call) -> list[Any]:
        return [self.objects.ref(obj) for obj in call.inputs]

    def _results(self, call: Call, header: CallHeader, ref: Any) -> list[ObjectId]:
        task = header.task
        if call.returns == STREAMING:
            self.objects.table.add((task, STREAM), RayStream(ref, lambda: self.has_finished(task)))
            self.submitted(call, header, ref.completed())
            return [(task, STREAM)]
        refs = ref if isinstance(ref, list) else [ref]
        self.submitted(call, header, refs[0])
        count = 1 if call.returns == DYNAMIC else call.returns
        for index in range(count):
            self.objects.table.add((task, index), refs[index])
        return [(task, index) for index in range(count)]

    # -------------------------------------------------------------------------------------- actors

    def _create(self, call: Call) -> ObjectId:
        new, spec = call.new, call.spec
        assert new is not None
        if new.rules.bundles:
            raise ValueError(
                "placement groups of gpunb.util are for one machine: on a Ray cluster make one by "
                "ray.util.placement_group, and pass its strategy on in ray={...}"
            )
        if new.get_if_exists and new.name is not None:
            try:
                return self.find_actor(new.name, new.namespace)[0]
            except ValueError:
                pass
        options = self.cluster.options(spec)
        header = self._header(call)
        actor = header.task
        own = new.namespace == SESSIONS
        if new.name is not None and not own:
            options.update(name=new.name, namespace=named_actors.space(new.namespace))
        if new.detached and not own:
            options["lifetime"] = "detached"
            options.setdefault("namespace", named_actors.space(new.namespace))
            options.setdefault("name", f"#{actor}")
        rules = new.rules
        options.update(
            max_restarts=rules.max_restarts,
            max_concurrency=rules.max_concurrency,
            max_pending_calls=new.max_pending,
            max_task_retries=_retries(new),
        )
        body = entry_points.AsyncActorHost if new.concurrent else entry_points.ActorHost
        groups = {"concurrency_groups": dict(rules.groups)} if rules.groups else {}
        try:
            handle = (
                (ray.remote(**groups)(body) if groups else ray.remote(body))
                .options(**options)
                .remote(self._joined(header, call), *self._inputs(call))
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
            named_actors.publish(NamedActor(handle, actor, new, spec.name))
        self.objects.table.add((actor, HANDLE), handle)
        self.objects.actors[actor] = RayActor(
            actor, handle if own else None, new, spec.name, spec.demand
        )
        self.submitted(call, header, None)
        return (actor, HANDLE)

    def _handle(self, actor: ActorId) -> Any:
        handle = self.objects.table.find((actor, HANDLE))
        if handle is None and (known := self.objects.actors.get(actor)) is not None:
            handle = known.handle
        if handle is None:
            why = known.why if (known := self.objects.actors.get(actor)) is not None else ""
            raise ActorDiedError(
                f"the actor #{actor} is not there: "
                + (why or "it belongs to a session that was shut down, or ended long ago")
            )
        return handle

    def _method(self, call: Call) -> list[ObjectId]:
        handle = self._handle(call.actor)
        header = self._header(call)
        method = handle.stream if call.returns == STREAMING else handle.call
        options: dict[str, Any] = {"max_task_retries": call.spec.max_retries}
        if call.retry is not False:
            options["retry_exceptions"] = [failures.Again]
        if call.spec.group:
            options["concurrency_group"] = call.spec.group
        ready = method.options(name=call.spec.name, num_returns=_returns(call.returns), **options)
        arguments = self._joined(header, call), *self._inputs(call)
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
        return self._results(call, header, ref)

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        handle, actor, new, kind = named_actors.find(name, namespace)
        obj = (actor, HANDLE)
        self.objects.table.add(obj, self.objects.table.find(obj) or handle)
        if actor not in self.objects.actors:
            self.objects.actors[actor] = RayActor(actor, None, new, kind, Demand(), own=False)
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
        known = self.objects.actors.get(actor)
        if known is not None:
            known.ended, known.handle, known.why = True, None, known.why or why

    # ------------------------------------------------------------------------------------ stopping

    def has_finished(self, task: TaskId) -> bool:
        """Whether a task that is over was not stopped, as far as that is known here."""
        return False

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        name, actor = self.objects.labels.get(obj[0], ("", 0))
        if actor and force:
            raise ValueError(
                f"force=True would end the process of the actor #{actor}, and {name} is only one "
                "call of it: use gpunb.kill to end the actor"
            )
        if not obj[0]:
            return
        stream = self.objects.stream(obj)
        if stream is not None:
            stream.stopped = True
        ref = stream.generator if stream is not None else self.objects.table.find(obj)
        if ref is None:
            return
        if actor:
            self.send_to_worker(key_of(actor), Interrupt(obj[0]))
        self.canceller.cancel(ref, force=force, recursive=recursive)


def _returns(returns: int) -> int | str:
    """How many results Ray is to expect. One at least, by which it is seen that a task is over."""
    if returns == STREAMING:
        return "streaming"
    return 1 if returns == DYNAMIC else max(1, returns)


def _retries(new: NewActor) -> int:
    """The retries of an actor's calls, which say to Ray whether calls wait for its restart."""
    return int(pickle.loads(new.type)[3]) if new.type else 0
