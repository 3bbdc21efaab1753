"""Functions whose calls run in worker processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from gpunb import backend, serialize
from gpunb.backend import Call, ObjectId
from gpunb.calls import Signature, packed, retry_of, returns_of, submitted
from gpunb.core.options import Options
from gpunb.core.tasks import TaskSpec
from gpunb.runtime import output

P = ParamSpec("P")
R = TypeVar("R")


class RemoteFunction(Generic[P, R]):
    """A function whose calls run in worker processes. Made by `gpunb.remote`."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        # It may be half made yet, if it refers to this and is being unpickled.
        self._function = function
        self._options = options
        self._name = getattr(function, "__qualname__", None) or repr(function)
        self._name = self._name.rpartition("<locals>.")[2]
        self._returns = returns_of(function, options.num_returns, self._name)
        self._retry = retry_of(options.retry_exceptions)
        self._code: bytes | None = None
        self._held: tuple[ObjectId, ...] = ()
        self._captured: Any = ()
        self._spec: TaskSpec | None = None
        self.__doc__ = getattr(function, "__doc__", None)
        self.__name__ = self._name
        self.__module__ = getattr(function, "__module__", __name__)
        self.__wrapped__ = function

    @functools.cached_property
    def _signature(self) -> Signature:
        return Signature(self._function, self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"the remote function {self._name} cannot be called directly: "
            f"use {self._name}.remote(...), or {self._name}.__wrapped__(...) to run it here"
        )

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Have the function run with these arguments; returns at once with an `ObjectRef`.

        With ``num_returns=n`` it is a list of n refs, and None for 0; for a generator function it
        is an `ObjectRefGenerator`. Refs at the top level of the arguments arrive as their values;
        refs inside other objects stay refs.

        Raises:
            TypeError: arguments that the function does not take, or that cannot be pickled.
            InfeasibleRequestError: this machine can never give what the task asks for.
        """
        self._signature.check(args, kwargs)
        backend.current()  # before the first call of all is packed
        spec = self._prepared()
        arguments, inputs = packed(args, kwargs, self._name, self._signature.names)
        assert self._code is not None
        call = Call(
            spec,
            self._code,
            arguments,
            inputs,
            self._returns,
            self._retry,
            "call",
            output.sink(spec.name),
            held=self._held,
        )
        return submitted(call, self._returns)

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
            noted: list[ObjectId] = []
            self._code = serialize.dumps_function(self._function, noted)
            self._held = tuple(noted)
            identity = hashlib.blake2b(self._code, digest_size=16).hexdigest()
            spec = self._spec = self._options.spec(self._name, identity)
        return spec

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteFunction, (self._function, self._options))

    def __repr__(self) -> str:
        return f"<remote function {self._name} asking for {self._options.demand()}>"
