"""What a worker is told of its devices and of the kernel's surroundings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpunb.core.resources import UNIT, Allocation, Device, Machine
from gpunb.workers import threads
from gpunb.workers.messages import Setup

EXPOSE = "GPUNB_EXPOSE_GPUS_ON_ZERO"

Pin = Callable[[Sequence[Device]], Mapping[str, str]]


class Surroundings(NamedTuple):
    """What of the kernel's process its workers share; a worker is told again when it changes."""

    environment: Mapping[str, str]
    directory: str | None
    path: list[str]
    argv: list[str]


class Setups:
    """Makes the `Setup` of each worker."""

    def __init__(self, machine: Machine, pin: Pin) -> None:
        self._devices = {device.key: device for device in machine.devices}
        self._cpus = machine.cpus
        self._pin = pin
        self._seen: tuple[Any, ...] = ()
        self._now = Surroundings({}, None, [], [])
        self._changes: tuple[object, object, dict[str, str | None]] = (None, None, {})

    def ids(self, allocation: Allocation) -> tuple[int | str, ...]:
        """The ids a user sees, ascending; devices are in the machine's order already."""
        return tuple([self._devices[key].id for key, _ in allocation.shares])

    def now(self) -> Surroundings:
        """The surroundings: the same object as long as nothing has changed, because every task
        asks."""
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None
        # The dict inside, where there is one: comparing the mapping itself takes ten times as long.
        environment = getattr(os.environ, "_data", os.environ)
        seen = (environment, directory, sys.path, sys.argv)
        if seen != self._seen:
            self._seen = (dict(environment), directory, list(sys.path), list(sys.argv))
            path = [str(each) for each in sys.path]
            self._now = Surroundings(dict(os.environ), directory, path, list(sys.argv))
        return self._now

    def of(
        self,
        allocation: Allocation,
        extra: Sequence[tuple[str, str]],
        base: Mapping[str, str],
        now: Surroundings,
    ) -> tuple[Any, ...]:
        """The setup as a plain tuple. `base` is the environment as the worker knows it."""
        environment = dict(self._changed(base, now.environment))
        devices = [self._devices[key] for key, _ in allocation.shares]
        if devices or now.environment.get(EXPOSE) != "1":
            environment.update(self._pin(devices))
        if not any(name in now.environment for name in threads.VARIABLES):
            count = str(self._threads(allocation))
            environment.update((name, count) for name in threads.VARIABLES)
        environment.update(extra)
        ids = self.ids(allocation)
        return tuple(Setup(environment, ids, now.directory, now.path, now.argv))

    def _threads(self, allocation: Allocation) -> int:
        """The cores that fall to a worker: those it asked for, or else its part of the devices'.

        Numerical libraries would start a thread for each core in each worker.
        """
        cpus = allocation.cpus
        if not cpus:
            share = sum(units for _, units in allocation.shares)
            cpus = self._cpus * share // (UNIT * max(1, len(self._devices)))
        return max(1, cpus // UNIT)

    def _changed(self, base: Mapping[str, str], now: Mapping[str, str]) -> Mapping[str, str | None]:
        """What the environment has become since `base`; None stands for what is gone."""
        before, after, changes = self._changes
        if before is not base or after is not now:
            changes = {name: value for name, value in now.items() if base.get(name) != value}
            changes.update(dict.fromkeys(base.keys() - now.keys()))
            self._changes = base, now, changes
        return changes
