"""Modules that are imported when they are first used.

`importlib.util.LazyLoader` has two problems: it puts modules into `sys.modules` before they are
loaded, where `inspect`, `pickle` and tracebacks load them by accident; and it breaks packages whose
`__init__` imports from a lazy submodule. So here:

1. A lazy module is not in `sys.modules`. A finder before all others knows the lazy modules.
2. The first import of the name, or the first use of the lazy module, loads it through Python's own
   machinery, with its locks, parents and errors. The finder's loader fills the same module object.
3. While one thread loads it, other threads that use it import it, and so wait for the import lock.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
import zipimport
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import ModuleType
from typing import Any

import cloudpickle.cloudpickle

__all__ = ["find_module", "lazy_module", "modules_within"]

# Loaders that run code in an existing module object. Others, such as those of extension modules,
# make the module object themselves.
_FILLING = (SourceFileLoader, SourcelessFileLoader, zipimport.zipimporter)

# Attributes that are known before the module is loaded, and those that pickle it (by name).
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


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, found without loading the module or its packages; None if there
    is no such module."""
    known = sys.modules.get(name)
    if known is None:
        known = _waiting.get(name)
    if known is not None:
        return getattr(known, "__spec__", None)
    head = name.rpartition(".")[0]
    if not head:
        return _find(name, None)
    parent = find_module(head)
    if parent is None or parent.submodule_search_locations is None:
        return None
    return _find(name, list(parent.submodule_search_locations))


def modules_within(module: ModuleType, names: Set[str]) -> Iterator[str]:
    """Yield the full names of the modules within a package, at any depth, that are attributes with
    these names. No module is loaded for that."""
    space: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    waiting = _state(module).submodules if isinstance(module, LazyModule) else {}
    for name in names & (space.keys() | waiting.keys()):
        part = waiting.get(name) or space[name]
        full = f"{object.__getattribute__(module, '__name__')}.{name}"
        known = sys.modules.get(full) or _waiting.get(full)
        if known is not None and part is known:
            yield full
            yield from modules_within(part, names)


class LazyModule(ModuleType):
    """A module that is not loaded yet; after that its class is an ordinary module's."""

    def __getattribute__(self, name: str) -> Any:
        if name in _KNOWN:
            return object.__getattribute__(self, name)
        loaded = _loaded(self)
        if loaded is self:  # it may define __getattr__
            return ModuleType.__getattribute__(self, name)
        return getattr(loaded, name)  # it has replaced itself in sys.modules

    def __setattr__(self, name: str, value: Any) -> None:
        loaded = _loaded(self)
        if loaded is self:
            ModuleType.__setattr__(self, name, value)
        else:
            setattr(loaded, name, value)

    def __delattr__(self, name: str) -> None:
        loaded = _loaded(self)
        if loaded is self:
            ModuleType.__delattr__(self, name)
        else:
            delattr(loaded, name)

    def __dir__(self) -> list[str]:
        loaded = _loaded(self)
        return list(ModuleType.__dir__(self)) if loaded is self else dir(loaded)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return cloudpickle.cloudpickle.subimport, (_state(self).name,)


def _loaded(module: LazyModule) -> ModuleType:
    """Return the loaded module for a lazy one. The thread that is loading it gets it unfinished,
    because the module's own code may use it."""
    state = _state(module)
    if state.loader_thread == threading.get_ident():
        return module
    return importlib.import_module(state.name)


class _State:
    """The state of a lazy module. It is kept in the spec, because the module's dict is public."""

    def __init__(self, name: str, package: ModuleType | None = None) -> None:
        self.name = name
        self.package = package  # keeps it alive: submodules become attributes of this object
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
    """Return the search path for submodules of `parent`, without loading it."""
    if parent is None:
        return None
    if isinstance(parent, LazyModule):
        spec = object.__getattribute__(parent, "__spec__")
        return list(spec.submodule_search_locations or ())
    return list(getattr(parent, "__path__", ()))


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of a module, from all finders except the lazy one."""
    for finder in list(sys.meta_path):
        if finder is _finder or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


class _Finder:
    """Finds modules for which there is a lazy module."""

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
    """Has the real loader load into the lazy module instead of a new one."""

    def __init__(self, loader: Any, module: LazyModule) -> None:
        self.loader = loader
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Only this thread sees the unfinished module; `_loaded` makes other threads wait.
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
        except BaseException:  # the next use starts again
            space.clear()
            space.update(before)
            state.loader_thread = None
            raise
        # Submodules that were made first. A binding by the package itself has precedence.
        for name, submodule in state.submodules.items():
            space.setdefault(name, submodule)
        _waiting.pop(spec.name, None)
        if sys.modules.get(spec.name) is not module:  # it has replaced itself
            state.loader_thread = None
            return
        spec.loader_state = None
        if type(module) is LazyModule:  # else it has set its own class
            object.__setattr__(module, "__class__", ModuleType)


_finder: Any = _Finder()
_waiting: weakref.WeakValueDictionary[str, ModuleType] = weakref.WeakValueDictionary()
