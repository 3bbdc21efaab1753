"""Which of the objects that a cell was given it has changed in place.

An object is compared by its pickle before and after. Large buffers that lie in private mappings, as
those that came from another process do, are not looked at: the system knows which pages of those
were written to. Of others there is a choice.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from gpunb.objects import address, untouched
from gpunb.serialize.devices import Tensors, moving

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

_PIECE = 256 * 1024

Others: TypeAlias = Literal["changed", "hashed", "ignored"]
"""What large buffers outside of private mappings are taken for; to hash takes 0.4 s per GB."""


class _Pickler(pickle.Pickler):
    """Pickles data; stands for code and modules by their identity. Tensors, of devices too, give
    their data as buffers of host memory."""

    def __init__(self, stream: io.BytesIO, buffers: list[memoryview]) -> None:
        super().__init__(stream, 5, buffer_callback=lambda each: buffers.append(each.raw()))
        moved = moving()
        self._tensors = Tensors(moved) if moved is not None else None

    def reducer_override(self, obj: Any) -> Any:
        if obj is not int and isinstance(obj, _CODE):
            return (int, (id(obj),))
        return NotImplemented if self._tensors is None else self._tensors.reduce(obj)


class _Fingerprint:
    """What an object's data was at one moment. Holds on to no memory of the object."""

    __slots__ = ("_data", "_large", "_others", "_small")

    def __init__(self, value: Any, others: Others) -> None:
        self._others = others
        self._data, buffers = _pickled(value)
        self._small = [bytes(each) for each in buffers if each.nbytes < LARGE]
        self._large = [self._first_look(each) for each in buffers if each.nbytes >= LARGE]

    def still(self, value: Any) -> bool:
        """Whether the object is what it was."""
        data, buffers = _pickled(value)
        if data != self._data:
            return False
        small = [each for each in buffers if each.nbytes < LARGE]
        large = [each for each in buffers if each.nbytes >= LARGE]
        if small != self._small or len(large) != len(self._large):
            return False
        return all(map(self._unchanged, large, self._large))

    def _first_look(self, buffer: memoryview) -> tuple[Any, int]:
        if self._others == "hashed" and not untouched(buffer):
            return ("hash", _hash(buffer)), buffer.nbytes
        place = None if self._others == "ignored" else address(buffer)
        return place, buffer.nbytes

    def _unchanged(self, buffer: memoryview, before: tuple[Any, int]) -> bool:
        known, size = before
        if buffer.nbytes != size:
            return False
        if self._others == "ignored":
            return True
        if isinstance(known, tuple):
            return bool(known[1] == _hash(buffer))
        return known == address(buffer) and untouched(buffer)


def _hash(buffer: memoryview) -> int:
    starts = range(0, buffer.nbytes, _PIECE)
    return hash(tuple([hash(buffer[start : start + _PIECE].tobytes()) for start in starts]))


def _pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    stream = io.BytesIO()
    buffers: list[memoryview] = []
    _Pickler(stream, buffers).dump(value)
    return stream.getvalue(), buffers


class Fingerprints:
    """Of the objects by name, taken when this is made."""

    def __init__(self, values: Mapping[str, Any], others: Others = "changed") -> None:
        self._values = {
            name: value for name, value in values.items() if not isinstance(value, _FIXED)
        }
        self._before = {name: _taken(value, others) for name, value in self._values.items()}

    def changed(self) -> Iterable[str]:
        """The names whose objects are no longer what they were, or cannot be compared."""
        return filter(self.has_changed, self._values)

    def forget(self, name: str) -> None:
        """Do not look at this one any more."""
        self._values.pop(name, None)

    def has_changed(self, name: str) -> bool:
        """Whether the object is no longer what it was, or cannot be compared."""
        if name not in self._values:
            return False
        before = self._before[name]
        try:
            return before is None or not before.still(self._values[name])
        except Exception:  # whatever its own methods raise
            return True


def _taken(value: Any, others: Others) -> _Fingerprint | None:
    try:
        return _Fingerprint(value, others)
    except Exception:  # whatever its own methods raise
        return None
