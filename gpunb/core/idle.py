"""Workers that wait for more work, and which of them to let go.

One that holds devices keeps them, so that its next task finds them warm; its CPUs and custom
resources are free meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from gpunb.core.placement import Capacity, Kept
from gpunb.core.records import Worker
from gpunb.core.resources import UNIT, Allocation, Demand
from gpunb.core.tasks import ReuseKey


class Idle:
    """The idle workers by what they may run, in each group the longest idle first.

    `warm` counts those that hold devices, `cold` the others.
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
        """The one for this key that was used last and holds none of the devices to avoid."""
        for worker in reversed(self._groups.get(key, ())):
            if not avoid or not self._holds_any(worker, avoid):
                return worker
        return None

    def _holds_any(self, worker: Worker, positions: Collection[int]) -> bool:
        where = self._capacity.position
        return any(where[key] in positions for key, _ in worker.allocation.shares)

    def surplus(self) -> Worker | None:
        """One to let go because there are more without devices than CPUs to run them."""
        if self.cold <= self._most_cold:
            return None
        return min((worker for worker in self if not worker.allocation.shares), key=_since)

    def idle_since(self) -> float | None:
        """Since when the longest idle one is idle."""
        return min((worker.since for worker in self), default=None)

    def in_the_way(self, demand: Demand, kept: Kept, leaving: Iterable[Allocation]) -> list[Worker]:
        """The warm workers that have to go before the demand fits; none if that does not help,
        or if what is leaving anyway makes room enough."""
        warm = sorted((worker for worker in self if worker.allocation.shares), key=_since)
        hope = self._capacity.copy()
        for allocation in leaving:
            hope.give(allocation)
        if hope.place(demand, kept):
            return []
        for count, worker in enumerate(warm, start=1):
            hope.give(worker.allocation)
            place = hope.place(demand, kept)
            if place:
                wanted = {hope.position[key] for key, _ in place.shares}
                # If none holds a part of those, it was too much that they hold together.
                return [e for e in warm[:count] if self._holds_any(e, wanted)] or warm[:count]
        return []


def _since(worker: Worker) -> float:
    return worker.since
