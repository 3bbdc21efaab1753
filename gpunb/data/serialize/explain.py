"""Explains why a value cannot be pickled, and which part of the value is the cause."""

# ruff: noqa: BLE001 - it calls methods of objects that may raise anything

from __future__ import annotations

import functools
import itertools
import reprlib
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gpunb.data.serialize.pickler import (
    StreamPickler,
    Way,
    by_value,
    closure_of,
    global_names,
    pickle_in_pieces,
)

__all__ = ["explain"]

_MOST_DEPTH = 40
_MOST_PROBES = 20_000
_MOST_SECONDS = 2.0

_BOUND_TO_PROCESS = (
    "locks, open files, sockets, generators and database connections belong to one process."
)
_WAYS: dict[Way, tuple[str, str]] = {
    "task": ("cannot be sent to a worker", "Make it inside the function instead."),
    "result": ("cannot be sent back", "Return what it gives instead."),
    "cell": (
        "cannot be sent to a worker",
        "Make it inside the cell instead, or name what to send with --in.",
    ),
    "home": (
        "cannot come home",
        "Bind what it gives, such as a list or a number, or keep it in a session (--session NAME).",
    ),
}
"""For each way of a value: the verb of the message, and the advice."""

_PROCESS_MODULES = frozenset(
    {"_thread", "threading", "_io", "io", "socket", "_socket", "ssl", "_ssl", "select", "mmap"}
    | {"subprocess", "sqlite3", "asyncio", "_asyncio", "concurrent", "multiprocessing", "weakref"}
    | {"contextvars", "_contextvars", "queue", "_queue", "selectors"}
)
_PROCESS_TYPES = (
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.FrameType,
    types.TracebackType,
)


class _Failure(NamedTuple):
    """An error of pickling, as text: the exception itself would keep its frames alive."""

    text: str
    too_deep: bool


class _Culprit(NamedTuple):
    path: tuple[str, ...]
    part: object
    failure: _Failure


def explain(
    value: Any,
    what: str,
    *,
    names: Sequence[str] = (),
    error: BaseException | None = None,
    way: Way = "task",
) -> str:
    """Return a sentence that names the part of `value` that cannot be pickled, and the reason.

    Args:
        value: the value that cannot be pickled.
        what: the value in words; "arguments of train" for a pair (args, kwargs).
        names: names of the positional arguments.
        error: the error of pickling `value`; without it, the value is pickled again.
        way: where the value was to go.
    """
    if what.removeprefix("the ").startswith("result"):
        way = "result"
    verb, advice = _WAYS[way]
    always = f". {advice}" if way in ("cell", "home") else ""
    known = None if error is None else _words(error)
    try:
        for subject, part in _subjects(value, what, names):
            failure = known if part is value and known is not None else _failure(part)
            if failure is not None:
                reason, bound = _reason(_Search().find(part, failure))
                return f"{subject} {verb}: {reason}" + (f" {advice}" if bound else always)
    except Exception as trouble:  # such as an object whose methods fail, or no stack left
        known = known or _words(trouble)
    reason = f"pickling it raised {known.text}" if known else "nothing in it fails now"
    return f"{what} {verb}: {reason}{always}"


