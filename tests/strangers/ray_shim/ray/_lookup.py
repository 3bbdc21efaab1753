"""Finds the names of Ray's modules in gpunb, and stands in for the names that are missing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

COUNTERPARTS = {
    "ray._private.test_utils": "ray._helpers",
    "ray._private.utils": "ray._helpers",
    "ray._private.worker": "ray._worker",
    "ray._raylet": "gpunb",
    "ray.experimental.state.api": "ray._state",
    "ray.actor": "gpunb.actor",
    "ray.cloudpickle": "cloudpickle",
    "ray.cluster_utils": "ray._cluster",
    "ray.exceptions": "ray._exceptions",
    "ray.runtime_context": "gpunb",
    "ray.tests.conftest": "tests.strangers.on_ray",
    "ray.util": "gpunb.util",
    "ray.util.check_serialize": "gpunb.util",
    "ray.util.state": "ray._state",
}
"""The module that has the names of a module of Ray."""

OTHERS: dict[str, object] = {"ray.actor.ActorClassInheritanceException": TypeError}
"""Names that mean something else here."""

TESTS = "RAY_SHIM_TESTS"
"""The environment variable with the folder of Ray's tests, which import helpers of each other."""


class NotThere(Exception):
    """A test uses a part of Ray that gpunb or this module does not have."""


class Absent:
    """Stands for a missing name where a test module is loaded. Each use in a test raises."""

    def __init__(self, name: str) -> None:
        self._absent = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{self._absent}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return missing(f"{self._absent}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def _used(self, *_: object) -> NoReturn:
        raise NotThere(self._absent)

    __enter__ = __iter__ = __getitem__ = __contains__ = __len__ = __str__ = _used
    __add__ = __mul__ = __float__ = __int__ = __eq__ = __hash__ = _used


def missing(name: str) -> Absent:
    """A stand-in for a missing name if a module or a class body is being run.

    Raises:
        NotThere: a function uses the name.
    """
    frame = inspect.currentframe()
    while frame and any(each in frame.f_code.co_filename for each in ("importlib", __file__)):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        raise NotThere(name)
    return Absent(name)


def find(module: str, counterpart: str | None, name: str) -> Any:
    """The value of `name` in a module of Ray."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if (own := f"{module}.{name}") in (*COUNTERPARTS, "ray._private", "ray.tests"):
        return importlib.import_module(own)
    if own == "ray.ObjectRef":
        return importlib.import_module("ray._worker").ObjectRef
    if own in OTHERS:
        return OTHERS[own]
    if counterpart is not None:
        try:
            return getattr(importlib.import_module(counterpart), name)
        except (AttributeError, ImportError):  # its text says what to use instead
            pass
    return missing(own)


class ShimModule(types.ModuleType):
    """A module of Ray with the names of its counterpart."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: Sequence[str] = (os.environ.get(TESTS, ""),) if name == "ray.tests" else ()

    def __getattr__(self, name: str) -> Any:
        return find(self.__name__, _counterpart(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


def _counterpart(name: str) -> str | None:
    if name.startswith("ray.util.") and name not in COUNTERPARTS:
        own = f"gpunb.{name.removeprefix('ray.')}"
        return own if own.count(".") == 2 and importlib.util.find_spec(own) else None
    return COUNTERPARTS.get(name)


class _Finder:
    """Makes each module `ray.*` that has no file, except those of Ray's tests."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        of_tests = name.rpartition(".")[2].startswith("test_") and name not in COUNTERPARTS
        if of_tests or not name.startswith("ray."):
            return None
        return ModuleSpec(name, _Finder, is_package=True)

    @staticmethod
    def create_module(spec: ModuleSpec) -> ShimModule:
        return ShimModule(spec.name)

    @staticmethod
    def exec_module(module: ShimModule) -> None:
        pass


def install() -> None:
    """Let the interpreter find the modules, after those that have a file."""
    sys.meta_path.append(_Finder)
