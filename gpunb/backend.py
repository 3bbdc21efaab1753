"""What the API needs of whatever carries it out, and which one that is in this process.

In a kernel it is the local runtime; in a worker it is the way back to the kernel. One is loaded by
name, so that nothing here depends on any of them.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from gpunb.core.tasks import ActorId, ActorSpec, TaskId, TaskSpec
from gpunb.exceptions import GpunbError
from gpunb.serialize import Payload

ObjectId: TypeAlias = tuple[int, int]
"""(task, index of its result), or (0, serial number) for what was `put`.

Below 0 the index is no result's, but stands for something that lives as long as there are
references to it.
"""

HANDLE = -1
"""The index for the handles of an actor, whose id is that of the task that makes it."""

STREAM = -2
"""The index for the generator of a task's results, which come one by one."""

STREAMING = -1
"""As a number of results: as many as the function yields, each as soon as it is there."""

DYNAMIC = -2
"""As a number of results: one, which holds a reference to each value that was yielded."""


SESSIONS = "\x00sessions"
"""The namespace in which sessions of cells have their names, apart from those of actors."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a remote function, ready to travel.

    Attributes:
        spec: what all calls of the function have in common.
        code: the pickled function.
        arguments: pickled (args, kwargs), with a `Slot` for each result that it takes.
        inputs: the results for the slots.
        returns: number of results, or `STREAMING` or `DYNAMIC`.
        retry: exceptions that are worth another attempt: none, all, or a pickled tuple of types.
        kind: ``"call"`` of a function, ``"create"`` for an actor's constructor, ``"method"`` for a
            call of one (its name is the spec's function), or ``"cell"`` for a notebook's cell.
        sink: receives what the task shows (kind, content, payloads); None for the default.
        actor: whose method it is.
        new: of the actor to make.
        held: what the function itself refers to.
    """

    spec: TaskSpec
    code: bytes
    arguments: Payload
    inputs: tuple[ObjectId, ...] = ()
    returns: int = 1
    retry: bytes | bool = False
    kind: str = "call"
    sink: Any = None
    actor: ActorId = 0
    new: NewActor | None = None
    held: tuple[ObjectId, ...] = ()

    def needed(self) -> tuple[ObjectId, ...]:
        """The objects that must be there until the call is over."""
        return (*self.inputs, *self.arguments.references, *self.held)


@dataclass(frozen=True, slots=True)
class NewActor:
    """What is said of an actor when it is asked for.

    Attributes:
        rules: for the scheduler.
        type: the pickled description of its class, for those who ask for it by name.
        name: by which it can be found; None if it cannot.
        namespace: within which the name is its own.
        get_if_exists: rather have the one that has the name already.
        detached: it does not end with its last handle.
        max_pending: calls that may wait or run; -1 without limit.
        concurrent: its calls share an event loop, instead of having threads.
        origin: the notebook's cell that asks. Run again, it replaces its actor of that name.
        settings: what a kernel is to know that finds a session of cells again.
    """

    rules: ActorSpec
    type: bytes
    name: str | None = None
    namespace: str = ""
    get_if_exists: bool = False
    detached: bool = False
    max_pending: int = -1
    concurrent: bool = False
    origin: str | None = None
    settings: bytes = b""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in pickled arguments for the value of input number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Context:
    """Where code runs. In a kernel all fields are None or empty.

    `actor` has the id of the actor and the pickled description of its class, `restarted` says
    whether it lost its state before; `cancelled` tells whether the task was cancelled. `others`
    has the kinds of devices that are no GPUs, and the ids of those that it holds.
    """

    task: int | None = None
    attempt: int | None = None
    name: str | None = None
    gpu_ids: tuple[int | str, ...] = ()
    actor: ActorId | None = None
    type: bytes = b""
    actor_name: str | None = None
    restarted: bool = False
    cancelled: Callable[[], bool] | None = None
    others: tuple[tuple[str, tuple[int | str, ...]], ...] = ()


