"""Room that is kept for one request that has waited long, and the price of keeping it.

Devices that are kept stand idle while others wait. So this idle time is counted, and limited to a
part of the time that tasks have used. Room is kept while the limit is not reached; then others may
use it, and it is kept again when half of the limit is left. So each try may be as dear as all
before it together, and a request whose room takes long to become free gets it after a few tries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpunb.scheduler.feasibility import Reserved
from gpunb.scheduler.line import Line
from gpunb.scheduler.resources import UNIT
from gpunb.scheduler.state import State


@dataclass(slots=True, eq=False)
class Reservation:
    """Room that is kept for a line whose first task has waited long.

    Attributes:
        since: time since which it is kept.
        cost: its idle time so far, in units of a device (or of a CPU) times seconds.
    """

    line: Line
    reserved: Reserved
    since: float
    cost: float = 0.0


class Account:
    """The time that tasks have used and the idle time of kept room, in units times seconds.

    Attributes:
        part: the allowed idle time, as a part of the used time.
        free: idle time that is allowed beyond that.
        busy, idle: units that tasks use now, and units of kept room that stand idle now.
    """

    __slots__ = ("busy", "free", "idle", "kept", "part", "used")

    def __init__(self, part: float, free: float) -> None:
        self.part, self.free = part, free
        self.used = self.kept = 0.0
        self.busy = self.idle = 0

    @property
    def left(self) -> float:
        """The idle time that is still allowed."""
        return self.part * self.used + self.free - self.kept

    @property
    def may_begin(self) -> bool:
        """Whether half of the allowed time is left, so that room may be kept again."""
        return self.left >= self.kept


class Costs:
    """Counts the price of reservations: of devices, and of CPUs where no device is kept."""

    def __init__(self, state: State) -> None:
        policy, self._capacity = state.policy, state.capacity
        count = len(self._capacity.shares)
        self._all = UNIT * count
        self.devices = Account(policy.idle_part, policy.idle_free * UNIT * count)
        self.cpus = Account(policy.idle_part, policy.idle_free * UNIT)
        self._last = math.inf
        self._kept: Reservation | None = None

    def elapse(self, now: float) -> None:
        """Count the time since the last call. Before that, nothing has become busy or idle."""
        seconds, self._last = now - self._last, now
        if seconds <= 0:
            return
        self.devices.used += seconds * self.devices.busy
        self.cpus.used += seconds * self.cpus.busy
        kept = self._kept
        if kept is not None:
            account = self.account(kept.reserved)
            kept.cost += seconds * account.idle
            account.kept += seconds * account.idle

    def of(self, kept: Reservation, now: float) -> float:
        """The idle time of this reservation until now."""
        idle = self.account(kept.reserved).idle if kept is self._kept else 0
        return kept.cost + max(0.0, now - self._last) * idle

    def look(self, now: float, kept: Reservation | None) -> float:
        """Look at what is busy from now on, and what is idle because it is kept while others wait.

        Returns the time at which the limit is reached if this stays so; infinite if never.
        """
        self.elapse(now)
        capacity, self._kept = self._capacity, kept
        self.devices.busy = self._all - sum(capacity.shares)
        self.cpus.busy = capacity.machine.cpus - capacity.cpus
        if kept is None:
            return math.inf
        account = self.account(kept.reserved)
        if kept.reserved.devices:
            shares = capacity.shares
            account.idle = sum([max(0, shares[at]) for at in kept.reserved.devices])
        else:
            account.idle = max(0, min(capacity.cpus, kept.reserved.spare.cpus))
        pace = account.idle - account.part * account.busy
        return now + max(0.0, account.left) / pace if pace > 0 else math.inf

    def account(self, reserved: Reserved) -> Account:
        """The account that pays for this room."""
        return self.devices if reserved.devices else self.cpus
