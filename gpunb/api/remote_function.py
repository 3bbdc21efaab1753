"""Functions whose calls run in worker processes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from gpunb.api.calls import (
    Signature,
    encoded_retry,
    encoded_returns,
    is_generator,
    pack_arguments,
    submit,
)
from gpunb.data import serialize
from gpunb.protocol import backend, sink
from gpunb.protocol.backend import Call, ObjectId
from gpunb.protocol.same_code import digest_of_function, with_code
from gpunb.scheduler.options import Options
from gpunb.scheduler.tasks import TaskSpec
from gpunb.system.signals import Divisible

P = ParamSpec("P")
R = TypeVar("R")


class RemoteFunction(Generic[P, R]):
    """A function whose calls run in worker processes. Made by `gpunb.remote`."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        # The function may be incomplete here: one that refers to itself is unpickled in steps.
        self._function = function
        self._options = options
        self._name = getattr(function, "__qualname__", None) or repr(function)
        self._name = self._name.rpartition("<locals>.")[2]
        self._returns = encoded_returns(is_generator(function), options.num_returns, self._name)
        self._retry = encoded_retry(options.retry_exceptions)
        if options.ranks is not None and self._returns != 1:
            raise ValueError(
                f"{self._name} yields its results, which does not go with ranks={options.ranks}: "
                "return a list from each rank"
            )
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
        """Submit a call of the function with these arguments. Returns at once.

        Returns:
            An `ObjectRef`; with ``num_returns=n`` a list of n refs, or None for 0; for a generator
            function an `ObjectRefGenerator`. With ``ranks=n`` the value of the ref is the list of
            the n ranks' results.

        The function gets the values of refs at the top level of the arguments; refs inside other
        objects stay refs.

        Raises:
            TypeError: arguments that the function does not take, or that cannot be pickled.
            InfeasibleRequestError: this machine can never give what the task asks for.
        """
        return self.submit_with(None, args, kwargs)

    def submit_with(
        self,
        console: sink.Sink | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
    ) -> Any:
        """As `remote`, with a sink for the output of the call and a name of its task; None for the
        usual ones. In an undivided block an interrupt can still stop the pickling of arguments.
        """
        with Divisible():
            self._signature.check(args, kwargs)
            backend.current()  # starts the session, if there is none, before arguments are pickled
            spec = self._prepared()
            if name is not None:
                spec = dataclasses.replace(spec, name=name)
            arguments, inputs = pack_arguments(args, kwargs, self._name, self._signature.names)
        assert self._code is not None
        code, returns = self._code, self._returns
        console = sink.sink(spec.name) if console is None else console
        call = Call(
            spec, code, arguments, inputs, returns, self._retry, "call", console, held=self._held
        )
        if self._options.ranks is not None:
            call = self._in_ranks(call, self._options.ranks)
        return submit(call, returns)

    def _in_ranks(self, call: Call, size: int) -> Call:
        from gpunb.protocol.ranks import Ranks, coordinated  # most programs need no ranks

        return coordinated(call, Ranks(size, bool(self._options.isolate)))

    def options(self, **changes: Any) -> RemoteFunction[P, R]:
        """The same function with other options, for example ``f.options(num_gpus=0.5).remote()``.

        Raises:
            ValueError: an unknown option or a bad value.
            TypeError: a value of a wrong type.
        """
        if "max_calls" in changes:
            raise ValueError("max_calls belongs to the function: give it to gpunb.remote")
        return RemoteFunction(self._function, self._options.updated(changes))

    def _remote(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return self.options(**options).remote(*(args or ()), **(kwargs or {}))

    def _prepared(self) -> TaskSpec:
        """The task specification. Pickles the function again if a helper it uses was redefined."""
        spec = self._spec
        if spec is None or not serialize.still_current(self._captured):
            self._captured = serialize.captured(self._function)
            noted: list[ObjectId] = []
            self._code = serialize.dumps_function(self._function, noted)
            self._held = tuple(noted)
            identity = hashlib.blake2b(self._code, digest_size=16).hexdigest()
            spec = self._options.spec(self._name, identity)
            if spec.auto is not None:
                spec = with_code(spec, digest_of_function(self._function))
            self._spec = spec
        return spec

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteFunction, (self._function, self._options))

    def __repr__(self) -> str:
        return f"<remote function {self._name} asking for {self._options.demand()}>"
