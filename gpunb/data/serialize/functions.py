"""Pickles functions, and finds out whether a pickle is out of date.

A function of a notebook is pickled by value, with the globals that it refers to. If one of them is
bound again, because the user ran the cell of a helper again, the pickle is out of date.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from gpunb.data.serialize.pickler import by_value, closure_of, global_names
from gpunb.data.serialize.values import dumps_in_band

__all__ = [
    "Snapshot",
    "captured",
    "dumps_function",
    "functions_within",
    "still_current",
]

Snapshot = tuple[tuple[dict[str, Any], str, object], ...]
"""For each name: the globals, the name, and the object that it was bound to."""

CACHED: Any = type(functools.lru_cache(len))
"""The type of functions that `functools.lru_cache` makes."""

_UNBOUND = object()
_FEW = 100
_CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, dict)


def dumps_function(function: Callable[..., Any], noted: list[Any] | None = None) -> bytes:
    """Pickle a function or class: by name if it can be imported, else by value. References that
    are noted meanwhile (`note_reference`) are added to `noted`.

    Raises:
        TypeError: it refers to an object that cannot be pickled; the text names it.
    """
    kind = "class" if isinstance(function, type) else "function"
    name = getattr(function, "__qualname__", None) or repr(function)
    data, references = dumps_in_band(function, what=f"{kind} {name}")
    if noted is not None:
        noted.extend(references)
    return data


def captured(function: Callable[..., Any]) -> Snapshot:
    """Return the present bindings of the globals that `function` refers to.

    Functions and classes that would travel by value with it are followed; those that are pickled by
    name are not. An object that is changed in place counts as the same.
    """
    found: dict[tuple[int, str], tuple[dict[str, Any], str, object]] = {}
    for each in functions_within(function):
        space = each.__globals__
        for name in global_names(each.__code__):
            found[id(space), name] = space, name, space.get(name, _UNBOUND)
    return tuple(found.values())


def functions_within(*things: object) -> Iterator[types.FunctionType]:
    """Yield the functions that would travel by value with these objects, each once.

    Globals of functions are followed, but data is not searched.
    """
    seen: dict[int, object] = {}  # keeps the objects alive, so that no id is used again
    todo: list[object] = list(things)
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if type(part) is types.FunctionType and by_value(part):
            yield part
            space = part.__globals__
            todo.extend(space[name] for name in global_names(part.__code__) if name in space)
        todo.extend(_parts(part))


def still_current(snapshot: Snapshot) -> bool:
    """Return whether each name is still bound to the identical object."""
    for space, name, value in snapshot:  # noqa: SIM110 - all() takes twice the time
        if space.get(name, _UNBOUND) is not value:
            return False
    return True


def _parts(thing: Any) -> Iterator[object]:
    """Yield the parts that are pickled with `thing` and may refer to globals."""
    kind = type(thing)  # not isinstance(), which a proxy can answer
    if kind is types.FunctionType:
        if by_value(thing):
            yield from (value for _, value in closure_of(thing))
            yield from thing.__defaults__ or ()
            yield from (thing.__kwdefaults__ or {}).values()
            yield from vars(thing).values()
    elif issubclass(kind, type):
        if by_value(thing):
            yield from list(vars(thing).values())
            yield from thing.__bases__
    elif kind is types.MethodType:
        yield from (thing.__func__, thing.__self__)
    elif issubclass(kind, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif issubclass(kind, (staticmethod, classmethod)):
        yield thing.__func__
    elif kind is CACHED:
        yield thing.__wrapped__
    elif issubclass(kind, property):
        yield from (thing.fget, thing.fset, thing.fdel)
    elif kind in _CONTAINERS:
        yield from _few(thing)
    else:
        yield kind


def _few(container: Any) -> Iterator[object]:
    """Yield the elements of a small container, such as a table of functions."""
    if len(container) <= _FEW:
        yield from list(container.values() if type(container) is dict else container)
