"""The interface between the API and the backend of this process.

In a kernel the backend is the engine; in a worker it sends requests to the kernel. `gpunb.api`
starts a backend and installs it here, so that this module depends on none of them.
"""

from __future__ import annotations

import contextvars
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from gpunb.data.serialize import Payload
from gpunb.scheduler.frozen import frozen
from gpunb.scheduler.tasks import ActorId, ActorSpec, TaskId, TaskSpec

if TYPE_CHECKING:
    from gpunb.protocol.facts import Fact
    from gpunb.protocol.sink import Sink

ObjectId: TypeAlias = tuple[int, int]
"""(task, index of its result), or (0, serial number) for a value from `put`.

An index below 0 is an actor or a generator, which lives as long as there are references to it.
"""

HANDLE = -1
"""The index for the handles of an actor, whose id is that of the task that makes it."""

STREAM = -2
"""The index for the generator of a task whose results come one by one."""

COMPLETED = -3
"""The index for the end of a generator's task: None, or the error of a task that did not end by
itself."""

STREAMING = -1
"""As a number of results: as many as the function yields, each available when it is yielded."""

DYNAMIC = -2
"""As a number of results: one result, which has a reference to each value that was yielded."""


HIDDEN = "\x00"
"""The first character of namespaces that are not for actors."""

SESSIONS = f"{HIDDEN}sessions"
"""The namespace for the names of sessions of cells, apart from the names of actors."""

GROUPS = f"{HIDDEN}groups/"
"""Prefix of a namespace; the result is the namespace for the names of placement groups."""


@frozen
class Call:
    """One call of a remote function, ready to travel.

    Attributes:
        spec: the part that is equal in all calls of the function.
        code: the pickled function.
        arguments: pickled (args, kwargs), with a `Slot` for each result that the call takes.
        inputs: the results for the slots.
        returns: number of results, or `STREAMING` or `DYNAMIC`.
        retry: exceptions that lead to another attempt: none, all, or a pickled tuple of types.
        kind: ``"call"`` of a function, ``"create"`` for an actor's constructor, ``"method"`` for a
            call of one (its name is the spec's function), ``"cell"`` for a notebook's cell, or
            ``"ranks"`` for the coordinator of a call in several ranks.
        sink: receives the output of the task; None for the default sink.
        actor: the actor that has the method; 0 for a function.
        new: the description of the actor to make.
        held: the objects that the function itself refers to.
        imports: modules of installed packages that the call needs at its begin.
        shell: module and name of the class of the notebook's shell, for a cell. Neither these nor
            the imports travel.
    """

    spec: TaskSpec
    code: bytes
    arguments: Payload
    inputs: tuple[ObjectId, ...] = ()
    returns: int = 1
    retry: bytes | bool = False
    kind: str = "call"
    sink: Sink | None = None
    actor: ActorId = 0
    new: NewActor | None = None
    held: tuple[ObjectId, ...] = ()
    imports: tuple[str, ...] = ()
    shell: tuple[str, str] = ("", "")

    def needed(self) -> tuple[ObjectId, ...]:
        """The objects that must exist until the call is over, its placement group among them."""
        needed = (*self.inputs, *self.arguments.references, *self.held)
        within = self.spec.demand.within
        return needed if within is None else (*needed, (within.group, HANDLE))


@dataclass(frozen=True, slots=True)
class NewActor:
    """The description of an actor to make.

    Attributes:
        rules: the options for the scheduler.
        type: the pickled description of its class, for handles made from its name; for a
            placement group, a pickled function that makes a handle from its id.
        name: the name by which other code finds the actor; None for no name.
        namespace: the namespace of the name.
        get_if_exists: return the existing actor of that name, if there is one.
        detached: whether the actor lives on without handles.
        max_pending: calls that may wait or run; -1 without limit.
        concurrent: whether its calls are coroutines on one event loop, not threads.
        origin: the notebook's cell. If it runs again, its new actor replaces the old one.
        settings: the settings of a session of cells, for a kernel that finds the session again.
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


CALL: contextvars.ContextVar[object] = contextvars.ContextVar("gpunb-call", default=None)
"""The asyncio task of the running call, also in tasks that it starts; None without a loop."""


@dataclass(frozen=True, slots=True)
class HandleTo:
    """Stands in a result for a handle to the actor or placement group `actor`: it is unpickled as
    the handle, and does not keep the actor alive. `make` is a pickled function of the id."""

    actor: ActorId
    make: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.make, self.actor)


def _made(make: bytes, actor: ActorId) -> Any:
    return pickle.loads(make)(actor)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in pickled arguments for the value of input number `index`."""

    index: int


