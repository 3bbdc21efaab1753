"""Values to and from bytes: `dumps` makes a `Payload`, `loads` makes the value again.

Small values travel inline, within a message. From `INLINE_LIMIT` bytes on everything goes into one
memory segment, the buffers of arrays straight from where they lie. Arrays arrive writable: each
`loads` gets memory of its own, and what it writes there nobody else sees.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import threading
from collections.abc import Hashable, Iterable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from cloudpickle import cloudpickle

from gpunb.exceptions import GpunbError
from gpunb.objects import Segment
from gpunb.serialize.rebuild import Rebuilder

if TYPE_CHECKING:
    from gpunb.serialize.reuse import Reuse

__all__ = [
    "INLINE_LIMIT",
    "Payload",
    "dumps",
    "from_wires",
    "loads",
    "note_reference",
    "to_wires",
]

INLINE_LIMIT = 48 * 1024
"""Bytes of stream and buffers together that still travel within a message."""

PROTOCOL = 5

# For exactly these types plain pickle does what cloudpickle does.
_SCALARS = frozenset({int, float, str, bool, bytes, NoneType})
_FEW = 64
_MOST_SHARED = 100
"""Segments beside its own that one payload may have: a message takes some 250."""
_SHORT = 4096

# Stands in each stream that holds a function, class or module by value.
_BY_VALUE = b"cloudpickle"


class Payload:
    """A value as bytes.

    Attributes:
        stream: the pickle; empty if it is in the segment.
        buffers: its out-of-band buffers; empty if they are in the segment.
        segment: the memory that holds both, or None.
        spans: (offset, length) in the segment, in bytes: the stream's, then each buffer's. An
            offset of -1 - n stands for the n-th of the shared segments, from its start.
        shared: segments that hold a buffer each, and that others may have sent before.
        references: what was passed to `note_reference` while this value was pickled.
    """

    __slots__ = ("buffers", "references", "segment", "shared", "spans", "stream")

    def __init__(
        self,
        stream: bytes = b"",
        buffers: tuple[bytes, ...] = (),
        segment: Segment | None = None,
        spans: tuple[tuple[int, int], ...] = (),
        references: tuple[Any, ...] = (),
        *,
        shared: tuple[Segment, ...] = (),
    ) -> None:
        self.stream = stream
        self.buffers = buffers
        self.segment = segment
        self.spans = spans
        self.references = references
        self.shared = shared

    @property
    def segments(self) -> list[Segment]:
        """All that its descriptors have to travel for."""
        return [] if self.segment is None else [self.segment, *self.shared]

    @property
    def nbytes(self) -> int:
        """Bytes of the stream and the buffers."""
        spans = sum(length for _, length in self.spans)
        return len(self.stream) + sum(map(len, self.buffers)) + spans

    def wire(self) -> tuple[Any, ...]:
        """Return a small tuple of plain values; the segments' descriptors have to travel apart."""
        return self.stream, self.buffers, self.spans, self.references

    @classmethod
    def from_wire(cls, wire: tuple[Any, ...], *segments: Segment | None) -> Payload:
        """Return the payload that `wire` came from.

        Raises:
            ValueError: if it needs a segment and there is none, or the segment is too short.
        """
        stream, buffers, spans, references = wire
        needs: dict[int, int] = {}
        for offset, length in spans:
            which, end = (-offset, length) if offset < 0 else (0, offset + length)
            needs[which] = max(needs.get(which, 0), end)
        there: list[Segment] = []
        for which in sorted(needs):
            segment = segments[which] if which < len(segments) else None
            if segment is None or segment.size < needs[which]:
                have = "none" if segment is None else f"one of {segment.size:,}"
                text = f"the payload needs a segment of {needs[which]:,} bytes and got {have}"
                raise ValueError(text)
            there.append(segment)
        if not there:
            return cls(stream, buffers, None, spans, references)
        return cls(stream, buffers, there[0], spans, references, shared=tuple(there[1:]))

    def __repr__(self) -> str:
        place = "inline" if self.segment is None else "in a segment"
        return f"<Payload of {self.nbytes:,} bytes, {place}>"


def to_wires(payloads: Iterable[Payload]) -> tuple[tuple[tuple[Any, int], ...], list[Segment]]:
    """Return the payloads as plain values, each with the number of its segments, and these."""
    parts = [(each.wire(), each.segments) for each in payloads]
    wires = tuple([(wire, len(segments)) for wire, segments in parts])
    return wires, [each for _, segments in parts for each in segments]


