"""The public functions: thin, over the backend of this process."""

from __future__ import annotations

import numbers
import os
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gpunb.api.actor_class import RemoteClass
from gpunb.api.actor_handle import ActorHandle, current_actor, get_actor, kill
from gpunb.api.actor_type import method
from gpunb.api.as_completed import as_completed
from gpunb.api.executor import Executor
from gpunb.api.generators import DynamicObjectRefGenerator, ObjectRefGenerator
from gpunb.api.refs import ObjectRef, check_timeout, value_of
from gpunb.api.remote import remote
from gpunb.api.remote_function import RemoteFunction
from gpunb.api.reports import report
from gpunb.api.session import Session, init, is_initialized, shutdown
from gpunb.api.timeline import Timeline
from gpunb.data import serialize
from gpunb.exceptions import TaskError, as_raised
from gpunb.instead import missing
from gpunb.protocol import backend
from gpunb.protocol.backend import STREAM
from gpunb.scheduler.option_values import check_switches
from gpunb.system.signals import UNDIVIDED

__all__ = [
    "ActorHandle",
    "DynamicObjectRefGenerator",
    "Executor",
    "ObjectRef",
    "ObjectRefGenerator",
    "RemoteClass",
    "RemoteFunction",
    "Session",
    "as_completed",
    "available_resources",
    "cancel",
    "cluster_resources",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "nodes",
    "put",
    "remote",
    "report",
    "shutdown",
    "status",
    "timeline",
    "wait",
]

T = TypeVar("T")


@overload
def get(refs: ObjectRef[T], *, timeout: float | None = None) -> T: ...


@overload
def get(refs: list[ObjectRef[T]], *, timeout: float | None = None) -> list[T]: ...


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """The value of a ref, or the list of values of a list of refs. Waits for them.

    Large arrays arrive without copies, as private views: a change in one is seen by nobody else.

    Args:
        refs: one ref, or a list of them. A generator of refs is returned as it is, as in Ray.
        timeout: seconds for all of them; 0 does not wait, None waits without limit.

    Raises:
        TaskError: a task raised an exception; the error is also of the exception's type.
        WorkerCrashedError, TaskCancelledError, ...: the task ended without a result.
        GetTimeoutError: a value was not ready in time.
        TypeError: `refs` is neither a ref nor a list of refs.
    """
    if isinstance(refs, ObjectRefGenerator):
        return refs
    single = isinstance(refs, ObjectRef)
    if not single and not isinstance(refs, list):
        raise TypeError(f"get takes an ObjectRef or a list of them, not {_described(refs)}")
    many: list[ObjectRef[Any]] = [refs] if single else refs
    objects = [_id_of(ref, "get") for ref in many]
    check_timeout(timeout)
    outcomes = backend.current().fetch(objects, timeout) if objects else []
    try:
        values = [value_of(each) for each in outcomes]
    except TaskError as error:
        if (raised := as_raised(error)) is error:
            raise
        raise raised from None
    return values[0] if single else values


def put(value: T) -> ObjectRef[T]:
    """Store a value once, for any number of tasks. Returns its ref.

    Raises:
        TypeError: the value cannot be pickled, or is a ref.
        OutOfMemoryError: the session's memory for objects has no room for it.
    """
    if isinstance(value, ObjectRef):
        raise TypeError("put takes a value, and this is a ref already: pass it on as it is")
    current = backend.current()
    payload = serialize.dumps(value, what="value of put")
    with UNDIVIDED:
        return ObjectRef(current.put(payload), held=True)


