"""The requests of workers and of attached kernels: one class a request, with its reply.

On the wire a request is a name and a plain tuple of fields; `decode` checks the number and the
types of the fields. A type checker sees the classes as frozen dataclasses. They are named tuples
at run time, because each process that starts pays for each class that it defines: a named tuple
takes 0.05 ms, and a frozen dataclass ten times as long.
"""

from __future__ import annotations

import collections
import typing
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast, dataclass_transform

from gpunb.protocol.backend import NewActor, ObjectId
from gpunb.protocol.plain import Malformed, short
from gpunb.protocol.records import Function, Submission, flat, reader
from gpunb.protocol.sink import Place, SweepInfo
from gpunb.scheduler.tasks import ActorId, TaskId

R = TypeVar("R")
V = TypeVar("V", bound="Verb[Any]")

Plain: TypeAlias = object
"""A plain value, as `gpunb.protocol.plain` describes it."""

Facts: TypeAlias = dict[str, Any]
"""Facts by name, as plain values for people and for JSON."""

Objects: TypeAlias = tuple[ObjectId, ...]

NUMBERS_AT_ONCE = 256
"""Numbers of tasks that a kernel may reserve with one request."""


class Surroundings(NamedTuple):
    """The state of a kernel's process that its workers share. A worker is told of a change."""

    environment: Mapping[str, str]
    directory: str | None
    path: list[str]
    argv: list[str]


class SinkInfo(NamedTuple):
    """A sink of an attached kernel: its number there, and its attributes as in `Sink`."""

    number: int
    place: Place | None
    background: bool
    asks: bool
    sweep: SweepInfo | None


class Verb(Generic[R]):
    """A request. The value of its reply has the type `R`."""

    __slots__ = ()


@dataclass_transform(frozen_default=True)
def _verb(cls: type[V]) -> type[V]:
    """Return the class as a named tuple of the fields that it annotates."""
    names = cls.__annotations__
    copied = ("__module__", "__qualname__", "__doc__", "__annotations__")
    body = {name: getattr(cls, name) for name in copied}
    bases = collections.namedtuple(cls.__name__, names), *cls.__bases__
    return cast("type[V]", type(cls.__name__, bases, {**body, "__slots__": ()}))


# ------------------------------------------------------------ from workers and attached kernels


@_verb
class Put(Verb[ObjectId]):
    """Keep the value in the payload. Reply: the id of the object.

    Attributes:
        failed: whether the payload is a failure, which `get` raises.
    """

    failed: bool


@_verb
class Fetch(Verb[bool]):
    """Wait until all objects are there or one has failed.

    Reply: whether one has failed. The payloads are the failure, or the values if they are wanted.

    Attributes:
        timeout: seconds; None for ever.
        values: whether the values are wanted.
    """

    objects: Objects
    timeout: float | None
    values: bool


@_verb
class Wait(Verb[list[ObjectId]]):
    """Wait until `count` objects are there, or `timeout` seconds. Reply: the objects there."""

    objects: Objects
    count: int
    timeout: float | None


@_verb
class Watch(Verb[None]):
    """Reply when the object is there. The task may do other things meanwhile."""

    object: ObjectId


@_verb
class Take(Verb[bool]):
    """Take the next value of a generator. Reply: whether there was one."""

    object: ObjectId


@_verb
class FindActor(Verb[tuple[ObjectId, bytes]]):
    """Find an actor by its name. Reply: its handle, and the pickled description of its class."""

    name: str
    namespace: str


@_verb
class Kill(Verb[None]):
    """End the process of an actor."""

    actor: ActorId
    restart: bool


@_verb
class Cancel(Verb[None]):
    """Stop the task that makes the object."""

    object: ObjectId
    force: bool
    recursive: bool


@_verb
class Interrupt(Verb[None]):
    """Raise KeyboardInterrupt in the task that makes the object."""

    object: ObjectId


@_verb
class Ask(Verb[Any]):
    """Ask for facts by name. Reply: plain values."""

    what: str
    arguments: tuple[Plain, ...]


# --------------------------------------------------------------------------- from workers alone


@_verb
class Submit(Verb[list[ObjectId]]):
    """Submit a call; the payload has its arguments. Reply: the ids of its results.

    Attributes:
        cleanup: whether the submitting task knows that it was cancelled.
    """

    call: Submission
    cleanup: bool


@_verb
class Input(Verb[str | None]):
    """Ask the user. Reply: the answer. Without a prompt, only check that the user can be asked."""

    prompt: str | None
    password: bool


# ------------------------------------------------------------------ from attached kernels alone


@_verb
class Attach(Verb[tuple[int, Plain]]):
    """Begin. Reply: the number of this kernel at the head process, and its machine.

    Attributes:
        reached: the last task number and the last object number that this kernel has used.
    """

    surroundings: Surroundings
    reached: tuple[int, int]


