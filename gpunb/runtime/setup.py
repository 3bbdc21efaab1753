"""What a new worker is told of its devices and of the kernel's surroundings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunb.core.resources import Allocation, Device, Machine
from gpunb.workers.messages import Setup

EXPOSE = "GPUNB_EXPOSE_GPUS_ON_ZERO"

Pin = Callable[[Sequence[Device]], Mapping[str, str]]


class Setups:
    """Makes the `Setup` of each new worker."""

    def __init__(self, machine: Machine, pin: Pin) -> None:
        self._devices = {device.key: device for device in machine.devices}
        self._pin = pin

    def ids(self, allocation: Allocation) -> tuple[int | str, ...]:
        """The ids a user sees, ascending; devices are in the machine's order already."""
        return tuple([self._devices[key].id for key, _ in allocation.shares])

    def of(
        self,
        allocation: Allocation,
        extra: Sequence[tuple[str, str]],
        base: Mapping[str, str],
    ) -> tuple[tuple[Any, ...], tuple[int | str, ...]]:
        """The setup as a plain tuple, and the ids. `base` is the environment it starts from."""
        environment: dict[str, str | None] = dict(_changes(base))
        devices = [self._devices[key] for key, _ in allocation.shares]
        if devices or os.environ.get(EXPOSE) != "1":
            environment.update(self._pin(devices))
        environment.update(extra)
        ids = self.ids(allocation)
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None
        path = [str(each) for each in sys.path]
        return tuple(Setup(environment, ids, directory, path, list(sys.argv))), ids


def _changes(base: Mapping[str, str]) -> dict[str, str | None]:
    """What the kernel's environment has become since a worker's was copied from it."""
    now = os.environ
    if len(now) == len(base) and all(now.get(name) == value for name, value in base.items()):
        return {}
    changed: dict[str, str | None] = {
        name: value for name, value in now.items() if base.get(name) != value
    }
    changed.update(dict.fromkeys(base.keys() - now.keys()))
    return changed
