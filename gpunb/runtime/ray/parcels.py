"""Values as they travel through Ray: payloads, with the Ray references that belong to them.

A value that refers to objects names them by their ids. The Ray references go beside it, so that
Ray counts them wherever the value is, and whoever gets it knows what the ids stand for.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpunb.backend import ObjectId
from gpunb.serialize import Payload

Find = Callable[[ObjectId], Any]
"""Gives the Ray reference, or the handle of an actor, that an id stands for; None if unknown."""


class Parcel:
    """A payload for Ray's pickler: large parts of it stay out of the stream, and are not copied
    where Ray keeps them.

    Attributes:
        references: ids of objects that the value refers to.
        refs: what they stand for.
        told: the task whose output was sent to its end before this.
    """

    __slots__ = ("buffers", "references", "refs", "stream", "told")

    def __init__(
        self,
        stream: Any,
        buffers: tuple[Any, ...] = (),
        references: tuple[ObjectId, ...] = (),
        refs: tuple[Any, ...] = (),
        told: int = 0,
    ) -> None:
        self.stream = stream
        self.buffers = buffers
        self.references = references
        self.refs = refs
        self.told = told

    def __reduce__(self) -> tuple[Any, ...]:
        buffers = tuple(map(_outside, self.buffers))
        return Parcel, (_outside(self.stream), buffers, self.references, self.refs, self.told)


_LARGE = 4096


def _outside(part: Any) -> Any:
    """A part of the payload, out of the stream if it is large."""
    if isinstance(part, bytes) and len(part) < _LARGE:
        return part
    return pickle.PickleBuffer(part)


def pack(payload: Payload, find: Find, more: Iterable[ObjectId] = (), told: int = 0) -> Parcel:
    """The payload to be handed to Ray. `more` is referred to by what goes with it."""
    references = (*payload.references, *more)
    refs = tuple([find(each) for each in references])
    if payload.segment is None:
        return Parcel(payload.stream, payload.buffers, references, refs, told)
    memory = payload.segment.map()
    stream, *buffers = [
        memory[start : start + size] if start >= 0 else payload.shared[-1 - start].map()[:size]
        for start, size in payload.spans
    ]
    return Parcel(stream, tuple(buffers), references, refs, told)


class Arrived(Payload):
    """A payload that came through Ray. What it refers to is known here as long as it is."""

    __slots__ = ("_leave",)

    def __init__(self, parcel: Parcel, leave: Callable[[Sequence[ObjectId]], object]) -> None:
        stream = parcel.stream
        if not isinstance(stream, bytes):
            stream = memoryview(stream)
        buffers: Any = tuple([memoryview(each) for each in parcel.buffers])
        super().__init__(stream, buffers, references=parcel.references)
        self._leave = leave

    def __del__(self) -> None:
        try:
            if self.references:
                self._leave(self.references)
        except Exception:
            pass  # at the interpreter's end
