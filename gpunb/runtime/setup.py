"""What a worker is told of its devices and of the kernel's surroundings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpunb.core.resources import GPU, UNIT, Allocation, Device, Machine
from gpunb.core.shares import pool
from gpunb.workers import threads
from gpunb.workers.messages import Setup

EXPOSE = "GPUNB_EXPOSE_GPUS_ON_ZERO"

Pin = Callable[[Sequence[Device]], Mapping[str, str]]
Sharing = Callable[[Device, int], Mapping[str, str]]


class Surroundings(NamedTuple):
    """What of the kernel's process its workers share; a worker is told again when it changes."""

    environment: Mapping[str, str]
    directory: str | None
    path: list[str]
    argv: list[str]


class Present:
    """The surroundings of this process, as they are now."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._now = Surroundings({}, None, [], [])

    def now(self) -> Surroundings:
        """The same object as long as nothing has changed, because every task asks."""
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None
        # The dict inside, where there is one: comparing the mapping itself takes ten times as long.
        environment = getattr(os.environ, "_data", os.environ)
        seen = (environment, directory, sys.path, sys.argv)
        if seen != self._seen:
            seen = (dict(environment), directory, list(sys.path), list(sys.argv))
            path = [str(each) for each in sys.path]
            self._now = Surroundings(dict(os.environ), directory, path, list(sys.argv))
            self._seen = seen  # the last, as several threads may ask
        return self._now


def others(machine: Machine) -> tuple[str, ...]:
    """The kinds of devices of the machine that are no GPUs."""
    kinds = dict.fromkeys(device.resource for device in machine.devices)
    return tuple(kind for kind in kinds if kind != GPU)


class Setups:
    """Makes the `Setup` of each worker."""

    def __init__(
        self,
        machine: Machine,
        pin: Pin,
        *,
        caps: bool = True,
        reports: float = 0.0,
        sharing: Sharing | None = None,
    ) -> None:
        """
        Args:
            caps: frameworks are told to keep to a worker's share.
            reports: as in `Setup`.
            sharing: more variables for a worker that has a share of a device.
        """
        self._caps = caps
        self._reports = reports
        self._sharing = sharing
        self._devices = {device.key: device for device in machine.devices}
        self._others = others(machine)
        self._cpus = machine.cpus
        self._pin = pin
        self._present = Present()
        self._changes: tuple[object, object, dict[str, str | None]] = (None, None, {})

    def ids(self, allocation: Allocation) -> tuple[int | str, ...]:
        """The ids of its GPUs that a user sees; devices are in the machine's order already."""
        devices = [self._devices[key] for key, _ in allocation.shares]
        return tuple([device.id for device in devices if device.resource == GPU])

    def now(self) -> Surroundings:
        """The surroundings of this process."""
        return self._present.now()

    def of(
        self,
        allocation: Allocation,
        extra: Sequence[tuple[str, str]],
        base: Mapping[str, str],
        now: Surroundings,
        *,
        caps: bool = True,
    ) -> tuple[Any, ...]:
        """The setup as a plain tuple. `base` is the environment as the worker knows it."""
        environment = dict(self._changed(base, now.environment))
        devices = [self._devices[key] for key, _ in allocation.shares]
        if not any(name in now.environment for name in threads.VARIABLES):
            count = str(self._threads(allocation))
            environment.update((name, count) for name in threads.VARIABLES)
        cap = None
        if len(devices) == 1 and (units := allocation.shares[0][1]) < UNIT:
            cap = pool(units, devices[0].memory) if caps and self._caps else None
            if self._sharing is not None:
                environment.update(self._sharing(devices[0], units))
        environment.update(extra)
        if devices or now.environment.get(EXPOSE) != "1":
            environment.update(self._pin(devices))  # the last: no variable of a task unpins it
        ids = self.ids(allocation)
        reports = self._reports if devices else 0.0
        held = tuple(
            (kind, tuple(device.id for device in devices if device.resource == kind))
            for kind in self._others
        )
        return tuple(Setup(environment, ids, now.directory, now.path, now.argv, cap, reports, held))

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
