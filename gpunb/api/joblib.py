"""A backend for joblib, and with it for scikit-learn. Importing this module registers it::

import gpunb.joblib
from joblib import parallel_config

with parallel_config("gpunb", num_gpus=0.25):
    search.fit(X, y)
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from joblib import register_parallel_backend
from joblib.parallel import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from gpunb.api.executor import DEVICES, Executor, room
from gpunb.exceptions import TaskError
from gpunb.scheduler.options import Options


class GpunbBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs batches of joblib's calls as tasks.

    ``parallel_config`` and ``Parallel`` take the options of `gpunb.remote`, and ``initializer``
    with ``initargs``, which each process calls before its first batch. A process runs many batches,
    as joblib's own processes do (``max_calls=0``); with ``max_calls=1`` each batch has a fresh
    process. A batch whose process crashes is not repeated, unless ``max_retries`` says so.
    ``n_jobs`` limits the batches that run at once; -1, the default here, is as many as fit on the
    machine. Nested calls run in threads of their process, or as tasks if the inner code asks for
    this backend.
    """

    default_n_jobs = -1
    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    uses_threads = False
    supports_sharedmem = False

    def __init__(self, nesting_level: int | None = None, **options: Any) -> None:
        inner = options.pop("inner_max_num_threads", None)
        options |= options.pop("ray_remote_args", None) or {}  # as Ray's backend takes them
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner)
        self._begin = _beginning(options)
        self._options = options
        self._executor: Executor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """The number of batches that run at the same time."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if multiprocessing.current_process().daemon:
            if n_jobs != 1:
                warnings.warn(
                    "a worker process of multiprocessing cannot have processes of its own: joblib "
                    "does the work in this one (n_jobs=1)",
                    stacklevel=3,
                )
            return 1
        return n_jobs if n_jobs > 0 else max(1, room(self._options) + 1 + n_jobs)

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        prefer: Any = None,
        require: Any = None,
        **options: Any,
    ) -> int:
        """Begin a call of `Parallel`. Returns the number of batches that run at once.

        Raises:
            ValueError, TypeError: options that `gpunb.remote` does not take.
        """
        own = {each: value for each, value in options.items() if each not in _JOBLIB}
        self._begin.update(_beginning(own))
        self._options.update(own)
        Options().updated(self._options).check_not_auto()
        count = self.effective_n_jobs(n_jobs)
        if count == 1 and not any(self._options.get(each) for each in DEVICES):
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        self._open(count)
        return max(count, 2)  # with 1, joblib runs the calls itself, in this process

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Any], object] | None = None
    ) -> Future[Any]:
        """Submit a batch. Returns its future."""
        assert self._executor is not None
        future = self._executor.submit(_run_batch, func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    apply_async = submit
    """The name of `submit` before joblib 1.5."""

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """The results of a batch.

        Raises:
            KeyboardInterrupt: a call raised it; as with joblib's own backends, not a TaskError.
        """
        try:
            return out.result()
        except TaskError as error:
            if isinstance(error.cause, KeyboardInterrupt):
                raise error.cause from error
            raise

    def terminate(self) -> None:
        """End a call of `Parallel`."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Stop all batches, after the error of a call or an interrupt by the user."""
        if self._executor is not None:
            count = self._executor.max_workers
            self._executor.stop()
            self._executor = None
            if ensure_ready:
                self._open(count)

    def _open(self, count: int | None) -> None:
        environment = {} if self.inner_max_num_threads is None else self._prepare_worker_env(1)
        options = {"max_calls": 0, "name": "joblib", **self._options}
        if environment:
            given = options.get("runtime_env") or {}
            variables = {**environment, **given.get("env_vars", {})}
            options["runtime_env"] = {**given, "env_vars": variables}
        self._executor = Executor(count, **self._begin, **options)


def _beginning(options: dict[str, Any]) -> dict[str, Any]:
    """Take the function that each process calls first out of the options, with its arguments."""
    return {each: options.pop(each) for each in ("initializer", "initargs") if each in options}


def _run_batch(batch: Callable[[], Any]) -> Any:
    """Run a batch. A worker that unpickles this function knows the backend: nested calls may use
    its name."""
    return batch()


_JOBLIB = frozenset({"context", "max_nbytes", "mmap_mode", "temp_folder", "verbose"})
"""Options that `Parallel` gives to every backend, about joblib's own way to share arrays."""

register_parallel_backend("gpunb", GpunbBackend)
