"""`Executor`: the standard library's interface to processes, on shares of GPUs."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

from gpunb import backend
from gpunb.core.options import Options
from gpunb.exceptions import GpunbError, InfeasibleRequestError
from gpunb.refs import ObjectRef, value_of
from gpunb.remote_function import RemoteFunction
from gpunb.signals import UNDIVIDED

P = ParamSpec("P")
T = TypeVar("T")

_FOREVER = 3600.0
"""Seconds of one wait; an interrupt of the main thread is heard in between."""


class _Future(concurrent.futures.Future[T]):
    """A future that knows its task: it can be cancelled until that begins."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor
        self.task_id: int | None = None
        """The number of the task, as in ``#7``; None until it is handed in."""

    def _look(self) -> None:
        """Take over what has become of the task, which nobody tells before its end."""
        if self._state == "PENDING" and self._executor.runs(self):
            with self._condition:
                if self._state == "PENDING":
                    self.set_running_or_notify_cancel()

    def running(self) -> bool:
        self._look()
        return super().running()

    def cancel(self) -> bool:
        """Keep the task from running. False if it runs already, or is over."""
        self._look()
        if not super().cancel():
            return False
        self._executor.forget(self)
        return True


class _Task(NamedTuple):
    ref: ObjectRef[Any]
    session: backend.Backend


