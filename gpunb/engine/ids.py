"""Ids of tasks and of objects that were put.

They go on in the next session of a process: a reference of an earlier one never means something
else. A head process and the kernels that attach to it tell each other how far theirs have come.
"""

from __future__ import annotations

import itertools

_tasks = itertools.count(1)
_puts = itertools.count(1)


def task() -> int:
    """The number of a new task; from any thread."""
    return next(_tasks)


def put() -> int:
    """The number of a new object that was put; from any thread."""
    return next(_puts)


def reached() -> tuple[int, int]:
    """How far the numbers of tasks and of objects have come."""
    return task(), put()


def go_on(tasks: int, puts: int) -> None:
    """Give no number any more that is not beyond these."""
    global _tasks, _puts
    _tasks = itertools.count(max(task(), tasks) + 1)
    _puts = itertools.count(max(put(), puts) + 1)
