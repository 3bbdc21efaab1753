"""The functions and actor classes that Ray runs; they call the task runner of this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any


def execute(sent: Any, *inputs: Any) -> Any:
    """A task with results that come at its end."""
    return _worker().run(sent, inputs)


def stream(sent: Any, *inputs: Any) -> Iterator[Any]:
    """A task with results that come one by one."""
    yield from _worker().run_stream(sent, inputs)


def load() -> int:
    """Load what any work needs, for what comes to this process later; the number of the process."""
    from gpunb.worker.cell import shell

    _worker()
    importlib.import_module("gpunb.worker.cell.run")
    shell.rehearse()
    return os.getpid()


class ActorHost:
    """An actor whose calls come one after the other, or in threads."""

    def __init__(self, sent: Any, *inputs: Any) -> None:
        _worker().become(sent, inputs)

    def call(self, sent: Any, *inputs: Any) -> Any:
        return _worker().run(sent, inputs)

    def stream(self, sent: Any, *inputs: Any) -> Iterator[Any]:
        yield from _worker().run_stream(sent, inputs)


class AsyncActorHost:
    """An actor whose calls are coroutines on one event loop."""

    def __init__(self, sent: Any, *inputs: Any) -> None:
        _worker().become(sent, inputs)

    async def call(self, sent: Any, *inputs: Any) -> Any:
        return await _worker().run_async(sent, inputs)

    async def stream(self, sent: Any, *inputs: Any) -> AsyncIterator[Any]:
        async for each in _worker().stream_async(sent, inputs):
            yield each


def _worker() -> Any:
    # The one cycle of imports: Ray's workers import this module by name, and need the runner only
    # when work comes. The runner submits tasks itself, and names these functions for that.
    from gpunb.ray import task_runner

    return task_runner.this()
