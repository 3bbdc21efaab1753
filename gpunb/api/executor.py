"""`Executor`: the standard library's interface to processes, on shares of GPUs."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from gpunb.api.refs import ObjectRef, value_of
from gpunb.api.remote_function import RemoteFunction
from gpunb.exceptions import GpunbError, InfeasibleRequestError
from gpunb.protocol import backend
from gpunb.scheduler.options import Options
from gpunb.system.signals import HEARTBEAT, UNDIVIDED

P = ParamSpec("P")
T = TypeVar("T")

DEVICES = ("num_gpus", "gpu_memory", "accelerator_type")
"""Options that ask for a device."""

_log = logging.getLogger("concurrent.futures")
"""Where the standard library reports errors of callbacks."""


class _Future(concurrent.futures.Future[T]):
    """A future of a task. It can be cancelled until the task begins."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor
        self.task_id: int | None = None
        """The number of the task, as in ``#7``; None until the task is submitted."""

    def _invoke_callbacks(self) -> None:
        """Call all callbacks. `sys.exit()` in one must not end the thread that settles futures."""
        for callback in self._done_callbacks:  # type: ignore[attr-defined]
            try:
                callback(self)
            except (Exception, SystemExit) as error:
                if isinstance(error, SystemExit) and _on_main_thread():
                    raise
                _log.exception("exception calling callback for %r", self)

    def _refresh(self) -> None:
        """Ask whether the task runs now: no message tells the executor when a task begins."""
        if self._state == "PENDING" and self._executor.has_begun(self):
            with self._condition:
                if self._state == "PENDING":
                    self.set_running_or_notify_cancel()

    def running(self) -> bool:
        self._refresh()
        return super().running()

    def cancel(self) -> bool:
        """Keep the task from running. Returns False if it runs already, or is over."""
        self._refresh()
        if not super().cancel():
            return False
        self._executor.withdraw(self)
        with self._condition:
            if self._state == "CANCELLED":  # wait() and as_completed() wait for the next state
                self.set_running_or_notify_cancel()
        return True


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Task(NamedTuple):
    ref: ObjectRef[Any]
    session: backend.Backend

    def cancel(self) -> None:
        with contextlib.suppress(GpunbError):  # the session has ended
            self.session.cancel(self.ref.id, False, True)


