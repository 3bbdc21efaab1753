"""What Ray runs: functions and actor classes that hand on to the worker that this process is."""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any


def execute(head: Any, arguments: Any, *inputs: Any) -> Any:
    """A task with results that come at its end."""
    return _worker().run(head, arguments, inputs)


def stream(head: Any, arguments: Any, *inputs: Any) -> Iterator[Any]:
    """A task with results that come one by one."""
    yield from _worker().run_stream(head, arguments, inputs)


def load() -> int:
    """Load what any work needs, for what comes to this process later; the number of the process."""
    from gpunb.workers import shell

    _worker()
    importlib.import_module("gpunb.workers.cells")
    shell.rehearse()
    return os.getpid()


class Host:
    """An actor whose calls come one after the other, or in threads."""

    def __init__(self, head: Any, arguments: Any, *inputs: Any) -> None:
        _worker().become(head, arguments, inputs)

    def call(self, head: Any, arguments: Any, *inputs: Any) -> Any:
        return _worker().run(head, arguments, inputs)

    def stream(self, head: Any, arguments: Any, *inputs: Any) -> Iterator[Any]:
        yield from _worker().run_stream(head, arguments, inputs)


class AsyncHost:
    """An actor whose calls are coroutines on one event loop."""

    def __init__(self, head: Any, arguments: Any, *inputs: Any) -> None:
        _worker().become(head, arguments, inputs)

    async def call(self, head: Any, arguments: Any, *inputs: Any) -> Any:
        return await _worker().run_async(head, arguments, inputs)

    async def stream(self, head: Any, arguments: Any, *inputs: Any) -> AsyncIterator[Any]:
        async for each in _worker().stream_async(head, arguments, inputs):
            yield each


def key_of(actor: int) -> str:
    """Under which name an actor is told something."""
    return f"actor-{actor}"


def _worker() -> Any:
    from gpunb.runtime.ray import running

    return running.this()
