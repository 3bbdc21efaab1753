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
    """

    __slots__ = ("free", "kept", "part", "used")

    def __init__(self, part: float, free: float) -> None:
        self.part, self.free = part, free
        self.used = self.kept = 0.0

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

    def elapse(self, now: float, kept: Reservation | None) -> None:
        """Count the time since the last call, in which `kept` stood idle while others waited."""
        seconds, self._last = now - self._last, now
        if seconds <= 0:
            return
        self.devices.used += seconds * self._used(self.devices)
        self.cpus.used += seconds * self._used(self.cpus)
        if kept is not None:
            idle = seconds * self._idle(kept.reserved)
            kept.cost += idle
            self.account(kept.reserved).kept += idle

    def account(self, reserved: Reserved) -> Account:
        """The account that pays for this room."""
        return self.devices if reserved.devices else self.cpus

    def end(self, reserved: Reserved, now: float) -> float:
        """The time at which the limit is reached if no task starts or ends before."""
        account = self.account(reserved)
        if account.left < 1:
            return now
        pace = self._idle(reserved) - account.part * self._used(account)
        return now + account.left / pace if pace > 0 else math.inf

    def _used(self, account: Account) -> int:
        capacity = self._capacity
        if account is self.devices:
            return self._all - sum(capacity.shares)
        return capacity.machine.cpus - capacity.cpus

    def _idle(self, reserved: Reserved) -> int:
        capacity = self._capacity
        if reserved.devices:
            return sum([max(0, capacity.shares[at]) for at in reserved.devices])
        return max(0, min(capacity.cpus, reserved.spare.cpus))
