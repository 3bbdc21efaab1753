"""`ObjectRef`: a handle to a value that a task will make or that was put."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpunb import backend, serialize
from gpunb.backend import ObjectId
from gpunb.core.resources import devices_text
from gpunb.signals import UNDIVIDED, interrupt_later

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

T = TypeVar("T")

HEARTBEAT = 0.1
"""Seconds after which an `await` looks around: an interrupt is not seen by a sleeping loop."""


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
        import concurrent.futures

        future: concurrent.futures.Future[T] = concurrent.futures.Future()
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
    import asyncio  # not before it is needed: it takes as long as all of this package

    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(ready.set)
        except RuntimeError:
            pass  # the loop was closed: nobody waits any more

    backend.current().notify(obj, tell)
    with _beating.setdefault(loop, _Heart(loop)):
        await ready.wait()


class _Heart:
    """Keeps a loop from sleeping for long while anybody waits in it, however many they are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.proxy(loop)
        self._waiting = 0
        self._beats = False

    def __enter__(self) -> None:
        self._waiting += 1
        if not self._beats:
            self._beat()

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1

    def _beat(self) -> None:
        self._beats = self._waiting > 0
        if self._beats:
            self._loop.call_later(HEARTBEAT, self._beat)


_beating: weakref.WeakKeyDictionary[Any, _Heart] = weakref.WeakKeyDictionary()


def check_timeout(timeout: float | None) -> None:
    if timeout is not None and not timeout >= 0:
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
