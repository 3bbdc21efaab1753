"""Finds what the tasks of this worker have imported, so that later workers have it at the start."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from gpunb.protocol import messages as msg
from gpunb.system.module_files import INSTALLED

LEAST = 30
"""Modules below which their import is too short to matter."""

NEVER = frozenset({"IPython", "debugpy", "gpunb", "ipykernel", "matplotlib_inline"})
"""Packages that are never followed, as they act on the process that imports them: shells and
debuggers."""

_NONE = 1 << 62


class ImportWatch:
    """Counts the modules of this process; `report` is None until tasks have imported enough."""

    def __init__(self) -> None:
        self._known = _NONE
        self._environment: dict[Any, Any] = {}

    def begin(self) -> None:
        """Count what is imported from now on. The environment of the task is set."""
        self._known = len(sys.modules)
        self._environment = _environment()

    def report(self) -> msg.Imported | None:
        """Return what was imported since the last report or `begin`."""
        if len(sys.modules) < self._known + LEAST:
            return None
        new = list(sys.modules)[self._known :]  # in the order in which they were ready
        self._known = len(sys.modules)
        before, now = self._environment, _environment()
        changed = [(name, value) for name, value in now.items() if before.get(name) != value]
        changes = [(os.fsdecode(name), os.fsdecode(value)) for name, value in changed]
        gone = [(os.fsdecode(name), None) for name in before.keys() - now.keys()]
        modules = tuple(name for name in new if package_of(name))
        return msg.Imported(modules, (*changes, *gone)) if modules else None


def _environment() -> dict[Any, Any]:
    """Return the dict inside `os.environ`, copied: a copy of the mapping takes 100 times as long,
    and each task needs it."""
    return dict(getattr(os.environ, "_data", os.environ))


def package_of(name: str) -> str:
    """Return the installed package of a loaded module, as the first part of its file's place among
    the packages. Empty for a module that is not of a package, or cannot be imported by its name."""
    module = sys.modules.get(name)
    if not issubclass(type(module), ModuleType):
        return ""
    # Access to an attribute loads some modules.
    facts = object.__getattribute__(module, "__dict__")
    path, spec = facts.get("__file__"), facts.get("__spec__")
    if not isinstance(path, str) or getattr(spec, "name", None) != name:
        return ""
    for folder in INSTALLED:
        if folder in path:
            package = path.rpartition(folder)[2].partition(os.sep)[0].partition(".")[0]
            return "" if package in NEVER else package
    return ""
