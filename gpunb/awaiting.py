"""What the coroutines of an event loop wait for.

While they wait for objects, their loop is kept from sleeping for long. In a worker the kernel is
told of which objects one has to come before the task can go on, so that a deadlock is found: of
those that all its coroutines wait for, directly or through others, if no timer may end that.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gpunb import backend
from gpunb.backend import Context, ObjectId
from gpunb.signals import HEARTBEAT

_COST = 20
"""A look at what coroutines wait for comes after this many times what the last one took."""

ROOT: contextvars.ContextVar[asyncio.Task[Any] | None] = contextvars.ContextVar(
    "gpunb-root", default=None
)
"""The coroutine that a call is, in all that it starts, where several calls share a loop."""

_sleeps_on = getattr(asyncio.futures, "_set_result_unless_cancelled", None)


async def until(ready: asyncio.Event, objects: Iterable[ObjectId]) -> None:
    """Wait for an event that is set when any of these objects is there."""
    loop = asyncio.get_running_loop()
    with _beating.setdefault(loop, _Heart(loop)).waits(ready, tuple(objects)):
        await ready.wait()


class _Wait(NamedTuple):
    """What one coroutine waits for; `root` as in `ROOT`."""

    objects: tuple[ObjectId, ...]
    context: Context
    root: weakref.ref[asyncio.Task[Any]] | None


class _Heart:
    """Keeps a loop from sleeping for long while anybody waits in it, however many they are.

    It knows what each waits for, and what the kernel was told of each task.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.proxy(loop)
        self._count = 0
        self._beats = False
        self._waits: weakref.WeakKeyDictionary[asyncio.Task[Any], _Wait]
        self._waits = weakref.WeakKeyDictionary()
        self._told: dict[tuple[int, int], frozenset[ObjectId]] = {}
        self._look_at = 0.0

    @contextmanager
    def waits(self, ready: asyncio.Event, objects: tuple[ObjectId, ...]) -> Iterator[None]:
        """The coroutine that runs waits for any of these."""
        task, wait = asyncio.current_task(), self._noted(objects)
        if task is not None and wait is not None:
            self._waits[task] = wait
        self._count += 1
        if not self._beats:
            self._beats = True
            self._loop.call_later(HEARTBEAT, self._beat)
        try:
            yield
        finally:
            self._count -= 1
            if task is not None and wait is not None:
                self._waits.pop(task, None)
                # What came makes true that the task goes on. Not while its coroutine is collected,
                # maybe just when something is sent.
                if not ready.is_set() and asyncio.current_task() is task:
                    self._withdraw(wait.context)

    @staticmethod
    def _noted(objects: tuple[ObjectId, ...]) -> _Wait | None:
        current = backend.current()
        context, root = current.context(), ROOT.get()
        if context.task is None or not hasattr(current, "awaits"):
            return None
        return _Wait(objects, context, None if root is None else weakref.ref(root))

    def _beat(self) -> None:
        self._beats = self._count > 0
        if self._beats:
            self._loop.call_later(HEARTBEAT, self._beat)
        began = time.monotonic()
        if (self._waits or self._told) and began >= self._look_at:
            self._look()
            self._look_at = began + _COST * (time.monotonic() - began)

    def _withdraw(self, context: Context) -> None:
        """The task may go on though nothing that was told came."""
        if self._told.pop(_job(context), None):
            _tell(context, frozenset())

    def _look(self) -> None:
        """Tell of each task what it waits for, where that has changed."""
        loop = asyncio.get_running_loop()
        timed = _timed(loop) if _is_its_own() else None
        jobs = {_job(each.context): each for each in self._waits.values()}
        for job in self._told.keys() - jobs.keys():
            del self._told[job]  # it goes on since one of them came
        for job, wait in jobs.items():
            root = wait.root() if wait.root is not None else None
            roots = asyncio.all_tasks(loop) if root is None else [root]
            objects = frozenset() if timed is None else self._needed(roots, timed)
            if objects != self._told.get(job, frozenset()):
                self._told[job] = objects
                _tell(wait.context, objects)

    def _needed(
        self, roots: Iterable[asyncio.Task[Any]], timed: set[asyncio.Task[Any]]
    ) -> frozenset[ObjectId]:
        """Objects of which one has to come before any of these goes on; none if that is not sure.

        A coroutine is followed to the tasks that it awaits, one or several.
        """
        found: set[ObjectId] = set()
        seen: set[Any] = set()
        todo: list[Any] = list(roots)
        while todo:
            task = todo.pop()
            if task in seen:
                continue
            seen.add(task)
            waiter = getattr(task, "_fut_waiter", None)
            if waiter is None or waiter.done() or task in timed:
                return frozenset()
            if (wait := self._waits.get(task)) is not None:
                found.update(wait.objects)
            elif others := [each for each in _awaited(task, waiter) if not each.done()]:
                if not all(isinstance(each, asyncio.Task) for each in others):
                    return frozenset()
                todo += others
            else:
                return frozenset()
        return frozenset(found)


_beating: weakref.WeakKeyDictionary[Any, _Heart] = weakref.WeakKeyDictionary()


def _awaited(task: asyncio.Task[Any], waiter: Any) -> Iterable[asyncio.Future[Any]]:
    """What a task needs one of, or all: another task, or those of `gather`, `wait` or a group."""
    if isinstance(waiter, asyncio.Task):
        return [waiter]
    if children := getattr(waiter, "_children", None):
        return list(children)
    coroutine: Any = task.get_coro()
    while isinstance(inner := getattr(coroutine, "cr_await", None), types.CoroutineType):
        coroutine = inner
    frame = getattr(coroutine, "cr_frame", None)
    module = frame.f_globals.get("__name__") if frame is not None else None
    if frame is None or module not in {"asyncio.tasks", "asyncio.taskgroups"}:
        return []
    names = frame.f_locals
    if names.get("waiter") is waiter:
        return list(names.get("fs", ()))
    group = names.get("self")
    if isinstance(group, asyncio.TaskGroup) and vars(group).get("_on_completed_fut") is waiter:
        return list(vars(group).get("_tasks", ()))
    return []


def _job(context: Context) -> tuple[int, int]:
    return context.task or 0, context.attempt or 0


def _tell(context: Context, objects: frozenset[ObjectId]) -> None:
    awaits = getattr(backend.existing(), "awaits", None)
    if awaits is not None:
        awaits(*_job(context), tuple(sorted(objects)))


def _is_its_own() -> bool:
    """Whether this thread is what runs the task, which else may go on in another."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or thread.name.startswith("gpunb-call")


def _timed(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]] | None:
    """The tasks whose waits a timer may end; None if they are not known."""
    handles = getattr(loop, "_scheduled", None)
    if handles is None:
        return None
    found: set[asyncio.Task[Any]] = set()
    for handle in handles:
        if handle.cancelled():
            continue
        callback = handle._callback  # noqa: SLF001 - there is no public way
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, asyncio.Timeout):
            task = getattr(owner, "_task", None)
            if task is not None:
                found.add(task)
        elif callback is not _sleeps_on and not _is_ours(callback):
            return None
    return found


def _is_ours(callback: Any) -> bool:
    return str(getattr(callback, "__module__", "")).startswith("gpunb.")
