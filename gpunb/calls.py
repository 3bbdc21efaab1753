"""What calls of functions, classes and methods have in common: from arguments to refs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from gpunb import backend, serialize
from gpunb.backend import DYNAMIC, STREAMING, Call, ObjectId, Slot
from gpunb.generators import ObjectRefGenerator
from gpunb.refs import ObjectRef
from gpunb.serialize import Payload
from gpunb.signals import UNDIVIDED


class Signature:
    """Checks arguments before they travel; the plain cases without `inspect`.

    Can be pickled whatever the defaults and annotations are, because it does not keep them.
    """

    __slots__ = ("_least", "_most", "_name", "_signature", "names")

    def __init__(
        self, function: Callable[..., Any] | inspect.Signature | None, name: str, *, bound: int = 0
    ) -> None:
        """`bound` parameters at the front are not the caller's: ``self``."""
        self._name = name
        self._least, self._most = 0, -1
        self.names: tuple[str, ...] = ()
        self._signature = _plain(function, bound)
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
        """Raises TypeError for arguments that do not fit."""
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
    """Stands for a default value in a signature."""

    def __repr__(self) -> str:
        return "..."

    def __reduce__(self) -> str:
        return "_DEFAULT"


_DEFAULT = _Default()


def _plain(
    function: Callable[..., Any] | inspect.Signature | None, bound: int
) -> inspect.Signature | None:
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


def packed(
    args: tuple[Any, ...], kwargs: dict[str, Any], what: str, names: Sequence[str]
) -> tuple[Payload, tuple[ObjectId, ...]]:
    """The arguments ready to travel, and the objects whose values travel on their own."""
    inputs: list[ObjectId] = []
    if any(isinstance(each, ObjectRef) for each in args):
        args = tuple([_taken(each, inputs) for each in args])
    if kwargs and any(isinstance(each, ObjectRef) for each in kwargs.values()):
        kwargs = {name: _taken(each, inputs) for name, each in kwargs.items()}
    return serialize.dumps((args, kwargs), what=f"arguments of {what}", names=names), tuple(inputs)


def _taken(value: Any, inputs: list[ObjectId]) -> Any:
    """A slot for a ref, whose value travels on its own."""
    if not isinstance(value, ObjectRef):
        return value
    inputs.append(value.id)
    return Slot(len(inputs) - 1)


def retry_of(retry: Any) -> bytes | bool:
    """The exceptions that are worth another attempt, as they travel."""
    if retry is None or isinstance(retry, bool):
        return bool(retry)
    pickled: bytes = cloudpickle.dumps(tuple(retry), protocol=5)
    return pickled


def returns_of(function: Any, returns: int | str | None, name: str) -> int:
    """The number of results as it travels: a generator function gives them one by one.

    Raises:
        ValueError: one by one, from a function that is no generator.
    """
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if returns is None:
        return STREAMING if generates else 1
    if isinstance(returns, int):
        return returns
    if not generates:
        raise ValueError(
            f"num_returns={returns!r} needs a generator function, and {name} does not yield"
        )
    return STREAMING if returns == "streaming" else DYNAMIC


def submitted(call: Call, returns: int) -> Any:
    """Hand in a call: the refs, or the generator, that it gives its caller."""
    current = backend.current()
    with UNDIVIDED:
        return _results(current.submit(call), returns)


def _results(objects: Sequence[ObjectId], returns: int) -> Any:
    """What a call gives its caller, who holds a reference to each object already."""
    if returns == STREAMING:
        return ObjectRefGenerator(objects[0][0])
    refs: list[ObjectRef[Any]] = [ObjectRef(each, held=True) for each in objects]
    if returns in (1, DYNAMIC):
        return refs[0]
    return refs or None
