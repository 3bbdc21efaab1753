"""Generators of refs, for functions that yield their results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, NoReturn, TypeVar

from gpunb.api.refs import ObjectRef, describe, until_ready
from gpunb.protocol import backend
from gpunb.protocol.backend import COMPLETED, STREAM, ObjectId
from gpunb.scheduler.tasks import TaskId
from gpunb.system.signals import UNDIVIDED, whole

T = TypeVar("T")


class ObjectRefGenerator(Generic[T]):
    """An iterator over the refs to the results of a generator function, as they are yielded.

    Use it in ``for`` or ``async for``, with ``next``, or in a list for `gpunb.wait`, where it is
    ready when its next ref is. An exception in the function is its last result: `gpunb.get` of
    that ref raises it. Results that were not taken are freed together with the generator.
    """

    def __init__(self, task: TaskId) -> None:
        """`task`: a task whose generator the backend has counted a reference to."""
        self._task = task
        self._index = 0
        self._peeked: ObjectRef[T] | None = None
        self._ended = False

    @whole
    def __del__(self) -> None:
        task = self.__dict__.pop("_task", None)
        if task is not None:
            backend.let_go((task, STREAM))

    @property
    def task_id(self) -> TaskId:
        """The number of the task, as in ``#7``."""
        return self._task

    @property
    def next_object(self) -> ObjectId:
        """The id of the object that `gpunb.wait` waits for."""
        return (self._task, self._index) if self._peeked is None else self._peeked.id

    def completed(self) -> ObjectRef[None]:
        """A ref that is ready when the task has ended. Its value is None; `gpunb.get` raises an
        error if the task did not end by itself, for example because its process ended."""
        return ObjectRef((self._task, COMPLETED))

    def next_ready(self) -> bool:
        """Whether there is a next ref now: then `next` does not wait."""
        return not self.is_finished() and self._at_next()

    def is_finished(self) -> bool:
        """Whether the function has ended and all its refs were taken."""
        if not self._ended and self._peeked is None and self._at_next():
            self._peeked = self._take()
        return self._ended

    def _at_next(self) -> bool:
        """Whether the next ref is ready, or the function has ended."""
        return bool(backend.current().wait([self.next_object], 1, 0))

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        """The next ref. Waits until it is ready.

        Raises:
            StopIteration: the function has ended.
        """
        if self._peeked is None:
            backend.current().wait([self.next_object], 1, None)
        ref = self._take()
        if ref is None:
            raise StopIteration
        return ref

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        if self._peeked is None:
            await until_ready(self.next_object)
        ref = self._take()
        if ref is None:
            raise StopAsyncIteration
        return ref

    def _take(self) -> ObjectRef[T] | None:
        if self._peeked is not None:
            ref, self._peeked = self._peeked, None
            return ref
        obj = self.next_object
        with UNDIVIDED:
            if not backend.current().take(obj):
                self._ended = True
                return None
            self._index += 1
            return ObjectRef(obj, held=True)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a generator of refs cannot be sent to another process: pass the refs that it gives, "
            "or list(generator) for all of them"
        )

    def __repr__(self) -> str:
        current = backend.existing()
        facts = current.ask("job", self._task) if current is not None else None
        return f"<ObjectRefGenerator {describe(self._task, facts)}; {self._index} taken>"


backend.HOLDERS[ObjectRefGenerator] = lambda each: (each.task_id, STREAM)


class DynamicObjectRefGenerator(Generic[T]):
    """The value of a task with ``num_returns="dynamic"``: a ref to each value it yielded."""

    def __init__(self, refs: list[ObjectRef[T]]) -> None:
        self._refs = refs

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def __getitem__(self, index: Any) -> Any:
        return self._refs[index]

    def __repr__(self) -> str:
        return f"<DynamicObjectRefGenerator of {len(self._refs)} refs>"
