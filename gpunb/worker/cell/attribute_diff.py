"""Finds the attributes of functions and classes that a cell has changed, and the variables of
functions within functions.

They travel apart from the values and are set on the notebook's own functions and classes, so that
these stay the same objects.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpunb.data.serialize.identities import Identity, functions, identity_of, object_of
from gpunb.data.serialize.pickler import closure_of
from gpunb.data.serialize.rebuild import arrived_classes, class_of
from gpunb.worker.cell.change_detection import Fingerprints

Key: TypeAlias = Identity | tuple[str]
"""The identity of a function, or a tuple with that of a class, in all processes."""

_DEFAULTS = ("__defaults__", "__kwdefaults__")
_VARIABLE = "variable "
"""Begins the name of a variable of a function, which is no attribute."""
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A changed attribute.

    Attributes:
        of: its function or class.
        name: the name of the attribute, or `_VARIABLE` and that of a variable.
        deleted: whether the cell has deleted it.
        same: whether its value is the same object as before, changed in place.
    """

    of: Key
    name: str
    value: Any = None
    deleted: bool = False
    same: bool = False


class _Before:
    """The attributes of a function or class as they were at one moment."""

    def __init__(self, key: Key, thing: Any) -> None:
        self._key = key
        self._thing = thing
        self._had = _of(thing)
        self._data = Fingerprints(self._had, "compared")

    def changed(self) -> Iterator[tuple[str, Attribute]]:
        title, has = self._thing.__name__, _of(self._thing)
        for name, value in has.items():
            same = name in self._had and self._had[name] is value
            if not same or (self._data.comparable(name) and self._data.has_changed(name)):
                yield f"{title}.{name}", Attribute(self._key, name, value, same=same)
        for name in self._had.keys() - has.keys():
            yield f"{title}.{name}", Attribute(self._key, name, deleted=True)


class Attributes:
    """Attributes of the functions and classes that came from the notebook."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._names: dict[Key, set[str]] = {}
        self._before: dict[Key, _Before] = {}
        if not values:
            return
        for name, each in values.items():
            if type(each) is types.FunctionType:
                self._names.setdefault(identity_of(each), set()).add(name)
        for key, function in functions():
            self._before[key] = _Before(key, function)
        for identity, each in arrived_classes():
            self._before[(identity,)] = _Before((identity,), each)

    def changed(self, outputs: tuple[str, ...] | None) -> dict[str, Attribute]:
        """The changed attributes, by names such as ``function.attribute``; with `outputs`, those of
        these functions only."""
        return dict(
            each
            for key, before in self._before.items()
            if outputs is None or not self._names.get(key, set()).isdisjoint(outputs)
            for each in before.changed()
        )


def bring_home(attributes: Mapping[str, Attribute]) -> Iterator[tuple[str, str]]:
    """Set attributes on the notebook's own objects; yield each that fails, with the reason."""
    for title, each in attributes.items():
        thing = class_of(*each.of) if len(each.of) == 1 else object_of(each.of)
        try:
            if thing is None or (each.deleted and each.name not in vars(thing)):
                continue
            if each.deleted:
                delattr(thing, each.name)
            elif each.name.startswith(_VARIABLE):
                _set_variable(thing, each)
            elif not (each.same and _filled(vars(thing).get(each.name), each.value)):
                setattr(thing, each.name, each.value)
        except Exception as error:  # the class may refuse it
            yield title, f"{type(error).__name__}: {error}"


def _set_variable(function: Any, changed: Attribute) -> None:
    at = function.__code__.co_freevars.index(changed.name.removeprefix(_VARIABLE))
    cell = (function.__closure__ or ())[at]
    own = dict(closure_of(function)).get(function.__code__.co_freevars[at])
    if not (changed.same and _filled(own, changed.value)):
        cell.cell_contents = changed.value


def _filled(own: Any, value: Any) -> bool:
    fill = FILLED.get(type(own)) if type(own) is type(value) else None
    if fill is not None and own is not value:  # which has come with its class already
        fill(own, value)
    return fill is not None


def _refill(own: Any, value: Any) -> None:
    own.clear()
    own.update(value)


FILLED: dict[type, Callable[[Any, Any], object]] = {
    **dict.fromkeys([list, bytearray], lambda own, value: own.__setitem__(slice(None), value)),
    **dict.fromkeys([dict, set], _refill),
}
"""Functions that copy the data of a container into another one, to which others may refer."""


def _of(thing: Any) -> dict[str, Any]:
    if isinstance(thing, types.FunctionType):
        variables = {f"{_VARIABLE}{name}": each for name, each in closure_of(thing)}
        return {**vars(thing), **{name: getattr(thing, name) for name in _DEFAULTS}, **variables}
    return {
        name: each
        for name, each in vars(thing).items()
        if not (name.startswith("__") and name.endswith("__")) and not isinstance(each, _SLOTS)
    }
