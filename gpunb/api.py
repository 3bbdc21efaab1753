"""The public functions: thin, over the backend of this process."""

from __future__ import annotations

import importlib
import numbers
from typing import Any, TypeVar, overload

from gpunb import backend, serialize
from gpunb.actor import ActorHandle, RemoteClass, current_actor, get_actor, kill, method
from gpunb.backend import STREAM
from gpunb.completion import as_completed
from gpunb.core.options import check_switches
from gpunb.decorators import remote
from gpunb.executor import Executor
from gpunb.generators import DynamicObjectRefGenerator, ObjectRefGenerator
from gpunb.history import Timeline
from gpunb.refs import ObjectRef, check_timeout, value_of
from gpunb.remote_function import RemoteFunction
from gpunb.session import Session, init, is_initialized, shutdown
from gpunb.signals import UNDIVIDED

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
    "get_job",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "monitor",
    "put",
    "remote",
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
    """The value of a ref, or the values of a list of refs in their order. Waits for them.

    Arrays arrive without copies, as private views: they can be written, and nobody else sees it.

    Args:
        refs: one ref, or a list of them.
        timeout: seconds; 0 looks and does not wait.

    Raises:
        TaskError: a task raised; also an instance of what it raised.
        WorkerCrashedError, TaskCancelledError, ...: the task ended without a result.
        GetTimeoutError: not all were there in time.
        TypeError: not a ref or a list of refs.
    """
    single = isinstance(refs, ObjectRef)
    if not single and not isinstance(refs, list):
        raise TypeError(f"get takes an ObjectRef or a list of them, not {_named(refs)}")
    many: list[ObjectRef[Any]] = [refs] if single else refs
    objects = [_identity(ref, "get") for ref in many]
    check_timeout(timeout)
    outcomes = backend.current().fetch(objects, timeout) if objects else []
    values = [value_of(each) for each in outcomes]
    return values[0] if single else values


def put(value: T) -> ObjectRef[T]:
    """Keep a value where tasks can have it without its being sent each time.

    Raises:
        TypeError: a value that cannot be pickled, or a ref.
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
    """Wait until `num_returns` of the refs are ready (or failed), at most `timeout` seconds.

    A generator of refs may stand among them: it is ready when its next ref is, or its end.

    Args:
        refs: a list, each ref once.
        num_returns: how many to wait for, from 1 to their number.
        timeout: seconds; 0 looks and does not wait. None waits as long as it takes.
        fetch_local: for programs written for Ray; either value means the same here.

    Returns:
        Two lists in the order of `refs`: at most `num_returns` that are ready, and the rest.

    Raises:
        TypeError: not a list of refs, or a `num_returns` that is no whole number.
        ValueError: a ref twice, or a `num_returns` that is not between 1 and their number.
    """
    if not isinstance(refs, list):
        raise TypeError(f"wait takes a list of ObjectRef, not {_named(refs)}")
    objects = [
        ref.next_object if isinstance(ref, ObjectRefGenerator) else _identity(ref, "wait")
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
    there = backend.current().wait(objects, num_returns, timeout)
    ready: list[Any] = []
    rest: list[Any] = []
    for ref, obj in zip(refs, objects, strict=True):
        (ready if obj in there and len(ready) < num_returns else rest).append(ref)
    return ready, rest


def cancel(ref: Any, *, force: bool = False, recursive: bool = True) -> None:
    """Stop the task that makes the ref, if it is not over; `get` then raises TaskCancelledError.

    A queued task is removed. A running one gets a KeyboardInterrupt; with `force` its process
    is killed. With `recursive`, so are the tasks that it submitted. A call of an actor whose
    calls are coroutines gets an asyncio.CancelledError; one that runs in a thread can only ask
    ``gpunb.get_runtime_context().is_canceled()``.

    Args:
        ref: a ref, or the generator of a task's refs.
        force: kill the process instead of interrupting it.
        recursive: cancel what the task has submitted, too.

    Raises:
        TypeError: neither, or a `force` or `recursive` that is not True or False.
        ValueError: `force` for a call of an actor.
    """
    if isinstance(ref, ActorHandle):
        raise TypeError("cancel takes the ref of a call: use gpunb.kill to end an actor")
    check_switches(force=force, recursive=recursive)
    generator = isinstance(ref, ObjectRefGenerator)
    obj = (ref.task_id, STREAM) if generator else _identity(ref, "cancel")
    backend.current().cancel(obj, force, recursive)


def get_gpu_ids() -> list[int | str]:
    """The ids of the devices that the caller may use, ascending; empty in the kernel.

    Ids are ints; for devices named by UUID or as MIG slices they are texts.
    """
    current = backend.existing()
    return list(current.context().gpu_ids) if current is not None else []


class RuntimeContext:
    """Where the caller runs."""

    def __init__(self, context: backend.Context) -> None:
        self._context = context

    def get_task_id(self) -> int | None:
        """The number of the running task; None in the kernel."""
        return self._context.task

    def get_task_name(self) -> str | None:
        """Its name; None in the kernel."""
        return self._context.name

    def get_actor_id(self) -> int | None:
        """The number of the actor that this is; None elsewhere."""
        return self._context.actor

    def get_actor_name(self) -> str | None:
        """The name for `get_actor` of the actor that this is; None if there is none."""
        return self._context.actor_name

    @property
    def current_actor(self) -> ActorHandle:
        """A handle to the actor that this is.

        Raises:
            RuntimeError: it is none.
        """
        return current_actor()

    @property
    def was_current_actor_reconstructed(self) -> bool:
        """Whether the actor that this is was started again after a crash."""
        return self._context.restarted

    def is_canceled(self) -> bool:
        """Whether the running call was cancelled, for calls that run in threads."""
        return self._context.cancelled is not None and self._context.cancelled()

    @property
    def attempt(self) -> int | None:
        """The attempt, from 1; None in the kernel."""
        return self._context.attempt

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Device ids as texts, by resource name: GPUs, and each other kind that there is."""
        held = (("GPU", self._context.gpu_ids), *self._context.others)
        return {name: [str(each) for each in ids] for name, ids in held}

    def get_assigned_resources(self) -> dict[str, float]:
        """What the process of the running task holds, by resource name, as in
        ``{"CPU": 1.0, "GPU": 0.5}``; empty in the kernel."""
        task = self._context.task
        held: dict[str, float] = {}
        if task is not None:
            held = backend.current().ask("assigned", task)
        return held

    def __repr__(self) -> str:
        task = f"task #{self._context.task}" if self._context.task else "the kernel"
        return f"<gpunb context of {task}, GPUs {list(self._context.gpu_ids)}>"