class Executor(concurrent.futures.Executor):
    """Run calls in worker processes, each on a share of a GPU if it asks for one:

        with gpunb.Executor(num_gpus=0.5) as executor:
            losses = list(executor.map(train, rates))

    For libraries that take an executor of the standard library. A call that fails, or whose
    process crashes, fails alone; the others and the executor go on.

    Args:
        max_workers: calls that run at the same time; by default as many as the machine has room.
        initializer: called once in each process, before its first call.
        initargs: what it is called with.
        options: of `gpunb.remote`, for each call. With devices each call has a fresh process;
            ``max_calls=0`` keeps processes, and with them what they have imported and loaded.
            A call whose process crashes is not made again, unless ``max_retries`` says so.

    Raises:
        ValueError, TypeError: unknown options or bad values.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        self._ended: queue.SimpleQueue[_Future[Any] | None] = queue.SimpleQueue()
        if max_workers is not None and (
            isinstance(max_workers, bool) or not isinstance(max_workers, int)
        ):
            raise TypeError(f"max_workers must be a whole number, not {max_workers!r}")
        if max_workers is not None and max_workers <= 0:
            raise ValueError(f"max_workers={max_workers} must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be callable, and {initializer!r} is not")
        if "num_returns" in options:
            raise ValueError("num_returns is not for an executor: a future has one result")
        # As in the standard library: a call may have had effects before its process crashed.
        checked = Options().updated({"max_retries": 0, **options})
        self._function: RemoteFunction[..., Any] = RemoteFunction(_call, checked)
        self._named = "name" in options
        self._functions: dict[str, RemoteFunction[..., Any]] = {}
        token = next(_TOKENS)
        self._initializer = (token, initializer, initargs) if initializer is not None else None
        self._most = max_workers
        self._lock = threading.RLock()
        self._waiting: deque[tuple[_Future[Any], tuple[Any, ...]]] = deque()
        self._running: dict[_Future[Any], _Task] = {}
        self._ending: set[_Future[Any]] = set()
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None
        _executors.add(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> _Future[T]:
        """Have ``fn(*args, **kwargs)`` called.

        A function that cannot be pickled fails its future, as in the standard library.

        Raises:
            RuntimeError: after `shutdown`.
            InfeasibleRequestError: this machine can never give what the options ask for.
        """
        future: _Future[T] = _Future(self)
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append((future, (fn, args, kwargs)))
            self._hand_in()
        if future.done() and isinstance(error := future.exception(), InfeasibleRequestError):
            raise error
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **more: Any,
    ) -> Iterator[T]:
        """The results of ``fn`` on each tuple of the iterables' items, in order.

        Args:
            timeout: seconds from now until the last result; then TimeoutError is raised.
            chunksize: calls that one process makes for one task.
            more: what later versions of Python know, such as ``buffersize``.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize={chunksize} must be >= 1")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **more)
        chunks = super().map(
            functools.partial(_call_each, fn),
            _chunks(zip(*iterables, strict=False), chunksize),
            timeout=timeout,
            **more,
        )
        return _flat(chunks)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and wait for those that there are.

        Args:
            wait: return when all are over; else at once, and they go on.
            cancel_futures: cancel those that have not begun.
        """
        with self._lock:
            self._closed = True
            known = [each for each, _ in self._waiting] + list(self._running)
        if cancel_futures:
            for each in known:
                each.cancel()
        if not wait:
            return
        with self._lock:
            while self._waiting or self._running or self._ending:
                self._idle.wait(_FOREVER)

    @property
    def max_workers(self) -> int | None:
        """Calls that run at the same time, if that is limited."""
        return self._most

    def stop(self) -> None:
        """Take no more calls, cancel those that wait and interrupt those that run."""
        self.shutdown(wait=False, cancel_futures=True)
        for task in list(self._running.values()):
            with contextlib.suppress(GpunbError):  # the session has ended
                task.session.cancel(task.ref.id, False, True)

    def runs(self, future: _Future[Any]) -> bool:
        """Whether the call of a future has begun."""
        task = self._running.get(future)
        facts = task.session.ask("job", task.ref.task_id) if task is not None else None
        return facts is not None and facts["state"] != "queued"

    def forget(self, future: _Future[Any]) -> None:
        """A future was cancelled before its call began."""
        with self._lock:
            task = self._running.pop(future, None)
            if task is None:
                self._waiting = deque(each for each in self._waiting if each[0] is not future)
            self._hand_in()
            self._idle.notify_all()
        if task is not None:
            with contextlib.suppress(GpunbError):  # the session has ended
                task.session.cancel(task.ref.id, False, True)

    def _hand_in(self) -> None:
        """Hand calls in, as long as there is room for them."""
        while self._waiting and (self._most is None or len(self._running) < self._most):
            future, (fn, args, kwargs) = self._waiting[0]
            try:
                ref = self._remote(fn).remote(self._initializer, fn, args, kwargs)
            except Exception as error:
                self._waiting.popleft()
                future.set_exception(error)
                self._idle.notify_all()
                continue
            session = backend.current()
            with UNDIVIDED:
                self._waiting.popleft()
                future.task_id = ref.task_id
                self._running[future] = _Task(ref, session)
                self._listen()
                session.notify(ref.id, functools.partial(self._ended.put, future))

    def _remote(self, fn: Any) -> RemoteFunction[..., Any]:
        """The function that calls `fn`, under its name."""
        if self._named:
            return self._function
        name = _name(fn)
        found = self._functions.get(name)
        if found is None:
            if len(self._functions) > 100:
                self._functions.clear()
            found = self._functions[name] = self._function.options(name=name)
        return found

    def _listen(self) -> None:
        """Have a thread that settles futures: their callbacks may take long, or submit more."""
        if self._thread is None:
            # Once more, so that it comes before the end of the session.
            atexit.unregister(_wait_for_all)
            atexit.register(_wait_for_all)
            self._thread = threading.Thread(
                target=_settle_all,
                args=(self._ended, weakref.ref(self)),
                name="gpunb-executor",
                daemon=True,
            )
            self._thread.start()

    def settle(self, future: _Future[Any]) -> None:
        """The task of a future is over."""
        with self._lock:
            task = self._running.pop(future, None)
            if task is not None:
                self._ending.add(future)
            self._hand_in()
        if task is not None:
            _settle(future, task)
            with self._lock:
                self._ending.discard(future)
                self._idle.notify_all()

    def __del__(self) -> None:
        self._ended.put(None)


def _settle_all(
    ended: queue.SimpleQueue[_Future[Any] | None], executor: weakref.ref[Executor]
) -> None:
    while (future := ended.get()) is not None:
        owner = executor() or future._executor  # noqa: SLF001 - it keeps what it belongs to
        owner.settle(future)
        del future, owner


def _settle(future: _Future[Any], task: _Task) -> None:
    with future._condition:  # noqa: SLF001 - a future's own
        if future._state == "PENDING" and not future.set_running_or_notify_cancel():  # noqa: SLF001
            return
    try:
        value = value_of(task.session.fetch([task.ref.id], 0)[0])
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)


_TOKENS = itertools.count()

_initialized: set[int] = set()
"""In a worker: the executors whose initializer was called here."""


def _call(
    initializer: tuple[int, Callable[..., object], tuple[Any, ...]] | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if initializer is not None:
        token, begin, values = initializer
        if token not in _initialized:
            begin(*values)
            _initialized.add(token)
    return fn(*args, **kwargs)


def _name(fn: Any) -> str:
    """What a call is shown as."""
    while isinstance(fn, functools.partial):
        fn = fn.args[0] if fn.func is _call_each else fn.func
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def _call_each(fn: Callable[..., T], chunk: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*each) for each in chunk]


def _chunks(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def _flat(chunks: Iterator[list[T]]) -> Iterator[T]:
    for chunk in chunks:
        yield from chunk


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def _wait_for_all() -> None:
    """As the standard library's: what was handed in is done before the interpreter ends."""
    for each in list(_executors):
        each.shutdown()