@_verb
class SubmitNumbered(Verb[tuple[list[ObjectId], bool]]):
    """Submit a call; the payload has its arguments. Reply: the ids of its results, and whether
    more calls of its function may be submitted without a reply.

    Attributes:
        number: of the function; 0 if the head process is not to remember it.
        function: None if the head process knows it by the number.
        task: the number of the new task, if the kernel has one for it.
        surroundings: None if they are as before.
    """

    number: int
    function: Function | None
    task: TaskId | None
    inputs: Objects
    actor: ActorId
    new: NewActor | None
    sink: SinkInfo | None
    surroundings: Surroundings | None


@_verb
class Numbers(Verb[tuple[int, ...]]):
    """Reserve numbers for tasks, at most `NUMBERS_AT_ONCE`. Reply: the numbers."""

    count: int


@_verb
class Answer(Verb[None]):
    """Give the user's answer to a question; the payload, if any, is an error. There is no reply."""

    question: int
    text: str | None


@_verb
class SendComm(Verb[None]):
    """Send a message of the front end to a worker that has shown something. There is no reply."""

    worker: int
    kind: str
    content: Mapping[str, Plain]
    sink: SinkInfo


@_verb
class Control(Verb[Facts]):
    """Send a request to the control server. Reply: the reply of the control server."""

    request: Facts


@_verb
class WatchStatus(Verb[None]):
    """Send a snapshot now and after each change, under this number. There is no reply."""

    number: int
    interval: float


@_verb
class Unwatch(Verb[None]):
    """Send no more snapshots under this number. There is no reply."""

    number: int


@_verb
class ListRetained(Verb[list[Facts]]):
    """List the cells and sessions that kernels have left. Reply: facts of each."""


@_verb
class Adopt(Verb[Facts]):
    """Take a reference to the result of a background cell. Reply: facts of the cell."""

    job: TaskId


@_verb
class BroughtHome(Verb[None]):
    """Say that the result of a background cell is bound. There is no reply."""

    job: TaskId


@_verb
class ReadLog(Verb[tuple[bytes, int]]):
    """Read the output of a cell from a position. Reply: a part of it, and the next position."""

    job: TaskId
    position: int


@_verb
class FindSession(Verb[tuple[ActorId, bytes, Facts] | None]):
    """Take over the session of that name. Reply: its actor, its settings and its last kernel."""

    name: str
    sink: SinkInfo


@_verb
class CancelAll(Verb[None]):
    """Stop all tasks of this kernel, but no actors."""


Shared: TypeAlias = Put | Fetch | Wait | Watch | Take | FindActor | Kill | Cancel | Interrupt | Ask
"""The requests that workers and attached kernels send."""

OfWorker: TypeAlias = Shared | Submit | Input

Left: TypeAlias = ListRetained | Adopt | BroughtHome | ReadLog | FindSession
"""The requests about cells and sessions that kernels have left."""

OfKernel: TypeAlias = (
    Shared
    | Left
    | Attach
    | SubmitNumbered
    | Numbers
    | Answer
    | SendComm
    | Control
    | WatchStatus
    | Unwatch
    | CancelAll
)

# --------------------------------------------------------------------------------- on the wire

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict})
_WITH_RECORDS = frozenset({Submit, SubmitNumbered, Attach, SendComm, FindSession})


def seconds(timeout: float | None) -> float | None:
    """Return a user's time-out as an exact float: it may be a number of NumPy's."""
    return None if timeout is None else float(timeout)


OF_IDS = frozenset(each.__name__ for each in (Put, Fetch, Wait, Watch, Take))
"""The requests whose fields are ids and exact numbers, and no values that a user gave."""


def encode(verb: Verb[Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the name of a request, and its fields as plain values."""
    kind, fields = type(verb), cast("tuple[Any, ...]", verb)
    if kind in _WITH_RECORDS:
        return kind.__name__, tuple([e if type(e) in _PLAIN else _flat(e) for e in fields])
    return kind.__name__, fields[:]


def _flat(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else flat(value)


def names(verbs: Any) -> dict[str, type[Verb[Any]]]:
    """Return the classes of a union by the names that they have on the wire."""
    return {each.__name__: each for each in typing.get_args(verbs)}


def decode(known: Mapping[str, type[Verb[Any]]], name: str, fields: tuple[Any, ...]) -> Any:
    """Return the request of this name, which must be among the known ones.

    Raises:
        Malformed: it is not, or a field has the wrong type.
    """
    kind: Any = known.get(name)
    if kind is None:
        raise Malformed(f"{short(name)} cannot be asked for")
    return reader(kind)(fields)
