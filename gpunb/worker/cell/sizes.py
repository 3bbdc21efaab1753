"""Estimates the size of a value in some milliseconds, without pickling it.

Arrays, tensors and tables know their sizes. Containers and objects are searched breadth first, up
to a number of parts; a sample of a long container stands for all of it.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

_MOST_PARTS = 10_000
_SAMPLE = 200
"""Elements of a container that are looked at."""

_FLAT = (int, float, complex, bool, type(None), str, bytes, bytearray)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def larger(values: Mapping[str, Any], most: int) -> dict[str, int]:
    """Return the sizes of those values that are larger than `most` bytes, by name. A part of a
    value that is not, such as an axis of a figure, is not searched again."""
    found, small = {}, {}
    for name, value in values.items():
        if id(value) not in small:
            size, parts, complete = _search(value)
            if size > most:
                found[name] = size
            elif complete:
                small.update(parts)
    return found


def size_of(value: Any) -> int:
    """Size of the data of a value in bytes. An object that is in it twice counts once."""
    return _search(value)[0]


def _search(value: Any) -> tuple[int, dict[int, Any], bool]:
    """Return the size of a value in bytes, the parts that were looked at by their ids, and whether
    no part was left over."""
    total = 0.0
    seen: dict[int, Any] = {}  # the objects themselves, so that no id is used again meanwhile
    todo: deque[tuple[Any, float]] = deque([(value, 1.0)])
    for _ in range(_MOST_PARTS):
        if not todo:
            break
        part, weight = todo.popleft()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        try:
            size, inner, more = _look(part)
        except Exception:  # its own methods may raise anything
            continue
        total += weight * size
        todo.extend((each, weight * more) for each in inner)
    return int(total), seen, not todo


def _look(part: Any) -> tuple[float, Iterable[Any], float]:
    """The size of an object by itself, parts of it, and the number that each part stands for."""
    if isinstance(part, _CODE):
        return 0, (), 1
    if isinstance(part, _FLAT):
        return sys.getsizeof(part), (), 1
    reported = _reported(part)
    if reported is not None:
        return reported, *_objects_in(part)
    if isinstance(part, dict):
        pairs, more = _sampled(part.items())
        return sys.getsizeof(part), [each for pair in pairs for each in pair], more
    if isinstance(part, (list, tuple, set, frozenset, deque)):
        return sys.getsizeof(part), *_sampled(part)
    return sys.getsizeof(part), _attributes(part), 1


def _reported(part: Any) -> int | None:
    """The size that an array, tensor or table reports; None for other objects."""
    package = type(part).__module__.partition(".")[0]
    if package == "pandas" and hasattr(part, "memory_usage"):
        size = part.memory_usage()
        return int(size.sum() if hasattr(size, "sum") else size)
    if package == "polars" and hasattr(part, "estimated_size"):
        return int(part.estimated_size())
    if not hasattr(type(part), "nbytes"):
        return None  # an object with any attribute, such as a mock, has no size
    known: Any = part.nbytes
    return int(known) if hasattr(known, "__index__") and not hasattr(known, "__len__") else None


def _objects_in(part: Any) -> tuple[list[Any], float]:
    """A sample of the objects in an array or a table of objects, and the number for each."""
    if hasattr(part, "memory_usage"):
        rows = part[:: max(1, len(part) // _SAMPLE)]
        columns = [rows[name] for name in rows] if hasattr(part, "columns") else [rows]
        found = [each for column in columns if _holds_objects(column) for each in column]
        return found, len(part) / max(1, len(rows))
    if _holds_objects(part) and hasattr(part, "flat"):
        sample = list(part.flat[:: max(1, part.size // _SAMPLE)])
        return sample, part.size / max(1, len(sample))
    return [], 1


def _holds_objects(column: Any) -> bool:
    dtype = getattr(column, "dtype", None)
    return getattr(dtype, "kind", "") == "O" and getattr(dtype, "storage", "python") == "python"


def _sampled(parts: Collection[Any]) -> tuple[list[Any], float]:
    """A sample of the parts, and the number that each stands for."""
    count = len(parts)
    if count <= _SAMPLE:
        return list(parts), 1
    if isinstance(parts, (list, tuple)):
        sample = list(parts[:: count // _SAMPLE])  # from all over
    else:
        sample = list(islice(parts, _SAMPLE))
    return sample, count / len(sample)


def _attributes(part: Any) -> Iterator[Any]:
    yield from vars(part).values() if hasattr(part, "__dict__") else ()
    for kind in type(part).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(part, name):
                yield getattr(part, name)
