"""The errors that gpunb raises.

    GpunbError
    +-- TaskError                  the task's own code raised; also of the type that it raised
    +-- WorkerCrashedError         the worker process died
    +-- TaskCancelledError         the task was cancelled
    +-- GetTimeoutError            a wait took too long (also a TimeoutError)
    +-- ActorError
    |   +-- ActorDiedError         the actor is gone for good
    |   +-- ActorUnavailableError  the actor cannot be reached now: it may be restarting
    +-- ActorAlreadyExistsError    another actor has the name (also a ValueError)
    +-- OutOfMemoryError           the machine's memory is used up (also a MemoryError)
    +-- PendingCallsLimitExceeded  an actor's queue of calls is full
    +-- InfeasibleRequestError     this machine can never give what was asked (also a ValueError)
    +-- ObjectLostError            the value behind a reference is gone
    +-- DeadlockError              tasks wait for each other, or for devices that they hold
    +-- InternalError              a bug in gpunb

Every one of them can be pickled, with all its attributes. Four of them have Ray's names, too:
RayError is GpunbError, RayTaskError TaskError, RayActorError ActorError, and ObjectStoreFullError
OutOfMemoryError.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = [
    "ActorAlreadyExistsError",
    "ActorDiedError",
    "ActorError",
    "ActorUnavailableError",
    "DeadlockError",
    "GetTimeoutError",
    "GpunbError",
    "InfeasibleRequestError",
    "InternalError",
    "ObjectLostError",
    "OutOfMemoryError",
    "PendingCallsLimitExceeded",
    "TaskCancelledError",
    "TaskError",
    "WorkerCrashedError",
]


class GpunbError(Exception):
    """The root of all errors that gpunb itself raises."""


class WorkerCrashedError(GpunbError):
    """The worker process died before the task was done."""


class TaskCancelledError(GpunbError):
    """The task was cancelled."""


class GetTimeoutError(GpunbError, TimeoutError):
    """The value was not there within the time that the caller gave."""


class ActorError(GpunbError):
    """A call to an actor could not be carried out."""


class ActorDiedError(ActorError):
    """The actor is dead and will not come back."""


class ActorUnavailableError(ActorError):
    """The actor cannot be reached now; it may be restarting."""


class ActorAlreadyExistsError(GpunbError, ValueError):
    """Another actor has the name that the new one is to have."""


class OutOfMemoryError(GpunbError, MemoryError):
    """The machine's memory is used up, or a task was stopped because it nearly was."""


class PendingCallsLimitExceeded(GpunbError):
    """The actor has as many waiting calls as its ``max_pending_calls`` allows."""


class InfeasibleRequestError(GpunbError, ValueError):
    """No state of this machine could satisfy the request."""


class ObjectLostError(GpunbError):
    """The value behind a reference is gone and cannot be made again."""


class DeadlockError(GpunbError):
    """Tasks wait for each other, or for devices that they themselves hold."""


class InternalError(GpunbError):
    """A bug in gpunb, never a user's mistake."""

    def __str__(self) -> str:
        return f"{super().__str__()} (this is a bug in gpunb: please report it)"


class _Failure(NamedTuple):
    """What a TaskError knows. One value, so that it takes one name in the instance's dict."""

    task: str
    cause: BaseException | None
    traceback: str
    process: int | None


_FAILURE = "_gpunb_failure"

# What a TaskError answers itself; every other name that is not a dunder is asked of the cause.
_OWN = frozenset({"task", "cause", "traceback", "process", "of", "with_traceback", "add_note"})


class TaskError(GpunbError):
    """The task raised an exception.

    What `gpunb.get` raises is an instance of a class that derives from both TaskError and the
    type of the exception, so that ``except ValueError`` and ``except TaskError`` work alike.
    Attributes, ``args`` among them, are those of the cause. ``str()`` is the traceback of the
    worker.

    Args:
        task: the task in words, such as ``train (#7)``.
        cause: the exception as it was raised, also kept as ``__cause__``; None if it is not known.
        traceback: the text of the worker's traceback.
        process: the id of the worker's process.
    """

    def __init__(
        self,
        task: str,
        cause: BaseException | None = None,
        traceback: str = "",
        *,
        process: int | None = None,
    ) -> None:
        # Not super(): next in line is the __init__ of the cause's type, with its own arguments.
        _fill(self, _Failure(task, cause, traceback, process))

    @classmethod
    def of(
        cls,
        cause: BaseException | None,
        *,
        task: str,
        traceback: str = "",
        process: int | None = None,
    ) -> TaskError:
        """Return an error that is also of the type of `cause`, where such a class is possible.

        It is a plain TaskError for exceptions that are no `Exception` (KeyboardInterrupt,
        SystemExit), for StopIteration, which would silently end the loop around ``get``, and for
        classes that cannot be derived from. A cause that is a TaskError itself (the error of a
        task inside this task) is not wrapped twice: its own cause counts, and the texts are joined.
        """
        if issubclass(type(cause), TaskError):  # isinstance() would ask the cause for __class__
            assert isinstance(cause, TaskError)
            traceback = because(traceback, cause)
            cause = cause.cause
        return _make(_Failure(task, cause, traceback, process))

    @property
    def task(self) -> str:
        """The task in words."""
        return _failure(self).task

    @property
    def cause(self) -> BaseException | None:
        """The exception that the task's code raised; its own traceback stayed in the worker."""
        return _failure(self).cause

    @property
    def traceback(self) -> str:
        """The text of the traceback, as it was in the worker."""
        return _failure(self).traceback

    @property
    def process(self) -> int | None:
        """The id of the process that ran the task."""
        return _failure(self).process

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            return own(self, name)
        if name == "_render_traceback_":  # with it a cause draws itself: without the remote part
            raise AttributeError(name)
        fields = own(self, "__dict__")
        failure = fields.get(_FAILURE)
        if name in fields or failure is None or failure.cause is None:
            return own(self, name)
        return getattr(failure.cause, name)

    def __str__(self) -> str:
        task, cause, traceback, process = _failure(self)
        head = f"{task} failed" if process is None else f"{task} failed in process {process}"
        if traceback:
            return f"{head}:\n\n{traceback.rstrip()}"
        if cause is None:
            return head
        return f"{head}: {type(cause).__name__}: {_safely(str, cause)}"

    def __repr__(self) -> str:
        failure = _failure(self)
        cause = _safely(repr, failure.cause)
        return f"<{type(self).__name__} in {failure.task}: {cause}>"

    # Identity, whatever the cause's type says: tools keep exceptions in sets.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dict(object.__getattribute__(self, "__dict__"))
        failure = fields.pop(_FAILURE)
        return _rebuild, (tuple(failure), type(self) is not TaskError), fields or None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        object.__getattribute__(self, "__dict__").update(state or {})


