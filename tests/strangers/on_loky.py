"""A plugin for pytest: the executors of loky are gpunb's."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable
from typing import Any

import loky
import pytest
from loky import process_executor
from loky.backend.context import LokyContext

import gpunb
from gpunb import exceptions


@gpunb.remote(num_cpus=0)
class _Flag:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def call(self, name: str) -> Any:
        found = getattr(self.event, name)()
        return await found if name == "wait" else found


class Event:
    """An event for tasks. Only child processes inherit those of multiprocessing."""

    def __init__(self, _: object = None) -> None:
        self._flag = _Flag.remote()

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda: gpunb.get(self._flag.call.remote(name))


class ProcessPoolExecutor(gpunb.Executor):
    """An executor with the arguments of loky's."""

    _flags = types.SimpleNamespace(broken=None)
    """One call that crashes breaks nothing here."""

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        env: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        options = {"runtime_env": {"env_vars": env}} if env else {}
        super().__init__(max_workers, initializer=initializer, initargs=initargs, **options)

    @property
    def _processes(self) -> Any:
        """A test that looks at loky's processes fails, and nothing else would end its calls."""
        self.stop()
        raise AttributeError("_processes")

    def shutdown(  # type: ignore[override]
        self, wait: bool = True, kill_workers: bool = False, **more: Any
    ) -> None:
        if kill_workers:
            self.stop()
        super().shutdown(wait, **more)


_reusable: ProcessPoolExecutor | None = None


def get_reusable_executor(max_workers: int | None = None, **settings: Any) -> ProcessPoolExecutor:
    """The executor of the last call, if it has so many workers and accepts calls."""
    global _reusable
    given = (max_workers or loky.cpu_count(), settings)
    if _reusable is None or _reusable._closed or _reusable.given != given:
        if _reusable is not None:
            _reusable.shutdown(kill_workers=bool(settings.get("kill_workers")))
        _reusable = ProcessPoolExecutor(given[0], **settings)
        _reusable.given = given
    return _reusable


for _module in (loky, process_executor):
    _module.ProcessPoolExecutor = ProcessPoolExecutor
loky.get_reusable_executor = get_reusable_executor
process_executor.BrokenProcessPool = exceptions.GpunbError
process_executor.TerminatedWorkerError = exceptions.WorkerCrashedError
process_executor.ShutdownExecutorError = (RuntimeError, exceptions.TaskCancelledError)
LokyContext.Event = Event


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    """Leave out the count of child processes: gpunb's processes have another parent."""
    for name, module in list(sys.modules.items()):
        if name.endswith("._executor_mixin"):
            module._check_subprocesses_number = lambda *_, **__: None


def pytest_configure() -> None:
    """Start the session that all tests share, before test modules ask for the number of CPUs."""
    gpunb.init(num_cpus=10, preload=[__name__])  # so that workers have these executors, too


def pytest_unconfigure() -> None:
    gpunb.shutdown()
