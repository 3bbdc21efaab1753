"""A line of waiting tasks: those of one demand, depth and priority."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from gpunb.scheduler.resources import Demand
from gpunb.scheduler.state import Task

Key: TypeAlias = tuple[Demand, int, int]
"""(demand, depth, priority) of a line"""


def key_of(task: Task) -> Key:
    return task.spec.demand, task.depth, task.spec.priority


class Line:
    """The queued tasks of one demand, depth and priority, first come first served.

    Attributes:
        tasks: begins with a task of this line. Others may have left it; `count` is without them.
        stuck: whether the first task was found not to fit.
        held: whether CPUs that the first task needs are kept for deeper tasks.
        held_since: time since which this is so, or since which one started nevertheless.
        patience: time after which one starts nevertheless.
        cpus: CPUs of the machine that a task needs; none in a bundle, which has its own.
        order: the `rank` of the first task.
        ages_at: time from which the first task has waited long.
        least: as in the `Fit` of the demand.
    """

    __slots__ = (
        "ages_at",
        "count",
        "cpus",
        "demand",
        "depth",
        "held",
        "held_since",
        "least",
        "order",
        "patience",
        "priority",
        "stuck",
        "tasks",
    )

    def __init__(self, key: Key, least: int, patience: float) -> None:
        self.demand, self.depth, self.priority = key
        self.cpus = self.demand.cpus if self.demand.within is None else 0
        self.least = least
        self.tasks: deque[Task] = deque()
        self.count = 0
        self.stuck = False
        self.order = (0.0, 0)
        self.ages_at = math.inf
        self.held = False
        self.held_since = math.inf
        self.patience = patience

    def __iter__(self) -> Iterator[Task]:
        return (task for task in self.tasks if self.has(task))

    def has(self, task: Task) -> bool:
        """Whether the task, which was added once, is still in the line."""
        return task.state == "queued" and task.depth == self.depth
