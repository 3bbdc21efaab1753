"""The errors that gpunb raises.

    GpunbError
    +-- TaskError                  the task's code raised an exception; also of the exception's type
    +-- WorkerCrashedError         the worker process died
    +-- TaskCancelledError         the task was cancelled
    +-- TaskPlacementGroupRemoved  the placement group of the task was removed
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

Each error can be pickled with all its attributes. Four have Ray's names as well: RayError is
GpunbError, RayTaskError TaskError, RayActorError ActorError, ObjectStoreFullError OutOfMemoryError.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gpunb.instead import missing

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
    "TaskPlacementGroupRemoved",
    "WorkerCrashedError",
]


class GpunbError(Exception):
    """The root of all errors that gpunb itself raises."""


class WorkerCrashedError(GpunbError):
    """The worker process died before the task was done."""


class TaskCancelledError(GpunbError):
    """The task was cancelled."""


class TaskPlacementGroupRemoved(GpunbError):
    """The placement group in which the task or actor should run was removed."""


class GetTimeoutError(GpunbError, TimeoutError):
    """The value was not ready within the caller's timeout."""


class ActorError(GpunbError):
    """A call to an actor could not be carried out."""


class ActorDiedError(ActorError):
    """The actor is dead and will not come back."""


class ActorUnavailableError(ActorError):
    """The actor cannot be reached now; it may be restarting."""


class ActorAlreadyExistsError(GpunbError, ValueError):
    """Another actor has the name that was given to a new one."""


class OutOfMemoryError(GpunbError, MemoryError):
    """The machine's memory is used up, or a task was stopped because it nearly was."""


class PendingCallsLimitExceeded(GpunbError):
    """The actor has as many waiting calls as its ``max_pending_calls`` allows."""


class InfeasibleRequestError(GpunbError, ValueError):
    """No state of this machine could satisfy the request."""


class ObjectLostError(GpunbError):
    """The value behind a reference is gone and cannot be made again."""


class DeadlockError(GpunbError):
    """Tasks wait for each other, or for devices that they hold themselves."""


class InternalError(GpunbError):
    """A bug in gpunb, never a user's mistake."""

    def __str__(self) -> str:
        return f"{super().__str__()} (this is a bug in gpunb: please report it)"


class _Failure(NamedTuple):
    """The fields of a TaskError. One object, so that they use one name in the instance's dict."""

    task: str
    cause: BaseException | None
    traceback: str
    process: int | None


_FAILURE = "_gpunb_failure"

# The attributes of a TaskError itself. All others, except dunders, are attributes of the cause.
_OWN = frozenset(
    "task cause traceback process of as_instanceof_cause with_traceback add_note".split()
)


class TaskError(GpunbError):
    """The task raised an exception.

    `gpunb.get` raises an instance of a class that derives from both TaskError and the type of the
    exception, so ``except ValueError`` and ``except TaskError`` both catch it. Its attributes,
    ``args`` included, are those of the cause. ``str()`` has the worker's traceback.

    Args:
        task: description of the task, such as ``train (#7)``.
        cause: the exception that was raised, also in ``__cause__``; None if it is unknown.
        traceback: the text of the worker's traceback.
        process: the id of the worker process.
    """

    def __init__(
        self,
        task: str,
        cause: BaseException | None = None,
        traceback: str = "",
        *,
        process: int | None = None,
    ) -> None:
        # Not super(): that is the __init__ of the cause's type, which has other arguments.
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

        The error is a plain TaskError for exceptions that are not an `Exception`
        (KeyboardInterrupt, SystemExit), for StopIteration, which no coroutine and no future can
        raise (see `as_raised`), and for classes that cannot be derived from. A TaskError as
        cause, of a task inside this task, is not wrapped again: the error gets its cause, and
        the tracebacks of both.
        """
        if issubclass(type(cause), TaskError):  # isinstance() would ask the cause for __class__
            assert isinstance(cause, TaskError)
            traceback = because(traceback, cause)
            cause = cause.cause
        return _make(_Failure(task, cause, traceback, process))

    @property
    def task(self) -> str:
        """A description of the task, such as ``train (#7)``."""
        return _failure(self).task

    @property
    def cause(self) -> BaseException | None:
        """The exception that the task's code raised, without its traceback object."""
        return _failure(self).cause

    @property
    def traceback(self) -> str:
        """The text of the traceback in the worker."""
        return _failure(self).traceback

    @property
    def process(self) -> int | None:
        """The id of the process that ran the task."""
        return _failure(self).process

    def as_instanceof_cause(self) -> TaskError:
        """Return this error, which is also of the cause's type; for programs written for Ray."""
        return as_raised(self)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__
        if name in _OWN or (name.startswith("__") and name.endswith("__")):
            return own(self, name)
        if name == "_render_traceback_":  # the cause's would leave out the worker's traceback
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

    # By identity, not as the cause's type defines it: tools keep exceptions in sets.
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


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)


