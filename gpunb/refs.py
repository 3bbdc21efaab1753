"""`ObjectRef`: a handle to a value that a task will make or that was put."""

from __future__ import annotations

import functools
import operator
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpunb import backend, serialize
from gpunb.backend import ObjectId
from gpunb.core.resources import devices_text
from gpunb.signals import UNDIVIDED, interrupt_later

if TYPE_CHECKING:
    import concurrent.futures

T = TypeVar("T")


class ObjectRef(Generic[T]):
    """A handle to a value that may not be there yet.

    Get the value with `gpunb.get(ref)`, `ref.result(timeout)` or `await ref`; giving up on any
    of these never cancels the task. Refs are equal when they mean the same object. They can be
    passed to remote functions: at the top level of the arguments the function receives the
    value, inside other objects it receives the ref.
    """

    __slots__ = ("__weakref__", "id")

    def __init__(self, identity: ObjectId, *, held: bool = False) -> None:
        """`held` if the backend has already counted this reference."""
        if held:
            self.id = identity
            return
        with UNDIVIDED:
            backend.current().hold(identity)
            self.id = identity

    def __del__(self) -> None:
        # At interpreter exit the module may be half gone.
        try:
            current = backend.existing()
            if current is not None:
                current.drop(self.id)
        except Exception:
            pass
        except KeyboardInterrupt:
            interrupt_later()

    def result(self, timeout: float | None = None) -> T:
        """The value; waits for it at most `timeout` seconds.

        Raises:
            TaskError: the task raised; also an instance of what it raised.
            GetTimeoutError: the value did not come in time; the task goes on.
        """
        check_timeout(timeout)
        value: T = value_of(backend.current().fetch([self.id], timeout)[0])
        return value

    def future(self) -> concurrent.futures.Future[T]:
        """A `concurrent.futures.Future` of the value. Cancelling it does not cancel the task."""
        future: concurrent.futures.Future[T] = _future_class()(self)
        future.set_running_or_notify_cancel()

        def ready() -> None:
            try:
                future.set_result(self.result(0))
            except BaseException as error:
                future.set_exception(error)

        backend.current().notify(self.id, ready)
        return future

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        await there(self.id)
        return self.result(0)

    @property
    def task_id(self) -> int:
        """The number of the task that makes the value, as in ``#7``; 0 for what was put."""
        return self.id[0]

    def hex(self) -> str:
        """The identity as text."""
        return f"{self.id[0]:016x}{self.id[1]:08x}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        serialize.note_reference(self.id)
        return (ObjectRef, (self.id,))

    def __repr__(self) -> str:
        task, index = self.id
        if not task:
            return f"<ObjectRef put {index}>"
        try:
            current = backend.existing()
            facts = current.ask("job", task) if current is not None else None
        except Exception:
            facts = None
        suffix = f"[{index}]" if index else ""
        return f"<ObjectRef {describe(task, facts)}{suffix}>"


backend.HOLDERS[ObjectRef] = operator.attrgetter("id")


async def there(obj: ObjectId) -> None:
    """Return when the object is there, or failed."""
    # Not before it is needed: asyncio takes as long as all of this package.
    import asyncio

    from gpunb.awaiting import until

    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(ready.set)
        except RuntimeError:
            pass  # the loop was closed: nobody waits any more

    backend.current().notify(obj, tell)
    await until(ready, (obj,))


@functools.cache
def _future_class() -> Any:
    """Futures of which the kernel knows that a task waits for them."""
    import concurrent.futures

    class Future(concurrent.futures.Future[Any]):
        def __init__(self, ref: ObjectRef[Any]) -> None:
            super().__init__()
            self._ref = ref

        def result(self, timeout: float | None = None) -> Any:
            self._wait(timeout)
            return super().result(timeout)

        def exception(self, timeout: float | None = None) -> BaseException | None:
            self._wait(timeout)
            return super().exception(timeout)

        def _wait(self, timeout: float | None) -> None:
            if timeout is None and not self.done() and in_task():
                backend.current().wait([self._ref.id], 1, None)

    return Future


def in_task() -> bool:
    """Whether this runs in a task, so that waiting may be a deadlock."""
    current = backend.existing()
    if current is None or not hasattr(current, "awaits"):
        return False  # it looks for none
    return current.context().task is not None


def check_timeout(timeout: float | None) -> None:
    """Raises ValueError or TypeError unless it is None or a number of seconds."""
    try:
        if timeout is None or timeout >= 0:
            return
    except (TypeError, ValueError):  # an array's "the truth value is ambiguous"
        raise TypeError(
            f"timeout={timeout!r} must be a number of seconds, or None to wait as long as it takes"
        ) from None
    raise ValueError(f"timeout={timeout!r} must be a number of seconds, 0 or more")


def describe(task: int, facts: dict[str, Any] | None) -> str:
    """A task in a few words: ``"train #7 running on GPU 1, 3.2 s"``."""
    if not facts:
        return f"#{task}"
    text = f"{facts['name']} #{task} {facts['state']}"
    if facts["devices"]:
        text += f" on {devices_text(facts['devices'], shares=False)}"
    return f"{text}, {facts['seconds']:.1f} s"


def value_of(outcome: backend.Outcome) -> Any:
    """The value; raises what came in its place."""
    if not outcome.failed:
        return serialize.loads(outcome.payload)
    error = serialize.loads(outcome.payload)
    if isinstance(error, BaseException):  # one of our own, which no task raised
        raise error
    raise serialize.load_failure(outcome.payload)
