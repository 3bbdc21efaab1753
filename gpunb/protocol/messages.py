"""The messages between kernel and worker.

Messages are named tuples, because each class and module costs time in every fresh worker. On the
wire a message is a plain tuple of builtin types that starts with its position in `_TYPES`. Values
of users are inside as `Wire`: bytes that are unpickled only after the environment of the worker is
set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, get_args

from gpunb.protocol.backend import ObjectId
from gpunb.protocol.plain import Malformed, check_depth
from gpunb.protocol.records import READERS, reader

Wire: TypeAlias = tuple[Any, ...]
"""A payload without its memory segment; the segment's descriptor travels beside the message."""


BATCH = 100
"""Objects in one request: each may need a descriptor, and a message has room for some 250."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that say how many threads numerical libraries may use."""


UNPINNED = -1.0
"""In place of the seconds between reports: the worker may see devices that are not its own, so its
frameworks number the devices differently."""


class Setup(NamedTuple):
    """The settings of a new worker, applied before it runs any code of the user.

    Attributes:
        environment: variables to set; None as a value removes one.
        gpu_ids: ids of its devices, ascending.
        directory: current directory, or None to keep it.
        path: `sys.path`.
        argv: `sys.argv`.
        caps: the limit of a framework's memory pool on the device, as the fields of `Caps`; None
            for no limit.
        reports: seconds between reports of the worker's device memory; 0 for a report after each
            task only; `UNPINNED` for none.
        others: each other kind of device of the machine, and the ids that the worker holds.
        follow: whether the worker reports what its tasks import.
    """

    environment: dict[str, str | None]
    gpu_ids: tuple[int | str, ...]
    directory: str | None
    path: list[str]
    argv: list[str]
    caps: tuple[float, int | None] | None = None
    reports: float = 0.0
    others: tuple[tuple[str, tuple[int | str, ...]], ...] = ()
    follow: bool = False


class HostedActor(NamedTuple):
    """The facts about an actor, for the worker that becomes it.

    Attributes:
        actor: id of the actor.
        name: the name by which other code finds the actor, or None.
        type: the pickled description of its class.
        restarted: whether the actor lost its process, and its state, before.
        concurrency: the number of calls at once.
        concurrent: whether calls are coroutines on one event loop, not threads.
        groups: each concurrency group, and the number of its calls at once.
    """

    actor: int
    name: str | None
    type: bytes
    restarted: bool
    concurrency: int
    concurrent: bool
    groups: tuple[tuple[str, int], ...] = ()


# ------------------------------------------------------------------------------ kernel to worker


class Execute(NamedTuple):
    """Run one attempt of a task.

    Attributes:
        setup: for a new worker, the fields of `Setup`.
        kind: as in `Call`.
        function: identity of the function; name of the method.
        code: pickle of the function or class, unless this worker was sent it before.
        arguments: pickled (args, kwargs), with a `Slot` for each result that the task takes.
        inputs: values for the slots, each (wire, number of segments).
        late: objects for the remaining slots, which the worker must request.
        retry: pickled exception types to report as retryable; True for all.
        host: for a worker that becomes an actor, the fields of `HostedActor`.
        group: the concurrency group of a call; empty for the default one.
        spin: whether the worker may spin while it waits for the next task.
        permit: the number of the permit that the worker needs to begin a task that was sent ahead;
            0 for others. The last field, see `ExecuteAhead`.
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
    group: str = ""
    spin: bool = True
    permit: int = 0


class ExecuteAhead(NamedTuple):
    """Run these tasks one after the other, after those before. The first one needs the permit of
    that number, the others the ones that follow. `tasks`: for each the fields of `Execute`, without
    the last, which is the permit."""

    permit: int
    tasks: tuple[tuple[Any, ...], ...]


class Prepare(NamedTuple):
    """Make a context on the only device that these variables show, before there is a task.

    Attributes:
        environment: variables to set; None as a value removes one.
        vendor: the plug-in of the device.
    """

    environment: dict[str, str | None]
    vendor: str


class Park(NamedTuple):
    """Move the device memory of the process to the host, or with `back` to the device again."""

    vendor: str
    back: bool


class Reply(NamedTuple):
    """The reply to the request of that number; if it `failed`, the payload is the exception."""

    request: int
    value: Any
    payloads: tuple[tuple[Wire, int], ...] = ()
    failed: bool = False


class CommMessage(NamedTuple):
    """A comm message of the front end to a widget of the worker; `kind` and `content` as
    in Jupyter's messages, and the message's header."""

    kind: str
    content: Mapping[str, Any]
    payloads: tuple[tuple[Wire, int], ...] = ()


class Rehearse(NamedTuple):
    """Go through the steps of a notebook's cell, if no task comes at once."""