def because(traceback: str, error: TaskError) -> str:
    """Return `traceback` and after it the text of `error`, another task's error that caused it."""
    return "\n\n".join(filter(None, (traceback.rstrip(), f"because {error}")))


def _failure(error: TaskError) -> _Failure:
    fields: dict[str, _Failure] = object.__getattribute__(error, "__dict__")
    return fields.get(_FAILURE) or _Failure("a task", None, "", None)


def _fill(error: TaskError, failure: _Failure) -> None:
    """Store the fields, around any `__setattr__` of the cause's type (as of frozen dataclasses)."""
    object.__getattribute__(error, "__dict__")[_FAILURE] = failure
    object.__setattr__(error, "__cause__", failure.cause)


def _rebuild(fields: tuple[Any, ...], derived: bool) -> TaskError:
    failure = _Failure(*fields)
    if derived:
        return _make(failure)
    return TaskError(*fields[:3], process=failure.process)


def as_raised(error: TaskError) -> TaskError:
    """Return the error for a call outside of coroutines: also of the type of its cause if that is
    StopIteration or StopAsyncIteration."""
    failure = _failure(error)
    if type(error) is not TaskError or not isinstance(failure.cause, _LOOP_ENDERS):
        return error
    raised = _blank(_derived(type(failure.cause)), failure.cause) or error
    _fill(raised, failure)
    return raised


def _make(failure: _Failure) -> TaskError:
    error = None
    if failure.cause is not None:
        error = _blank(_class_for(failure.cause), failure.cause)
    if error is None:
        error = TaskError.__new__(TaskError)
    _fill(error, failure)
    return error


# Weak on both sides: the old class of a redefined exception can be freed.
_classes: weakref.WeakKeyDictionary[type, weakref.ref[type[TaskError]]]
_classes = weakref.WeakKeyDictionary()


def _class_for(cause: BaseException) -> type[TaskError]:
    """Return the class of the error: TaskError, derived from the type of the cause if possible."""
    kind = type(cause)
    if not issubclass(kind, Exception) or issubclass(kind, _LOOP_ENDERS):
        return TaskError
    return _derived(kind)


_LOOP_ENDERS = (StopIteration, StopAsyncIteration)


def _derived(kind: type[BaseException]) -> type[TaskError]:
    """Return the class that is both a TaskError and `kind`, if there can be one."""
    if issubclass(TaskError, kind):
        return TaskError
    try:
        known = _classes.get(kind)
        found = known() if known is not None else None
        if found is None:
            found = _derive(kind)
            _classes[kind] = weakref.ref(found)
    except BaseException:  # noqa: BLE001 - a metaclass or __init_subclass__ may raise anything
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
    """Return the `__new__` of the nearest base in C, which allocates the instance."""
    return next(base for base in kind.__mro__ if not is_heap_type(base)).__new__


def is_heap_type(kind: type) -> bool:
    """Return whether the class was made at run time, as by a class statement, and not in C."""
    return bool(kind.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE


def _safely(text: Callable[[Any], str], value: object) -> str:
    """Return ``text(value)``; a description if the value's own method fails."""
    try:
        return text(value)
    except BaseException as error:  # noqa: BLE001 - an error must be shown even if its methods fail
        return f"<{type(value).__name__}: its {text.__name__}() raised {type(error).__name__}>"
