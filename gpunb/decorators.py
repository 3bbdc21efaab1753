"""`gpunb.remote`: makes functions and classes run in worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

from gpunb.actor import ActorHandle, RemoteClass
from gpunb.core.options import ActorOptions, Options, check_either
from gpunb.remote_function import RemoteFunction

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

    A function runs in a process for each call, or a reused one; a class lives in a process of its
    own, an actor, which holds its devices until it ends.

    Args:
        num_gpus: a share of one device, between 0 and 1 in steps of 0.0001, or a whole number.
        gpu_memory: instead: bytes of one device, as a number or a text such as ``"10GiB"``.
        accelerator_type: type of the device, such as ``"A100"``, or a list of types in order of
            preference.
        min_memory: beside `num_gpus`: only devices with at least so much memory altogether.
        num_cpus: default 1 for a function, but 0 if it asks for a device, and 0 for a class.
        resources: custom resources by name, and devices of other kinds than GPUs: ``{"TPU": 4}``.
        memory: bytes of host memory, for the reader only.
        name: shown in status and messages; of an actor, the name for `get_actor`.
        runtime_env: ``{"env_vars": {...}}``, variables for the worker.
        caps: False if frameworks need not keep to the task's share of a device.
        ray: more options for Ray, as its own `options()` takes them, such as
            ``{"scheduling_strategy": "SPREAD"}``; looked at with ``gpunb.init("ray")`` only.
        num_returns: (function) number of results; the function then returns that many values.
            ``"streaming"``, the default of a generator function, gives an `ObjectRefGenerator`;
            ``"dynamic"`` one ref to a sequence of refs.
        max_calls: (function) calls after which a worker process is replaced: 1 is a fresh process
            for each task, the default with a device; 0 is no limit, the default without.
        max_retries: (function) further attempts after a crash of the worker, default 3; -1
            without limit.
        retry_exceptions: (function) True, or a list of exception types, to try again after those
            as well.
        timeout: (function) seconds one attempt may run.
        max_restarts: (class) how often the process is started again after a crash, without its
            state; default 0, -1 without limit.
        max_task_retries: (class) further attempts of a call that was lost in a crash, default 0.
        max_concurrency: (class) calls at once, in threads; default 1, or 1000 at once on one
            event loop if there are ``async def`` methods.
        max_pending_calls: (class) calls that may wait or run before further ones are refused.
        lifetime: (class) ``"detached"`` for an actor that does not end with its last handle.
        get_if_exists: (class) rather have the actor of that name, if there is one.
        namespace: (class) within which its name is its own.

    Raises:
        ValueError: an unknown option or a bad value.
        TypeError: a value of a wrong type, or something that is neither function nor class.
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
