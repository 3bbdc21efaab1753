"""Values to and from bytes: `dumps` makes a `Payload`, `loads` makes the value again.

Small values travel inline, within a message. Values above `INLINE_LIMIT` bytes go into one memory
segment; the buffers of arrays are written there without another copy. Arrays arrive writable, at
addresses that are multiples of 64: each `loads` has its own private memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from gpunb.data import arenas, blocks
from gpunb.data.segments import LARGE, Segment, aligned
from gpunb.data.serialize.parts import Part
from gpunb.data.serialize.pickler import PROTOCOL, Way, pickle_in_pieces, set_way
from gpunb.data.serialize.rebuild import Rebuilder, Rebuilding, Shared
from gpunb.exceptions import GpunbError

if TYPE_CHECKING:
    from gpunb.data.serialize.reuse import Reuse

__all__ = [
    "INLINE_LIMIT",
    "Payload",
    "dumps",
    "from_wires",
    "inlined",
    "loads",
    "to_wires",
]

INLINE_LIMIT = 48 * 1024
"""Bytes of the stream and the buffers together that travel within a message at most."""

# For these types plain pickle and cloudpickle give the same result.
_SCALARS = frozenset({int, float, str, bool, bytes, NoneType})
_FEW = 64
_MOST_SHARED = 100
"""Segments that one payload may share; a message has room for some 250 descriptors."""
_SHORT = 4096
_PARTS = 4
"""Parts of a payload's wire without the place of a block."""

# Occurs in each stream with a function, class or module by value.
_BY_VALUE = b"cloudpickle"


class Payload:
    """A value as bytes.

    Attributes:
        stream: the pickle; empty if it is in the segment.
        buffers: its out-of-band buffers; empty if they are in the segment.
        segment: the memory that holds both, or None.
        spans: (offset, length) in the segment, in bytes: the stream's, then each buffer's. An
            offset of -1 - n means the n-th of the shared segments, from its start.
        shared: segments with one buffer each, which other payloads may use, too.
        references: the identities that `note_reference` noted while the value was pickled.
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
        """The segments whose descriptors have to be sent with the payload."""
        return [] if self.segment is None else [self.segment, *self.shared]

    @property
    def nbytes(self) -> int:
        """Bytes of the stream and the buffers."""
        spans = sum(length for _, length in self.spans)
        return len(self.stream) + sum(map(len, self.buffers)) + spans

    def wire(self) -> tuple[Any, ...]:
        """Return a small tuple of plain values, without the segments."""
        return self.stream, self.buffers, self.spans, self.references

    @classmethod
    def from_wire(cls, wire: tuple[Any, ...], *segments: Segment | None) -> Payload:
        """Return the payload of a tuple from `wire`.

        Raises:
            ValueError: a segment is missing or too short.
        """
        stream, buffers, spans, references = wire
        if not spans:
            return cls(stream, buffers, None, (), references)
        needs: dict[int, int] = {}
        for offset, length in spans:
            which, end = (-offset, length) if offset < 0 else (0, offset + length)
            needs[which] = max(needs.get(which, 0), end)
        there: list[Segment] = []
        for which in sorted(needs):
            segment = segments[which] if which < len(segments) else None
            if segment is None or segment.size < needs[which]:
                none = "none, as where no file descriptor is left (see `ulimit -n`)"
                have = none if segment is None else f"one of {segment.size:,}"
                text = f"the payload needs a segment of {needs[which]:,} bytes and got {have}"
                raise ValueError(text)
            there.append(segment)
        return cls(stream, buffers, there[0], spans, references, shared=tuple(there[1:]))

    def __repr__(self) -> str:
        place = "inline" if self.segment is None else "in a segment"
        return f"<Payload of {self.nbytes:,} bytes, {place}>"


def to_wires(payloads: Iterable[Payload]) -> tuple[tuple[tuple[Any, int], ...], list[Segment]]:
    """Return the payloads as plain values, each with its number of new segments; and the segments.

    A file that several payloads have blocks of is there once. The wire of such a payload ends with
    (number of the segment, offset, size).
    """
    wires: list[tuple[Any, int]] = []
    segments: list[Segment] = []
    files: dict[Segment, int] = {}
    for each in payloads:
        segment, wire = each.segment, each.wire()
        if segment is None:
            wires.append((wire, 0))
            continue
        before, file = len(segments), segment
        if (place := segment.place) is not None:
            file, offset = place
            wire = *wire, (files.setdefault(file, before), offset, segment.size)
        if place is None or files[file] == before:
            segments.append(file)
        segments += each.shared
        wires.append((wire, len(segments) - before))
    return tuple(wires), segments


def from_wires(wires: Iterable[tuple[Any, int]], segments: Iterable[Segment]) -> list[Payload]:
    """Return the payloads of `to_wires`, with the segments in the same order.

    Raises:
        ValueError: a segment is missing or too short.
    """
    there = list(segments)
    files: dict[int, Segment] = {}
    made: list[Payload] = []
    start = 0
    for wire, count in wires:
        own: list[Segment | None] = [*there[start : start + count]]
        parts, place = wire[:_PARTS], wire[_PARTS:]
        if place:
            ((number, offset, size),) = place
            if number not in files and 0 <= number < len(there):
                files[number] = blocks.known_file(there[number])
            own[: number == start] = [_block(files.get(number), offset, size)]
        made.append(Payload.from_wire(parts, *own))
        start += count
    return made


def _block(file: Segment | None, offset: int, size: int) -> blocks.Block | None:
    if file is None:
        return None
    if not 0 <= offset <= offset + size <= file.size:
        text = f"a block of {size:,} bytes at {offset:,} was announced, the file has"
        raise ValueError(f"{text} {file.size:,}")
    return blocks.Block(size, (file, offset))


def dumps(
    value: Any,
    *,
    what: str = "value",
    names: Sequence[str] = (),
    way: Way = "task",
    reuse: Reuse | None = None,
    shared: Sequence[Part] = (),
) -> Payload:
    """Pickle `value`.

    Args:
        value: anything that cloudpickle takes.
        what: the value in words, for error messages. "arguments of train" for a pair
            (args, kwargs): the message then names the argument.
        names: names of the positional arguments, for the same purpose.
        way: where the value goes, for the same purpose.
        reuse: segments of large buffers that were sent before.
        shared: objects that the receiver has, with their paths; the stream has only the paths.

    Raises:
        TypeError: the value cannot be pickled; the text names the part and the reason.
        OutOfMemoryError: no shared memory is left.
    """
    if _is_plain(value):
        stream = pickle.dumps(value, PROTOCOL)
        return Payload(stream) if len(stream) <= INLINE_LIMIT else _packed([stream], [], ())
    buffers: list[memoryview] = []
    try:
        pieces, references = _pickle(value, buffers, what, names, way, shared=shared)
        payload = _packed(pieces, buffers, references, reuse)
        if reuse is not None:
            buffers.clear()
            reuse.sent()
        return payload
    except BaseException:
        buffers.clear()  # the error's traceback would keep the data alive
        raise


def dumps_in_band(value: Any, *, what: str = "value") -> tuple[bytes, tuple[Any, ...]]:
    """Pickle `value` into bytes for `loads(Payload(...))`; return them and the references.

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
    shared: Shared | None = None,
    fill: bool = False,
) -> Any:
    """Unpickle the value of a payload. Each call returns a new, independent value.

    Args:
        payload: a result of `dumps`. Its segment stays open.
        namespace, lazy_modules, update_classes, shared, fill: see `Rebuilding`.

    Raises:
        whatever unpickling raises, such as ImportError.
    """
    stream, buffers = opened(payload)
    if shared is None and not fill and isinstance(stream, bytes) and _BY_VALUE not in stream:
        return pickle.loads(stream, buffers=buffers)
    rebuilding = Rebuilding(namespace, lazy_modules, update_classes, shared, fill)
    return Rebuilder(stream, buffers, rebuilding).load()


