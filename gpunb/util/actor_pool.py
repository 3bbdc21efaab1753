"""`ActorPool`: actors that work through values, each on one value at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpunb.api.refs import ObjectRef
from gpunb.protocol import backend

Function = Callable[[Any, Any], ObjectRef[Any]]


class ActorPool:
    """Lets actors work through values, each on one value at a time:

        pool = ActorPool([Model.remote(), Model.remote()])
        list(pool.map(lambda model, batch: model.predict.remote(batch), batches))

    Args:
        actors: handles to actors that are idle.
    """

    def __init__(self, actors: Iterable[Any]) -> None:
        self._idle: deque[Any] = deque(actors)
        self._waiting: deque[tuple[int, Function, Any]] = deque()
        self._running: dict[int, tuple[list[ObjectRef[Any]], Any]] = {}
        self._submitted = 0

    def map(self, fn: Function, values: Iterable[Any]) -> Iterator[Any]:
        """The results of ``fn(actor, value)`` in the order of the values. The function calls a
        method and returns its ref, or the refs of its results. Results of earlier submits are
        discarded."""
        return self._mapped(fn, values, self.get_next)

    def map_unordered(self, fn: Function, values: Iterable[Any]) -> Iterator[Any]:
        """As `map`, but in the order in which the results are ready."""
        return self._mapped(fn, values, self.get_next_unordered)

    def _mapped(
        self, fn: Function, values: Iterable[Any], get_next: Callable[[], Any]
    ) -> Iterator[Any]:
        self._waiting.clear()
        while self._running:  # the actors finish these calls before the new ones
            self._free(min(self._running))
        for value in values:
            self.submit(fn, value)

        def results() -> Iterator[Any]:
            while self.has_next():
                yield get_next()

        return results()

    def submit(self, fn: Function, value: Any) -> None:
        """Call ``fn(actor, value)`` as soon as an actor is idle."""
        self._waiting.append((self._submitted, fn, value))
        self._submitted += 1
        self._start()

    def has_next(self) -> bool:
        """Whether there are results that were not taken."""
        return bool(self._running or self._waiting)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """The result of the earliest submit that was not taken. Waits for it.

        Raises:
            StopIteration: no result is left.
            TimeoutError: it was not ready within `timeout` seconds; with `ignore_if_timedout` it
                is discarded, and its actor gets the next value.
        """
        return self._next(False, timeout, ignore_if_timedout)

    def get_next_unordered(
        self, timeout: float | None = None, ignore_if_timedout: bool = False
    ) -> Any:
        """As `get_next`, but the result that is ready first."""
        return self._next(True, timeout, ignore_if_timedout)

    def has_free(self) -> bool:
        """Whether an actor is idle and no value waits."""
        return bool(self._idle) and not self._waiting

    def pop_idle(self) -> Any:
        """Remove an idle actor from the pool and return it; None if there is none."""
        return self._idle.popleft() if self.has_free() else None

    def push(self, actor: Any) -> None:
        """Add an actor.

        Raises:
            ValueError: the actor is in the pool already.
        """
        if actor in self._idle or any(actor == each for _, each in self._running.values()):
            raise ValueError(f"{actor!r} is in the pool already")
        self._idle.append(actor)
        self._start()

    def _start(self) -> None:
        while self._idle and self._waiting:
            number, fn, value = self._waiting.popleft()
            actor = self._idle.popleft()
            try:
                result = fn(actor, value)
                refs = result if isinstance(result, list) else [result]
                self._running[number] = refs, actor
            except BaseException:
                self._idle.append(actor)
                raise

    def _next(self, unordered: bool, timeout: float | None, ignore: bool) -> Any:
        if not self.has_next():
            raise StopIteration("nothing is left to come from the pool")
        if not self._running:
            raise ValueError("the pool has no actor: add one with push")
        numbers = sorted(self._running) if unordered else [min(self._running)]
        known = {self._running[each][0][0].id: each for each in numbers}
        begin = time.monotonic()
        ready = backend.current().wait(list(known), 1, timeout)
        if not ready:
            if ignore:
                self._free(numbers[0])
            waited = time.monotonic() - begin
            raise TimeoutError(f"no result of the pool was there after {waited:.1f} s")
        values = [ref.result() for ref in self._free(min(known[each] for each in ready))]
        return values[0] if len(values) == 1 else values

    def _free(self, number: int) -> list[ObjectRef[Any]]:
        """Remove a running call. Returns the refs of its results; the actor gets the next value."""
        refs, actor = self._running.pop(number)
        self._idle.append(actor)
        self._start()
        return refs
