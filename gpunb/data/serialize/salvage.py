"""Unpickles the valid parts of a stream in which one part fails.

`Salvager` is based on Python's slow unpickler, and used only after the fast one has failed. It goes
on after an error and puts a `_Lost` in place of the object. It notes the parts of each object, so
that `lost` can find out which values are complete. These share their objects as always.
"""

# ruff: noqa: SLF001, BLE001 - `pickle` has no public name for its slow unpickler; user code may raise anything

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterable
from typing import Any

from gpunb.data.serialize import identities, values
from gpunb.data.serialize.rebuild import Rebuilding, Replacing, Shared

__all__ = ["loads_arguments", "loads_function", "loads_names", "why_lost"]

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
_CONTAINERS = frozenset({list, dict, set})

_Operation = Callable[[Any], None]
_PythonUnpickler: Any = pickle._Unpickler


def loads_names(
    payload: values.Payload,
    *,
    namespace: dict[str, Any],
    lazy_modules: bool = False,
    shared: Shared | None = None,
    fill: bool = False,
) -> tuple[Any, dict[str, Any], dict[str, Exception]]:
    """Unpickle a pair of a value and a dict of named values; leave out named values that fail.

    Returns:
        The value, the other named values, and the errors of those that fail.

    Raises:
        whatever unpickling the first value raises.
    """
    identities.referred.clear()
    try:
        made = values.loads(
            payload, namespace=namespace, lazy_modules=lazy_modules, shared=shared, fill=fill
        )
        return *made, {}
    except Exception as error:
        failed = error
    try:  # outside of the first `try`, whose error would keep the frames alive
        salvager = Salvager(
            *values.opened(payload), Rebuilding(namespace, lazy_modules, shared=shared, fill=fill)
        )
        first, named = salvager.load()
        lost = {name: why for name, each in named.items() if (why := salvager.lost(each))}
        if not lost or salvager.lost(first) is not None:
            raise failed
        return first, {name: each for name, each in named.items() if name not in lost}, lost
    finally:
        del failed


def loads_arguments(payload: values.Payload) -> tuple[Any, Any]:
    """Unpickle a pair (args, kwargs).

    Raises:
        whatever unpickling raises, with a note that names the argument.
    """
    try:
        args, kwargs = values.loads(payload)
    except Exception as error:
        salvager = Salvager(*values.opened(payload), Rebuilding())
        args, kwargs = salvager.load()
        names = [*map(str, range(1, len(args) + 1)), *map(repr, kwargs)]
        for name, each in zip(names, [*args, *kwargs.values()], strict=True):
            if (why := salvager.lost(each)) is not None:
                reason = why_lost(why)
                error.add_note(f"argument {name} cannot be made again in the worker: {reason}")
                break
        raise
    return args, kwargs


def loads_function(code: bytes) -> Any:
    """Unpickle a function or a class.

    Raises:
        whatever unpickling raises, with a note that names the variable of a function that fails.
    """
    try:
        return pickle.loads(code)
    except Exception as error:
        salvager = Salvager(code, None, Rebuilding())
        for note in getattr(salvager.lost(salvager.load()), "__notes__", ()):
            error.add_note(note)
        raise


