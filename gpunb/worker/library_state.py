"""State that libraries keep for a whole process: settings, what a notebook has registered
with them, and their global random generators.

A cell finds what the notebook has of these, and what a cell in the foreground changes comes home.
Nothing is imported for it: what is for a library that is not loaded waits until it is.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from gpunb.data import serialize
from gpunb.data.serialize.values import dumps_in_band
from gpunb.worker.import_hooks import when_loaded
from gpunb.worker.known_libraries import SETTINGS
from gpunb.worker.library import STATE, Library, State
from gpunb.worker.registrations import REGISTRATIONS

LIBRARIES = {**SETTINGS, **REGISTRATIONS}

LATE = REGISTRATIONS.keys() - {"IPython"}
"""What is unpickled once its library is loaded: its types and functions would load the library."""


def taken(*, random: bool) -> dict[str, bytes]:
    """The settings for a cell, by library, as far as they can be pickled; with `random`, also the
    states of random number generators."""
    found = {}
    for name, library in _libraries():
        if library.random and not random:
            continue
        module = sys.modules.get(library.module)
        if name in LATE and module is None:
            if name in _late:
                found[name] = _late[name]
            continue
        if module is None:
            state = _waiting.get(name, {})
        else:
            state = _changes(_read(name, module), _default(library, module))
        if name in OWN:
            state = {**state, _FUNCTIONS: library}
        if state:
            found[name] = _packed(state)
    return found


class LibraryWatch:
    """Gives the libraries of this process what the notebook has, now or when they are loaded, and
    says later what has changed."""

    def __init__(self, given: Mapping[str, bytes], namespace: dict[str, Any]) -> None:
        self._before: dict[str, State] = {}
        states = {n: _opened(packed, namespace) for n, packed in given.items() if n not in LATE}
        own = ((name, state.pop(_FUNCTIONS, None)) for name, state in states.items())
        OWN.update((name, library) for name, library in own if library is not None)
        for name, library in _libraries():
            module = sys.modules.get(library.module)
            if module is not None and library.entries is not None:  # no cell has run here before
                _untouched.setdefault(name, _entries(library, module))
            if name in LATE:
                register = partial(self._register, name, given, namespace)
                when_loaded(library.module, register, key=name)
                continue
            state = states.get(name, {})
            # Without the module, in the place of what an earlier cell has left waiting.
            if module is None or state != _applied.get(name, {}):
                when_loaded(library.module, partial(self._apply, name, state), key=name)
            else:
                self._before[name] = _read(name, module)

    def _register(
        self, name: str, given: Mapping[str, bytes], namespace: dict[str, Any], module: Any
    ) -> None:
        packed = given.get(name)
        if packed is not None and _late.get(name) != packed:
            _late[name] = packed
            _register(name, packed, namespace, module)
        self._before[name] = _read(name, module)

    def _apply(self, name: str, state: State, module: Any) -> None:
        library, before = _library(name), _applied.get(name, {})
        default = _default(library, module)
        wanted = {each: default[each] for each in before if each in default} | state
        if library.random:
            _write(name, state, module)
            self._before[name] = state
            return
        _applied[name] = state  # what a session has set stays until the notebook sets another
        now = _read(name, module)
        if changes := _changes(wanted, now):
            _write(name, changes, module)
            now = _read(name, module)
        self._before[name] = now

    def changed(self, *, random: bool) -> dict[str, bytes]:
        """The settings that have changed since, by library."""
        found = {}
        for name, library in _libraries():
            module = sys.modules.get(library.module)
            if module is None or (library.random and not random):
                continue
            before = self._before.get(name) or _default(library, module)
            if changes := _changes(_read(name, module), before):
                found[name] = _packed(changes)
                if not library.random and name not in LATE:  # the notebook has it from now on
                    _applied[name] = _applied.get(name, {}) | _travelling(changes)
        return found


def bring_home(changed: Mapping[str, bytes], namespace: dict[str, Any]) -> None:
    """Set in the notebook's process what a cell has changed."""
    for name, packed in changed.items():
        if name in LATE:
            _late[name] = packed
            when_loaded(LIBRARIES[name].module, partial(_register, name, packed, namespace))
            continue
        _waiting[name] = {**_waiting.get(name, {}), **_opened(packed, namespace)}
        when_loaded(_library(name).module, partial(_arrive, name))


def _register(name: str, packed: bytes, namespace: dict[str, Any], module: Any) -> None:
    _held[name] = state = _opened(packed, namespace)
    _write(name, state, module)


def _arrive(name: str, module: Any) -> None:
    _write(name, _waiting.pop(name, {}), module)


OWN: dict[str, Library] = {}
"""The libraries of which the user has said how to read and set their settings."""

_FUNCTIONS = "\0functions"
"""A library of the user goes to the worker with its settings, under this name."""


def _libraries() -> Iterable[tuple[str, Library]]:
    return {**LIBRARIES, **OWN}.items() if OWN else LIBRARIES.items()


def _library(name: str) -> Library:
    return LIBRARIES.get(name) or OWN[name]


_applied: dict[str, State] = {}
"""The settings that the notebook had when the worker heard of them last."""

_late: dict[str, bytes] = {}
"""The registrations that came last."""

_held: dict[str, State] = {}
"""What was registered last. Some registries do not hold it, and the names that do come later."""

_waiting: dict[str, State] = {}
"""The settings that came home and wait until their library is loaded."""


_untouched: dict[str, Any] = {}
"""The entries of registries with nothing of the notebook's in them, by library."""


def _read(name: str, module: Any) -> State:
    library = _library(name)
    if library.entries is None:
        return _asked(library.read, module)
    entries, default = _entries(library, module), _default(library, module)
    if _same(entries, _untouched.get(name)):
        return default
    state = _asked(library.read, module)
    _untouched[name] = entries if state == default else None
    return state


def _entries(library: Library, module: Any) -> Any:
    try:
        return library.entries(module) if library.entries is not None else None
    except Exception:  # as in `_asked`
        return object()


def _default(library: Library, module: Any) -> State:
    return _asked(library.default, module)


def _asked(ask: Callable[[Any], State], module: Any) -> State:
    try:
        return ask(module)
    except Exception:  # another release keeps them elsewhere, or the user has changed its parts
        return {}


def _write(name: str, state: State, module: Any) -> None:
    warns = module is not warnings  # whose filters `catch_warnings` would put back
    with warnings.catch_warnings(action="ignore") if warns else contextlib.nullcontext():
        for each, value in state.items():
            with contextlib.suppress(Exception):  # another release may not know it
                _library(name).write(module, each, value)


def _changes(now: State, before: State) -> State:
    try:
        if now == before:  # which is much faster than the line below
            return {}
    except Exception:  # an array, say
        pass
    return {name: value for name, value in now.items() if not _same(value, before.get(name, _same))}


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # an array, say
        return False


def _packed(state: State) -> bytes:
    """As bytes, without what cannot be pickled."""
    if STATE in state:
        return pickle.dumps(state, 5)
    try:
        return dumps_in_band(state)[0]
    except TypeError:
        return dumps_in_band(_travelling(state))[0]


def _travelling(state: State) -> State:
    """The settings that can be pickled."""
    some = {}
    for name, value in state.items():
        with contextlib.suppress(TypeError):
            dumps_in_band(value)
            some[name] = value
    return some


def _opened(packed: bytes, namespace: dict[str, Any]) -> State:
    try:
        state: State = serialize.loads(serialize.Payload(packed), namespace=namespace)
    except Exception:  # whatever making its values again raises
        return {}
    return state