# Under Ray's names, for programs that were written for it.
RayError = GpunbError
RayTaskError = TaskError
RayActorError = ActorError
ObjectStoreFullError = OutOfMemoryError


def because(traceback: str, error: TaskError) -> str:
    """Return `traceback`, which ends where `error` of another task came up, and that one's text."""
    return "\n\n".join(filter(None, (traceback.rstrip(), f"because {error}")))


def _failure(error: TaskError) -> _Failure:
    fields: dict[str, _Failure] = object.__getattribute__(error, "__dict__")
    return fields.get(_FAILURE) or _Failure("a task", None, "", None)


def _fill(error: TaskError, failure: _Failure) -> None:
    """Store the fields past any `__setattr__` of the cause's type (frozen dataclasses have one)."""
    object.__getattribute__(error, "__dict__")[_FAILURE] = failure
    object.__setattr__(error, "__cause__", failure.cause)


def _rebuild(fields: tuple[Any, ...], derived: bool) -> TaskError:
    failure = _Failure(*fields)
    if derived:
        return _make(failure)
    return TaskError(*fields[:3], process=failure.process)


def _make(failure: _Failure) -> TaskError:
    error = None
    if failure.cause is not None:
        error = _blank(_class_for(failure.cause), failure.cause)
    if error is None:
        error = TaskError.__new__(TaskError)
    _fill(error, failure)
    return error


# Weak on both sides: a notebook that defines its exception class anew leaves nothing behind.
_classes: weakref.WeakKeyDictionary[type, weakref.ref[type[TaskError]]]
_classes = weakref.WeakKeyDictionary()


def _class_for(cause: BaseException) -> type[TaskError]:
    """Return the class, made once per type of cause, that is both a TaskError and that type."""
    kind = type(cause)
    loop_enders = (StopIteration, StopAsyncIteration)
    if not issubclass(kind, Exception) or issubclass(kind, loop_enders):
        return TaskError
    if issubclass(TaskError, kind):
        return TaskError
    try:
        known = _classes.get(kind)
        found = known() if known is not None else None
        if found is None:
            found = _derive(kind)
            _classes[kind] = weakref.ref(found)
    except BaseException:  # noqa: BLE001 - whatever a metaclass or an __init_subclass__ raises
        return TaskError
    return found


def _derive(kind: type[BaseException]) -> type[TaskError]:
    name = f"TaskError({kind.__name__})"
    body = {"__module__": __name__, "__qualname__": name, "__doc__": TaskError.__doc__}
    return types.new_class(name, (TaskError, kind), {}, lambda space: space.update(body))


def _blank(cls: type[TaskError], cause: BaseException) -> TaskError | None:
    """Return an empty instance of `cls`, made without the `__init__` of the cause's type."""
    arguments: tuple[Any, ...] = ()
    if isinstance(cause, BaseExceptionGroup):
        arguments = cause.message, cause.exceptions
    for new in (native_new(type(cause)), Exception.__new__):
        try:
            error = new(cls, *arguments)
        except TypeError:  # "MemoryError.__new__(...) is not safe"
            continue
        return error if isinstance(error, cls) else None
    return None


def native_new(kind: type) -> Callable[..., Any]:
    """Return the `__new__` of the nearest base in C, the one that lays out the instance."""
    return next(base for base in kind.__mro__ if not is_heap_type(base)).__new__


def is_heap_type(kind: type) -> bool:
    """Return whether a class statement made it, or something like one."""
    return bool(kind.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE


def _safely(text: Callable[[Any], str], value: object) -> str:
    """Return ``text(value)``; a description if the value's own method fails."""
    try:
        return text(value)
    except BaseException as error:  # noqa: BLE001 - an error must be shown whatever it does
        return f"<{type(value).__name__}: its {text.__name__}() raised {type(error).__name__}>"
