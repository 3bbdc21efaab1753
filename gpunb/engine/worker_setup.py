"""The environment of a worker: its devices, its variables and its directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpunb.protocol.backend import VARIABLES
from gpunb.protocol.messages import THREAD_VARIABLES, UNPINNED, Setup
from gpunb.protocol.verbs import Surroundings
from gpunb.scheduler.resources import GPU, UNIT, Allocation, Device, Machine
from gpunb.scheduler.shares import pool

EXPOSE = "GPUNB_EXPOSE_GPUS_ON_ZERO"

LEFT = "RAY_EXPERIMENTAL_NOSET_"
"""Beginning of the names of variables, as in Ray, that leave a variable of devices as it is."""

Sharing = Callable[[Device, int], Mapping[str, str]]


class Pin(Protocol):
    """As `pin_environment`."""

    def __call__(
        self, devices: Sequence[Device], *, ordered: bool = False
    ) -> Mapping[str, str]: ...


class Present:
    """The surroundings of this process now, with the variables that its session adds."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._now = Surroundings({}, None, [], [])

    def now(self) -> Surroundings:
        """Return the surroundings. While nothing has changed it is the same object, because each
        task needs it."""
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None
        # The dict inside, where there is one: comparing the mapping itself takes ten times as long.
        environment = getattr(os.environ, "_data", os.environ)
        seen = (environment, VARIABLES, directory, sys.path, sys.argv)
        if seen != self._seen:
            seen = (dict(environment), dict(VARIABLES), directory, list(sys.path), list(sys.argv))
            path = [str(each) for each in sys.path]
            known = {**os.environ, **VARIABLES}
            self._now = Surroundings(known, directory, path, list(sys.argv))
            self._seen = seen  # the last, as several threads may ask
        return self._now


def without_left(
    pins: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[dict[str, str], bool]:
    """Return the device variables to set in a worker, and whether some were left out because the
    environment says not to touch them."""
    kept = {
        name: value
        for name, value in pins.items()
        if environment.get(LEFT + name, "").lower() not in ("1", "true")
    }
    return kept, len(kept) < len(pins)


def others(machine: Machine) -> tuple[str, ...]:
    """Return the kinds of devices in the machine that are not GPUs."""
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

    @property
    def shares_by_driver(self) -> bool:
        """Whether the driver itself keeps processes to their shares."""
        return self._sharing is not None

    def ids(self, allocation: Allocation) -> tuple[int | str, ...]:
        """Return the ids of the allocated GPUs that the user sees, in the machine's order."""
        devices = [self._devices[key] for key, _ in allocation.shares]
        return tuple([device.id for device in devices if device.resource == GPU])

    def now(self) -> Surroundings:
        """Return the surroundings of this process."""
        return self._present.now()

    def of(
        self,
        allocation: Allocation,
        extra: Sequence[tuple[str, str]],
        base: Mapping[str, str],
        now: Surroundings,
        *,
        caps: bool = True,
        seen: Sequence[str] = (),
        follow: bool = False,
    ) -> tuple[Any, ...]:
        """Return the setup as a plain tuple.

        Args:
            base: the environment that the worker has.
            seen: keys of the devices that the worker sees, in this order; its own if empty.
            follow: as in `Setup`.
        """
        environment = dict(self._changed(base, now.environment))
        devices = [self._devices[key] for key, _ in allocation.shares]
        if not any(name in now.environment for name in THREAD_VARIABLES):
            count = str(self.threads(allocation))
            environment.update((name, count) for name in THREAD_VARIABLES)
        cap = None
        if len(devices) == 1 and (units := allocation.shares[0][1]) < UNIT:
            cap = pool(units, devices[0].memory) if caps and self._caps else None
            if self._sharing is not None:
                environment.update(self._sharing(devices[0], units))
        environment.update(extra)
        left = False
        if devices or now.environment.get(EXPOSE) != "1":
            visible = [self._devices[key] for key in seen]
            pinned = self._pin(visible, ordered=True) if seen else self._pin(devices)
            pins, left = without_left(pinned, now.environment)
            environment.update(pins)  # the last: no variable of a task unpins it
        ids = self.ids(allocation)
        reports = UNPINNED if left or seen else self._reports if devices else 0.0
        held = tuple(
            (kind, tuple(device.id for device in devices if device.resource == kind))
            for kind in self._others
        )
        return tuple(
            Setup(environment, ids, now.directory, now.path, now.argv, cap, reports, held, follow)
        )

    def threads(self, allocation: Allocation) -> int:
        """Return the cores of a worker: those that the task asked for, or its part of the devices'.

        Numerical libraries would start a thread for each core in each worker.
        """
        cpus = allocation.cpus
        if not cpus:
            share = sum(units for _, units in allocation.shares)
            cpus = self._cpus * share // (UNIT * max(1, len(self._devices)))
        return max(1, cpus // UNIT)

    def _changed(self, base: Mapping[str, str], now: Mapping[str, str]) -> Mapping[str, str | None]:
        """Return the changes of the environment since `base`; None for a removed variable."""
        before, after, changes = self._changes
        if before is not base or after is not now:
            changes = {name: value for name, value in now.items() if base.get(name) != value}
            changes.update(dict.fromkeys(base.keys() - now.keys()))
            self._changes = base, now, changes
        return changes
