"""Rebuilds functions, classes and modules that were pickled by value.

cloudpickle's streams name its own private functions, which rebuild the objects. `Rebuilder` calls
other functions instead, because a notebook differs from cloudpickle's other users in three points:

1. A function that returns to the notebook must use the notebook's own globals, not a copy.
2. A class that was made in this process is the master copy: an instance that returns with an older
   copy of the class does not undo later changes of its methods, counters or registries.
3. A module need not be imported before its first use.
"""

# ruff: noqa: SLF001 - the names in cloudpickle's streams are private; a test pins them

from __future__ import annotations

import contextlib
import io
import pickle
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from cloudpickle import cloudpickle

from gpunb.data.serialize import identities
from gpunb.data.serialize.modules import lazy_module
from gpunb.data.serialize.pickler import by_value
from gpunb.system.signals import UNDIVIDED

__all__ = ["Rebuilder", "Rebuilding", "Replacing", "StreamReader"]


Shared: TypeAlias = Callable[[bytes], Any]
"""Returns the object of this process at a pickled path; see `parts`."""

if TYPE_CHECKING:
    _Unpickler = pickle.Unpickler
else:
    _Unpickler = object  # `Replacing` comes before one of two unpicklers


class Rebuilding:
    """The functions that replace cloudpickle's own for one stream.

    Args:
        namespace: the globals for functions of ``__main__``. Names that travel with a function
            are added if they are missing, and never changed.
        lazy_modules: whether modules are imported at their first use.
        update_classes: whether attributes that arrive replace those of a class that was made in
            this process; otherwise only missing ones are added.
        shared: returns the objects of this process that the stream names.
        fill: whether tensors that this process has already are filled, in place of new ones.
    """

    def __init__(
        self,
        namespace: dict[str, Any] | None = None,
        lazy_modules: bool = False,
        update_classes: bool = False,
        shared: Shared | None = None,
        fill: bool = False,
    ) -> None:
        self.shared = shared
        self._namespace = namespace
        self._update_classes = update_classes
        self.replacements: dict[str, Callable[..., Any]] = {
            "_make_skeleton_class": partial(_known_or_made, cloudpickle._make_skeleton_class),
            "_make_skeleton_enum": partial(_known_or_made, cloudpickle._make_skeleton_enum),
            "_class_setstate": self._set_class_state,
        }
        if namespace is not None:
            self.replacements["_make_function"] = self._make_function
            self.replacements["_function_setstate"] = self._set_function_state
        if lazy_modules:
            self.replacements["subimport"] = lazy_module
        if fill:
            self.replacements["identified"] = identities.filled

    def _make_function(
        self, code: types.CodeType, base_globals: dict[str, Any], *rest: Any
    ) -> types.FunctionType:
        # `__module__` is no sign of `__main__`: functools.wraps copies it to wrappers elsewhere.
        if self._namespace is None or base_globals.get("__name__") != "__main__":
            made: types.FunctionType = cloudpickle._make_function(code, base_globals, *rest)
            return made
        self._namespace.setdefault("__builtins__", __builtins__)
        self._namespace.setdefault("__name__", "__main__")
        return types.FunctionType(code, self._namespace, *rest)

    def _set_function_state(self, function: types.FunctionType, state: tuple[Any, Any]) -> None:
        if function.__globals__ is not self._namespace:
            cloudpickle._function_setstate(function, state)
            return
        attributes, slots = state
        for name, value in slots.pop("__globals__").items():
            self._namespace.setdefault(name, value)
        # cloudpickle's own setter sets the rest, but overwrites `__builtins__`.
        builtins = self._namespace["__builtins__"]
        cloudpickle._function_setstate(function, (attributes, {**slots, "__globals__": {}}))
        self._namespace["__builtins__"] = builtins

    def _set_class_state(self, cls: type, state: tuple[dict[str, Any], Any]) -> Any:
        attributes, slots = state
        if not self._update_classes and not _came_from_elsewhere(cls):
            attributes = {k: v for k, v in attributes.items() if k not in cls.__dict__}
        return cloudpickle._class_setstate(cls, (attributes, slots))


_REPLACED = ("cloudpickle.cloudpickle", identities.__name__)
"""The modules of the functions that are replaced."""