def from_wires(wires: Iterable[tuple[Any, int]], segments: Iterable[Segment]) -> list[Payload]:
    """Return the payloads again, with the segments that came along, in order.

    Raises:
        ValueError: a segment is missing.
    """
    taken = iter(segments)
    return [
        Payload.from_wire(wire, *[next(taken, None) for _ in range(count)]) for wire, count in wires
    ]


Way: TypeAlias = Literal["task", "result", "cell", "home"]
"""Where a value is to go: to a task or back, to a cell of a notebook or home."""


def dumps(
    value: Any,
    *,
    what: str = "value",
    names: Sequence[str] = (),
    way: Way = "task",
    reuse: Reuse | None = None,
) -> Payload:
    """Pickle `value`.

    Args:
        value: anything that cloudpickle takes.
        what: the value in words, for error messages. "arguments of train" for a pair
            (args, kwargs): the message then names the argument.
        names: names of the positional arguments, for the same purpose.
        way: where it is to go, for the same purpose.
        reuse: what was sent before of large buffers.

    Raises:
        TypeError: if it cannot be pickled; the text says which part of it, and why.
        OutOfMemoryError: if there is no shared memory for it.
    """
    if _is_plain(value):
        stream = pickle.dumps(value, PROTOCOL)
        return Payload(stream) if len(stream) <= INLINE_LIMIT else _packed([stream], [], ())
    buffers: list[memoryview] = []
    try:
        pieces, references = _pickle(value, buffers, what, names, way)
        payload = _packed(pieces, buffers, references, reuse)
        if reuse is not None:
            buffers.clear()
            reuse.sent()
        return payload
    except BaseException:
        buffers.clear()  # the error's traceback would keep the data alive
        raise


def dumps_in_band(value: Any, *, what: str = "value") -> tuple[bytes, tuple[Any, ...]]:
    """Pickle `value` into one string of bytes, which `loads(Payload(...))` takes; beside it what
    was passed to `note_reference`.

    Raises:
        TypeError: as `dumps` does.
    """
    pieces, references = _pickle(value, None, what, ())
    return b"".join(pieces), references


def loads(
    payload: Payload,
    *,
    namespace: dict[str, Any] | None = None,
    lazy_modules: bool = False,
    update_classes: bool = False,
) -> Any:
    """Make the value again; any number of times, each independent of the others.

    Args:
        payload: what `dumps` made. Its segment is left open.
        namespace: globals for functions that were pickled by value out of a ``__main__``. Names
            that travel with them are added where it lacks them, and never changed.
        lazy_modules: whether modules in the value are imported only when they are used.
        update_classes: whether classes that were made in this process take over changed
            attributes, or only those that they lack.

    Raises:
        whatever rebuilding the value raises, such as ImportError.
    """
    stream: bytes | memoryview = payload.stream
    buffers: Iterable[Any] | None = None
    if payload.segment is not None:
        memory = payload.segment.map()
        stream, *buffers = (
            memory[start : start + size] if start >= 0 else payload.shared[-1 - start].map()[:size]
            for start, size in payload.spans
        )
    elif payload.buffers:
        buffers = map(bytearray, payload.buffers)
    if isinstance(stream, bytes) and _BY_VALUE not in stream:
        return pickle.loads(stream, buffers=buffers)
    return Rebuilder(
        stream,
        buffers=buffers,
        namespace=namespace,
        lazy_modules=lazy_modules,
        update_classes=update_classes,
    ).load()


def note_reference(identity: Hashable) -> None:
    """Note that the value being pickled refers to `identity`; for use in `__reduce__`.

    Within a `dumps` of this thread it ends up in the payload's references: in those of the
    innermost one, if an object's `__reduce__` calls `dumps` itself. Elsewhere nothing happens.
    """
    noted = getattr(_collector, "noted", None)
    if noted is not None:
        noted.append(identity)


_collector = threading.local()


class Moving(Protocol):
    """Has a pickler of its own; see `devices`."""

    def pickler(self, pieces: list[Any], buffers: list[memoryview] | None) -> StreamPickler: ...


def enter(moving: Moving | None) -> Moving | None:
    """From now on this thread pickles with it; return with what it did before."""
    before: Moving | None = getattr(_collector, "moving", None)
    _collector.moving = moving
    return before


class StreamPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, collecting the stream in pieces so that large ones are not copied."""

    def __init__(self, pieces: list[Any], buffers: list[memoryview] | None) -> None:
        self.write = pieces.append
        # A method of this object would make a cycle, and large pieces wait for the collector.
        callback = None if buffers is None else functools.partial(_take, buffers)
        super().__init__(self, protocol=PROTOCOL, buffer_callback=callback)


def _of_file(file: io.TextIOWrapper) -> Any:
    """As cloudpickle, which makes a text in memory of a file; but not to or from a cell, where
    it would take the file's place. Standard streams are those of where they arrive."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    if getattr(_collector, "way", "task") in ("cell", "home"):
        raise pickle.PicklingError(f"cannot pickle {type(file).__name__} objects: it is open here")
    return _as_cloudpickle_does(file)


