"""Functions as bytes, and whether those bytes are still what the function would do now.

A function out of a notebook travels by value, with the globals that it refers to. When one of them
is bound to something else, because the user ran the cell of a helper again, the bytes are stale.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cloudpickle import cloudpickle

from gpunb.serialize.values import Payload, dumps_in_band, loads

__all__ = [
    "Snapshot",
    "captured",
    "dumps_function",
    "functions_within",
    "loads_function",
    "still_current",
]

Snapshot = tuple[tuple[dict[str, Any], str, object], ...]
"""(the globals, a name in them, what it was bound to)"""

_UNBOUND = object()
_FEW = 100
_CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, dict)


def dumps_function(function: Callable[..., Any], noted: list[Any] | None = None) -> bytes:
    """Pickle a function or class: by reference if it can be imported, else by value. What it
    passes to `note_reference` is added to `noted`.

    Raises:
        TypeError: if it refers to something that cannot be pickled; the text says to what.
    """
    kind = "class" if isinstance(function, type) else "function"
    name = getattr(function, "__qualname__", None) or repr(function)
    data, references = dumps_in_band(function, what=f"{kind} {name}")
    if noted is not None:
        noted.extend(references)
    return data


def loads_function(
    data: bytes, *, namespace: dict[str, Any] | None = None, lazy_modules: bool = False
) -> Any:
    """Make the function again; see `loads` for the arguments."""
    return loads(Payload(data), namespace=namespace, lazy_modules=lazy_modules)


def captured(function: Callable[..., Any]) -> Snapshot:
    """Return what the globals that `function` refers to are bound to now.

    It follows the functions and classes that would travel by value with it; of those that are
    imported by name nothing is noted. An object that is changed in place counts as the same.
    """
    found: dict[tuple[int, str], tuple[dict[str, Any], str, object]] = {}
    for each in functions_within(function):
        space = each.__globals__
        for name in global_names(each.__code__):
            found[id(space), name] = space, name, space.get(name, _UNBOUND)
    return tuple(found.values())


def functions_within(*things: object) -> Iterator[types.FunctionType]:
    """Yield the functions that would travel by value with these things, each once.

    It follows what they refer to as globals, but does not look into data.
    """
    seen: dict[int, object] = {}  # the objects themselves, so that no id is used again meanwhile
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


def by_value(thing: object) -> bool:
    """Return whether a function or class travels as code, not as a name to import."""
    try:
        return not cloudpickle._should_pickle_by_reference(thing)  # noqa: SLF001
    except Exception:  # noqa: BLE001 - a proxy that only looks like one
        return False


def global_names(code: types.CodeType) -> Iterable[str]:
    """Return the names of globals in a function's code, nested functions included."""
    names: Iterable[str] = cloudpickle._extract_code_globals(code)  # noqa: SLF001
    return names


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the names and values of a function's free variables, as far as they are bound."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _parts(thing: Any) -> Iterator[object]:
    """Yield what travels with `thing` by value and may refer to globals itself."""
    kind = type(thing)  # not isinstance(), which asks proxies what they are
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
    elif issubclass(kind, property):
        yield from (thing.fget, thing.fset, thing.fdel)
    elif kind in _CONTAINERS:
        yield from _few(thing)
    else:
        yield kind


def _few(container: Any) -> Iterator[object]:
    """Yield the elements of a table of functions, say; not those of data."""
    if len(container) <= _FEW:
        yield from list(container.values() if type(container) is dict else container)
