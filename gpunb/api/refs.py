"""`ObjectRef`: a reference to the result of a task, or to a value that was put."""

from __future__ import annotations

import functools
import operator
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpunb.data import serialize
from gpunb.protocol import backend
from gpunb.protocol.backend import COMPLETED, ObjectId
from gpunb.scheduler.resources import devices_text
from gpunb.system.signals import HEARTBEAT, UNDIVIDED, again, interrupt_later

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

T = TypeVar("T")


class Ident(int):
    """A number that also works as one of Ray's ids: it has `hex` and `binary`, and a call returns
    it, because some ids are methods in Ray."""

    def __call__(self) -> Ident:
        return self

    def hex(self) -> str:
        """The number as 16 hexadecimal digits."""
        return f"{int(self):016x}"

    def binary(self) -> bytes:
        """The number as 8 bytes."""
        return bytes.fromhex(self.hex())


class ObjectRef(Generic[T]):
    """A reference to a value that may not exist yet.

    Get the value with `gpunb.get(ref)`, `ref.result(timeout)` or `await ref`. A timeout, or the
    end of a wait, never cancels the task. Refs are equal when they refer to the same object. They
    can be passed to remote functions: for a ref at the top level of the arguments the function
    receives the value, for one inside another object it receives the ref.
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

    @again
    def __del__(self) -> None:
        # Not `whole`: an undivided block takes longer than this method, and there are many refs.
        try:
            current = backend.existing()
            if current is not None:
                current.drop(self.id)
        except Exception:
            pass  # at interpreter exit the module may be half gone
        except KeyboardInterrupt:  # the backend has not dropped it yet
            interrupt_later()
            self.__del__()

    def result(self, timeout: float | None = None) -> T:
        """The value. Waits for it at most `timeout` seconds, or without limit.

        Raises:
            TaskError: the task raised an exception; the error is also of the exception's type.
            GetTimeoutError: the value was not ready in time; the task goes on.
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

    def as_future(self) -> asyncio.Future[T]:
        """A future of asyncio, for the loop that runs. Cancelling it does not cancel the task."""
        import asyncio

        return asyncio.ensure_future(self._wait())

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        await until_ready(self.id)
        return self.result(0)

    @property
    def task_id(self) -> Ident:
        """The number of the task that makes the value, as in ``#7``; 0 for a value that was put."""
        return Ident(self.id[0])

    def hex(self) -> str:
        """The id as 24 hexadecimal digits."""
        return f"{self.id[0]:016x}{self.id[1] & 0xFFFFFFFF:08x}"

    def binary(self) -> bytes:
        """The id as 12 bytes."""
        return bytes.fromhex(self.hex())

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
        suffix = " completed" if index == COMPLETED else f"[{index}]" if index else ""
        return f"<ObjectRef {describe(task, facts)}{suffix}>"


backend.HOLDERS[ObjectRef] = operator.attrgetter("id")


async def until_ready(obj: ObjectId) -> None:
    """Wait until the object is ready, or its task failed."""
    # Imported here, because asyncio takes as long to import as the whole package.
    import asyncio

    from gpunb.api.heartbeat import until

    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(ready.set)
        except RuntimeError:
            pass  # the loop was closed

    backend.current().notify(obj, wake)
    await until(ready)


@functools.cache
def _future_class() -> Any:
    """The class of futures that tell the kernel when a task waits for them."""
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
            if timeout is not None or self.done():
                return
            if in_task():
                backend.current().wait([self._ref.id], 1, None)
            while not concurrent.futures.wait([self], HEARTBEAT).done:
                pass  # an interrupt is seen between two waits

    return Future


def in_task() -> bool:
    """Whether this code runs in a task."""
    current = backend.existing()
    return current is not None and current.context().task is not None


def check_timeout(timeout: float | None) -> None:
    """Check a timeout: raises ValueError if it is negative, TypeError if it is not a number."""
    try:
        if timeout is None or timeout >= 0:
            return
    except (TypeError, ValueError):  # an array's "the truth value is ambiguous"
        raise TypeError(
            f"timeout={timeout!r} must be a number of seconds, or None to wait as long as it takes"
        ) from None
    raise ValueError(f"timeout={timeout!r} must be a number of seconds, 0 or more")


def describe(task: int, facts: dict[str, Any] | None) -> str:
    """A short description of a task, such as ``"train #7 running on GPU 1, 3.2 s"``."""
    if not facts:
        return f"#{task}"
    text = f"{facts['name']} #{task} {facts['state']}"
    if facts["devices"]:
        text += f" on {devices_text(facts['devices'], shares=False)}"
    return f"{text}, {facts['seconds']:.1f} s"


def value_of(outcome: backend.Outcome) -> Any:
    """The value of an outcome; raises its error if it has one."""
    if not outcome.failed:
        return serialize.loads(outcome.payload)
    error = serialize.loads(outcome.payload)
    if isinstance(error, BaseException):  # an error of gpunb, not of the task's code
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, and through it to callers' handles
    raise serialize.load_failure(outcome.payload)
