"""The pickler of values, and the rules on which functions and classes travel by value.

Also the state of each thread's pickling: the references that were noted, the pickler for tensors on
devices, and where the value goes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import sys
import threading
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from cloudpickle import cloudpickle

from gpunb.data.serialize import identities
from gpunb.data.serialize.parts import Part, preamble
from gpunb.system.module_files import users_file

PROTOCOL = 5

Way: TypeAlias = Literal["task", "result", "cell", "home"]
"""Where a value goes: to a task, back as its result, to a cell, or from a cell to the notebook."""

_collector = threading.local()


def note_reference(identity: Hashable) -> None:
    """Note that the value being pickled refers to `identity`; for use in `__reduce__`.

    Within a `dumps` of this thread the identity is added to the payload's references; if calls of
    `dumps` are nested, to those of the innermost one. Elsewhere nothing happens.
    """
    noted = getattr(_collector, "noted", None)
    if noted is not None:
        noted.append(identity)


class Moving(Protocol):
    """Makes the pickler that a thread uses; see `devices.Moved`."""

    def pickler(self, pieces: list[Any], buffers: list[memoryview] | None) -> StreamPickler: ...


def set_way(way: Way) -> Way:
    """Set where the values go that this thread pickles; return the setting before."""
    before: Way = getattr(_collector, "way", "task")
    _collector.way = way
    return before


def keeps_identities() -> bool:
    """Whether the values that this thread pickles are the names of a cell, on their way to it or
    home. Tensors and functions among them stay the same objects; see `identities`."""
    return getattr(_collector, "way", "task") in ("cell", "home")


@dataclass(slots=True)
class Noted:
    """What a thread has met while it pickled.

    Attributes:
        functions: the functions that it pickled by value.
        graphs: whether there was a tensor of PyTorch with a graph.
    """

    functions: list[types.FunctionType] = field(default_factory=list)
    graphs: bool = False


@contextlib.contextmanager
def noting() -> Iterator[Noted]:
    """Note what this thread meets while it pickles."""
    before = getattr(_collector, "met", None)
    _collector.met = noted = Noted()
    try:
        yield noted
    finally:
        _collector.met = before


def note_graph() -> None:
    """Note that a tensor with a graph is pickled, for `noting`."""
    met = getattr(_collector, "met", None)
    if met is not None:
        met.graphs = True


def set_moving(moving: Moving | None) -> Moving | None:
    """Set what makes this thread's pickler, None for the usual one; return the setting before."""
    before: Moving | None = getattr(_collector, "moving", None)
    _collector.moving = moving
    return before


class StreamPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler with the stream in pieces, so that large pieces are not copied."""

    def __init__(self, pieces: list[Any], buffers: list[memoryview] | None) -> None:
        self.write = pieces.append
        # A bound method would make a cycle, which keeps large pieces until garbage is collected.
        callback = None if buffers is None else functools.partial(_keep_buffer, buffers)
        super().__init__(self, protocol=PROTOCOL, buffer_callback=callback)
        self._cells: dict[int, Any] = {}  # an `_EmptyCell` each

    def reducer_override(self, obj: Any) -> Any:
        """Reduce classes and functions as cloudpickle does; a class keeps its slots and its
        qualified name."""
        if issubclass(type(obj), type):
            return _with_more(obj, cloudpickle._class_reduce(obj))  # noqa: SLF001
        if isinstance(obj, types.FunctionType):
            reduced = _within_library(obj, self._function_reduce(obj))
            met = getattr(_collector, "met", None)
            if met is not None and reduced is not NotImplemented:
                met.functions.append(obj)
            return with_identity(obj, reduced) if keeps_identities() else reduced
        return NotImplemented

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[Any, ...]:
        """Return cloudpickle's arguments for a function, but with cells that functions share."""
        *rest, _ = super()._function_getnewargs(func)
        cells = func.__closure__
        shared = cells and tuple(self._cells.setdefault(id(c), _EmptyCell(c)) for c in cells)
        return (*rest, shared)


def _within_library(function: types.FunctionType, reduced: Any) -> Any:
    """Let a function that a library has made within another one, which travels by value, have the
    globals of the library at the receiver: copies would not be what the library uses, and some
    cannot be pickled. A function of the user's own module has the values that it has here."""
    space = function.__globals__
    module = sys.modules.get(space.get("__name__", ""))
    if not isinstance(reduced, tuple) or module is None or vars(module) is not space:
        return reduced
    if module.__name__ in ("__main__", "__mp_main__") or by_value(module):
        return reduced
    if users_file(module.__name__) is not None:
        return reduced
    make, (code, _, *rest), (attributes, slots), *more = reduced
    arguments = code, _LibraryGlobals(module.__name__), *rest
    return make, arguments, (attributes, {**slots, "__globals__": {}}), *more


