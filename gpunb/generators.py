"""Generators of refs: for results that come one by one, or whose number the function decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, NoReturn, TypeVar

from gpunb import backend
from gpunb.backend import STREAM, ObjectId
from gpunb.core.tasks import TaskId
from gpunb.refs import ObjectRef, describe, there
from gpunb.signals import UNDIVIDED, interrupt_later

T = TypeVar("T")


class ObjectRefGenerator(Generic[T]):
    """The results of a generator function, as refs, each as soon as it was yielded.

    Use it in ``for`` or ``async for``, with ``next``, or in a list for `gpunb.wait`, where it is
    ready when its next ref can be had. An exception in the function is its last result: getting
    that ref raises it. What is yielded and not taken is let go together with the generator.
    """

    def __init__(self, task: TaskId) -> None:
        """For a task whose generator the caller holds a reference to."""
        self._task = task
        self._index = 0

    def __del__(self) -> None:
        try:
            current = backend.existing()
            if current is not None:
                current.drop((self._task, STREAM))
        except Exception:
            pass
        except KeyboardInterrupt:
            interrupt_later()

    @property
    def task_id(self) -> TaskId:
        """The number of the task, as in ``#7``."""
        return self._task

    @property
    def next_object(self) -> ObjectId:
        """What `wait` waits for."""
        return self._task, self._index

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        return self

    def __next__(self) -> ObjectRef[T]:
        """The next ref; waits until it is there.

        Raises:
            StopIteration: the function has ended.
        """
        backend.current().wait([self.next_object], 1, None)
        ref = self._take()
        if ref is None:
            raise StopIteration
        return ref

    def __aiter__(self) -> AsyncIterator[ObjectRef[T]]:
        return self

    async def __anext__(self) -> ObjectRef[T]:
        await there(self.next_object)
        ref = self._take()
        if ref is None:
            raise StopAsyncIteration
        return ref

    def _take(self) -> ObjectRef[T] | None:
        obj = self.next_object
        with UNDIVIDED:
            if not backend.current().take(obj):
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
