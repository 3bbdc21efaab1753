"""Finds the objects that a cell has changed in place.

The pickles of an object before and after the cell are compared. Large buffers are not copied:

1. A buffer in a private mapping, such as one that came from another process, is unchanged if the
   system has no page of it that was written to. Nothing reads the buffer.
2. Another buffer is watched, if the system tells which pages are written to, and else hashed.
3. The caller may have these other buffers ignored, or taken as changed.
"""

from __future__ import annotations

import io
import pickle
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from gpunb.data.page_map import Mappings, Watch
from gpunb.data.segments import address, untouched
from gpunb.data.serialize.devices import Tensors, moving
from gpunb.data.serialize.reuse import owner_of, passing

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
"""Types whose objects do not change, or change in no data."""

_CODE = (type, types.FunctionType, types.ModuleType, types.MethodType)

LARGE = 64 * 1024
"""Size in bytes from which a buffer is watched by page instead of copied."""

WATCHED = 1 << 20
"""Size in bytes from which a buffer outside of private mappings is watched instead of hashed."""

_PIECE = 256 * 1024

Others: TypeAlias = Literal["changed", "compared", "ignored"]
"""How to treat large buffers outside of private mappings. Comparing buffers that cannot be watched
takes 0.4 s per GB."""


class _Pickler(pickle.Pickler):
    """Pickles data. Code and modules are replaced by their identities; tensors, of devices too, by
    buffers of host memory."""

    def __init__(self, stream: io.BytesIO, buffers: list[memoryview]) -> None:
        super().__init__(stream, 5, buffer_callback=lambda each: buffers.append(each.raw()))
        moved = moving()
        self._tensors = Tensors(moved) if moved is not None else None

    def reducer_override(self, obj: Any) -> Any:
        if obj is not int and isinstance(obj, _CODE):
            return (int, (id(obj),))
        return NotImplemented if self._tensors is None else self._tensors.reduce(obj)


class _Fingerprint:
    """The data of an object at one moment. It keeps no memory of the object alive."""

    __slots__ = ("_data", "_large", "_others", "_small")

    def __init__(self, value: Any, others: Others, mappings: Mappings) -> None:
        self._others = others
        self._data, buffers = _pickled(value)
        self._small = [bytes(each) for each in buffers if each.nbytes < LARGE]
        large = [each for each in buffers if each.nbytes >= LARGE]
        self._large = [self._first_look(each, mappings) for each in large]
        if any(isinstance(known, Watch) for known, _ in self._large):
            owners = [_weakly(owner_of(each)) for each in large]
            buffers.clear()
            large.clear()
            self._hash_passing(value, [owner() is None for owner in owners])

    def _hash_passing(self, value: Any, passing: list[bool]) -> None:
        """Hash the buffers that were made for the pickle alone. It is no use to watch them, as the
        next pickle has them elsewhere."""
        if not any(passing):
            return
        large = [each for each in _pickled(value)[1] if each.nbytes >= LARGE]
        for number, (each, passes) in enumerate(zip(large, passing, strict=True)):
            if passes and isinstance(self._large[number][0], Watch):
                self._large[number] = _hash(each), each.nbytes

    def still(self, value: Any) -> bool:
        """Whether the data of the object is the same."""
        data, buffers = _pickled(value)
        if data != self._data:
            return False
        small = [each for each in buffers if each.nbytes < LARGE]
        large = [each for each in buffers if each.nbytes >= LARGE]
        if small != self._small or len(large) != len(self._large):
            return False
        return all(map(self._unchanged, large, self._large))

    def _first_look(self, buffer: memoryview, mappings: Mappings) -> _Look:
        if self._others == "ignored":
            return None, buffer.nbytes
        if self._others == "changed" or (untouched(buffer) and mappings.private(buffer)):
            return address(buffer), buffer.nbytes
        return _watched(buffer) or _hash(buffer), buffer.nbytes

    def _unchanged(self, buffer: memoryview, before: _Look) -> bool:
        known, size = before
        if buffer.nbytes != size:
            return False
        match known:
            case None:
                return True
            case Watch():
                return known.untouched(buffer)
            case bytes():
                return known == _hash(buffer)
        return known == address(buffer) and untouched(buffer)


_Look: TypeAlias = tuple[int | bytes | Watch | None, int]
"""A large buffer's address, hash or watch, or None if it is ignored; and its size."""


def _watched(buffer: memoryview) -> Watch | None:
    if buffer.nbytes < WATCHED or passing(buffer):
        return None
    try:
        return Watch(buffer)
    except OSError:  # the system cannot tell
        return None


def _weakly(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # its lifetime is unknown
        return lambda: None


def _hash(buffer: memoryview) -> bytes:
    starts = range(0, buffer.nbytes, _PIECE)
    pieces = tuple([hash(buffer[start : start + _PIECE].tobytes()) for start in starts])
    return hash(pieces).to_bytes(8, "little", signed=True)


def _pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    stream = io.BytesIO()
    buffers: list[memoryview] = []
    _Pickler(stream, buffers).dump(value)
    return stream.getvalue(), buffers


class Fingerprints:
    """Fingerprints of objects by name, taken when this is made."""

    def __init__(self, values: Mapping[str, Any], others: Others = "changed") -> None:
        self._values = {
            name: value for name, value in values.items() if not isinstance(value, _FIXED)
        }
        mappings = Mappings()
        self._before = {
            name: _taken(value, others, mappings) for name, value in self._values.items()
        }

    def changed(self) -> Iterable[str]:
        """The names whose objects have changed or cannot be compared."""
        return filter(self.has_changed, self._values)

    def forget(self, name: str) -> None:
        """Take this name as unchanged from now on."""
        self._values.pop(name, None)

    def comparable(self, name: str) -> bool:
        """Whether the object of this name can be compared."""
        return name in self._values and self._before[name] is not None

    def has_changed(self, name: str) -> bool:
        """Whether the object of this name has changed or cannot be compared."""
        if name not in self._values:
            return False
        before = self._before[name]
        try:
            return before is None or not before.still(self._values[name])
        except Exception:  # its own methods may raise anything
            return True


def _taken(value: Any, others: Others, mappings: Mappings) -> _Fingerprint | None:
    try:
        return _Fingerprint(value, others, mappings)
    except Exception:  # its own methods may raise anything
        return None
