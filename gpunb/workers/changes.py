"""Which of the objects that a cell was given it has changed in place.

An object is compared by its pickle before and after. Large buffers are not looked at: they lie in
private mappings, and the system knows which pages of those were written to.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable, Mapping
from typing import Any

from gpunb.objects import address, untouched

_FIXED = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    range,
)
"""Types whose objects do not change, or whose change is not data: no need to look."""

_CODE = (type, types.FunctionType, types.ModuleType, types.MethodType)

LARGE = 64 * 1024
"""Bytes from which on a buffer is watched by page instead of copied."""


class _Pickler(pickle.Pickler):
    """Pickles data; stands for code and modules by their identity."""

    def reducer_override(self, obj: Any) -> Any:
        if obj is not int and isinstance(obj, _CODE):
            return (int, (id(obj),))
        return NotImplemented


class _Fingerprint:
    """What an object's data was at one moment. Holds on to no memory of the object."""

    __slots__ = ("_data", "_large", "_small")

    def __init__(self, value: Any) -> None:
        self._data, buffers = _pickled(value)
        self._small = [bytes(each) for each in buffers if each.nbytes < LARGE]
        self._large = [(address(each), each.nbytes) for each in buffers if each.nbytes >= LARGE]

    def still(self, value: Any) -> bool:
        """Whether the object is what it was."""
        data, buffers = _pickled(value)
        if data != self._data:
            return False
        small = [each for each in buffers if each.nbytes < LARGE]
        large = [each for each in buffers if each.nbytes >= LARGE]
        places = [(address(each), each.nbytes) for each in large]
        return small == self._small and places == self._large and all(map(untouched, large))


def _pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    stream = io.BytesIO()
    buffers: list[memoryview] = []
    _Pickler(stream, 5, buffer_callback=lambda each: buffers.append(each.raw())).dump(value)
    return stream.getvalue(), buffers


class Fingerprints:
    """Of the objects by name, taken when this is made."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {
            name: value for name, value in values.items() if not isinstance(value, _FIXED)
        }
        self._before = {name: _taken(value) for name, value in self._values.items()}

    def changed(self) -> Iterable[str]:
        """The names whose objects are no longer what they were, or cannot be compared."""
        for name, value in self._values.items():
            before = self._before[name]
            try:
                same = before is not None and before.still(value)
            except Exception:  # whatever its own methods raise
                same = False
            if not same:
                yield name


def _taken(value: Any) -> _Fingerprint | None:
    try:
        return _Fingerprint(value)
    except Exception:  # whatever its own methods raise
        return None
