"""Pickles the exceptions of tasks.

Frames are not sent, so the text of the traceback is made in the task's process. The exceptions of
the chain are pickled one by one, so that one that cannot be pickled does not affect the others.
Whatever the methods of an exception raise, a readable text arrives.
"""

# ruff: noqa: BLE001 - methods of exceptions may raise even SystemExit

from __future__ import annotations

import os
import pickle
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard, TypeVar

from gpunb.data.serialize.pickler import PROTOCOL, pickle_in_pieces
from gpunb.data.serialize.sources import with_sources
from gpunb.data.serialize.values import Payload, dumps, loads
from gpunb.exceptions import GpunbError, TaskError, because, is_heap_type, native_new

__all__ = ["dump_failure", "load_failure"]

_T = TypeVar("_T")

_MOST_ERRORS = 32
_MOST_LINES = 400
_MOST_CHARACTERS = 40_000
"""Of the text; less than a payload's inline limit, so that it needs no shared memory."""


# Not error.name, because the class may define __getattribute__.
_get = object.__getattribute__


class _Link(NamedTuple):
    """One exception of the chain, in plain values.

    Attributes:
        data: its pickle; None if it cannot be pickled.
        description: its type and text.
        cause, context: the indices of its `__cause__` and `__context__` in the chain; or -1.
        suppress: its `__suppress_context__`.
    """

    data: bytes | None
    description: str
    cause: int
    context: int
    suppress: bool


def dump_failure(
    error: BaseException, *, task: str, skip: int = 0, process: int | None = None
) -> Payload:
    """Turn an exception of a task into a payload for `load_failure`. Raises nothing.

    Args:
        error: the exception, with its traceback.
        task: the task in words, such as ``train (#7)``.
        skip: the number of outermost frames that are not the user's.
        process: the pid of the task's process; by default this process.
    """
    text = _clipped(_attempt(lambda: _traceback_text(error, skip), f"{_type_name(error)}\n"))
    references: list[Any] = []
    root = error.cause if _is_ours(error) else error
    none: list[_Link] = []
    links = _attempt(lambda: _links(root, references), none)
    head = (task, process or os.getpid(), text)
    try:
        payload = dumps((*head, tuple(map(tuple, links))), what=f"error of {task}")
        payload.references = tuple(references)
    except BaseException:  # such as no memory
        payload = Payload(pickle.dumps((*head, ()), PROTOCOL))
    return payload


def load_failure(payload: Payload, *, namespace: dict[str, Any] | None = None) -> TaskError:
    """Return the error to raise in the caller's process; `namespace` as in `loads`."""
    task, process, text, rows = loads(payload)
    links = [_Link(*row) for row in rows]
    errors = [_loaded(link, namespace) for link in links]
    for error, link in zip(errors, links, strict=True):
        _chain(error, link, errors)
    text = with_sources(text)
    return TaskError.of(errors[0] if errors else None, task=task, traceback=text, process=process)


def _loaded(link: _Link, namespace: dict[str, Any] | None) -> BaseException:
    if link.data is None:
        return GpunbError(link.description)
    try:
        error = loads(Payload(link.data), namespace=namespace)
        if isinstance(error, BaseException):
            return error
        reason = f"it became a {type(error).__name__}"
    except KeyboardInterrupt:
        raise
    except BaseException as trouble:  # such as a module that is missing here
        reason = _described(trouble)
    return GpunbError(f"{link.description} (it could not be rebuilt: {reason})")


def _is_ours(error: BaseException) -> TypeGuard[TaskError]:
    return issubclass(type(error), TaskError)  # isinstance() may ask the error for its __class__


def _chain(error: BaseException, link: _Link, errors: list[BaseException]) -> None:
    put = object.__setattr__  # frozen dataclasses refuse others
    if link.context >= 0:
        put(error, "__context__", errors[link.context])
    if link.cause >= 0:
        put(error, "__cause__", errors[link.cause])
    put(error, "__suppress_context__", link.suppress)


def _traceback_text(error: BaseException, skip: int) -> str:
    frames = _get(error, "__traceback__")
    for _ in range(skip):
        frames = frames.tb_next if frames is not None else None
    if _is_ours(error):
        head = ["Traceback (most recent call last):\n"] if frames is not None else []
        return because("".join([*head, *traceback.format_tb(frames)]), error)
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except BaseException:
        return "".join([*traceback.format_tb(frames), _described(error)])


def _clipped(text: str) -> str:
    """Cut the middle out of a long text, such as that of a recursion or of much data."""
    lines = text.splitlines(keepends=True)
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        gap = f"\n  ... {len(lines) - 2 * half:,} lines left out ...\n\n"
        text = "".join([*lines[:half], gap, *lines[-half:]])
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        gap = f"\n  ... {len(text) - 2 * half:,} characters left out ...\n"
        text = text[:half] + gap + text[-half:]
    return text


