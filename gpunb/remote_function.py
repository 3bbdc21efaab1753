"""`gpunb.remote` on functions."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import cloudpickle

from gpunb import backend, serialize
from gpunb.backend import Call, ObjectId, Slot
from gpunb.core.options import Options
from gpunb.core.tasks import TaskSpec
from gpunb.refs import ObjectRef
from gpunb.runtime import output

P = ParamSpec("P")
R = TypeVar("R")


class RemoteFunction(Generic[P, R]):
    """A function whose calls run in worker processes. Made by `gpunb.remote`."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        self._function = function
        self._options = options
        self._name = getattr(function, "__qualname__", None) or repr(function)
        self._name = self._name.rpartition("<locals>.")[2]
        self._signature = _Signature(function, self._name)
        self._returns = options.returns
        self._retry = _retry(options)
        self._code: bytes | None = None
        self._captured: Any = ()
        self._spec: TaskSpec | None = None
        self.__doc__ = getattr(function, "__doc__", None)
        self.__name__ = self._name
        self.__module__ = getattr(function, "__module__", __name__)
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"the remote function {self._name} cannot be called directly: "
            f"use {self._name}.remote(...), or {self._name}.__wrapped__(...) to run it here"
        )

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Have the function run with these arguments; returns at once with an `ObjectRef`.

        With ``num_returns=n`` it is a list of n refs, and None for 0. Refs at the top level of
        the arguments arrive as their values; refs inside other objects stay refs.

        Raises:
            TypeError: arguments that the function does not take, or that cannot be pickled.
            InfeasibleRequestError: this machine can never give what the task asks for.
        """
        self._signature.check(args, kwargs)
        current = backend.current()
        spec = self._prepared()
        inputs: list[ObjectId] = []
        sent_args: tuple[Any, ...] = args
        sent_kwargs: dict[str, Any] = kwargs
        if any(isinstance(each, ObjectRef) for each in args):
            sent_args = tuple([_taken(each, inputs) for each in args])
        if kwargs and any(isinstance(each, ObjectRef) for each in kwargs.values()):
            sent_kwargs = {name: _taken(each, inputs) for name, each in kwargs.items()}
        arguments = serialize.dumps(
            (sent_args, sent_kwargs), what=f"arguments of {self._name}", names=self._signature.names
        )
        assert self._code is not None
        call = Call(
            spec,
            self._code,
            arguments,
            tuple(inputs),
            self._returns,
            self._retry,
            "call",
            output.sink(spec.name),
        )
        refs: list[ObjectRef[Any]] = [ObjectRef(each, held=True) for each in current.submit(call)]
        if self._returns == 1:
            return refs[0]
        return refs or None

    def options(self, **changes: Any) -> RemoteFunction[P, R]:
        """The same function with other options, for example ``f.options(num_gpus=0.5).remote()``.

        Raises:
            ValueError: an unknown option or a bad value.
            TypeError: a value of a wrong type.
        """
        if "max_calls" in changes:
            raise ValueError("max_calls belongs to the function: give it to gpunb.remote")
        return RemoteFunction(self._function, self._options.updated(changes))

    def _prepared(self) -> TaskSpec:
        """The function's pickle and identity; made again if a helper that it uses was redefined."""
        spec = self._spec
        if spec is None or not serialize.still_current(self._captured):
            self._captured = serialize.captured(self._function)
            self._code = serialize.dumps_function(self._function)
            identity = hashlib.blake2b(self._code, digest_size=16).hexdigest()
            spec = self._spec = self._options.spec(self._name, identity)
        return spec

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteFunction, (self._function, self._options))

    def __repr__(self) -> str:
        return f"<remote function {self._name} asking for {self._options.demand()}>"


class _Signature:
    """Checks arguments before they travel; the plain cases without `inspect`."""

    __slots__ = ("_least", "_most", "_name", "_signature", "names")

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        self._least, self._most = 0, -1
        self.names: tuple[str, ...] = ()
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None
            return
        kinds = inspect.Parameter
        parameters = list(self._signature.parameters.values())
        positional = [p for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
        self.names = tuple(p.name for p in positional)
        if len(positional) == len(parameters):
            self._least = sum(p.default is kinds.empty for p in positional)
            self._most = len(positional)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not kwargs and self._least <= len(args) <= self._most:
            return
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}{self._signature}: {error}") from None


def _taken(value: Any, inputs: list[ObjectId]) -> Any:
    """A slot for a ref, whose value travels on its own."""
    if not isinstance(value, ObjectRef):
        return value
    inputs.append(value.id)
    return Slot(len(inputs) - 1)


def _retry(options: Options) -> bytes | bool:
    retry = options.retry_exceptions
    if retry is None or isinstance(retry, bool):
        return bool(retry)
    pickled: bytes = cloudpickle.dumps(tuple(retry), protocol=5)
    return pickled


@overload
def remote(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(**options: Any) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]: ...


def remote(*args: Any, **options: Any) -> Any:
    """Make a function run in worker processes, on a share of a GPU if it asks for one.

    Use it bare or with options::

        @gpunb.remote(num_gpus=0.5)
        def train(rate): ...

        ref = train.remote(0.1)
        loss = gpunb.get(ref)

    Args:
        num_gpus: a share of one device, between 0 and 1 in steps of 0.0001, or a whole number.
        gpu_memory: instead: bytes of one device, as a number or a text such as ``"10GiB"``.
        accelerator_type: type of the device, such as ``"A100"``, or a list of types in order of
            preference.
        num_cpus: default 1, but 0 for a task that asks for a device.
        resources: custom resources by name.
        memory: bytes of host memory, for the reader only.
        name: shown in status and messages; the function's own by default.
        num_returns: number of results; the function then returns that many values.
        max_calls: calls after which a worker process is replaced: 1 is a fresh process for each
            task, the default with a device; 0 is no limit, the default without.
        max_retries: further attempts after a crash of the worker, default 3; -1 without limit.
        retry_exceptions: True, or a list of exception types, to try again after those as well.
        timeout: seconds one attempt may run.
        runtime_env: ``{"env_vars": {...}}``, variables for the worker.

    Raises:
        ValueError: an unknown option or a bad value.
        TypeError: a value of a wrong type, or something that is not a function.
    """
    if args and (options or len(args) > 1):
        raise TypeError(
            "use @gpunb.remote alone or with options by name: @gpunb.remote(num_gpus=1)"
        )
    if not args and not options:
        raise TypeError("gpunb.remote() needs a function or options, such as num_gpus=1")
    if args:
        return _decorate(args[0], Options())
    checked = Options().updated(options)
    return lambda function: _decorate(function, checked)


def _decorate(function: Any, options: Options) -> RemoteFunction[..., Any]:
    if isinstance(function, RemoteFunction):
        raise TypeError(f"{function!r} is remote already: use .options(...) to change it")
    if isinstance(function, type):
        raise TypeError(
            f"{function.__qualname__} is a class: this version of gpunb runs functions, not actors"
        )
    if not callable(function):
        raise TypeError(f"gpunb.remote takes a function, not {function!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(
            f"{function.__qualname__} is an async function: a task must be a plain one; "
            "call asyncio.run inside it"
        )
    return RemoteFunction(function, options)
