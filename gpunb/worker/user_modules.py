"""The user's modules in this process, and whether their files were edited.

A worker that runs one task after the other, or was forked by a zygote that has preloaded a module
of the user's, must not go on with old code. Of the modules that are loaded, those of Python itself,
of installed packages and of gpunb count as not edited; so do extension modules, which cannot be
loaded twice. To look costs some microseconds, one call of the system for each module.
"""

from __future__ import annotations

import gc
import importlib
import linecache
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from cloudpickle import cloudpickle

from gpunb.system.module_files import users_file

_Mark: TypeAlias = tuple[int, int] | None
"""When a file was modified and its size; None if it may not be what was loaded."""

_CLOCK = 20_000_000
"""Nanoseconds by which the times of files may lag behind the clock."""


class Loaded:
    """The user's modules that are loaded, each with its file as it was then.

    That is not known of a module that was edited between two looks and first seen at the second:
    it counts as edited.
    """

    def __init__(self) -> None:
        self._since = time.time_ns()
        self._count = 0
        self._seen: set[str] = set()
        self._files: dict[str, tuple[str, _Mark]] = {}
        self._old: dict[tuple[str, str], list[object]] = {}

    def edited(self) -> list[str]:
        """The names of those whose files have changed, in the order in which they were loaded."""
        if len(sys.modules) != self._count:
            self._look()
        self._since = time.time_ns()
        found = []
        for name, (path, mark) in self._files.items():
            try:
                now = os.stat(path)
            except OSError:
                continue  # without its file it stays as it is
            if mark is None or mark[0] != now.st_mtime_ns or mark[1] != now.st_size:
                found.append(name)
        return found

    def _look(self) -> None:
        """Take note of modules that are new."""
        names = list(sys.modules)
        for name in names:
            if name not in self._seen and (path := users_file(name)) is not None:
                self._files[name] = path, self._mark(path)
        for name in self._files.keys() - sys.modules.keys():
            del self._files[name]
        self._seen, self._count = set(names), len(names)

    def _mark(self, path: str) -> _Mark:
        try:
            facts = os.stat(path)
        except OSError:
            return None
        # Not the time of modification: of a file that took another's place that may be any.
        if self._since - _CLOCK <= facts.st_ctime_ns <= time.time_ns() + _CLOCK:
            return None
        return facts.st_mtime_ns, facts.st_size

    def forget(self) -> None:
        """Take all modules of the user's out of this process: they are imported anew, all of them,
        as each may have bound what is in the others."""
        for name, (path, _) in self._files.items():
            module = sys.modules.pop(name, None)
            head, _, tail = name.rpartition(".")
            # "from package import module" does not look further if the package has the name.
            space = vars(sys.modules[head]) if head in sys.modules else {}
            if space.get(tail) is module:
                space.pop(tail, None)
            linecache.checkcache(path)
        self._files.clear()
        importlib.invalidate_caches()
        # cloudpickle keeps classes that came by value: their bases may be of the old modules.
        for table in ("_DYNAMIC_CLASS_TRACKER_BY_ID", "_DYNAMIC_CLASS_TRACKER_BY_CLASS"):
            getattr(cloudpickle, table, {}).clear()
        self._seen &= sys.modules.keys()
        self._count = -1
        gc.collect()  # what the old ones hold, on a device perhaps

    def reload(self, wanted: Callable[[str], bool]) -> None:
        """Load those that were edited and are wanted again in place, as ``%autoreload`` does: the
        objects that there are of their functions and classes get the new code."""
        for name in self.edited():
            if not wanted(name):
                continue
            superreload: Any = importlib.import_module("IPython.extensions.autoreload").superreload
            path, _ = self._files[name]
            try:
                facts = os.stat(path)
                self._files[name] = path, (facts.st_mtime_ns, facts.st_size)
                linecache.checkcache(path)
                superreload(sys.modules[name], importlib.reload, self._old)
            except Exception as error:
                sys.stderr.write(f"gpunb: reloading {name} failed: {error!r}\n")


class Autoreload(NamedTuple):
    """The edited modules that a notebook's ``%autoreload`` reloads: all but these, or only these.
    Unpickling it reloads them, so that later values in the same stream use the new modules."""

    all: bool
    modules: frozenset[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _reload, tuple(self)


def _reload(every: bool, modules: frozenset[str]) -> None:
    loaded.reload(lambda name: (name in modules) != every)


loaded = Loaded()
"""The modules of this process; a fork starts with the records of its parent."""
