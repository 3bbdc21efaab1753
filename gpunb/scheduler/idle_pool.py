"""Idle workers, and the choice of those that end.

An idle worker that holds devices keeps them, so that its next task finds them warm. Its CPUs and
custom resources are free meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import attrgetter

from gpunb.scheduler.feasibility import Reserved
from gpunb.scheduler.groups import group_of
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import UNIT, Allocation, Demand
from gpunb.scheduler.state import Worker
from gpunb.scheduler.tasks import ReuseKey

_since = attrgetter("since")


class IdlePool:
    """The idle workers by the key of the tasks that they may run, the longest idle ones first.

    `warm` counts the workers that hold devices, `cold` the others.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._groups: dict[ReuseKey, list[Worker]] = {}
        self._most_cold = max(1, capacity.machine.cpus // UNIT)
        self.warm = 0
        self.cold = 0

    def __iter__(self) -> Iterator[Worker]:
        return chain.from_iterable(self._groups.values())

    def add(self, worker: Worker) -> None:
        assert worker.key is not None
        self._groups.setdefault(worker.key, []).append(worker)
        self._count(worker, +1)

    def remove(self, worker: Worker) -> None:
        assert worker.key is not None
        group = self._groups[worker.key]
        group.remove(worker)
        if not group:
            del self._groups[worker.key]
        self._count(worker, -1)

    def _count(self, worker: Worker, change: int) -> None:
        if worker.allocation.shares:
            self.warm += change
        else:
            self.cold += change

    def find(self, key: ReuseKey, avoid: Collection[int]) -> Worker | None:
        """The last used worker for this key that holds none of the devices to avoid."""
        for worker in reversed(self._groups.get(key, ())):
            if not avoid or not self._holds_any(worker, avoid):
                return worker
        return None

    def _holds_any(self, worker: Worker, positions: Collection[int]) -> bool:
        where = self._capacity.position
        return any(where[key] in positions for key, _ in worker.allocation.shares)

    def surplus(self, more: int) -> Worker | None:
        """The longest idle worker without devices, if there are more of these than CPUs, by more
        than this number."""
        if self.cold <= self._most_cold + more:
            return None
        return min((worker for worker in self if not worker.allocation.shares), key=_since)

    def in_the_way(
        self, demand: Demand, reserved: Reserved, leaving: Iterable[Allocation]
    ) -> list[Worker]:
        """The warm workers that must end before the demand fits.

        Empty if their end does not help, or if the allocations that are `leaving` make room enough.
        """
        group = group_of(demand)
        there = (each for each in self if each.allocation.shares)
        warm = sorted(
            (each for each in there if group_of(each.allocation) == group),
            key=lambda worker: (not worker.prepared, worker.since),
        )
        hope = self._capacity.copy()
        for allocation in leaving:
            hope.give(allocation)
        if hope.place(demand, reserved):
            return []
        for count, worker in enumerate(warm, start=1):
            hope.give(worker.allocation)
            place = hope.place(demand, reserved)
            if place:
                wanted = {hope.position[key] for key, _ in place.shares}
                # If none holds a part of those, they held too much together (max_gpus).
                return [e for e in warm[:count] if self._holds_any(e, wanted)] or warm[:count]
        return []
