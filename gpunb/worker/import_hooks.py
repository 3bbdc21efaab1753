"""Runs functions once a module is loaded."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_Loaded = Callable[[Any], object]

_waiting: dict[str, dict[object, _Loaded]] = {}
"""The calls that wait for a module, by the module's name and by key."""


def when_loaded(name: str, call: _Loaded, key: object = None) -> None:
    """Call this with the module, now if it is loaded, or else when it is. Nobody hears of errors
    of the call. It takes the place of a call with the same `key` that still waits."""
    module = sys.modules.get(name)
    if module is None:
        _waiting.setdefault(name, {})[object() if key is None else key] = call
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        return
    with contextlib.suppress(Exception):
        call(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds no modules itself; sees when an import finds a module that a hook waits for."""

    def __init__(self) -> None:
        self._looking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting or getattr(self._looking, "name", "") == name:
            return None
        self._looking.name = name  # other finders ask all finders, too
        try:
            return self._find(name, path, target)
        finally:
            self._looking.name = ""

    def _find(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in list(sys.meta_path):
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    _look_on(name, spec.loader)
                return spec
        return None


def _look_on(name: str, loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for call in _waiting.pop(name, {}).values():
            with contextlib.suppress(Exception):
                call(sys.modules.get(name, module))

    with contextlib.suppress(AttributeError):  # a loader with slots
        loader.exec_module = exec_module


_finder = _Finder()
