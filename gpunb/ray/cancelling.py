"""Cancels Ray's tasks without the risk that Ray ends this process.

Ray 2.60 handles the result of a task in two steps, on its thread for input and output: it takes the
task from the list of running ones, and then notes its end. A `ray.cancel` from another thread
between these steps finds a task that neither runs nor has ended, lets it fail, and the second step
then ends the process (a failed check in ``task_manager.cc``). Nothing tells another thread whether
this moment is now. So gpunb cancels on that thread itself, where no step is ever half done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import ray

_WITHIN = 5.0
"""Seconds for which a caller waits until Ray's thread has cancelled. It is later only if that
thread is held up."""


class Canceller:
    """Cancels tasks of the Ray cluster that this process has joined."""

    def __init__(self, ready: Callable[[], Any]) -> None:
        """`ready` returns Ray's reference to an object that is there."""
        self._ready = ready
        self._thread = 0

    def cancel(self, ref: Any, *, force: bool, recursive: bool = True) -> None:
        """Cancel the task with this result. Nothing happens if it is over, or if it is no task's.

        Args:
            ref: Ray's reference to a result, or its generator.
        """
        cancelled = threading.Event()

        def cancel(_: Any = None) -> None:
            self._thread = threading.get_ident()
            # It is no task's, it is over, or the cluster is gone.
            with contextlib.suppress(Exception):
                ray.cancel(ref, force=force, recursive=recursive)
            cancelled.set()

        if threading.get_ident() == self._thread:
            cancel()
            return
        with contextlib.suppress(Exception):  # the cluster is gone
            ready = self._ready()
            ready._on_completed(cancel)  # on Ray's thread, soon
            cancelled.wait(_WITHIN)
