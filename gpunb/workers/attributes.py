"""What a cell changed of functions and classes of the notebook: their attributes.

They go home apart from the values, and are set on the notebook's own functions and classes, which
stay the objects that they are.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpunb.serialize.rebuild import arrived_classes, class_of
from gpunb.workers.changes import Fingerprints

Key: TypeAlias = str | tuple[str]
"""A function's name in the notebook, or, as a tuple, what identifies a class everywhere."""

_DEFAULTS = ("__defaults__", "__kwdefaults__")
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


@dataclass(frozen=True, slots=True)
class Attribute:
    """What became of one: of the function or class `of`. It may have been deleted, or be the same
    object as before, which was changed in place."""

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
    """Those of the functions among some values, and of the classes that came from the notebook."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._before: dict[Key, _Before] = {
            name: _Before(name, each)
            for name, each in values.items()
            if type(each) is types.FunctionType and each.__module__ == "__main__"
        }
        for identity, each in arrived_classes() if values else ():
            self._before[(identity,)] = _Before((identity,), each)

    def changed(self, outputs: tuple[str, ...] | None) -> dict[str, Attribute]:
        """What has changed, by names such as ``function.attribute``; with `outputs`, of these
        functions and no others."""
        return dict(
            each
            for key, before in self._before.items()
            if outputs is None or key in outputs
            for each in before.changed()
        )


def bring_home(
    attributes: Mapping[str, Attribute], functions: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Set them on the notebook's own; yield what cannot be set, and why."""
    for title, each in attributes.items():
        thing = functions.get(each.of) if isinstance(each.of, str) else class_of(*each.of)
        try:
            if thing is None or (each.deleted and each.name not in vars(thing)):
                continue
            if each.deleted:
                delattr(thing, each.name)
            elif not (each.same and _filled(vars(thing).get(each.name), each.value)):
                setattr(thing, each.name, each.value)
        except Exception as error:  # its class may have ways of its own
            yield title, f"{type(error).__name__}: {error}"


def _filled(own: Any, value: Any) -> bool:
    """Put what came home into the container that the notebook has, as others may have it too."""
    if type(own) is not type(value) or type(own) not in (list, dict, set):
        return False
    own.clear()
    (own.extend if type(own) is list else own.update)(value)
    return True


def _of(thing: Any) -> dict[str, Any]:
    if isinstance(thing, types.FunctionType):
        return {**vars(thing), **{name: getattr(thing, name) for name in _DEFAULTS}}
    return {
        name: each
        for name, each in vars(thing).items()
        if not (name.startswith("__") and name.endswith("__")) and not isinstance(each, _SLOTS)
    }