def get_runtime_context() -> RuntimeContext:
    """Where the caller runs: task, attempt and devices."""
    current = backend.existing()
    return RuntimeContext(current.context() if current is not None else backend.Context())


def cluster_resources() -> dict[str, float]:
    """All that there is: CPUs, devices, accelerator types, custom resources, as in
    ``{"CPU": 8.0, "GPU": 2.0, "accelerator_type:A100": 2.0}``."""
    total: dict[str, float] = backend.current().ask("total")
    return total


def available_resources() -> dict[str, float]:
    """What of `cluster_resources()` is free now, under the same names."""
    free: dict[str, float] = backend.current().ask("available")
    return free


def status() -> dict[str, Any]:
    """Devices, running and waiting tasks with the reason why they wait: the snapshot that
    everything shows, in plain values, ready for JSON. Sizes are in bytes, times in seconds."""
    facts: dict[str, Any] = backend.current().ask("status")
    return facts


def monitor() -> Any:
    """The live picture of the session: devices, who holds them, what waits and why. A widget in a
    notebook, else the status as text."""
    return importlib.import_module("gpunb.notebook.monitor").monitor()


def get_job(ident: int) -> Any:
    """The handle of a background cell, as its ``%%gpu --bg`` has returned it: one of this notebook,
    or one that any kernel has handed in to the head process that this one is attached to.

    Its names are bound here by `wait` and `result`, its output is shown there. That of another
    kernel's is had from `logs()`.

    Raises:
        ValueError: there is no such cell.
        ObjectLostError: what it made is not kept any more.
    """
    return importlib.import_module("gpunb.notebook.found").get_job(ident)


def timeline() -> Timeline:
    """What ran when on which devices, with the GPU-seconds of each cell; to look at, and to export
    as an SVG or for chrome://tracing."""
    return Timeline(backend.current().ask("timeline"))


def _identity(ref: object, function: str) -> backend.ObjectId:
    if not isinstance(ref, ObjectRef):
        raise TypeError(f"{function} takes ObjectRef, not {_named(ref)}")
    return ref.id


def _named(value: object) -> str:
    return f"{value!r:.60} of type {type(value).__name__}"