def _subjects(value: Any, what: str, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield (words, part): each argument, or else the value as one."""
    task = what.removeprefix("arguments of ")
    if task != what and type(value) is tuple and len(value) == 2:
        args, kwargs = value
        for number, (argument, name) in enumerate(itertools.zip_longest(args, names[: len(args)])):
            yield f"argument {number + 1 if name is None else repr(name)} of {task}", argument
        for name, argument in kwargs.items():
            yield f"argument {name!r} of {task}", argument
    yield what, value


class _Search:
    """Searches for the smallest part that cannot be pickled."""

    def __init__(self) -> None:
        self.probes = _MOST_PROBES
        self.deadline = time.monotonic() + _MOST_SECONDS
        self.above: dict[int, object] = {}

    def find(self, part: object, failure: _Failure) -> _Culprit:
        """Return the culprit in `part`, which failed: `part` itself if none of its parts fails."""
        return self._within(part, failure, ()) or _Culprit((), part, failure)

    def _within(self, part: object, failed: _Failure, path: tuple[str, ...]) -> _Culprit | None:
        """Return the culprit; None if `part` fails only because it refers to an object above it."""
        if _of_process_kind(type(part)):
            return _Culprit(path, part, failed)
        self.above[id(part)] = part
        points_back = False
        for step, inner in _parts_of(part):
            if self._exhausted(path):
                break
            if id(inner) in self.above:
                points_back = True
                continue
            failure = _failure(inner)
            if failure is None:
                continue
            if failure.too_deep and type(inner) is type(part):
                return _Culprit(path, part, failed)
            found = self._within(inner, failure, (*path, step))
            if found is not None:
                return found
            points_back = True
        return None if points_back and path else _Culprit(path, part, failed)

    def _exhausted(self, path: tuple[str, ...]) -> bool:
        self.probes -= 1
        late = time.monotonic() > self.deadline
        return late or self.probes < 0 or len(path) >= _MOST_DEPTH


def _failure(part: object) -> _Failure | None:
    """Return the error of pickling `part` alone; None if there is none."""
    try:
        pickle_in_pieces(part, [])
    except (Exception, SystemExit) as error:
        return _words(error)
    return None


def _words(error: BaseException) -> _Failure:
    try:
        message = str(error)
    except Exception:
        message = ""
    name = type(error).__name__
    return _Failure(
        text=f"{name}: {message}" if message else name,
        too_deep=isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError),
    )


def _parts_of(thing: object) -> Iterator[tuple[str, object]]:
    """Yield (step, part) for the parts that are pickled with `thing`, until `thing` raises."""
    try:
        yield from _parts_by_kind(thing)
    except (Exception, SystemExit):
        return


def _parts_by_kind(thing: Any) -> Iterator[tuple[str, object]]:
    kind = type(thing)
    if kind is list or kind is tuple:
        yield from ((f"[{i}]", part) for i, part in enumerate(thing))
    elif kind is dict:
        yield from _items(thing.items())
    elif kind is set or kind is frozenset:
        yield from ((" (an element)", part) for part in thing)
    elif kind is types.FunctionType:
        yield from _parts_of_function(thing)
    elif issubclass(kind, type):
        if by_value(thing):
            yield from ((f".{name}", part) for name, part in list(vars(thing).items()))
            yield from ((f" (base {base.__name__})", base) for base in thing.__bases__)
    elif kind is types.MethodType:
        yield from ((".__self__", thing.__self__), (".__func__", thing.__func__))
    elif kind is functools.partial:
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif kind is staticmethod or kind is classmethod:
        yield "", thing.__func__
    elif kind is property:
        yield from ((".fget", thing.fget), (".fset", thing.fset), (".fdel", thing.fdel))
    elif kind is not types.ModuleType:
        yield from _parts_of_object(thing)


def _items(pairs: Any) -> Iterator[tuple[str, object]]:
    for key, part in list(pairs):
        yield f" (the key {_short(key)})", key
        yield f"[{_short(key)}]", part


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if not by_value(function):
        return
    name = f"{function.__name__}()"
    for variable, part in closure_of(function):
        yield f"variable {variable!r} captured by {name}", part
    for variable in global_names(function.__code__):
        if variable in function.__globals__:
            yield f"global {variable!r} of {name}", function.__globals__[variable]
    for part in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default argument of {name}", part
    for attribute, part in vars(function).items():
        yield f"attribute {attribute!r} of {name}", part


def _parts_of_object(thing: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts that the object's own reducer returns: pickle sees nothing else."""
    reduced = StreamPickler.dispatch_table[type(thing)](thing)
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, pairs = (*reduced[:5], None, None, None)[:5]
    if isinstance(state, tuple) and len(state) == 2:
        yield from _attributes(state[0])
        yield from _attributes(state[1])
    else:
        yield from _attributes(state)
    yield from ((f"[{i}]", part) for i, part in enumerate(items or ()))
    yield from _items(pairs or ())
    for number, part in enumerate(arguments or ()):
        if issubclass(type(thing), BaseException):
            yield f".args[{number}]", part
        else:
            yield " (its class)" if issubclass(type(part), type) else " (a part of it)", part


def _attributes(state: Any) -> Iterator[tuple[str, object]]:
    if isinstance(state, dict):
        yield from ((f".{name}", part) for name, part in list(state.items()))
    elif state is not None:
        yield " (its state)", state


def _reason(culprit: _Culprit) -> tuple[str, bool]:
    """Return why the culprit fails, and whether the cause is that it belongs to one process."""
    where = ""
    for step in culprit.path:
        joined = not where or step[:1] in {".", "[", " ", ""}
        where += step if joined else f", {step}"
    if not where or where.startswith(" "):
        where = f"it{where}"
    if culprit.failure.too_deep:
        limit = sys.getrecursionlimit()
        return f"{where} is nested too deeply (Python's limit is {limit:,} levels)", False
    kind = type(culprit.part)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    article = "an" if name.lstrip("_")[:1].lower() in set("aeiou") else "a"
    # The error of types that have no way to be pickled, such as handles of C libraries.
    no_way = "cannot pickle" in culprit.failure.text and kind.__name__ in culprit.failure.text
    if no_way or _of_process_kind(kind):
        return f"{where} is {article} {name}; {_BOUND_TO_PROCESS}", True
    return f"{where} is {article} {name}, and pickling it raised {culprit.failure.text}", False


def _of_process_kind(kind: type) -> bool:
    package = str(kind.__module__).partition(".")[0]
    return package in _PROCESS_MODULES or issubclass(kind, _PROCESS_TYPES)


def _short(key: object) -> str:
    try:
        return reprlib.repr(key)
    except Exception:
        return f"a {type(key).__name__}"