@frozen
class Context:
    """Where code runs. In a kernel all fields are None or empty.

    `actor` has the id of the actor and the pickled description of its class, `restarted` says
    whether it lost its state before; `cancelled` tells whether the task was cancelled. `others`
    has the kinds of devices that are no GPUs, and the ids of those that it holds. `function` tells
    the module and the name of what runs, such as ``"__main__.train"``.
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
    function: Callable[[], str] | None = None


class Backend(Protocol):
    """Carries out tasks and keeps objects."""

    def submit(self, call: Call) -> Sequence[ObjectId]:
        """Submit a call. The caller gets one reference to each result, to the generator if the
        results come one by one, or to the actor that the call makes.

        Raises:
            InfeasibleRequestError: the machine can never satisfy the demand.
            PendingCallsLimitExceeded: the actor has as many calls as it takes.
            ActorDiedError: the actor belongs to another session.
            ValueError: the name of the actor is taken.
        """

    def put(self, payload: Payload) -> ObjectId:
        """Store a value; the caller gets one reference."""

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        """The values, in order. Returns when all are there, or when one has failed: then the list
        ends with the failure.

        Raises:
            GetTimeoutError: they were not there within `timeout` seconds.
        """

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        """The objects that are there, when at least `count` are or `timeout` seconds are over."""

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        """Call `callback` from any thread, once, when the object is there (or failed)."""

    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None:
        """Stop the task that makes the object, if it is not over.

        Raises:
            ValueError: `force` for a call of an actor, whose process it would end.
        """

    def interrupt(self, obj: ObjectId) -> None:
        """Raise KeyboardInterrupt in the task that makes the object; the task may catch it."""

    def take(self, obj: ObjectId) -> bool:
        """Take the next value of a generator, after a wait for it; the caller gets a reference.
        False if the generator is at its end."""

    def find_actor(self, name: str, namespace: str) -> tuple[ObjectId, bytes]:
        """The actor of that name and the description of its class; the caller gets a reference.

        Raises:
            ValueError: no actor has the name.
        """

    def kill(self, actor: ActorId, restart: bool) -> None:
        """End the process of an actor. With `restart` it starts again, if its options allow it."""

    def hold(self, obj: ObjectId) -> None:
        """Count one more reference to the object in this process."""

    def drop(self, obj: ObjectId) -> None:
        """Count one reference less. May be called at any time, from any thread, in a destructor.
        An interrupt is raised here only if nothing was done yet, else a moment later."""

    def ask(self, what: Fact, *arguments: Any) -> Any:
        """Return facts as plain values. Some take an argument, such as the id of a job."""

    def context(self) -> Context:
        """The context in which the caller runs."""

    def shutdown(self) -> None:
        """End all work. Further calls do nothing."""


@runtime_checkable
class ParkingBackend(Protocol):
    """A backend whose actors can be parked."""

    def park(self, actor: ActorId) -> str:
        """Park an actor, and wait for its worker. Returns why it cannot be parked, or ''."""


@runtime_checkable
class ExitingBackend(Protocol):
    """A backend in whose workers `kill` may be faster than the results of calls that are over."""

    def exit_actor(self, actor: ActorId) -> None:
        """End the actor of this process when its running calls have handed over their results."""


@runtime_checkable
class SharedBackend(Protocol):
    """A backend of several kernels, in which background cells and sessions outlive their kernel.
    `pid` is the process that they share."""

    pid: int

    def retained(self) -> list[dict[str, Any]]:
        """The cells and sessions of kernels that are gone."""

    def adopt(self, job: TaskId) -> dict[str, Any]:
        """The facts about a background cell; the caller gets one reference to its result.

        Raises:
            ValueError: there is no such cell.
            ObjectLostError: its result is not stored any more.
        """

    def brought_home(self, job: TaskId) -> None:
        """Note that this kernel has bound the values of a background cell."""

    def log_of(self, job: TaskId, position: int) -> tuple[bytes, int]:
        """A part of a cell's output from a position on, and the position of the next part. The part
        is empty at the end.

        Raises:
            ValueError: the output is not stored.
        """

    def cancel_all(self) -> None:
        """Cancel the tasks and cells of this kernel."""

    def find_session(self, name: str, sink: Sink) -> tuple[ActorId, bytes, dict[str, Any]] | None:
        """Take over the session of that name, if its kernel is gone. Returns its number, its
        settings, and facts about the former kernel. Its output between cells goes to `sink`."""


LET_GO: list[Callable[[], object]] = []
"""Functions that drop handles which no code can use any more, such as a handle among the outputs of
a notebook. They are called before a request is refused because of such a handle."""

NOTICES: list[str] = []
"""Notes that a session which starts by itself shows, about the end of the session before."""

VARIABLES: dict[str, str] = {}
"""Variables that the session of this kernel adds to the environment of its workers."""

NAMESPACE = "GPUNB_NAMESPACE"
"""The environment variable with the namespace of the worker's session."""