class Executor(concurrent.futures.Executor):
    """Run calls in worker processes, each on a share of a GPU if it asks for one:

        with gpunb.Executor(num_gpus=0.5) as executor:
            losses = list(executor.map(train, rates))

    For libraries that take an executor of the standard library. A call that fails, or whose
    process crashes, fails alone; the others and the executor go on.

    Args:
        max_workers: number of calls that run at the same time; default: as many as fit on the
            machine.
        initializer: function that is called once in each process, before its first call.
        initargs: arguments of `initializer`.
        options: options of `gpunb.remote` for each call. With devices each call has a fresh
            process; ``max_calls=0`` keeps processes, with the modules they have imported.
            A call whose process crashes is not repeated, unless ``max_retries`` says so.

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
        self._finished: queue.SimpleQueue[_Future[Any] | None] = queue.SimpleQueue()
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
        checked.check_not_auto()
        self._function: RemoteFunction[..., Any] = RemoteFunction(_call, checked)
        self._has_name = "name" in options
        self._functions: dict[str, RemoteFunction[..., Any]] = {}
        token = next(_TOKENS)
        self._initializer = (token, initializer, initargs) if initializer is not None else None
        self._max_workers = max_workers
        # A call moves from `_waiting` to `_running`, then to `_settling`; `_lock` guards all three.
        self._lock = threading.RLock()
        self._waiting: deque[tuple[_Future[Any], tuple[Any, ...]]] = deque()
        self._running: dict[_Future[Any], _Task] = {}
        self._settling: set[_Future[Any]] = set()
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._thread: threading.Thread | None = None
        _executors.add(self)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> _Future[T]:
        """Submit the call ``fn(*args, **kwargs)``. Returns its future.

        If the function cannot be pickled, its future fails, as in the standard library.

        Raises:
            RuntimeError: after `shutdown`.
            InfeasibleRequestError: this machine can never give what the options ask for.
        """
        future: _Future[T] = _Future(self)
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append((future, (fn, args, kwargs)))
            self._submit_waiting()
        error = future.exception() if future.done() and not future.cancelled() else None
        if isinstance(error, InfeasibleRequestError):
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
            chunksize: number of calls in one task.
            more: arguments of later versions of Python, such as ``buffersize``.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize={chunksize} must be >= 1")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **more)
        chunks = super().map(
            functools.partial(call_each, fn),
            chunked(zip(*iterables, strict=False), chunksize),
            timeout=timeout,
            **more,
        )
        return (value for chunk in chunks for value in chunk)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and wait for the submitted ones.

        Args:
            wait: whether to return only when all calls are over. If False, they go on.
            cancel_futures: whether to cancel the calls that have not begun.
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
            while self._waiting or self._running or self._settling:
                self._idle.wait(HEARTBEAT)  # an interrupt is seen between two waits

    @property
    def max_workers(self) -> int | None:
        """The number of calls that run at the same time; None without limit."""
        return self._max_workers

    def stop(self) -> None:
        """Accept no more calls, cancel those that wait and interrupt those that run."""
        with UNDIVIDED:
            self.shutdown(wait=False, cancel_futures=True)
            for task in list(self._running.values()):
                task.cancel()

    def has_begun(self, future: _Future[Any]) -> bool:
        """Whether the task of a future has begun."""
        task = self._running.get(future)
        facts = task.session.ask("job", task.ref.task_id) if task is not None else None
        return facts is not None and facts["state"] != "queued"

    def withdraw(self, future: _Future[Any]) -> None:
        """Remove the call of a future that was cancelled before its task began."""
        with self._lock:
            task = self._running.pop(future, None)
            if task is None:
                self._waiting = deque(each for each in self._waiting if each[0] is not future)
            self._submit_waiting()
            self._idle.notify_all()
        if task is not None:
            task.cancel()

    def _submit_waiting(self) -> None:
        """Submit waiting calls as tasks, until `max_workers` of them are submitted."""
        limit = self._max_workers
        while self._waiting and (limit is None or len(self._running) < limit):
            future, (fn, args, kwargs) = self._waiting[0]
            with UNDIVIDED:  # but an interrupt stops the pickling of the arguments
                try:
                    ref = self._remote(fn).remote(self._initializer, fn, args, kwargs)
                except BaseException as error:  # pickling an argument may raise anything
                    self._waiting.popleft()
                    future.set_exception(error)
                    self._idle.notify_all()
                    if isinstance(error, KeyboardInterrupt):  # most likely one by the user
                        raise
                    continue
                session = backend.current()
                self._waiting.popleft()
                future.task_id = ref.task_id
                self._running[future] = _Task(ref, session)
                self._start_thread()
                session.notify(ref.id, functools.partial(self._finished.put, future))

    def _remote(self, fn: Any) -> RemoteFunction[..., Any]:
        """The remote function for calls of `fn`, with the name of `fn`."""
        if self._has_name:
            return self._function
        name = _function_name(fn)
        found = self._functions.get(name)
        if found is None:
            if len(self._functions) > 100:
                self._functions.clear()
            found = self._functions[name] = self._function.options(name=name)
        return found

    def _start_thread(self) -> None:
        """Start the thread that settles futures: their callbacks may be slow, or submit calls."""
        if self._thread is None:
            # Registered again, so that it runs before the session's own exit function.
            atexit.unregister(_wait_for_all)
            atexit.register(_wait_for_all)
            self._thread = threading.Thread(
                target=_settle_all,
                args=(self._finished, weakref.ref(self)),
                name="gpunb-executor",
                daemon=True,
            )
            self._thread.start()
            weakref.finalize(self, self._finished.put, None).atexit = False

    def settle(self, future: _Future[Any]) -> None:
        """Give a future the result or error of its task, which is over."""
        with self._lock:
            task = self._running.pop(future, None)
            if task is not None:
                self._settling.add(future)
            self._submit_waiting()
        if task is not None:
            _settle(future, task)
            with self._lock:
                self._settling.discard(future)
                self._idle.notify_all()


def _settle_all(
    finished: queue.SimpleQueue[_Future[Any] | None], executor: weakref.ref[Executor]
) -> None:
    while (future := finished.get()) is not None:
        owner = executor() or future._executor  # noqa: SLF001 - a future keeps its executor
        owner.settle(future)
        del future, owner


def _settle(future: _Future[Any], task: _Task) -> None:
    with future._condition:  # noqa: SLF001 - the lock of the standard library's Future
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
"""In a worker: tokens of the executors whose initializer this process has called."""


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


def _function_name(fn: Any) -> str:
    """The name of a function, inside partials too, for status and messages."""
    while isinstance(fn, functools.partial):
        fn = fn.args[0] if fn.func is call_each else fn.func
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def call_each(fn: Callable[..., T], chunk: list[tuple[Any, ...]]) -> list[T]:
    """The results of ``fn`` for each tuple of arguments."""
    return [fn(*each) for each in chunk]


def chunked(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Lists of at most `size` items each."""
    while chunk := list(itertools.islice(items, size)):
        yield chunk


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


def _wait_for_all() -> None:
    """Finish all calls before the interpreter ends, as the standard library's executors do."""
    for each in list(_executors):
        each.shutdown()


def room(options: Mapping[str, Any]) -> int:
    """The number of tasks with these options that fit on the machine at once."""
    total = backend.current().ask("total")
    gpus = options.get("num_gpus") or 0
    if gpus and not isinstance(gpus, str):  # not "auto"
        devices = total.get("GPU", 0)
        return int(devices * math.floor(1 / gpus) if gpus < 1 else devices // gpus)
    if any(options.get(each) for each in DEVICES):
        return int(total.get("GPU", 0)) or 1
    return int(total.get("CPU", 1) // (options.get("num_cpus") or 1))
