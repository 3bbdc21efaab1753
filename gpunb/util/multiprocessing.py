"""`Pool`: the interface of `multiprocessing.Pool`, on gpunb's workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, as_completed, wait
from multiprocessing import TimeoutError
from typing import Any

from gpunb.api.executor import Executor, call_each, chunked
from gpunb.exceptions import TaskCancelledError
from gpunb.protocol import backend

__all__ = ["AsyncResult", "Pool", "TimeoutError"]


class AsyncResult:
    """The result of ``apply_async`` and ``map_async``: one value, or a list of them."""

    def __init__(
        self, futures: list[Future[Any]], single: bool, callback: Any, error_callback: Any
    ) -> None:
        self._futures = futures
        self._single = single
        self._unfinished = len(futures)
        self._callbacks = callback, error_callback
        for each in futures:
            each.add_done_callback(self._on_done)
        if not futures and callback is not None:
            callback([])

    def get(self, timeout: float | None = None) -> Any:
        """The value, or the list of values. Waits for them.

        Raises:
            TimeoutError: multiprocessing's; a call was not over within `timeout` seconds.
        """
        self.wait(timeout)
        if not self.ready():
            raise TimeoutError
        if (error := self._error()) is not None:
            raise error
        values = [each.result() for each in self._futures]
        return values[0] if self._single else values

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all calls are over, at most `timeout` seconds."""
        wait(self._futures, timeout)

    def ready(self) -> bool:
        """Whether all calls are over."""
        return all(each.done() for each in self._futures)

    def successful(self) -> bool:
        """Whether no call has failed.

        Raises:
            ValueError: a call is not over.
        """
        if not self.ready():
            raise ValueError(f"{self!r} is not ready")
        return self._error() is None

    def _error(self) -> BaseException | None:
        """The error of the first call that has failed, or was cancelled."""
        for each in self._futures:
            if each.cancelled():
                return TaskCancelledError("the call was cancelled before it began")
            if (error := each.exception()) is not None:
                return error
        return None

    def _on_done(self, _: Future[Any]) -> None:
        self._unfinished -= 1
        if self._unfinished:
            return
        callback, error_callback = self._callbacks
        failed = self._error()
        if failed is not None and error_callback is not None:
            error_callback(failed)
        elif failed is None and callback is not None:
            callback(self.get())


class Pool:
    """A pool of worker processes with the interface of `multiprocessing.Pool`.

    Args:
        processes: number of calls at the same time; default: the number of CPUs.
        initializer: called in each process before its first call, with `initargs`.
        maxtasksperchild: number of calls after which a process is replaced.
        options: options of `gpunb.remote` for each call, or a dict of them as ``ray_remote_args``.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        context: object = None,
        **options: Any,
    ) -> None:
        del context  # a start method; here the session has one
        options.pop("ray_address", None)
        options = {**(options.pop("ray_remote_args", None) or {}), **options}
        if maxtasksperchild is not None:
            options["max_calls"] = maxtasksperchild
        self._processes = processes or max(1, int(backend.current().ask("total").get("CPU", 1)))
        self._executor = Executor(
            self._processes, initializer=initializer, initargs=tuple(initargs), **options
        )
        self._closed = False

    def apply(self, func: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """The result of a call of the function. Waits for it."""
        return self.apply_async(func, args, kwargs).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        callback: Any = None,
        error_callback: Any = None,
    ) -> AsyncResult:
        """Submit a call of the function. Returns its `AsyncResult`."""
        future = self._submit(func, *args, **(kwargs or {}))
        return AsyncResult([future], True, callback, error_callback)

    def map(self, func: Any, iterable: Iterable[Any], chunksize: int | None = None) -> list[Any]:
        """The results of the function for each item, in order."""
        return list(self.imap(func, list(iterable), chunksize))

    def map_async(
        self,
        func: Any,
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Any = None,
        error_callback: Any = None,
    ) -> AsyncResult:
        """As `map`, but returns an `AsyncResult` at once."""
        futures = [self._submit(func, each) for each in iterable]
        return AsyncResult(futures, False, callback, error_callback)

    def starmap(self, func: Any, iterable: Iterable[Any], chunksize: int | None = None) -> Any:
        """As `map`; each item is the tuple of the function's arguments."""
        return self.map(functools.partial(_spread, func), iterable, chunksize)

    def starmap_async(
        self,
        func: Any,
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Any = None,
        error_callback: Any = None,
    ) -> AsyncResult:
        """As `starmap`, but returns an `AsyncResult` at once."""
        spread = functools.partial(_spread, func)
        return self.map_async(spread, iterable, chunksize, callback, error_callback)

    def imap(self, func: Any, iterable: Iterable[Any], chunksize: int | None = 1) -> Iterator[Any]:
        """As `map`, but returns an iterator over the results."""
        self._check_open()
        items = list(iterable)
        size = chunksize or max(1, len(items) // (4 * self._processes))
        return self._executor.map(func, items, chunksize=size)

    def imap_unordered(
        self, func: Any, iterable: Iterable[Any], chunksize: int | None = 1
    ) -> Iterator[Any]:
        """As `imap`, in the order in which the results are ready."""
        chunks = chunked(zip(list(iterable)), chunksize or 1)
        futures = [self._submit(call_each, func, chunk) for chunk in chunks]
        return (value for each in as_completed(futures) for value in each.result())

    def close(self) -> None:
        """Accept no more calls."""
        self._closed = True
        self._executor.shutdown(wait=False)

    def terminate(self) -> None:
        """Accept no more calls, and stop the submitted ones."""
        self._closed = True
        self._executor.stop()

    def join(self) -> None:
        """Wait until all submitted calls are over.

        Raises:
            ValueError: the pool was neither closed nor terminated.
        """
        if not self._closed:
            raise ValueError("the pool is still running: close or terminate it first")
        self._executor.shutdown()

    def __enter__(self) -> Pool:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def _submit(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        self._check_open()
        return self._executor.submit(func, *args, **kwargs)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the pool takes no calls any more: it was closed")


def _spread(func: Callable[..., Any], args: Iterable[Any]) -> Any:
    return func(*args)