_as_cloudpickle_does = cloudpickle.Pickler.dispatch_table[io.TextIOWrapper]
StreamPickler.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
    {io.TextIOWrapper: _of_file}
)


def _take(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> None:
    """Keep a buffer out of the stream. One that is not contiguous fails there as well."""
    buffers.append(buffer.raw())


def pickle_in_pieces(
    value: Any, buffers: list[memoryview] | None
) -> tuple[list[bytes | memoryview], tuple[Any, ...]]:
    """Return the stream in pieces, and the references; `buffers` gets what stays out of it.

    Raises:
        whatever pickling raises.
    """
    pieces: list[Any] = []
    outer = getattr(_collector, "noted", None)
    noted: list[Any] = []
    _collector.noted = noted
    moving: Moving | None = getattr(_collector, "moving", None)
    make = StreamPickler if moving is None else moving.pickler
    try:
        make(pieces, buffers).dump(value)
    finally:
        _collector.noted = outer
    # Large bytes, bytearrays and buffers come as they are, the rest as bytes.
    for number, piece in enumerate(pieces):
        if type(piece) is not bytes:
            is_buffer = isinstance(piece, pickle.PickleBuffer)
            pieces[number] = piece.raw() if is_buffer else memoryview(piece)
    return pieces, tuple(noted)


def _pickle(
    value: Any,
    buffers: list[memoryview] | None,
    what: str,
    names: Sequence[str],
    way: Way = "task",
) -> tuple[list[bytes | memoryview], tuple[Any, ...]]:
    """Like `pickle_in_pieces`, but the error says what is wrong, and where."""
    outer = getattr(_collector, "way", "task")
    _collector.way = way
    try:
        return pickle_in_pieces(value, buffers)
    except (GpunbError, MemoryError):
        raise
    except Exception as error:
        from gpunb.serialize.explain import explain

        raise TypeError(explain(value, what, names=names, error=error, way=way)) from error
    finally:
        _collector.way = outer


def _packed(
    pieces: Sequence[bytes | memoryview],
    buffers: list[memoryview],
    references: tuple[Any, ...],
    reuse: Reuse | None = None,
) -> Payload:
    """Keep the parts inline, or write them to a segment."""
    total = sum(map(len, pieces)) + sum(map(len, buffers))
    if total <= INLINE_LIMIT:
        return Payload(b"".join(pieces), tuple(map(bytes, buffers)), references=references)
    if reuse is not None:
        return _packed_with(reuse, pieces, buffers, references)
    segment, spans = Segment.write([pieces, *buffers])
    return Payload(segment=segment, spans=spans, references=references)


def _packed_with(
    reuse: Reuse,
    pieces: Sequence[bytes | memoryview],
    buffers: list[memoryview],
    references: tuple[Any, ...],
) -> Payload:
    """Write to a segment what was not sent before."""
    shared: list[Segment] = []
    places: list[tuple[int, int] | None] = []
    for raw in buffers:
        known = reuse.segment(raw) if len(shared) < _MOST_SHARED else None
        if known is not None:
            shared.append(known)
        places.append(None if known is None else (-len(shared), raw.nbytes))
    own = [raw for raw, place in zip(buffers, places, strict=True) if place is None]
    segment, spans = Segment.write([pieces, *own])
    rest = iter(spans[1:])
    all_spans = (spans[0], *[next(rest) if place is None else place for place in places])
    return Payload(segment=segment, spans=all_spans, references=references, shared=tuple(shared))


def _is_plain(value: Any) -> bool:
    """Return whether plain pickle will do, for the values that most calls are made of.

    That is a scalar, a few of them in a tuple, list or dict, or (args, kwargs) of such.
    """
    kind = type(value)
    if kind in _SCALARS:
        return kind is not bytes or len(value) <= _SHORT
    if kind is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        return _is_flat(value[0]) and (not value[1] or _is_flat(value[1]))
    return _is_flat(value)


def _is_flat(value: Any) -> bool:
    kind = type(value)
    if (kind is not tuple and kind is not list and kind is not dict) or len(value) > _FEW:
        return False
    items = value
    if kind is dict:
        if not _SCALARS.issuperset(map(type, value)):
            return False
        items = value.values()
    kinds = set(map(type, items))
    if bytes in kinds and max(len(item) for item in items if type(item) is bytes) > _SHORT:
        return False
    return _SCALARS.issuperset(kinds)
