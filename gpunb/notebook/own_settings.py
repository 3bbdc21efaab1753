"""Lets the settings of a library that gpunb does not know travel with cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpunb.data import serialize
from gpunb.worker.library import Library
from gpunb.worker.library_state import OWN


def register(
    module: str,
    read: Callable[[Any], dict[str, Any]],
    write: Callable[[Any, str, Any], object],
    default: Callable[[Any], dict[str, Any]] | None = None,
) -> None:
    """As `gpunb.register_settings`."""
    if not isinstance(module, str) or not module:
        raise TypeError(f"module is {module!r}; it must be the name of a module")
    default = default or _no_settings
    for name, function in (("read", read), ("write", write), ("default", default)):
        if not callable(function):
            raise TypeError(f"{name} is {function!r}; it must be a function")
    library = Library(module, read, write, default)
    serialize.dumps(library, what=f"the functions for the settings of {module}", way="cell")
    OWN[f"own {module}"] = library


def _no_settings(_: Any) -> dict[str, Any]:
    return {}
