"""Paths to objects within other objects, and streams that name objects of their reader by a path.

A value that a worker sends back may have parts that the notebook has sent and the worker has not
changed. The stream then has the path to such a part instead of its data, so that the part is the
same object afterwards.
"""

from __future__ import annotations

import pickle
import struct
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias

__all__ = ["Part", "Path", "at", "in_array", "part_at", "parts", "preamble"]

Path: TypeAlias = tuple[Any, ...]
"""A name, then (whether the step is an item, its key or attribute name) for each step."""

Part: TypeAlias = tuple[Any, Path]
"""An object and the path to it."""

_MOST = 200
_FEW = 100
_DEEP = 4
"""At most so many objects, items of one container, and steps of a path are followed."""

_PLAIN = (
    *(int, float, complex, str, bytes, bool, type(None), type, range),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)


def parts(values: Mapping[str, Any], *, exact: bool, repeated: bool = False) -> Iterator[Part]:
    """Yield the values and their parts, each once, those with the shortest paths first. With
    `exact` the paths lead to the same parts in a pickled copy of the values; with `repeated` a part
    comes again for each other path to it."""
    todo: deque[Part] = deque((value, (name,)) for name, value in values.items())
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        thing, path = todo.popleft()
        if isinstance(thing, _PLAIN):
            continue
        if id(thing) in seen:
            if repeated:
                yield thing, path
            continue
        seen.add(id(thing))
        yield thing, path
        if len(path) <= _DEEP:
            todo.extend((part, (*path, step)) for step, part in _steps(thing, exact))


def _steps(thing: Any, exact: bool) -> Iterable[tuple[tuple[bool, Any], Any]]:
    kind = type(thing)
    if issubclass(kind, dict):
        if len(thing) > _FEW:
            return []
        items = list(dict.items(thing))
        return [((True, key), each) for key, each in items if type(key) in (str, int)]
    if kind is list or kind is tuple:
        return [((True, at), each) for at, each in enumerate(thing[:_FEW])]
    if found := in_array(thing):
        return [((True, at), each) for at, each in found]
    if kind.__dictoffset__ == 0 or (exact and not _ordinary(kind)):
        return []
    try:
        space = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    return [((False, name), each) for name, each in list(space.items())[:_FEW]]


def in_array(thing: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Indices and objects of an array of objects, such as that of the axes of a figure."""
    kind = type(thing)
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray" or thing.dtype.kind != "O":
        return []
    return list(islice(sys.modules["numpy"].ndenumerate(thing), _FEW))


def _ordinary(kind: Any) -> bool:
    """Whether pickle handles instances by their attributes alone."""
    return (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__getstate__ is object.__getstate__
        and not hasattr(kind, "__setstate__")
    )


def part_at(values: Mapping[str, Any], path: bytes) -> Any:
    """Return the part at a pickled path."""
    return at(values, pickle.loads(path))


def at(values: Mapping[str, Any], path: Path) -> Any:
    """Return the part at a path."""
    name, *steps = path
    part = values[name]
    for item, key in steps:
        part = part[key] if item else vars(part)[key]
    return part


def preamble(shared: Iterable[Part]) -> bytes:
    """Return the start of a stream: it makes the reader put these parts into its memo, in order."""
    pieces = [pickle.PROTO + b"\x05"]
    for _, path in shared:
        data = pickle.dumps(path, 5)
        pieces += pickle.BINBYTES, struct.pack("<I", len(data)), data
        pieces += pickle.BINPERSID, pickle.MEMOIZE, pickle.POP
    return b"".join(pieces)