class Permits(NamedTuple):
    """To a worker: read permits from the pipe whose descriptor comes beside this, as
    `gpunb.protocol.permits` says. From a worker: it does, from now on."""


class Retired(NamedTuple):
    """End: no further message follows."""


# ------------------------------------------------------------------------------ worker to kernel


class Ready(NamedTuple):
    """A new worker waits for a task."""

    pid: int


class Prepared(NamedTuple):
    """A context is made, or cannot be made for this reason."""

    problem: str


class ParkReply(NamedTuple):
    """The device memory was moved, or could not be for this reason."""

    problem: str
    back: bool


class Done(NamedTuple):
    """An attempt is over. `report` is one of ``"ok"``, ``"raised"``, ``"retry"``,
    ``"interrupted"`` and, for an actor that wants to end, ``"exit"``. `results` has the results, or
    one failure, or the reason of the exit. `short` if there was too little device memory."""

    task: int
    attempt: int
    report: str
    results: tuple[tuple[Wire, int], ...]
    short: bool = False


class Yielded(NamedTuple):
    """A generator has yielded the value number `position`, from 0."""

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
    """A request on behalf of a task; `verbs.encode` makes `verb` and `arguments`."""

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
    """All references that the worker has, each as (object, count). Replaces earlier counts."""

    held: tuple[tuple[ObjectId, int], ...]


class Used(NamedTuple):
    """The device memory that the frameworks of a worker use, for each device: (position among the
    worker's devices, bytes now, bytes at most)."""

    memory: tuple[tuple[int, int, int], ...]


class Imported(NamedTuple):
    """The tasks of a worker have imported these modules of installed packages. `changed`: as in
    `gpunb.protocol.zygote.Imports`."""

    modules: tuple[str, ...]
    changed: tuple[tuple[str, str | None], ...]


class Shown(NamedTuple):
    """Something to show where the task was submitted: `kind` and `content` as in Jupyter's
    messages, without its envelope."""

    task: int
    kind: str
    content: Mapping[str, Any]
    payloads: tuple[tuple[Wire, int], ...] = ()


# ---------------------------------------------------------------------- head to attached kernel


class Output(NamedTuple):
    """An action for the sink that the kernel knows by this number: `kind` is the action, `content`
    its arguments."""

    sink: int
    kind: str
    content: Mapping[str, Any]
    payloads: tuple[tuple[Wire, int], ...] = ()


Message: TypeAlias = (
    Execute
    | Reply
    | CommMessage
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
    | Prepare
    | Prepared
    | Park
    | ParkReply
    | Imported
    | Rehearse
    | Permits
    | ExecuteAhead
)

_TYPES: tuple[Any, ...] = get_args(Message)
NUMBER = {kind: number for number, kind in enumerate(_TYPES)}
_REPORTS = frozenset({"ok", "raised", "retry", "interrupted", "exit"})
_STREAMS = frozenset({"stdout", "stderr"})

# A payload is checked when it is unpickled, not here.
READERS.update({tuple[Wire, int]: None, tuple[tuple[Wire, int], ...]: None})


def pack(message: Message) -> tuple[Any, ...]:
    """Return the message as a plain tuple."""
    return (NUMBER[type(message)], *message)


def unpack(packed: tuple[Any, ...]) -> Message:
    """Return the message of a tuple that `pack` has made; the sender is trusted."""
    message: Message = _TYPES[packed[0]](*packed[1:])
    return message


def checked(packed: Any) -> Message:
    """Return the message of a decoded value from a sender that is not trusted.

    Raises:
        Malformed: the value is no message, or a field has the wrong type.
    """
    number = packed[0] if type(packed) is tuple and packed else None
    if type(number) is not int or not 0 <= number < len(_TYPES):
        raise Malformed(f"no message has the number {number!r}")
    kind, fields = _TYPES[number], packed[1:]
    message: Message = reader(kind)(fields)
    if kind is Done:
        if fields[2] not in _REPORTS:
            raise Malformed(f"report of Done cannot be {fields[2]!r}")
    elif kind is Printed:
        if fields[1] not in _STREAMS:
            raise Malformed(f"stream of Printed cannot be {fields[1]!r}")
    elif kind is Yielded:
        if fields[2] < 0:
            raise Malformed(f"{fields[2]} is no position of a value")
    elif kind is Shown or kind is Output:
        check_depth(fields[2])
    return message
