"""`gpunb.remote`: makes functions and classes run in worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

from gpunb.api.actor_class import RemoteClass
from gpunb.api.actor_handle import ActorHandle
from gpunb.api.remote_function import RemoteFunction
from gpunb.scheduler.options import ActorOptions, Options, check_either

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def remote(cls: type[T], /) -> RemoteClass[T]: ...  # type: ignore[overload-overlap]


@overload
def remote(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(**options: Any) -> Callable[[Any], Any]: ...


def remote(*args: Any, **options: Any) -> Any:
    """Make a function or a class run in worker processes, on a share of a GPU if it asks for one.

    Use it bare or with options:

        @gpunb.remote(num_gpus=0.5)
        def train(rate): ...

        loss = gpunb.get(train.remote(0.1))

        @gpunb.remote(num_gpus=1)
        class Model:
            def predict(self, batch): ...

        model = Model.remote()
        labels = gpunb.get(model.predict.remote(batch))

    Each call of a function runs in a fresh or a reused process. An instance of a class is an
    actor: a process of its own, which holds its devices until it ends.

    Args:
        num_gpus: a share of one device, between 0 and 1 in steps of 0.0001, or a whole number;
            (function) ``"auto"`` for the share that earlier runs of the same code needed.
        gpu_memory: in place of `num_gpus`: bytes of one device, a number or a text such as
            ``"10GiB"``; (function) ``"auto"``, which is the same amount on each device.
        accelerator_type: type of the device, such as ``"A100"``, or a list of types in order of
            preference.
        min_memory: least total memory of each device, for `num_gpus`; bytes or a text.
        num_cpus: default 1 for a function, but 0 if it asks for a device, and 0 for a class.
        resources: custom resources by name, and devices of other kinds than GPUs: ``{"TPU": 4}``.
        memory: bytes of host memory; it has no effect.
        priority: a whole number; of the tasks that wait, those with a higher one start first. One
            step counts as ten minutes of waiting. Default 0.
        name: shown in status and messages; for an actor, its name for `get_actor`.
        runtime_env: ``{"env_vars": {...}}``, environment variables of the worker.
        caps: False does not tell frameworks to keep to the task's share of a device.
        ray: further options of Ray, such as ``{"scheduling_strategy": "SPREAD"}``; used with
            ``gpunb.init("ray")`` only.
        scheduling_strategy: a `PlacementGroupSchedulingStrategy`, to run in a placement group; or
            ``"DEFAULT"`` or ``"SPREAD"``, which are the same on one machine and are passed on to
            Ray.
        num_returns: (function) number of results; the function then returns that many values.
            ``"streaming"``, the default of a generator function, gives an `ObjectRefGenerator`;
            ``"dynamic"`` one ref to a sequence of refs.
        max_calls: (function) number of calls after which a worker process is replaced. 1, a fresh
            process for each task, is the default with a device; 0, no limit, without.
        max_retries: (function) further attempts after a crash of the worker, default 3; -1
            without limit.
        retry_exceptions: (function) True, or a list of exception types after which the task is
            tried again.
        timeout: (function) seconds that one attempt may run.
        ranks: (function) number of processes that run each call at once, each with the resources
            of the call and the environment of ``torchrun``; all of them start together. The value
            of the ref is the list of their results.
        isolate: (function) True shows each rank its own devices only; else a rank with whole
            devices sees those of all ranks.
        retry_oom: (function) True runs a task that ran out of memory on a part of a device again,
            with twice the part; always with ``"auto"``.
        max_restarts: (class) how often the process starts again after a crash, without its
            state; default 0, -1 without limit.
        max_task_retries: (class) further attempts of a call that was lost in a crash, default 0.
        max_concurrency: (class) number of calls at once: in threads, default 1; or on one event
            loop if there are ``async def`` methods, default 1000.
        concurrency_groups: (class) names of groups of methods, each with the number of its calls
            that may run at once: ``{"io": 2}``. `gpunb.method` puts a method into a group;
            `max_concurrency` counts the calls of the others.
        max_pending_calls: (class) number of calls that may wait or run; further ones are refused.
        lifetime: (class) ``"detached"`` for an actor that does not end with its last handle.
        get_if_exists: (class) True returns the actor that has the name already, if there is one.
        namespace: (class) namespace in which the name is unique; default: the session's.

    Raises:
        ValueError: an unknown option or a bad value.
        TypeError: a value of a wrong type, or an object that is neither function nor class.
    """
    if args and (options or len(args) > 1):
        raise TypeError(
            "use @gpunb.remote alone or with options by name: @gpunb.remote(num_gpus=1)"
        )
    if not args and not options:
        raise TypeError("gpunb.remote() needs a function or options, such as num_gpus=1")
    if args:
        return _decorate(args[0], {})
    check_either(options)
    return lambda thing: _decorate(thing, options)


def _decorate(thing: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(thing, (RemoteFunction, RemoteClass)):
        raise TypeError(f"{thing!r} is remote already: use .options(...) to change it")
    if isinstance(thing, ActorHandle):
        raise TypeError(f"{thing!r} is an actor already")
    if isinstance(thing, type):
        return RemoteClass(thing, ActorOptions().updated(options)).checked()
    if not callable(thing):
        raise TypeError(f"gpunb.remote takes a function or a class, not {thing!r}")
    if inspect.iscoroutinefunction(thing) or inspect.isasyncgenfunction(thing):
        raise ValueError(
            f"{thing.__qualname__} is an async function: a task must be a plain one; "
            "call asyncio.run inside it"
        )
    return RemoteFunction(thing, Options().updated(options))
