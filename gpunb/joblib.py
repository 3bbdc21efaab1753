"""A backend for joblib, and with it for scikit-learn. Importing this registers it::

import gpunb.joblib
from joblib import parallel_config

with parallel_config("gpunb", num_gpus=0.25):
    search.fit(X, y)
"""

from __future__ import annotations

import math
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

from gpunb import backend
from gpunb.executor import Executor


class GpunbBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs batches of joblib's calls as tasks.

    Options are those of `gpunb.remote`, given to ``parallel_config`` or ``Parallel``. Processes are
    kept from one batch to the next, as joblib's own are (``max_calls=0``); ``max_calls=1`` makes a
    fresh one for each. A batch whose process crashes is not made again, unless ``max_retries``
    says so. ``n_jobs`` limits the batches that run at once; -1 (the default here)
    stands for as many as there is room for. Calls within calls run in threads of their process, or
    as tasks of their own where the inner code asks for this backend.
    """

    default_n_jobs = -1
    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    uses_threads = False
    supports_sharedmem = False

    def __init__(self, nesting_level: int | None = None, **options: Any) -> None:
        inner = options.pop("inner_max_num_threads", None)
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner)
        self._options = options
        self._executor: Executor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many batches run at the same time."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, self._room() + 1 + n_jobs)

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        prefer: Any = None,
        require: Any = None,
        **options: Any,
    ) -> int:
        """Begin a call of `Parallel`.

        Raises:
            ValueError, TypeError: options that `gpunb.remote` does not take.
        """
        own = {each: value for each, value in options.items() if each not in _JOBLIB}
        self._options.update(own)
        count = self.effective_n_jobs(n_jobs)
        if count == 1 and not any(self._options.get(each) for each in _DEVICES):
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        self._open(count)
        return max(count, 2)  # joblib itself, and in this process, does what has one job

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Any], object] | None = None
    ) -> Future[Any]:
        """Run a batch."""
        assert self._executor is not None
        future = self._executor.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    apply_async = submit
    """Its name before joblib 1.5."""

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """The results of a batch."""
        return out.result()

    def terminate(self) -> None:
        """End a call of `Parallel`."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Stop what runs, because one call failed or the user interrupted."""
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
        self._executor = Executor(count, **options)

    def _room(self) -> int:
        """How many batches the machine has room for."""
        total = backend.current().ask("total")
        gpus = self._options.get("num_gpus") or 0
        if gpus:
            devices = total.get("GPU", 0)
            return int(devices * math.floor(1 / gpus) if gpus < 1 else devices // gpus)
        if any(self._options.get(each) for each in _DEVICES):
            return int(total.get("GPU", 0)) or 1
        return int(total.get("CPU", 1) // (self._options.get("num_cpus") or 1))


_JOBLIB = frozenset({"context", "max_nbytes", "mmap_mode", "temp_folder", "verbose"})
"""What `Parallel` tells every backend of the files through which joblib's own share arrays."""

_DEVICES = ("num_gpus", "gpu_memory", "accelerator_type")

register_parallel_backend("gpunb", GpunbBackend)
