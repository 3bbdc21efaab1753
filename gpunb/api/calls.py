"""Turns the arguments of a call of a function, class or method into a submitted call and refs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from gpunb.api.generators import ObjectRefGenerator
from gpunb.api.refs import ObjectRef
from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.protocol import backend
from gpunb.protocol.backend import DYNAMIC, STREAMING, Call, ObjectId, Slot
from gpunb.system.signals import UNDIVIDED


class Signature:
    """Checks the arguments of a call; calls with positional arguments only need no `inspect`.

    Keeps neither defaults nor annotations, so it can always be pickled.
    """

    __slots__ = ("_least", "_most", "_name", "_signature", "names")

    def __init__(
        self, function: Callable[..., Any] | inspect.Signature | None, name: str, *, bound: int = 0
    ) -> None:
        """`bound`: number of first parameters, such as ``self``, that the caller does not give."""
        self._name = name
        self._least, self._most = 0, -1
        self.names: tuple[str, ...] = ()
        self._signature = _without_values(function, bound)
        if self._signature is None:
            return
        kinds = inspect.Parameter
        parameters = list(self._signature.parameters.values())
        positional = [p for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
        self.names = tuple(p.name for p in positional)
        if len(positional) == len(parameters):
            self._least = sum(p.default is kinds.empty for p in positional)
            self._most = len(positional)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check arguments: raises TypeError if the function does not take them."""
        if not kwargs and self._least <= len(args) <= self._most:
            return
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}{self._signature}: {error}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Signature, (self._signature, self._name)


class _Default:
    """The placeholder of a default value in a signature."""

    def __repr__(self) -> str:
        return "..."

    def __reduce__(self) -> str:
        return "_DEFAULT"


_DEFAULT = _Default()


def _without_values(
    function: Callable[..., Any] | inspect.Signature | None, bound: int
) -> inspect.Signature | None:
    """The signature without annotations, default values and the first `bound` parameters."""
    if function is None or isinstance(function, inspect.Signature):
        return function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    empty = inspect.Parameter.empty
    parameters = [
        each.replace(annotation=empty, default=empty if each.default is empty else _DEFAULT)
        for each in signature.parameters.values()
    ]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    while bound and parameters and parameters[0].kind in kinds:
        del parameters[0]
        bound -= 1
    return inspect.Signature(parameters)


_NO_ARGUMENTS = serialize.dumps(((), {}))


def pack_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], what: str, names: Sequence[str]
) -> tuple[Payload, tuple[ObjectId, ...]]:
    """The pickled arguments of the call `what`, and the ids of the refs at their top level."""
    if not args and not kwargs:
        return _NO_ARGUMENTS, ()
    inputs: list[ObjectId] = []
    if any(isinstance(each, ObjectRef) for each in args):
        args = tuple([_slot_for(each, inputs) for each in args])
    if kwargs and any(isinstance(each, ObjectRef) for each in kwargs.values()):
        kwargs = {name: _slot_for(each, inputs) for name, each in kwargs.items()}
    return serialize.dumps((args, kwargs), what=f"arguments of {what}", names=names), tuple(inputs)


def _slot_for(value: Any, inputs: list[ObjectId]) -> Any:
    """A slot for a ref, after its id is added to `inputs`; any other value as it is."""
    if not isinstance(value, ObjectRef):
        return value
    inputs.append(value.id)
    return Slot(len(inputs) - 1)


def encoded_retry(retry: Any) -> bytes | bool:
    """The option ``retry_exceptions`` for a message: a bool, or the pickled exception types."""
    if retry is None or isinstance(retry, bool):
        return bool(retry)
    pickled: bytes = cloudpickle.dumps(tuple(retry), protocol=5)
    return pickled


def is_generator(function: Any) -> bool:
    """Whether a function yields its results."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def encoded_returns(generates: bool, returns: int | str | None, name: str) -> int:
    """The option ``num_returns`` for a message: a number, STREAMING or DYNAMIC.

    Raises:
        ValueError: `returns` is for generators, and the function `name` is none.
    """
    if returns is None:
        return STREAMING if generates else 1
    if isinstance(returns, int):
        return returns
    if not generates:
        raise ValueError(
            f"num_returns={returns!r} needs a generator function, and {name} does not yield"
        )
    return STREAMING if returns == "streaming" else DYNAMIC


def submit(call: Call, returns: int) -> Any:
    """Submit a call. Returns its refs, or the generator of its refs."""
    current = backend.current()
    with UNDIVIDED:  # the backend counts a reference to each object
        objects = current.submit(call)
        if returns == STREAMING:
            return ObjectRefGenerator(objects[0][0])
        refs: list[ObjectRef[Any]] = [ObjectRef(each, held=True) for each in objects]
        return refs[0] if returns in (1, DYNAMIC) else refs or None
