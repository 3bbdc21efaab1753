"""What the kernel and a worker say to each other.

Messages are named tuples, because every fresh worker pays for the first use of each thing it
touches: on the wire a message is a plain tuple that starts with its place in `_TYPES`, and only
builtin types are in it. What users made is inside, as `Wire`: bytes that are unpickled only after
the environment of the worker is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

ObjectId: TypeAlias = tuple[int, int]
"""(task, index of its result), or (0, serial number) for what was `put`."""

Wire: TypeAlias = tuple[Any, ...]
"""A payload without its memory segment; the segment's descriptor travels beside the message."""


class Setup(NamedTuple):
    """What a new worker is before it runs anything.

    Attributes:
        environment: variables to set; None as a value removes one.
        gpu_ids: ids of its devices, ascending.
        directory: current directory, or None to keep it.
        path: `sys.path`.
        argv: `sys.argv`.
        caps: what the pool of a framework may take of its device, as the fields of `Caps`; None
            for all.
        reports: seconds after which it says again how much device memory it has; 0 to say it
            only after each task.
        others: each other kind of device that the machine has, and the ids of those it holds.
    """

    environment: dict[str, str | None]
    gpu_ids: tuple[int | str, ...]
    directory: str | None
    path: list[str]
    argv: list[str]
    caps: tuple[float, int | None] | None = None
    reports: float = 0.0
    others: tuple[tuple[str, tuple[int | str, ...]], ...] = ()


class Host(NamedTuple):
    """What a worker that becomes an actor is told of itself.

    Attributes:
        actor: its id.
        name: by which it can be found, or None.
        type: the pickled description of its class.
        restarted: whether it was there before and lost its state.
        concurrency: calls at once.
        concurrent: whether they share an event loop, instead of having threads.
    """

    actor: int
    name: str | None
    type: bytes
    restarted: bool
    concurrency: int
    concurrent: bool


# ------------------------------------------------------------------------------ kernel to worker


class Execute(NamedTuple):
    """Run one attempt of a task.

    Attributes:
        setup: for a new worker, the fields of `Setup`.
        kind: as in `Call`.
        function: identity of the function; name of the method.
        code: pickle of the function or class, unless this worker was sent it before.
        arguments: pickled (args, kwargs); results that it takes are `Slot` objects in there.
        inputs: values for the slots, each (wire, number of segments).
        late: objects for the remaining slots, to be asked for.
        retry: pickled exception types to report as retryable; True for all.
        host: for a worker that becomes an actor, the fields of `Host`.
    """

    task: int
    attempt: int
    name: str
    kind: str
    setup: tuple[Any, ...] | None
    function: str
    code: bytes | None
    arguments: tuple[Wire, int]
    inputs: tuple[tuple[Wire, int], ...]
    late: tuple[ObjectId, ...]
    returns: int
    retry: bytes | bool
    last: bool
    host: tuple[Any, ...] | None = None


class Reply(NamedTuple):
    """The answer to the request of that number; if it `failed`, the payload is what to raise."""

    request: int
    value: Any
    payloads: tuple[tuple[Wire, int], ...] = ()
    failed: bool = False


class Told(NamedTuple):
    """What the front end says to something that the worker has shown; `kind` and `content` as in
    Jupyter's messages, and the message's header."""

    kind: str
    content: Mapping[str, Any]
    payloads: tuple[tuple[Wire, int], ...] = ()


class Retired(NamedTuple):
    """Nothing more will come: end."""


# ------------------------------------------------------------------------------ worker to kernel


class Ready(NamedTuple):
    """A new worker has rehearsed and waits."""

    pid: int


class Done(NamedTuple):
    """An attempt is over. `report` is one of ``"ok"``, ``"raised"``, ``"retry"``,
    ``"interrupted"`` and, for an actor that wants to end, ``"exit"``; the results, or one failure,
    or how it ends in words, are in `results`."""

    task: int
    attempt: int
    report: str
    results: tuple[tuple[Wire, int], ...]


class Yielded(NamedTuple):
    """A generator has its value number `position`, from 0."""

    task: int
    attempt: int
    position: int
    result: tuple[Wire, int]


class Printed(NamedTuple):
    """Text for ``"stdout"`` or ``"stderr"`` of one of the tasks that run here at once."""

    task: int
    stream: str
    text: str


class Request(NamedTuple):
    """Ask for something; `verb` names a handler, `task` and `attempt` say who asks."""

    request: int
    task: int
    attempt: int
    verb: str
    arguments: tuple[Any, ...]
    payloads: tuple[tuple[Wire, int], ...] = ()


class Held(NamedTuple):
    """The worker now has, or no longer has, references to an object."""

    object: ObjectId
    change: int


class Stock(NamedTuple):
    """All references that the worker has, each as (object, count), whatever was said before."""

    held: tuple[tuple[ObjectId, int], ...]


class Used(NamedTuple):
    """What the frameworks of a worker have of its devices: (position among them, bytes now, bytes
    at most)."""

    memory: tuple[tuple[int, int, int], ...]


class Shown(NamedTuple):
    """Something to show where the task was submitted: `kind` and `content` as in Jupyter's
    messages, without its envelope."""

    task: int
    kind: str
    content: Mapping[str, Any]
    payloads: tuple[tuple[Wire, int], ...] = ()


# ---------------------------------------------------------------------- head to attached kernel


class Output(NamedTuple):
    """Something for the sink that the kernel knows by this number: `kind` names what is to be done
    with it, `content` what with."""

    sink: int
    kind: str
    content: Mapping[str, Any]
    payloads: tuple[tuple[Wire, int], ...] = ()


Message: TypeAlias = (
    Execute
    | Reply
    | Told
    | Retired
    | Ready
    | Done
    | Yielded
    | Printed
    | Request
    | Held
    | Shown
    | Stock
    | Used
    | Output
)

_TYPES: tuple[type[Any], ...] = (
    Execute,
    Reply,
    Retired,
    Ready,
    Done,
    Yielded,
    Printed,
    Request,
    Held,
    Shown,
    Stock,
    Told,
    Used,
    Output,
)
_NUMBER = {kind: number for number, kind in enumerate(_TYPES)}


def pack(message: Message) -> tuple[Any, ...]:
    """The message as builtin types only."""
    return (_NUMBER[type(message)], *message)


def unpack(packed: tuple[Any, ...]) -> Message:
    """The opposite of `pack`."""
    message: Message = _TYPES[packed[0]](*packed[1:])
    return message
