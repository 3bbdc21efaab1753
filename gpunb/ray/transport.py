"""Values as they travel through Ray: payloads, with the Ray references that belong to them.

A value that refers to objects names them by their ids. The Ray references go beside it, so that
Ray counts them wherever the value is, and whoever gets it knows what the ids stand for.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gpunb.data.serialize import Payload
from gpunb.protocol.backend import NewActor, ObjectId
from gpunb.scheduler.tasks import ActorId, TaskId

INTERRUPTED = frozenset({"cell", "ranks"})
"""Kinds of calls that the kernel interrupts itself. They have results then, too."""


def key_of(actor: int) -> str:
    """Return the name under which an actor's mailbox is found."""
    return f"actor-{actor}"


class JobEnvRef(NamedTuple):
    """Where a worker finds a `JobEnv` that it does not have yet.

    Attributes:
        ref: Ray's reference to it, by Ray's pickler. With the reference itself in each call, Ray
            would note for each that it borrows the object, which takes 0.1 ms; it is in a list
            where Ray was told to pickle no references by themselves. The kernel keeps the object.
    """

    key: str
    ref: bytes | list[Any]

    def open(self) -> Any:
        """Return Ray's reference."""
        from ray import cloudpickle

        return cloudpickle.loads(self.ref) if isinstance(self.ref, bytes) else self.ref[0]


class CallHeader(NamedTuple):
    """The facts about a call that a worker gets beside its arguments.

    Attributes:
        code: the pickled function, or a Ray reference to it in a list.
        job_env: the kernel's `JobEnv`.
        sink: number of the kernel's sink for what it shows.
        new: of an actor, what it is.
        share: units of a device that frameworks are to keep to; 0 for no limit.
    """

    task: TaskId
    name: str
    kind: str
    function: str
    code: bytes | list[Any]
    returns: int
    retry: bytes | bool
    timeout: float | None
    job_env: JobEnvRef
    sink: int
    parent: TaskId | None
    actor: ActorId
    new: NewActor | None
    share: int
    gpus: bool


def joined(header: CallHeader, arguments: RayPayload) -> Any:
    """Return the facts about a call, and its arguments, as one argument for Ray: bytes, as in
    `light`, if the header has nothing for Ray to see either."""
    parts = tuple(header), light(arguments)
    small = isinstance(header.code, bytes) and isinstance(header.job_env.ref, bytes)
    refers = header.new is not None or not small
    return parts if refers or parts[1] is arguments else pickle.dumps(parts)


def separated(sent: Any) -> tuple[CallHeader, RayPayload]:
    """Return what `joined` was given."""
    fields, arguments = pickle.loads(sent) if isinstance(sent, bytes) else sent
    return CallHeader(*fields), opened(arguments)


def light(payload: RayPayload) -> bytes | RayPayload:
    """Return the payload, or only its stream if that is bytes, and small, and all that there is:
    for anything but bytes Ray's pickler takes 0.1 ms on each side."""
    stream = payload.stream
    if not isinstance(stream, bytes) or len(stream) >= _LARGE or payload.buffers:
        return payload
    more = payload.references or payload.output_of or payload.failed or payload.cancelled
    return payload if more else stream


def opened(sent: bytes | RayPayload) -> RayPayload:
    """Return what `light` was given."""
    return RayPayload(sent) if isinstance(sent, bytes) else sent


FindRef = Callable[[ObjectId], Any]
"""Gives the Ray reference, or the handle of an actor, that an id stands for; None if unknown."""


class RayPayload:
    """A payload for Ray's pickler: large parts of it stay out of the stream, and are not copied
    where Ray keeps them.

    Attributes:
        references: ids of objects that the value refers to.
        refs: what they stand for.
        output_of: the task whose output was sent to its end before this; 0 for none.
        failed: whether it is the failure of a generator, among its results.
        cancelled: whether Ray cancelled the call, whose results came home all the same.
    """

    __slots__ = ("buffers", "cancelled", "failed", "output_of", "references", "refs", "stream")

    def __init__(
        self,
        stream: Any,
        buffers: tuple[Any, ...] = (),
        references: tuple[ObjectId, ...] = (),
        refs: tuple[Any, ...] = (),
        output_of: int = 0,
    ) -> None:
        self.stream = stream
        self.buffers = buffers
        self.references = references
        self.refs = refs
        self.output_of = output_of
        self.failed = self.cancelled = False

    def __reduce__(self) -> tuple[Any, ...]:
        buffers = tuple(map(_outside, self.buffers))
        parts = (_outside(self.stream), buffers, self.references, self.refs, self.output_of)
        flags = {name: True for name in ("failed", "cancelled") if getattr(self, name)}
        return (RayPayload, parts, (None, flags)) if flags else (RayPayload, parts)


_LARGE = 4096


def _outside(part: Any) -> Any:
    """A part of the payload, out of the stream if it is large."""
    if isinstance(part, bytes) and len(part) < _LARGE:
        return part
    return pickle.PickleBuffer(part)


def pack(
    payload: Payload, find: FindRef, more: Iterable[ObjectId] = (), output_of: int = 0
) -> RayPayload:
    """Return the form of this payload that Ray gets. `more` are further objects to keep alive."""
    references = (*payload.references, *more)
    refs = tuple([find(each) for each in references])
    if payload.segment is None:
        return RayPayload(payload.stream, payload.buffers, references, refs, output_of)
    memory = payload.segment.map()
    stream, *buffers = [
        memory[start : start + size] if start >= 0 else payload.shared[-1 - start].map()[:size]
        for start, size in payload.spans
    ]
    return RayPayload(stream, tuple(buffers), references, refs, output_of)


class ReceivedPayload(Payload):
    """A payload that came through Ray. While it exists, this process holds the objects in it."""

    __slots__ = ("_leave",)

    def __init__(self, packed: RayPayload, leave: Callable[[Sequence[ObjectId]], object]) -> None:
        stream = packed.stream
        if not isinstance(stream, bytes):
            stream = memoryview(stream)
        buffers: Any = tuple([memoryview(each) for each in packed.buffers])
        super().__init__(stream, buffers, references=packed.references)
        self._leave = leave

    def __reduce__(self) -> tuple[Any, ...]:
        stream, *buffers = map(bytes, (self.stream, *self.buffers))
        return Payload, (stream, tuple(buffers), None, (), self.references)

    def __del__(self) -> None:
        try:
            if self.references:
                self._leave(self.references)
        except Exception:
            pass  # at the interpreter's end
