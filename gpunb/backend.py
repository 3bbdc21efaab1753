"""What the API needs of whatever carries it out, and which one that is in this process.

In a kernel it is the local runtime; in a worker it is the way back to the kernel. One is loaded by
name, so that nothing here depends on any of them.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from gpunb.core.tasks import TaskSpec
from gpunb.exceptions import GpunbError
from gpunb.serialize import Payload

ObjectId: TypeAlias = tuple[int, int]
"""(task, index of its result), or (0, serial number) for what was `put`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a remote function, ready to travel.

    Attributes:
        spec: what all calls of the function have in common.
        code: the pickled function.
        arguments: pickled (args, kwargs), with a `Slot` for each result that it takes.
        inputs: the results for the slots.
        returns: number of results.
        retry: exceptions that are worth another attempt: none, all, or a pickled tuple of types.
        kind: ``"call"``, or ``"cell"`` for a notebook's cell.
        sink: receives what the task shows (kind, content, payloads); None for the default.
    """

    spec: TaskSpec
    code: bytes
    arguments: Payload
    inputs: tuple[ObjectId, ...] = ()
    returns: int = 1
    retry: bytes | bool = False
    kind: str = "call"
    sink: Any = None


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in pickled arguments for the value of input number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Context:
    """Where code runs. In a kernel all fields are None or empty."""

    task: int | None = None
    attempt: int | None = None
    name: str | None = None
    gpu_ids: tuple[int | str, ...] = ()


class Backend(Protocol):
    """Carries out tasks and keeps objects."""

    def submit(self, call: Call) -> list[ObjectId]:
        """Hand in a call; the caller holds one reference to each result.

        Raises:
            InfeasibleRequestError: the machine can never satisfy the demand.
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
        """Stop the task that makes the object, if it is not over."""

    def interrupt(self, obj: ObjectId) -> None:
        """Raise KeyboardInterrupt in the task that makes the object, and leave the rest to it."""

    def hold(self, obj: ObjectId) -> None:
        """One more reference to the object exists here."""

    def drop(self, obj: ObjectId) -> None:
        """One reference less. May be called at any time, from any thread, even a destructor."""

    def ask(self, what: str, *arguments: Any) -> Any:
        """``"total"``, ``"available"``, ``"status"`` or ``"job"``: facts as plain values."""

    def context(self) -> Context:
        """Where the caller runs."""

    def shutdown(self) -> None:
        """End all work. Idempotent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an object: its value, or the failure that came in its place."""

    payload: Payload
    failed: bool = False


_lock = threading.RLock()
_current: Backend | None = None
_start: Callable[[], Backend] | None = None

_NAMES = {"local": "gpunb.runtime.starting:start"}


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
