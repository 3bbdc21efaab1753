"""Modules that are imported when they are first used.

`importlib.util.LazyLoader` puts a module into `sys.modules` before it is loaded, where whoever
looks through that table (`inspect`, `pickle`, tracebacks) loads it by accident, and it breaks
packages whose `__init__` imports from a submodule that is still lazy. So here a lazy module stays
*out* of `sys.modules`, and a finder waits in front of the others: whoever imports the name first,
an ``import`` statement or the first use of the lazy module, loads it through Python's own
machinery (its locks, parents and errors included) *into that same module object*.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
import zipimport
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import ModuleType
from typing import Any

import cloudpickle.cloudpickle

__all__ = ["lazy_module"]

# Loaders that only run code in a module that they are given. Others (those of extension modules)
# make the module object themselves, so nothing can stand in for it.
_FILLING = (SourceFileLoader, SourcelessFileLoader, zipimport.zipimporter)

# What can be said of a module without running it, and how it is pickled (by name).
_KNOWN = frozenset(
    {"__class__", "__name__", "__spec__", "__loader__", "__package__", "__file__"}
    | {"__reduce__", "__reduce_ex__"}
)


def lazy_module(name: str) -> ModuleType:
    """Return the module called `name`, not yet imported where that is possible.

    Built-in and extension modules and namespace packages are imported at once.

    Raises:
        ModuleNotFoundError: if there is no such module; its `name` says which one.
    """
    found = sys.modules.get(name)
    if found is None:
        found = _waiting.get(name)
    if found is not None:
        return found
    head, _, tail = name.rpartition(".")
    parent = lazy_module(head) if head else None
    spec = _find(name, _search_path(parent))
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if not isinstance(spec.loader, _FILLING):
        return importlib.import_module(name)
    return _wait_for(spec, parent, tail)


class LazyModule(ModuleType):
    """A module that is still to be loaded; an ordinary module afterwards."""

    def __getattribute__(self, name: str) -> Any:
        if name in _KNOWN or _state(self).loader_thread == threading.get_ident():
            return object.__getattribute__(self, name)
        loaded = importlib.import_module(_state(self).name)
        if loaded is self:
            return object.__getattribute__(self, name)
        return getattr(loaded, name)  # it put something else into sys.modules

    def __setattr__(self, name: str, value: Any) -> None:
        if _state(self).loader_thread == threading.get_ident():
            object.__setattr__(self, name, value)
        else:
            setattr(importlib.import_module(_state(self).name), name, value)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(_state(self).name))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return cloudpickle.cloudpickle.subimport, (_state(self).name,)


class _State:
    """What a lazy module must remember; it lies in the spec, as the module's dict is public."""

    def __init__(self, name: str, package: ModuleType | None = None) -> None:
        self.name = name
        self.package = package  # keeps it alive: submodules are to hang on this very object
        self.submodules: dict[str, ModuleType] = {}
        self.loader_thread: int | None = None


def _state(module: ModuleType) -> _State:
    spec = object.__getattribute__(module, "__spec__")
    if isinstance(spec.loader_state, _State):
        return spec.loader_state
    return _State(spec.name)


def _wait_for(spec: ModuleSpec, parent: ModuleType | None, tail: str) -> ModuleType:
    module = LazyModule(spec.name)
    spec.loader_state = _State(spec.name, parent)
    metadata = {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
    if spec.has_location:
        metadata["__file__"] = spec.origin
    for key, value in metadata.items():
        object.__setattr__(module, key, value)
    if isinstance(parent, LazyModule):
        _state(parent).submodules[tail] = module
    elif parent is not None:
        vars(parent).setdefault(tail, module)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return _waiting.setdefault(spec.name, module)


def _search_path(parent: ModuleType | None) -> Sequence[str] | None:
    """Return where to look for submodules of `parent`; without loading it."""
    if parent is None:
        return None
    if isinstance(parent, LazyModule):
        spec = object.__getattribute__(parent, "__spec__")
        return list(spec.submodule_search_locations or ())
    return list(getattr(parent, "__path__", ()))


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Ask all finders but ours."""
    for finder in list(sys.meta_path):
        if finder is _finder or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


class _Finder:
    """Answers only for names that a lazy module waits for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = _waiting.get(name)
        if not isinstance(module, LazyModule):
            return None
        spec = _find(name, path)
        if spec is None or not isinstance(spec.loader, _FILLING):
            return spec
        spec.loader_state = _state(module)
        spec.loader = _Filling(spec.loader, module)  # type: ignore[assignment]
        return spec


class _Filling:
    """Loads into the lazy module what its real loader would load into a new one."""

    def __init__(self, loader: Any, module: LazyModule) -> None:
        self.loader = loader
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Until it is done, this thread alone sees the half-loaded module. Others that touch it
        # import it, and so wait for its lock.
        spec.loader_state.loader_thread = threading.get_ident()
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        spec = object.__getattribute__(module, "__spec__")
        state = spec.loader_state
        spec.loader = self.loader
        object.__setattr__(module, "__loader__", self.loader)
        space = vars(module)
        before = dict(space)
        try:
            self.loader.exec_module(module)
        except BaseException:  # the next use tries again, from the start
            space.clear()
            space.update(before)
            state.loader_thread = None
            raise
        # Submodules that were made first; what the package itself binds by that name wins.
        for name, submodule in state.submodules.items():
            space.setdefault(name, submodule)
        _waiting.pop(spec.name, None)
        if sys.modules.get(spec.name) is not module:  # it replaced itself: go on asking that one
            state.loader_thread = None
            return
        spec.loader_state = None
        object.__setattr__(module, "__class__", ModuleType)


_finder: Any = _Finder()
_waiting: weakref.WeakValueDictionary[str, ModuleType] = weakref.WeakValueDictionary()