def opened(payload: Payload) -> tuple[bytes | memoryview, Iterable[Any] | None]:
    """Return the stream and the out-of-band buffers of a payload."""
    if payload.segment is not None:
        memory = payload.segment.map()
        stream, *buffers = (
            memory[start : start + size] if start >= 0 else payload.shared[-1 - start].map()[:size]
            for start, size in payload.spans
        )
        return stream, buffers
    return payload.stream, map(_writable, payload.buffers) if payload.buffers else None


def inlined(payload: Payload) -> Payload:
    """Return the same payload without a segment of its own."""
    if payload.segment is None:
        return payload
    stream, buffers = opened(payload)
    parts = tuple(map(bytes, buffers or ()))
    return Payload(bytes(stream), parts, references=payload.references)


def _writable(data: bytes) -> memoryview:
    view = aligned(len(data))
    view[:] = data
    return view


def _pickle(
    value: Any,
    buffers: list[memoryview] | None,
    what: str,
    names: Sequence[str],
    way: Way = "task",
    *,
    shared: Sequence[Part] = (),
) -> tuple[list[bytes | memoryview], tuple[Any, ...]]:
    """Call `pickle_in_pieces`; its error names the part that cannot be pickled."""
    outer = set_way(way)
    try:
        return pickle_in_pieces(value, buffers, shared)
    except (GpunbError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        from gpunb.data.serialize.explain import (
            explain,
        )  # imported here because it is rarely needed

        raise TypeError(explain(value, what, names=names, error=error, way=way)) from error
    finally:
        set_way(outer)


def _packed(
    pieces: Sequence[bytes | memoryview],
    buffers: list[memoryview],
    references: tuple[Any, ...],
    reuse: Reuse | None = None,
) -> Payload:
    """Return a payload with the parts inline, or in a segment if they are large."""
    total = sum(map(len, pieces)) + sum(map(len, buffers))
    if total <= INLINE_LIMIT:
        return Payload(b"".join(pieces), tuple(map(bytes, buffers)), references=references)
    if reuse is not None:
        return _packed_with(reuse, pieces, buffers, references)
    known = arenas.current
    small = Segment.write if known is None else known.write
    write = arenas.write_large if total >= LARGE else small
    segment, spans = write([pieces, *buffers])
    return Payload(segment=segment, spans=spans, references=references)


def _packed_with(
    reuse: Reuse,
    pieces: Sequence[bytes | memoryview],
    buffers: list[memoryview],
    references: tuple[Any, ...],
) -> Payload:
    """Return a payload that shares segments of buffers that were sent before."""
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
    """Return whether plain pickle is enough: the fast path for most calls.

    It is enough for a scalar, a few scalars in a tuple, list or dict, and (args, kwargs) of these.
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
