"""How functions, classes and modules that travelled by value are put together again.

cloudpickle writes into its streams the names of its own private functions that rebuild them.
`Rebuilder` puts other functions in their place, because a notebook differs from cloudpickle's
other users in three points:
1. a function that comes home must use the notebook's own globals, not a copy of them;
2. a class that was made in this process is the master copy: a method, counter or registry that
   was changed here since is not set back by whatever comes home along with an instance;
3. a module need not be imported before it is used.
"""

# ruff: noqa: SLF001 - the names in cloudpickle's streams are private; a test pins them

from __future__ import annotations

import io
import pickle
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from cloudpickle import cloudpickle

from gpunb.serialize.modules import lazy_module

__all__ = ["Rebuilder", "StreamReader"]


class Rebuilder(pickle.Unpickler):
    """Unpickles one stream.

    Args:
        stream: the pickle, in memory.
        buffers: its out-of-band buffers.
        namespace: the globals of functions whose own globals are those of ``__main__``; names
            that travel along with them are added where it lacks them, and never changed.
        lazy_modules: whether modules wait for their first use instead of being imported.
        update_classes: whether a class that was made in this process takes over the attributes
            that arrive; otherwise it only gains those that it lacks.
    """

    def __init__(
        self,
        stream: bytes | memoryview,
        *,
        buffers: Iterable[Any] | None = None,
        namespace: dict[str, Any] | None = None,
        lazy_modules: bool = False,
        update_classes: bool = False,
    ) -> None:
        source = io.BytesIO(stream) if isinstance(stream, bytes) else StreamReader(stream)
        super().__init__(source, buffers=buffers)
        self._namespace = namespace
        self._update_classes = update_classes
        self._own: dict[str, Callable[..., Any]] = {
            "_make_skeleton_class": self._make_class,
            "_make_skeleton_enum": self._make_enum,
            "_class_setstate": self._set_class_state,
        }
        if namespace is not None:
            self._own["_make_function"] = self._make_function
            self._own["_function_setstate"] = self._set_function_state
        if lazy_modules:
            self._own["subimport"] = lazy_module

    def load(self) -> Any:
        """Return the value, and hold on to nothing of it."""
        try:
            return super().load()
        finally:
            # Methods of this object, which knows all that it has made, are there and in what it
            # has noted of the stream.
            self._own.clear()
            self.memo = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what a name in the stream stands for."""
        if module == "cloudpickle.cloudpickle" and name in self._own:
            return self._own[name]
        return super().find_class(module, name)

    def _make_function(
        self, code: types.CodeType, base_globals: dict[str, Any], *rest: Any
    ) -> types.FunctionType:
        # Not by the function's __module__: functools.wraps copies that onto wrappers of others.
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
        # cloudpickle's own setter fills in the rest. It also writes `__builtins__`.
        builtins = self._namespace["__builtins__"]
        cloudpickle._function_setstate(function, (attributes, {**slots, "__globals__": {}}))
        self._namespace["__builtins__"] = builtins

    def _make_class(self, *arguments: Any) -> Any:
        return _known_or_made(cloudpickle._make_skeleton_class, arguments)

    def _make_enum(self, *arguments: Any) -> Any:
        return _known_or_made(cloudpickle._make_skeleton_enum, arguments)

    def _set_class_state(self, cls: type, state: tuple[dict[str, Any], Any]) -> Any:
        attributes, slots = state
        if not self._update_classes and not _came_from_elsewhere(cls):
            attributes = {k: v for k, v in attributes.items() if k not in cls.__dict__}
        return cloudpickle._class_setstate(cls, (attributes, slots))


# The classes that this process got from another one, by cloudpickle's id. Its tracker knows these
# and the ones that were made here, and does not tell them apart.
_arrived: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def _known_or_made(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the class with the id in `arguments`, made by `make` if this process lacks it."""
    identity = arguments[-2]  # ..., class_tracker_id, extra
    # cloudpickle makes it each time, only to drop it: the __init_subclass__ and metaclasses of
    # bases, which often keep registries, would see a class that does not exist.
    known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if known is not None:
        return known
    cls = make(*arguments)
    _arrived[identity] = cls
    return cls


def arrived_classes() -> list[tuple[str, type]]:
    """The classes that this process got from another one, each with what identifies it there."""
    return list(_arrived.items())


def class_of(identity: str) -> type | None:
    """The class of that identity, made here or elsewhere."""
    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    return known


def _came_from_elsewhere(cls: type) -> bool:
    identity = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    return identity is not None and _arrived.get(identity) is cls


class StreamReader:
    """A file to unpickle from, over memory that is not copied first as BytesIO would."""

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
        """Return the bytes up to the next newline, it included. Old protocols read lines."""
        rest = bytes(self._stream[self._position : self._position + 4096])
        end = rest.find(b"\n") + 1
        if not end and len(rest) == 4096:
            rest = bytes(self._stream[self._position :])
            end = rest.find(b"\n") + 1
        return self.read(end or len(rest))