def _links(root: BaseException | None, references: list[Any]) -> list[_Link]:
    errors = _chained(root)
    place = {id(error): number for number, error in enumerate(errors)}
    links = []
    for error in errors:
        data, description = _packed(error, references)
        cause = place.get(id(_get(error, "__cause__")), -1)
        context = place.get(id(_get(error, "__context__")), -1)
        suppress = _get(error, "__suppress_context__")
        links.append(_Link(data, description, cause, context, suppress))
    return links


def _chained(root: BaseException | None) -> list[BaseException]:
    """Return the errors of the chain, `root` first, each once."""
    found: list[BaseException] = []
    seen = set()
    todo = [root]
    while todo and len(found) < _MOST_ERRORS:
        error = todo.pop(0)
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        found.append(error)
        if not _is_ours(error):
            todo += [_get(error, "__cause__"), _get(error, "__context__")]
    return found


def _packed(error: BaseException, references: list[Any]) -> tuple[bytes | None, str]:
    """Return the exception's pickle, or None, and its description."""
    description = _described(error)
    # pickle calls `__init__` with `args`, which may differ from the arguments of the first call. If
    # that fails, or a part of the exception cannot be pickled, send a copy made without `__init__`.
    as_it_is = _tried(error)
    if as_it_is.arguments is not None and as_it_is.arguments == _repr(_get(error, "args")):
        best = as_it_is
    else:
        copied = _tried(_Copy(error))
        best = as_it_is if copied.data is None else copied
    if best.data is None:
        reason = f"it could not be pickled: {as_it_is.trouble}"
        return None, f"{description} (args: {_clipped(_repr(_get(error, 'args')))}; {reason})"
    references.extend(best.references)
    return best.data, description


class _Trial(NamedTuple):
    """The outcome of pickling an exception and loading it again."""

    data: bytes | None = None
    references: tuple[Any, ...] = ()
    arguments: str | None = None
    trouble: str = ""


def _tried(error: Any) -> _Trial:
    try:
        pieces, references = pickle_in_pieces(error, None)
        data = b"".join(pieces)
        back = loads(Payload(data))
        if not isinstance(back, BaseException):
            return _Trial(trouble=f"unpickling it gives a {type(back).__name__}")
        return _Trial(data, references, _repr(_get(back, "args")))
    except BaseException as trouble:
        return _Trial(trouble=_described(trouble))


class _Copy:
    """Is pickled as a copy of an exception, with those of its parts that can be pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.error
        if hasattr(error, "exceptions") and hasattr(error, "derive"):  # a group of them
            members = [_Copy(e) if _fails(e) else e for e in error.exceptions]
            arguments: tuple[Any, ...] = (error.message, members)  # type: ignore[attr-defined]
        else:
            arguments = tuple(_clipped(_repr(a)) if _fails(a) else a for a in error.args)
        state = {name: part for name, part in _fields(error) if not _fails(part)}
        return _restored, (type(error), arguments, state)


def _restored(
    kind: type[BaseException], arguments: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error: BaseException = native_new(kind)(kind, *arguments)
    for name, part in {"args": arguments, **state}.items():
        _attempt(lambda n=name, p=part: object.__setattr__(error, n, p), None)  # type: ignore[misc]
    return error


def _fields(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes: slots, fields such as `errno`, and the `__dict__`."""
    for base in type(error).__mro__:
        for name, field in vars(base).items():
            if not isinstance(field, types.MemberDescriptorType) or name.startswith("__"):
                continue
            # `obj` of an AttributeError may be any object, however large.
            if hasattr(error, name) and not (base is AttributeError and name == "obj"):
                value = getattr(error, name)
                # In builtin types None means unset, and setting None is different.
                if value is not None or is_heap_type(base):
                    yield name, value
    yield from vars(error).items()


def _fails(part: Any) -> bool:
    """Return whether pickling and loading `part` fails."""
    try:
        loads(Payload(b"".join(pickle_in_pieces(part, None)[0])))
    except BaseException:
        return True
    return False


def _described(error: BaseException) -> str:
    name = _type_name(error)
    text = _clipped(_attempt(lambda: str(error), "(its text cannot be shown)"))
    return f"{name}: {text}" if text else name


def _type_name(error: BaseException) -> str:
    kind = type(error)
    known = kind.__module__ == "builtins"
    return kind.__qualname__ if known else f"{kind.__module__}.{kind.__qualname__}"


def _repr(part: object) -> str:
    return _attempt(lambda: repr(part), f"<{type(part).__name__}>")


def _attempt(make: Callable[[], _T], otherwise: _T) -> _T:
    """Return ``make()``, or `otherwise` if it raises any exception."""
    try:
        return make()
    except BaseException:
        return otherwise