class _LibraryGlobals:
    """Stands for the globals of a module."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return _globals_of, (self.module,)


def _globals_of(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))


class _EmptyCell:
    """Stands for the cell of a variable. The receiver makes one cell of it for all functions of
    the stream that have the variable; the state of the functions sets its content."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __reduce__(self) -> Any:
        return cloudpickle._make_empty_cell, ()  # noqa: SLF001


def with_identity(obj: Any, reduced: Any, without: tuple[str, ...] = ()) -> Any:
    """Add the identity of an object to what it is reduced to, and the names of attributes that it
    has no value of; see `identities`."""
    if not isinstance(reduced, tuple):
        return reduced
    make, arguments, *rest = reduced
    return identities.identified, (identities.identity_of(obj), make, arguments, without), *rest


def _with_more(cls: type, reduced: Any) -> Any:
    """Add the slots and the qualified name of a class to the arguments that make it. cloudpickle's
    classes have a ``__dict__`` instead of slots, and the receiver could not make their instances
    with the first class."""
    more: dict[str, Any] = {}
    if slots := vars(cls).get("__slots__"):  # typing.NamedTuple takes not even empty ones
        more["__slots__"] = slots
    if cls.__qualname__ != cls.__name__:
        more["__qualname__"] = cls.__qualname__
    if not more or not isinstance(reduced, tuple):
        return reduced
    make, arguments, *state = reduced
    if make is not cloudpickle._make_skeleton_class:  # noqa: SLF001
        return reduced
    kind, name, bases, made_with, *rest = arguments
    return make, (kind, name, bases, {**made_with, **more}, *rest), *state


def _reduce_file(file: io.TextIOWrapper) -> Any:
    """Reduce a text file. A standard stream becomes that of the receiver. Other files become a text
    in memory, as with cloudpickle; but not for cells, where it would replace the user's file."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    if getattr(_collector, "way", "task") in ("cell", "home"):
        raise pickle.PicklingError(f"cannot pickle {type(file).__name__} objects: it is open here")
    return _reduce_file_as_cloudpickle(file)


_FILENAME = 10
"""The position of the file name among the arguments that make a code object."""


def _reduce_code(code: types.CodeType) -> Any:
    """Reduce a code object with its file name, which tracebacks and debuggers need. From version
    3.1.3 on cloudpickle writes ``<dynamic-code>`` instead."""
    make, arguments = _reduce_code_as_cloudpickle(code)
    # A new string each time, as for the other names: whether two are one object may change.
    name = "".join(code.co_filename)
    return make, (*arguments[:_FILENAME], name, *arguments[_FILENAME + 1 :])


_reduce_file_as_cloudpickle = cloudpickle.Pickler.dispatch_table[io.TextIOWrapper]
_reduce_code_as_cloudpickle = cloudpickle.Pickler.dispatch_table[types.CodeType]
StreamPickler.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
    {io.TextIOWrapper: _reduce_file, types.CodeType: _reduce_code}
)


def _keep_buffer(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> None:
    """Keep a buffer out of the stream; raise BufferError if it is not contiguous."""
    buffers.append(buffer.raw())


def pickle_in_pieces(
    value: Any, buffers: list[memoryview] | None, shared: Sequence[Part] = ()
) -> tuple[list[bytes | memoryview], tuple[Any, ...]]:
    """Return the stream in pieces, and the references; add out-of-band buffers to `buffers`.

    Raises:
        whatever pickling raises.
    """
    pieces: list[Any] = []
    outer = getattr(_collector, "noted", None)
    noted: list[Any] = []
    _collector.noted = noted
    moving: Moving | None = getattr(_collector, "moving", None)
    make = StreamPickler if moving is None else moving.pickler
    try:
        pickler = make(pieces, buffers)
        if shared:
            pieces.append(preamble(shared))
            pickler.memo = {id(part): (at, part) for at, (part, _) in enumerate(shared)}
        pickler.dump(value)
    finally:
        _collector.noted = outer
    # The pickler writes large bytes, bytearrays and buffers as they are, the rest as bytes.
    for number, piece in enumerate(pieces):
        if type(piece) is not bytes:
            is_buffer = isinstance(piece, pickle.PickleBuffer)
            pieces[number] = piece.raw() if is_buffer else memoryview(piece)
    return pieces, tuple(noted)


def by_value(thing: object) -> bool:
    """Return whether a function or class travels as code, not as a name to import."""
    try:
        return not cloudpickle._should_pickle_by_reference(thing)  # noqa: SLF001
    except Exception:  # noqa: BLE001 - a proxy of a function or class
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
