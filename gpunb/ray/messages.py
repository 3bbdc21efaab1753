"""The messages in a kernel's mailbox, one class each: reports of workers, and the kernel's replies.

They are named tuples: a class of these is made several times as fast as a dataclass, and each
worker makes them when it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:  # the mailbox's own process loads this module, and needs no more
    from collections.abc import Sequence

    from gpunb.ray.transport import RayPayload
    from gpunb.scheduler.tasks import ActorId, TaskId


class Began(NamedTuple):
    """A call runs, in this process.

    Attributes:
        worker: the name under which messages reach its worker.
        log: path of Ray's log of the process, or an empty text.
        parent: the call that submitted it; None for the kernel's own.
        sink: number of the sink for its output; 0 for none.
        share: units of a device that frameworks keep to; 0 for no limit.
        rank: of a cell that runs in several ranks, packed; else empty.
    """

    task: TaskId
    attempt: int
    pid: int
    node: str
    gpus: tuple[int | str, ...]
    worker: str
    log: str
    name: str
    kind: str
    parent: TaskId | None
    sink: int
    actor: ActorId
    share: int
    rank: bytes


class Text(NamedTuple):
    """A call has written text to a standard stream."""

    task: TaskId
    stream: str
    text: str


class Show(NamedTuple):
    """A call shows output that is no text: a message for the front end."""

    task: TaskId
    kind: str
    content: dict[str, Any]
    payloads: Sequence[RayPayload]


class Made(NamedTuple):
    """The constructor of an actor has returned."""

    task: TaskId
    title: str


class Ended(NamedTuple):
    """A call is over: `state` is done, failed, cancelled, or again if it is tried again."""

    task: TaskId
    state: str


class ConstructorFailed(NamedTuple):
    """The constructor of an actor has raised: `failure` has the arguments of its `Payload`."""

    actor: ActorId
    failure: tuple[Any, ...]


class Left(NamedTuple):
    """An actor has ended itself; without a reason it meant to."""

    actor: ActorId
    reason: str | None


class GroupMade(NamedTuple):
    """The ranks of a call, or of a session, have this placement group of Ray."""

    owner: TaskId
    group: bytes


class Exits(NamedTuple):
    """A call ends its process."""

    task: TaskId
    status: int


class Mark(NamedTuple):
    """All that was sent to the mailbox before is there. The kernel sends it to itself."""

    number: int


class Late(NamedTuple):
    """A call ran longer than its time limit of so many seconds."""

    task: TaskId
    seconds: float


class Ask(NamedTuple):
    """A call asks its user; without a prompt, whether there is one."""

    task: TaskId | None
    number: int
    prompt: str | None
    password: bool
    worker: str


class Interrupt(NamedTuple):
    """Interrupt a call."""

    task: TaskId


class Answer(NamedTuple):
    """What the user has answered to a question with this number, or why there is no answer."""

    number: int
    text: str | None
    error: BaseException | None


class Comm(NamedTuple):
    """A message of a widget in the front end."""

    kind: str
    content: dict[str, Any]
    payloads: Sequence[RayPayload]


ToKernel: TypeAlias = (
    Began
    | Text
    | Show
    | Made
    | Ended
    | ConstructorFailed
    | Left
    | GroupMade
    | Exits
    | Mark
    | Late
    | Ask
)
ToWorker: TypeAlias = Interrupt | Answer | Comm
