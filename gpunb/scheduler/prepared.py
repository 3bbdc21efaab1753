"""Prepared workers: each has made a context on a device, and waits for a task with a share of it.

A prepared worker is an idle worker that holds a small share of its device, the room of its context.
It ends when a request needs the room, and when another session wants the device.
"""

from __future__ import annotations

import math

from gpunb.scheduler import events as ev
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.resources import UNIT, Allocation, Device
from gpunb.scheduler.shares import CONTEXT
from gpunb.scheduler.state import State, Worker
from gpunb.scheduler.workers import Workers

ROOM = CONTEXT * 5 // 4
"""Bytes of device memory that a prepared worker counts for."""

TRIES = 3
"""Prepared workers of a device that may end by themselves, before no more are started."""


class Prepared:
    """Starts prepared workers on the devices that the policy names.

    `places` has the key, the position and the room for a context of each of these devices.
    """

    def __init__(self, state: State, queue: Queue, workers: Workers) -> None:
        self._state = state
        self._queue = queue
        self._workers = workers
        self._failures: dict[str, int] = {}
        self._refused: set[str] = set()
        devices = state.machine.devices
        self.places = [
            (each.key, at, room(each))
            for at, each in enumerate(devices)
            if each.key in state.policy.prepare
        ]

    def start_missing(self, now: float) -> None:
        """After each event: start a prepared worker on each device that has room for one. While
        tasks wait, the room is theirs."""
        state, capacity = self._state, self._state.capacity
        if self._queue.lines:
            return
        for key, at, units in self.places:
            if (
                key in self._workers.prepared
                or key in state.wanted
                or key in self._refused
                or at in capacity.lost
                or self._failures.get(key, 0) >= TRIES
            ):
                continue
            if units <= min(capacity.shares[at], capacity.budget):
                worker = self._workers.prepare(Allocation(((key, units),)), now)
                state.decisions.append(ev.Prepare(worker.id, worker.allocation))

    def ended(self, worker: Worker) -> None:
        """Note that the process of a worker is gone."""
        if worker.prepared and worker.state == "idle":
            ((key, _),) = worker.allocation.shares
            self._failures[key] = self._failures.get(key, 0) + 1

    def refused(self, worker: Worker) -> None:
        """Note that the worker was not started, because other sessions hold its device."""
        self._refused.update(key for key, _ in worker.allocation.shares)

    def pause(self) -> None:
        """Start none on any device until `resume`, because the devices are needed."""
        self._refused.update(key for key, _, _ in self.places)

    def resume(self) -> None:
        """Try all devices again, because other sessions hold others than before."""
        self._refused.clear()


def room(device: Device) -> int:
    """The units of the device that a prepared worker holds."""
    if not device.memory:
        return UNIT // 64
    return min(UNIT, math.ceil(ROOM * UNIT / device.memory))