class Backend(Protocol):
    """Carries out tasks and keeps objects."""

    def submit(self, call: Call) -> list[ObjectId]:
        """Hand in a call; the caller holds one reference to each result: to the generator if they
        come one by one, to the actor if the call makes one.

        Raises:
            InfeasibleRequestError: the machine can never satisfy the demand.
            PendingCallsLimitExceeded: the actor has as many calls as it takes.
            ActorDiedError: the actor belongs to another session.
            ValueError: the name of the actor is taken.
        """

    def put(self, payload: Payload) -> ObjectId:
        """Keep a value; the caller holds one reference."""

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        """The values, in order, when all are there or one has failed (then the list ends with it).

        Raises:
            GetTimeoutError: not within `timeout` seconds.
        """

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        """Those that are there, when at least `count` are or `timeout` seconds have passed."""

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        """Call `callback` from any thread, once, when the object is there (or failed)."""

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        """Stop the task that makes the object, if it is not over.

        Raises:
            ValueError: `force` for a call of an actor, whose process it would end.
        """

    def interrupt(self, obj: ObjectId) -> None:
        """Raise KeyboardInterrupt in the task that makes the object, and leave the rest to it."""

    def take(self, obj: ObjectId) -> bool:
        """Have the next value of a generator, which has been waited for: the caller then holds a
        reference to it. False if there is none, because the generator is at its end."""

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        """The actor of that name and the description of its class; the caller holds a reference.

        Raises:
            ValueError: no actor has it.
        """

    def kill(self, actor: ActorId, restart: bool) -> None:
        """End the process of an actor; it starts again if `restart`, as far as it may."""

    def hold(self, obj: ObjectId) -> None:
        """One more reference to the object exists here."""

    def drop(self, obj: ObjectId) -> None:
        """One reference less. May be called at any time, from any thread, even a destructor."""

    def ask(self, what: str, *arguments: Any) -> Any:
        """``"total"``, ``"available"``, ``"status"``, ``"job"`` or ``"actor"``: facts as plain
        values; ``"refusal"``: why a demand can never be met, or None."""

    def context(self) -> Context:
        """Where the caller runs."""

    def shutdown(self) -> None:
        """End all work. Idempotent."""


@runtime_checkable
class Keeper(Protocol):
    """A backend of several kernels, where background cells and sessions outlive theirs."""

    def kept(self) -> list[dict[str, Any]]:
        """What kernels that are gone have left: cells to bring home, and sessions."""

    def adopt(self, job: TaskId) -> dict[str, Any]:
        """What is known of a background cell; the caller holds one reference to its result.

        Raises:
            ValueError: there is no such cell.
            ObjectLostError: its result is not kept any more.
        """

    def brought_home(self, job: TaskId) -> None:
        """What a background cell made is bound here."""

    def log_of(self, job: TaskId, position: int) -> tuple[bytes, int]:
        """A portion of what a cell has shown from a position on, and where the next begins; empty
        at the end.

        Raises:
            ValueError: nothing is kept of it.
        """

    def cancel_all(self) -> None:
        """Stop the caller's own tasks and cells, and no other kernel's."""

    def find_session(self, name: str, sink: Any) -> tuple[ActorId, bytes, dict[str, Any]] | None:
        """The session of that name that its kernel has left, which is the caller's from now on:
        its number, its settings, and whose it was. What it shows between cells goes to `sink`."""


LET_GO: list[Callable[[], object]] = []
"""What to call before something is refused because of a handle that nobody can use any more, such
as one among the outputs of a notebook."""

WORD: list[str] = []
"""What a session that starts by itself has to tell its user, who knows only of the one before."""

HOLDERS: dict[type, Callable[[Any], ObjectId]] = {}
"""The types whose instances are references, and what each refers to."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an object: its value, or the failure that came in its place."""

    payload: Payload
    failed: bool = False


class ExitActor(BaseException):
    """Raised in a method to end its actor."""


_lock = threading.RLock()
_current: Backend | None = None
_start: Callable[[], Backend] | None = None

_NAMES = {
    "local": "gpunb.runtime.starting:start",
    "head": "gpunb.runtime.attached:attach",
    "ray": "gpunb.runtime.ray:connect",
}


def load(name: str, **settings: Any) -> Backend:
    """Start the backend of that name.

    Raises:
        ValueError: no such backend.
    """
    if name not in _NAMES:
        known = ", ".join(sorted(map(repr, _NAMES)))
        raise ValueError(f"there is no backend {name!r}: known are {known}")
    module, _, function = _NAMES[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), function)(**settings)
    return backend


def current() -> Backend:
    """The backend of this process; started with its defaults if there is none yet.

    Raises:
        GpunbError: there is none, and none can be started here.
    """
    backend = _current
    if backend is not None:
        return backend
    with _lock:
        if _current is None:
            if _start is None:
                raise GpunbError("gpunb is not initialised in this process: call gpunb.init()")
            install(_start())
        assert _current is not None
        return _current


def existing() -> Backend | None:
    """The backend of this process, if there is one."""
    return _current


def install(backend: Backend | None) -> None:
    """Make this the backend of the process."""
    global _current
    _current = backend


def start_with(function: Callable[[], Backend]) -> None:
    """What `current` calls when there is no backend yet."""
    global _start
    _start = function


def lock() -> threading.RLock:
    """Held by whoever starts or ends a backend."""
    return _lock