def wait(
    refs: list[Any],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,  # noqa: ARG001 - for programs written for Ray
) -> tuple[list[Any], list[Any]]:
    """Wait until `num_returns` of the refs are ready or failed, at most `timeout` seconds.

    The list may hold generators of refs: one is ready when its next ref is ready, or it has ended.

    Args:
        refs: a list of refs, each once.
        num_returns: number of refs to wait for, from 1 to ``len(refs)``.
        timeout: seconds; 0 does not wait, None waits without limit.
        fetch_local: for programs written for Ray; it has no effect.

    Returns:
        Two lists in the order of `refs`: at most `num_returns` refs that are ready, and the rest.

    Raises:
        TypeError: `refs` is not a list of refs, or `num_returns` is not a whole number.
        ValueError: `refs` holds a ref twice, or `num_returns` is not between 1 and ``len(refs)``.
    """
    if not isinstance(refs, list):
        raise TypeError(f"wait takes a list of ObjectRef, not {_described(refs)}")
    objects = [
        ref.next_object if isinstance(ref, ObjectRefGenerator) else _id_of(ref, "wait")
        for ref in refs
    ]
    if isinstance(num_returns, bool) or not isinstance(num_returns, numbers.Integral):
        raise TypeError(f"num_returns must be a whole number, not {num_returns!r}")
    if not refs:
        return [], []
    if len(set(objects)) != len(objects):
        raise ValueError("wait was given the same ref twice")
    if not 1 <= num_returns <= len(refs):
        raise ValueError(f"num_returns={num_returns!r} must be between 1 and {len(refs)}")
    check_timeout(timeout)
    found = backend.current().wait(objects, num_returns, timeout)
    ready: list[Any] = []
    rest: list[Any] = []
    for ref, obj in zip(refs, objects, strict=True):
        (ready if obj in found and len(ready) < num_returns else rest).append(ref)
    return ready, rest


def cancel(ref: Any, *, force: bool = False, recursive: bool = True) -> None:
    """Cancel the task that makes a ref, unless it is over. `get` then raises TaskCancelledError.

    As in Ray, a task that catches its interrupt and returns a value has this value; a call of an
    actor that does so was cancelled.

    A queued task is removed. A running task gets a KeyboardInterrupt, or its process is killed
    with `force`. An actor's call that is a coroutine gets an asyncio.CancelledError. An actor's
    call in a thread is not interrupted: it can ask
    ``gpunb.get_runtime_context().is_canceled()``. Tasks that a task submits in its cleanup, after
    the interrupt, run.

    Args:
        ref: a ref, or the generator of a task's refs.
        force: True kills the process instead of interrupting it.
        recursive: whether the tasks that the task has submitted are cancelled too.

    Raises:
        TypeError: `ref` is neither, or `force` or `recursive` is not True or False.
        ValueError: `force` for a call of an actor.
    """
    if isinstance(ref, ActorHandle):
        raise TypeError("cancel takes the ref of a call: use gpunb.kill to end an actor")
    check_switches(force=force, recursive=recursive)
    generator = isinstance(ref, ObjectRefGenerator)
    obj = (ref.task_id, STREAM) if generator else _id_of(ref, "cancel")
    backend.current().cancel(obj, force, recursive)


def get_gpu_ids() -> list[int | str]:
    """The ids of the devices that the caller may use, ascending; empty in the kernel.

    An id is an int, or a text for a MIG slice and for a device that was named by its UUID.
    """
    current = backend.existing()
    return list(current.context().gpu_ids) if current is not None else []


