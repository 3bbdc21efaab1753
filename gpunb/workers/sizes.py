"""How large a value is, about: without pickling it, and in some milliseconds at most.

Arrays, tensors and tables say it themselves. Containers and objects are gone through, breadth
first and up to so many of their parts, and of long containers a sample stands for the rest.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

_MOST_PARTS = 10_000
_SAMPLE = 200
"""Elements of a container that are looked at."""

_FLAT = (int, float, complex, bool, type(None), str, bytes, bytearray)
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def size_of(value: Any) -> int:
    """Bytes of the data of a value. What is in it twice counts once."""
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
    return int(total)


def _look(part: Any) -> tuple[float, Iterable[Any], float]:
    """The size of a thing by itself, parts of it, and how many each of these stands for."""
    if isinstance(part, _CODE):
        return 0, (), 1
    if isinstance(part, _FLAT):
        return sys.getsizeof(part), (), 1
    said = _said(part)
    if said is not None:
        objects = _objects_in(part)
        return said, objects[0], objects[1]
    if isinstance(part, dict):
        pairs, more = _sampled(part.items())
        return sys.getsizeof(part), [each for pair in pairs for each in pair], more
    if isinstance(part, (list, tuple, set, frozenset, deque)):
        return sys.getsizeof(part), *_sampled(part)
    return sys.getsizeof(part), _attributes(part), 1


def _said(part: Any) -> int | None:
    """What an array, tensor or table says of itself."""
    package = type(part).__module__.partition(".")[0]
    if package == "pandas" and hasattr(part, "memory_usage"):
        size = part.memory_usage()
        return int(size.sum() if hasattr(size, "sum") else size)
    if package == "polars" and hasattr(part, "estimated_size"):
        return int(part.estimated_size())
    if not hasattr(type(part), "nbytes"):
        return None  # what answers to any name would be asked for one that it does not know
    said: Any = part.nbytes
    return int(said) if hasattr(said, "__index__") and not hasattr(said, "__len__") else None


def _objects_in(part: Any) -> tuple[list[Any], float]:
    """The objects that an array or a table of objects refers to; a sample of them."""
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
    """Some of the parts, and how many each of them stands for."""
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