def namespace() -> str:
    """The default namespace of actors' names: the session's."""
    return VARIABLES.get(NAMESPACE) or os.environ.get(NAMESPACE) or "default"


def node_id() -> str:
    """The id of this machine, for programs that ask Ray for the id of a node."""
    import hashlib
    import socket

    return hashlib.blake2b(socket.gethostname().encode(), digest_size=28).hexdigest()


HOLDERS: dict[type, Callable[[Any], ObjectId]] = {}
"""The types of references, each with a function that returns the id of the object."""


@frozen
class Outcome:
    """The value of an object, or the failure in place of a value."""

    payload: Payload
    failed: bool = False


def titled(name: str, class_name: str, title: str) -> str:
    """The name of an actor's constructor or call, with the actor's title in place of the class. A
    name that the user chose stays."""
    rest = name.removeprefix(class_name)
    return title + rest if rest != name and rest[:1] in ("", ".") else name


class ExitActor(BaseException):
    """Raised in a method to end its actor. With an argument, the actor ends as failed, and the
    argument is the reason."""


class FailedWith(Exception):
    """Raised in a task that fails with the unchanged failure of another task.

    Attributes:
        payload: the failure.
    """

    def __init__(self, payload: Payload) -> None:
        super().__init__()
        self.payload = payload


_lock = threading.RLock()
_current: Backend | None = None
_start: Callable[[], Backend] | None = None


def current() -> Backend:
    """The backend of this process. Starts one with the default settings if there is none.

    Raises:
        GpunbError: there is none, and none can be started in this process.
    """
    backend = _current
    if backend is not None:
        return backend
    with _lock:
        if _current is None:
            assert _start is not None, "gpunb.api, which starts sessions, was not imported"
            install(_start())
        assert _current is not None
        return _current


def existing() -> Backend | None:
    """The backend of this process, if there is one."""
    return _current


def let_go(obj: ObjectId) -> None:
    """Count one reference less, if there is a session."""
    if _current is not None:
        _current.drop(obj)


def install(backend: Backend | None) -> None:
    """Make this the backend of the process."""
    global _current
    _current = backend


def start_with(function: Callable[[], Backend]) -> None:
    """Set the function that `current` calls if there is no backend yet."""
    global _start
    _start = function


def lock() -> threading.RLock:
    """The lock for the start and the end of a backend."""
    return _lock