class RuntimeContext:
    """The task, actor and devices of the caller."""

    def __init__(self, context: backend.Context) -> None:
        self._context = context

    def get_task_id(self) -> int | None:
        """The number of the running task; None in the kernel."""
        return self._context.task

    def get_task_name(self) -> str | None:
        """The name of the running task; None in the kernel."""
        return self._context.name

    def get_task_function_name(self) -> str | None:
        """The module and the name of the function or method that runs, such as
        ``"__main__.train"``, whatever the task is called; None in the kernel."""
        function = self._context.function
        return function() if function is not None else None

    def get_actor_id(self) -> int | None:
        """The number of the current actor; None outside of actors."""
        return self._context.actor

    def get_actor_name(self) -> str | None:
        """The name of the current actor, for `get_actor`; None if it has none."""
        return self._context.actor_name

    @property
    def current_actor(self) -> ActorHandle:
        """A handle to the current actor.

        Raises:
            RuntimeError: the caller is not a method of an actor.
        """
        return current_actor()

    @property
    def was_current_actor_reconstructed(self) -> bool:
        """Whether the current actor was started again after a crash."""
        return self._context.restarted

    def is_canceled(self) -> bool:
        """Whether the running call was cancelled; for calls in threads, which get no interrupt."""
        return self._context.cancelled is not None and self._context.cancelled()

    def get_node_id(self) -> str:
        """The id of this machine, a text."""
        return backend.node_id()

    def get_job_id(self) -> str:
        """The id of the session, a text."""
        return f"{backend.current().ask('session').get('pid', 0):08x}"

    def get_worker_id(self) -> str:
        """The id of this process, a text."""
        return f"{os.getpid():056x}"

    @property
    def namespace(self) -> str:
        """The default namespace of actors' names."""
        return backend.namespace()

    @property
    def attempt(self) -> int | None:
        """The number of the task's attempt, from 1; None in the kernel."""
        return self._context.attempt

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Device ids as texts, by resource name: ``"GPU"``, and each other kind of device."""
        held = (("GPU", self._context.gpu_ids), *self._context.others)
        return {name: [str(each) for each in ids] for name, ids in held}

    def get_assigned_resources(self) -> dict[str, float]:
        """The resources that the running task holds, by name, such as
        ``{"CPU": 1.0, "GPU": 0.5}``; empty in the kernel."""
        task = self._context.task
        held: dict[str, float] = {}
        if task is not None:
            held = backend.current().ask("assigned", task)
        return held

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing("gpunb.get_runtime_context()", name)

    def __repr__(self) -> str:
        task = f"task #{self._context.task}" if self._context.task else "the kernel"
        return f"<gpunb context of {task}, GPUs {list(self._context.gpu_ids)}>"


def get_runtime_context() -> RuntimeContext:
    """The context of the caller: its task, attempt, actor and devices."""
    current = backend.existing()
    return RuntimeContext(current.context() if current is not None else backend.Context())


def cluster_resources() -> dict[str, float]:
    """All resources by name: CPUs, devices, accelerator types and custom resources, such as
    ``{"CPU": 8.0, "GPU": 2.0, "accelerator_type:A100": 2.0}``."""
    total: dict[str, float] = backend.current().ask("total")
    return total


def available_resources() -> dict[str, float]:
    """The resources that are free now, by the names of `cluster_resources()`."""
    free: dict[str, float] = backend.current().ask("available")
    return free


def status() -> dict[str, Any]:
    """The snapshot of the session as plain values, ready for JSON: devices, running and waiting
    tasks, and the reason why each one waits. Sizes are in bytes, times in seconds."""
    facts: dict[str, Any] = backend.current().ask("status")
    return facts


def timeline(filename: str | os.PathLike[str] | None = None) -> Timeline:
    """The history of the session: which job ran when on which devices, and the GPU-seconds of
    each cell. It can be exported as an SVG, and as a trace for chrome://tracing.

    Args:
        filename: a file to write the trace to.
    """
    found = Timeline(backend.current().ask("timeline"))
    if filename is not None:
        found.to_chrome_trace(filename)
    return found


def nodes() -> list[dict[str, Any]]:
    """A list with one node, this machine and its resources, in the form of `ray.nodes()`."""
    host = os.uname().nodename
    return [
        {
            "NodeID": backend.node_id(),
            "Alive": True,
            "NodeManagerAddress": "127.0.0.1",
            "NodeManagerHostname": host,
            "NodeName": host,
            "Resources": cluster_resources(),
            "Labels": {},
        }
    ]


def _id_of(ref: object, function: str) -> backend.ObjectId:
    if not isinstance(ref, ObjectRef):
        raise TypeError(f"{function} takes ObjectRef, not {_described(ref)}")
    return ref.id


def _described(value: object) -> str:
    return f"{value!r:.60} of type {type(value).__name__}"