class Replacing(_Unpickler):
    """The part of both unpicklers that reads a stream in memory and replaces functions."""

    def __init__(
        self, stream: bytes | memoryview, buffers: Iterable[Any] | None, rebuilding: Rebuilding
    ) -> None:
        file = io.BytesIO(stream) if isinstance(stream, bytes) else StreamReader(stream)
        super().__init__(file, buffers=buffers)
        self._replacements = rebuilding.replacements
        self._shared = rebuilding.shared

    def persistent_load(self, path: Any) -> Any:
        """Return an object that this process has already."""
        if self._shared is None:
            raise pickle.UnpicklingError("the stream names an object of another process")
        return self._shared(path)

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the function or class of a name in the stream."""
        if module in _REPLACED and name in self._replacements:
            return self._replacements[name]
        return super().find_class(module, name)


class Rebuilder(Replacing, pickle.Unpickler):
    """Unpickles one stream, in memory, with its out-of-band buffers."""

    def load(self) -> Any:
        """Return the value, and keep no reference to any part of it."""
        try:
            return super().load()
        finally:
            # Both refer to methods of the `Rebuilding`, which has the namespace.
            self._replacements.clear()
            self.memo = {}


# The classes that arrived from other processes, by cloudpickle's id. Its own tracker does not
# distinguish them from classes that were made here.
_arrived: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def _known_or_made(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return the class with the id in `arguments`; call `make` if this process has none."""
    identity = arguments[-2]  # ..., class_tracker_id, extra
    # cloudpickle would make a class each time and drop it, and libraries would see it.
    known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if known is not None:
        return known
    if make is cloudpickle._make_skeleton_enum:
        cls = make(*arguments)
    else:
        with _without_calls(arguments[2]):
            cls = (_made_plainly if _is_own_metaclass(arguments[0]) else make)(*arguments)
    _arrived[identity] = cls
    return cls


def _is_own_metaclass(kind: Any) -> bool:
    return isinstance(kind, type) and kind is not type and by_value(kind)


def _made_plainly(
    kind: Any,
    name: str,
    bases: tuple[type, ...],
    made_with: dict[str, Any],
    identity: str | None,
    _: Any,
) -> type:
    """Make a class without the functions of the notebook's metaclasses, which ran when the notebook
    made the class: what they have registered then comes with their attributes."""
    library: Any = next(each for each in kind.__mro__ if not by_value(each))
    made: type = library.__new__(kind, name, types.resolve_bases(bases), dict(made_with))
    library.__init__(made, name, bases, {})
    return cloudpickle._lookup_class_or_track(identity, made)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_calls(bases: Iterable[Any]) -> Iterator[None]:
    """Leave out the notebook's own `__init_subclass__` of these bases, as for metaclasses."""
    kinds: list[Any] = [each for each in bases if isinstance(each, type)]
    classes: set[Any] = {each for base in kinds for each in base.__mro__}
    name = "__init_subclass__"
    own = [(each, vars(each)[name]) for each in classes if name in vars(each) and by_value(each)]
    with UNDIVIDED if own else contextlib.nullcontext():  # an interrupt would lose the functions
        for each, _ in own:
            type.__delattr__(each, name)
        try:
            yield
        finally:
            for each, function in own:
                type.__setattr__(each, name, function)


def arrived_classes() -> list[tuple[str, type]]:
    """Return the classes that arrived from other processes, each with its cloudpickle id."""
    return list(_arrived.items())


def class_of(identity: str) -> type | None:
    """Return the class with a cloudpickle id, wherever it was made; None if it is unknown."""
    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    return known


def _came_from_elsewhere(cls: type) -> bool:
    identity = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    return identity is not None and _arrived.get(identity) is cls


class StreamReader:
    """A file over a memory view. Unlike BytesIO it does not copy the memory first."""

    def __init__(self, stream: memoryview) -> None:
        self._stream = stream
        self._position = 0

    def read(self, count: int = -1, /) -> bytes:
        """Return the next `count` bytes."""
        start = self._position
        end = len(self._stream) if count < 0 else start + count
        piece = bytes(self._stream[start:end])
        self._position += len(piece)
        return piece

    def readinto(self, target: Any, /) -> int:
        """Fill `target` with the next bytes; return how many there were."""
        with memoryview(target).cast("B") as room:
            piece = self._stream[self._position : self._position + len(room)]
            room[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def readline(self) -> bytes:
        """Return the bytes up to and with the next newline. Old protocols read lines."""
        rest = bytes(self._stream[self._position : self._position + 4096])
        end = rest.find(b"\n") + 1
        if not end and len(rest) == 4096:
            rest = bytes(self._stream[self._position :])
            end = rest.find(b"\n") + 1
        return self.read(end or len(rest))
