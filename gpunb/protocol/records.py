"""Converts dataclasses and named tuples to plain tuples, and back with every field checked.

A decoder of messages makes plain values only, so messages, requests and the specifications of
tasks travel as tuples of their fields. `read` takes the types of the fields from the annotations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from gpunb.data.serialize import Payload
from gpunb.protocol.backend import Call, NewActor, ObjectId
from gpunb.protocol.plain import Malformed, short
from gpunb.scheduler.tasks import TaskSpec

if TYPE_CHECKING:
    from gpunb.protocol.sink import Sink

T = TypeVar("T")

_SPECS = 1000
"""Specifications that are remembered in both forms: many calls have the same one."""

_EXACT = frozenset({type(None), bool, int, str, bytes, float})

Reader: TypeAlias = Callable[[Any], Any]
"""Returns the value that a field stands for, or raises Malformed."""

KINDS = frozenset({"call", "create", "method", "cell", "ranks"})


@dataclass(frozen=True, slots=True)
class Function:
    """The part of `Call` that is equal in all calls of a function, with the same fields."""

    spec: TaskSpec
    code: bytes
    returns: int
    retry: bytes | bool
    kind: str
    held: tuple[ObjectId, ...]

    @classmethod
    def of(cls, call: Call, owner: int | None = None) -> Function:
        """Return the part of a call that other calls share; `owner` as in `TaskSpec`."""
        spec = call.spec
        if spec.ray is not None or owner is not None:  # options for Ray mean nothing here
            spec = dataclasses.replace(spec, ray=None, owner=owner or spec.owner)
        return cls(spec, call.code, call.returns, call.retry, call.kind, call.held)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(sorted(KINDS))}")


@dataclass(frozen=True, slots=True)
class Submission:
    """A call without its arguments; the fields are those of `Call`."""

    function: Function
    inputs: tuple[ObjectId, ...]
    actor: int
    new: NewActor | None

    @classmethod
    def of(cls, call: Call) -> Submission:
        """Return a call without its arguments."""
        return cls(Function.of(call), call.inputs, call.actor, call.new)

    def call(self, arguments: Payload, sink: Sink | None) -> Call:
        """Return the call with these arguments, whose output goes to `sink`."""
        function = self.function
        return Call(
            function.spec,
            function.code,
            arguments,
            self.inputs,
            function.returns,
            function.retry,
            function.kind,
            sink,
            self.actor,
            self.new,
            function.held,
        )


def flat(value: Any) -> Any:
    """Return a dataclass as the tuple of its fields, also those inside it and inside tuples."""
    kind = type(value)
    if kind in _EXACT:
        return value
    if kind is TaskSpec and value.ray is None:
        return _flat_spec(value)
    if kind is tuple:
        return tuple(map(flat, value))
    return _fields(value)


@functools.lru_cache(_SPECS)
def _flat_spec(spec: TaskSpec) -> Any:
    return _fields(spec)


def _fields(value: Any) -> Any:
    kind: Any = type(value)
    if (names := _names(kind)) is None:
        return value
    return tuple([flat(getattr(value, name)) for name in names])


@functools.cache
def _names(kind: Any) -> tuple[str, ...] | None:
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(each.name for each in dataclasses.fields(kind))


def read(kind: type[T], fields: Any) -> T:
    """Return the dataclass of this kind that `flat` was given, or a named tuple.

    Raises:
        Malformed: the fields are something else, or the dataclass refuses a field.
    """
    hint: Any = kind
    made: T = reader(hint)(fields)
    return made


@functools.cache
def reader(kind: Any) -> Reader:
    """Return the function that reads the fields of a dataclass or named tuple, as `read` does."""
    hints = list(get_type_hints(kind).values())
    if issubclass(kind, tuple):
        return _of_fields(kind.__name__, hints, functools.partial(tuple.__new__, kind))
    read = _of_fields(kind.__name__, hints, lambda fields: kind(*fields))
    return functools.lru_cache(_SPECS)(read) if kind is TaskSpec else read


def _of_fields(name: str, hints: Sequence[Any], make: Callable[[Any], Any]) -> Reader:
    """Return a reader for a tuple of fields with these annotations."""
    found = [_of_hint(each) for each in hints]
    allowed: tuple[Any, ...] = tuple(types for types, _ in found)
    closer = [(index, look) for index, (_, look) in enumerate(found) if look is not None]

    def read(fields: Any) -> Any:
        if type(fields) is not tuple or len(fields) != len(allowed):
            raise Malformed(f"{short(fields)} must have the fields of {name}")
        if not all(map(isinstance, fields, allowed)):
            types = ", ".join(type(each).__name__ for each in fields)
            raise Malformed(f"the fields of {name} cannot be ({types})")
        try:
            if closer:
                fields = list(fields)
                for index, look in closer:
                    if fields[index] is not None:
                        fields[index] = look(fields[index])
            return make(fields)
        except (TypeError, ValueError) as error:
            raise Malformed(f"this is no {name}: {error}") from error

    return read


def _of_hint(hint: Any) -> tuple[tuple[type, ...], Reader | None]:
    """Return the types that a value may have, and the reader for a value that needs a closer look
    and is not None."""
    allowed: list[type] = []
    closer = None
    union = get_origin(hint) in (Union, types.UnionType)
    for each in get_args(hint) if union else (hint,):
        kind = get_origin(each) or each
        if dataclasses.is_dataclass(each) or hasattr(each, "_fields"):
            kind, closer = tuple, reader(each)
        elif each in READERS:
            closer = READERS[each]
        elif kind is tuple:
            closer = _of_tuple(get_args(each))
        allowed += {Any: (object,), float: (float, int), Mapping: (dict,)}.get(kind, (kind,))
    return tuple(allowed), closer


def _of_tuple(hints: tuple[Any, ...]) -> Reader | None:
    """Return the reader for a tuple; None if there may be anything in it."""
    if hints[-1] is not Ellipsis:
        return _of_fields(f"a tuple of {len(hints)}", hints, tuple)
    allowed, closer = _of_hint(hints[0])
    if allowed == (object,):
        return None

    def read(values: tuple[Any, ...]) -> tuple[Any, ...]:
        for each in values:
            if not isinstance(each, allowed):
                raise Malformed(f"{short(each)} cannot be one of several {hints[0]}")
        return tuple(map(closer, values)) if closer is not None else values

    return read


def _number(value: float) -> float:
    if math.isnan(value):
        raise Malformed("nan is no number of seconds")
    return value


def _object(value: Any) -> ObjectId:
    return _objects((value,))[0]


def _objects(values: tuple[Any, ...]) -> tuple[ObjectId, ...]:
    for each in values:
        if type(each) is tuple and len(each) == 2:
            task, index = each
            if type(task) is int and type(index) is int:
                continue
        raise Malformed(f"{short(each)} is not the id of an object")
    return values


READERS: dict[Any, Reader | None] = {
    float: _number,
    ObjectId: _object,
    tuple[ObjectId, ...]: _objects,
}
"""Readers by annotation, where they are not made from it; None if any value of the type will do."""