def why_lost(error: Exception) -> str:
    """Return the error of an object that cannot be made again, with its notes, as one text."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"


class _Lost:
    """Stands for an object that could not be made of these parts."""

    def __init__(self, error: Exception, parts: list[Any]) -> None:
        self.error = error
        self.parts = parts


class Salvager(Replacing, _PythonUnpickler):  # type: ignore[misc]
    """Unpickles as much of one stream as possible."""

    def __init__(
        self,
        stream: bytes | memoryview,
        buffers: Iterable[Any] | None,
        rebuilding: Rebuilding,
    ) -> None:
        super().__init__(stream, buffers, rebuilding)
        # By identity, each with the object itself, so that no other object gets its identity.
        self._made_of: dict[int, tuple[Any, list[Any]]] = {}
        self._harmed: dict[int, _Lost] = {}
        self._named: set[int] = set()

    def lost(self, value: Any) -> Exception | None:
        """Return the error that makes a loaded value incomplete; None if it is complete."""
        seen: set[int] = set()
        todo = [value]
        while todo:
            part = todo.pop()
            if type(part) is _Lost:
                return part.error
            if id(part) not in seen:
                seen.add(id(part))
                todo.extend(self._made_of.get(id(part), (part, []))[1])
        return None

    def harm(self, parts: Iterable[Any]) -> _Lost | None:
        """Return the first known fault of any of these parts; None if there is none so far."""
        for part in parts:
            found = part if type(part) is _Lost else self._harmed.get(id(part))
            if found is not None:
                return found
        return None

    def note(self, whole: Any, parts: Iterable[Any]) -> None:
        """Note that these have become parts of an object."""
        parts = [part for part in parts if type(part) not in _PLAIN]
        if parts and type(whole) is not _Lost:
            self._made_of.setdefault(id(whole), (whole, []))[1].extend(parts)
            if (harm := self.harm(parts)) is not None:
                self._harmed.setdefault(id(whole), harm)

    def name(self, call: list[Any]) -> None:
        """If this call sets the state of a function, name in the error the variable that fails. The
        innermost of nested functions is set first, and only its variable is named."""
        match call:
            case [_, (types.FunctionType() as function, (_, {"__globals__": names} as slots))]:
                cells = zip(function.__code__.co_freevars, slots["__closure__"] or (), strict=True)
                for kind, variables in (("global", names), ("variable", dict(cells))):
                    for name, value in variables.items():
                        lost = self.harm([value])
                        if lost is not None and id(lost.error) not in self._named:
                            self._named.add(id(lost.error))
                            place = f"a {kind} of the function {slots['__qualname__']!r}"
                            lost.error.add_note(f"the cause is {name!r}, {place}")


def _making(opcode: bytes, count: int, *, calls: bool) -> _Operation:
    """Return an operation that makes an object of the last `count` parts, or with 0 of the parts
    since the mark. If it `calls` a function, no faulty part is passed to that function."""
    original: _Operation = _PythonUnpickler.dispatch[opcode[0]]

    def make(self: Salvager) -> None:
        parts = self.stack[-count:]
        lost = self.harm(parts) if calls else None
        if lost is None:
            rest = self.metastack[-1] if not count else self.stack[:-count]
            try:
                original(self)
            except Exception as error:
                self.stack[:] = rest
                self.append(_Lost(error.with_traceback(None), parts))
        else:
            if not count:
                self.pop_mark()
            del self.stack[len(self.stack) - count :]
            self.name(parts)
            self.append(_Lost(lost.error, parts))
        self.note(self.stack[-1], parts)

    return make


def _changing(opcode: bytes, count: int) -> _Operation:
    """Return an operation that adds the last `count` parts to an object, or with 0 the parts since
    the mark."""
    original: _Operation = _PythonUnpickler.dispatch[opcode[0]]

    def change(self: Salvager) -> None:
        parts = self.stack[-count:]
        whole = self.stack[-count - 1] if count else self.metastack[-1][-1]
        takes_all = type(whole) in _CONTAINERS and opcode != pickle.BUILD
        lost = self.harm([whole] if takes_all else [whole, *parts])
        if lost is None or (takes_all and type(whole) is not _Lost):
            try:
                original(self)  # takes the parts from the stack before it can fail
            except Exception as error:
                parts.append(_Lost(error.with_traceback(None), []))
        else:
            if not count:
                self.pop_mark()
            del self.stack[len(self.stack) - count :]
        self.note(whole, parts)

    return change


def _pop(self: Salvager) -> None:
    """Drop the last object. If that was a failed call, its first argument is incomplete."""
    last = self.stack[-1] if self.stack else None
    if type(last) is _Lost and len(last.parts) == 2 and type(last.parts[1]) is tuple:
        self.note(last.parts[1][0], [last])
    _PythonUnpickler.dispatch[pickle.POP[0]](self)


Salvager.dispatch = {
    **_PythonUnpickler.dispatch,
    pickle.POP[0]: _pop,
    **{each[0]: _making(each, 0, calls=False) for each in (pickle.TUPLE, pickle.FROZENSET)},
    pickle.TUPLE1[0]: _making(pickle.TUPLE1, 1, calls=False),
    pickle.TUPLE2[0]: _making(pickle.TUPLE2, 2, calls=False),
    pickle.TUPLE3[0]: _making(pickle.TUPLE3, 3, calls=False),
    pickle.REDUCE[0]: _making(pickle.REDUCE, 2, calls=True),
    pickle.NEWOBJ[0]: _making(pickle.NEWOBJ, 2, calls=True),
    pickle.NEWOBJ_EX[0]: _making(pickle.NEWOBJ_EX, 3, calls=True),
    pickle.STACK_GLOBAL[0]: _making(pickle.STACK_GLOBAL, 2, calls=True),
    pickle.BINPERSID[0]: _making(pickle.BINPERSID, 1, calls=True),
    pickle.BUILD[0]: _changing(pickle.BUILD, 1),
    pickle.APPEND[0]: _changing(pickle.APPEND, 1),
    pickle.SETITEM[0]: _changing(pickle.SETITEM, 2),
    **{each[0]: _changing(each, 0) for each in (pickle.APPENDS, pickle.SETITEMS, pickle.ADDITEMS)},
}
